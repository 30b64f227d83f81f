//! ZeroMQ endpoints.

use std::path::PathBuf;

/// Meaning of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Listens on a host (empty means all) and a port.
    Bind(String, u16),
    /// Connects to `host:port`.
    Connect(String),
    /// Listens on a Unix domain socket.
    Ipc(PathBuf),
}

/// Error of an endpoint that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{endpoint}' is no endpoint for KV events: {reason}")]
pub struct AddressError {
    endpoint: String,
    reason: &'static str,
}

impl Address {
    /// Parses an endpoint like vLLM: listens on a wildcard address and connects to any other.
    pub(crate) fn parse(endpoint: &str) -> Result<Self, AddressError> {
        let refused = |reason| AddressError { endpoint: endpoint.to_owned(), reason };
        if let Some(path) = endpoint.strip_prefix("ipc://") {
            return if path.is_empty() { Err(refused("it has no path")) } else { Ok(Self::Ipc(path.into())) };
        }
        let rest = endpoint.strip_prefix("tcp://").ok_or_else(|| refused("it must begin with tcp:// or ipc://"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| refused("it has no port"))?;
        let port = port.parse().map_err(|_| refused("its port is no number"))?;
        match host.trim_matches(['[', ']']) {
            "" => Err(refused("it has no host")),
            "*" => Ok(Self::Bind(String::new(), port)),
            bare if bare.contains("::") => Ok(Self::Bind(bare.to_owned(), port)),
            _ => Ok(Self::Connect(format!("{host}:{port}"))),
        }
    }

    /// Parses an endpoint like [`Address::parse`], but always listens on it.
    pub(crate) fn parse_bound(endpoint: &str) -> Result<Self, AddressError> {
        Ok(match Self::parse(endpoint)? {
            Self::Connect(place) => {
                let (host, port) = place.rsplit_once(':').unwrap_or((&place, "0"));
                Self::Bind(host.to_owned(), port.parse().unwrap_or(0))
            }
            bound => bound,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_are_listened_on_and_others_connected_to() {
        let parse = |endpoint: &str| Address::parse(endpoint).unwrap();
        assert_eq!(parse("tcp://*:5557"), Address::Bind(String::new(), 5557));
        assert_eq!(parse("tcp://[::]:1"), Address::Bind("::".into(), 1));
        assert_eq!(parse("tcp://router.ns:5557"), Address::Connect("router.ns:5557".into()));
        assert_eq!(parse("ipc:///tmp/kv"), Address::Ipc("/tmp/kv".into()));
        assert_eq!(Address::parse_bound("tcp://127.0.0.1:7").unwrap(), Address::Bind("127.0.0.1".into(), 7));
        for endpoint in ["", "tcp://*", "tcp://*:x", "tcp://:1", "udp://*:1", "ipc://", "inproc://a"] {
            assert!(Address::parse(endpoint).is_err(), "{endpoint}");
        }
    }
}
