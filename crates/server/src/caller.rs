//! The client that sent a request: the holder of its API key, or the address of its connection.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::FromRequestParts;
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderValue, header};
use octavo_engine::ClientId;
use sha2::{Digest, Sha256};

use crate::auth::X_API_KEY;
use crate::keys::{Accepted, KeyId, Meter};
use crate::trace::RequestTrace;

/// The first byte of the ids of keys. Addresses that begin with it are multicast addresses, which no client has.
const OF_KEYS: u8 = 0xff;

/// The address of a connection's other end; none on a Unix socket.
///
/// Headers such as `X-Forwarded-For` are not read, because any client can send them. Behind a proxy, all clients
/// without a key of their own are therefore one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) Option<IpAddr>);

/// The client that sent a request, as the scheduler, the prefix cache and the store of responses identify it.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    key: Option<Accepted>,
    address: Option<IpAddr>,
    /// The hash of the credentials of a request whose key was not checked.
    credentials: u128,
    meter: Meter,
}

impl Caller {
    /// The client of a request with these headers, which passed [`crate::auth::guard`].
    pub(crate) fn from_headers(headers: &HeaderMap, extensions: &Extensions) -> Self {
        let key = extensions.get::<Accepted>().cloned();
        Self {
            credentials: if key.is_some() { 0 } else { credentials(headers) },
            key,
            address: extensions.get::<Peer>().and_then(|peer| peer.0),
            meter: extensions.get::<Meter>().cloned().unwrap_or_default(),
        }
    }

    /// The client in the scheduler: its key, or else its address. An IPv6 network of 64 bits is one client, because its
    /// owner has all its addresses.
    pub(crate) fn id(&self) -> ClientId {
        self.key_id().unwrap_or(ClientId(match self.address {
            Some(IpAddr::V4(address)) => address.to_ipv6_mapped().to_bits(),
            Some(IpAddr::V6(address)) => match address.to_ipv4_mapped() {
                Some(_) => address.to_bits(),
                None => address.to_bits() >> 64 << 64,
            },
            None => 0,
        }))
    }

    /// The owner of the responses that the client stores: its key, or else the credentials that it sent. Those of a server
    /// without keys may have been checked by a proxy.
    pub(crate) fn owner(&self) -> ClientId {
        self.key_id().unwrap_or(ClientId(self.credentials))
    }

    /// The salt of the prefix cache: the request's own, and the client's if several clients have keys that do not `share`
    /// the cache. The key itself is not part of it, because salts appear in KV events.
    pub(crate) fn salt(&self, own: Option<&str>, share: bool) -> Option<Arc<str>> {
        let client = match &self.key {
            Some(Accepted { id, several: true, .. }) if !share => match id {
                KeyId::Numbered(index) => format!("api-key {index}"),
                KeyId::Named(name) => format!("client {name}"),
            },
            _ => return own.map(Arc::from),
        };
        Some(format!("{client}: {}", own.unwrap_or_default()).into())
    }

    /// The smallest priority that the client's key allows.
    pub(crate) fn min_priority(&self) -> Option<i64> {
        self.key.as_ref()?.min_priority
    }

    /// Counts the tokens of the request.
    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    fn key_id(&self) -> Option<ClientId> {
        Some(match &self.key.as_ref()?.id {
            KeyId::Numbered(index) => ClientId(u128::MAX - *index as u128),
            KeyId::Named(name) => {
                let mut bytes = first_half(Sha256::new_with_prefix(name.as_bytes()));
                bytes[0] = OF_KEYS;
                ClientId(u128::from_be_bytes(bytes))
            }
        })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::from_headers(&parts.headers, &parts.extensions))
    }
}

/// The hash of the headers that may carry a key.
fn credentials(headers: &HeaderMap) -> u128 {
    let mut hash = Sha256::new();
    for name in [header::AUTHORIZATION.as_str(), X_API_KEY] {
        let value = headers.get(name).map_or(&[][..], HeaderValue::as_bytes);
        hash.update((value.len() as u64).to_le_bytes());
        hash.update(value);
    }
    u128::from_be_bytes(first_half(hash))
}

fn first_half(hash: Sha256) -> [u8; 16] {
    let digest = hash.finalize();
    std::array::from_fn(|index| digest[index])
}

/// Where a request comes from, which all its sequences share.
pub(crate) struct Origin {
    pub(crate) priority: i64,
    pub(crate) client: ClientId,
    pub(crate) meter: Meter,
    pub(crate) cache_salt: Option<Arc<str>>,
    pub(crate) arrival: Instant,
    pub(crate) trace: RequestTrace,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> Caller {
        let peer = Peer(Some(address.parse().unwrap()));
        let mut extensions = Extensions::new();
        extensions.insert(peer);
        Caller::from_headers(&HeaderMap::new(), &extensions)
    }

    fn accepted(id: KeyId) -> Accepted {
        Accepted { id, several: true, min_priority: None, account: None }
    }

    fn numbered(index: usize) -> Caller {
        Caller { key: Some(accepted(KeyId::Numbered(index))), ..at("10.0.0.1") }
    }

    fn named(name: &str) -> Caller {
        Caller { key: Some(accepted(KeyId::Named(name.into()))), ..at("10.0.0.1") }
    }

    fn sending(name: &'static str, value: &'static str) -> Caller {
        let headers = HeaderMap::from_iter([(http::HeaderName::from_static(name), HeaderValue::from_static(value))]);
        Caller::from_headers(&headers, &Extensions::new())
    }

    #[test]
    fn a_client_is_its_key_or_its_address() {
        assert_eq!(numbered(0).id(), Caller { address: None, ..numbered(0) }.id());
        assert_eq!(named("a").id(), Caller { address: None, ..named("a") }.id());
        let ids = [numbered(0), numbered(1), named("a"), named("b"), named("0"), at("10.0.0.1"), at("10.0.0.2")];
        let ids = ids.map(|caller| caller.id().0);
        assert!((0..ids.len()).all(|index| !ids[..index].contains(&ids[index])), "{ids:?}");
        assert_eq!(at("10.0.0.1").id(), at("::ffff:10.0.0.1").id());
        assert_ne!(at("::ffff:10.0.0.1").id(), at("::ffff:10.0.0.2").id());
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        assert_eq!(at("2001:db8:0:1::1").id(), at("2001:db8:0:1:ffff::2").id());
        assert_ne!(at("2001:db8:0:1::1").id(), at("2001:db8:0:2::1").id());
    }

    #[test]
    fn the_owner_of_a_response_is_a_key_or_the_credentials_that_were_sent() {
        assert_eq!(named("a").owner(), named("a").id());
        let without_key = [
            sending("authorization", "Bearer a"),
            sending("authorization", "Bearer b"),
            sending("x-api-key", "Bearer a"),
            at("10.0.0.1"),
        ];
        let owners = without_key.map(|caller| caller.owner().0);
        assert!((0..owners.len()).all(|index| !owners[..index].contains(&owners[index])), "{owners:?}");
        assert_eq!(sending("authorization", "Bearer a").owner().0, owners[0]);
        assert_eq!(at("10.0.0.2").owner().0, owners[3], "a client may move");
    }

    #[test]
    fn salts_of_keys_are_apart_unless_they_share() {
        let salts = [numbered(0), numbered(1), named("0"), named("1")].map(|caller| caller.salt(None, false));
        assert!(salts.iter().all(Option::is_some));
        assert!((0..salts.len()).all(|index| !salts[..index].contains(&salts[index])), "{salts:?}");
        assert_ne!(named("a").salt(Some("mine"), false), named("a").salt(None, false));
        assert_ne!(named("a").salt(Some("mine"), false), named("b").salt(Some("mine"), false));
        assert_eq!(named("a").salt(Some("mine"), true).as_deref(), Some("mine"));
        let only = Accepted { several: false, ..accepted(KeyId::Named("a".into())) };
        assert_eq!(Caller { key: Some(only), ..at("10.0.0.1") }.salt(None, false), None);
        assert_eq!(at("10.0.0.1").salt(None, false), None);
    }
}
