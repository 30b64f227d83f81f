//! The client that sent a request: its API key, or the address of its connection.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::Request;
use octavo_engine::ClientId;

/// The address of a connection's other end; none on a Unix socket.
///
/// Headers such as `X-Forwarded-For` are not read, because any client can send them. Behind a proxy, all clients
/// without a key of their own are therefore one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) Option<IpAddr>);

/// Index of the API key that a request carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyIndex(pub(crate) usize);

/// The client that sent a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    key: Option<usize>,
    address: Option<IpAddr>,
}

impl Caller {
    pub(crate) fn of(request: &Request) -> Self {
        let extensions = request.extensions();
        Self {
            key: extensions.get::<KeyIndex>().map(|key| key.0),
            address: extensions.get::<Peer>().and_then(|peer| peer.0),
        }
    }

    /// The client in the scheduler. An IPv6 network of 64 bits is one client, because its owner has all its addresses.
    pub(crate) fn id(&self) -> ClientId {
        ClientId(match (self.key, self.address) {
            // Multicast addresses, which are never those of a client.
            (Some(key), _) => u128::MAX - key as u128,
            (None, Some(IpAddr::V4(address))) => address.to_ipv6_mapped().to_bits(),
            (None, Some(IpAddr::V6(address))) => match address.to_ipv4_mapped() {
                Some(_) => address.to_bits(),
                None => address.to_bits() >> 64 << 64,
            },
            (None, None) => 0,
        })
    }

    /// The salt of the prefix cache: the request's own, and the key's number if keys do not share the cache. The key
    /// itself is not part of it, because salts appear in KV events.
    pub(crate) fn salt(&self, own: Option<&str>, apart: bool) -> Option<Arc<str>> {
        match self.key.filter(|_| apart) {
            Some(key) => Some(format!("api-key {key}: {}", own.unwrap_or_default()).into()),
            None => own.map(Arc::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> Caller {
        Caller { key: None, address: Some(address.parse().unwrap()) }
    }

    fn with_key(key: usize) -> Caller {
        Caller { key: Some(key), ..at("10.0.0.1") }
    }

    #[test]
    fn a_client_is_its_key_or_its_address() {
        assert_eq!(with_key(0).id(), Caller { key: Some(0), ..at("10.0.0.2") }.id());
        assert_ne!(with_key(0).id(), with_key(1).id());
        assert_ne!(with_key(0).id(), at("10.0.0.1").id());
        assert_ne!(at("10.0.0.1").id(), at("10.0.0.2").id());
        assert_eq!(at("10.0.0.1").id(), at("::ffff:10.0.0.1").id());
        assert_ne!(at("::ffff:10.0.0.1").id(), at("::ffff:10.0.0.2").id());
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        assert_eq!(at("2001:db8:0:1::1").id(), at("2001:db8:0:1:ffff::2").id());
        assert_ne!(at("2001:db8:0:1::1").id(), at("2001:db8:0:2::1").id());
    }

    #[test]
    fn salts_of_keys_are_apart_unless_they_share() {
        let salts = [with_key(0), with_key(1)].map(|caller| caller.salt(None, true));
        assert!(salts[0].is_some() && salts[0] != salts[1]);
        assert_ne!(with_key(0).salt(Some("mine"), true), salts[0]);
        assert_ne!(with_key(0).salt(Some("mine"), true), with_key(1).salt(Some("mine"), true));
        assert_eq!(with_key(0).salt(Some("mine"), false).as_deref(), Some("mine"));
        assert_eq!(at("10.0.0.1").salt(None, true), None);
    }
}
