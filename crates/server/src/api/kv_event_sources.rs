//! GET /kv_event_sources

use axum::Json;
use axum::extract::State;
use http::{HeaderMap, header};
use serde_json::{Value, json};

use crate::app::AppState;

/// The addresses where the engine publishes KV events, for routers that are configured with the server's address alone: a
/// list of one entry, or an empty one if nothing is published.
pub(crate) async fn handle(State(state): State<AppState>, headers: HeaderMap) -> Json<Value> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).and_then(without_port);
    let entries = state.config.kv_event_sources.iter().map(|source| {
        json!({
            "data_parallel_rank": source.rank,
            "endpoint": reachable(&source.endpoint, host),
            "replay_endpoint": source.replay_endpoint.as_deref().map(|endpoint| reachable(endpoint, host)),
            "topic": source.topic,
            "block_size": source.block_size,
        })
    });
    Json(entries.collect())
}

/// Replaces an unspecified address by the host of the request: a server that listens on all addresses does not know by
/// which one others reach it, but the client has just used one.
fn reachable(endpoint: &str, host: Option<&str>) -> String {
    let everywhere = |rest: &str| {
        ["*", "[::]", "::", "0.0.0.0"]
            .iter()
            .find_map(|any| Some(rest.strip_prefix(any)?.strip_prefix(':')?.to_owned()))
    };
    match (endpoint.strip_prefix("tcp://").and_then(everywhere), host) {
        (Some(port), Some(host)) => format!("tcp://{host}:{port}"),
        _ => endpoint.to_owned(),
    }
}

/// The host of a `Host` header, an IPv6 address with its brackets.
fn without_port(host: &str) -> Option<&str> {
    let end = match host.rfind(':') {
        Some(colon) if host[colon..].find(']').is_none() => colon,
        _ => host.len(),
    };
    Some(&host[..end]).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_become_the_host_that_was_asked() {
        let hosts = [
            ("10.0.0.7:8000", "10.0.0.7"),
            ("replica-0", "replica-0"),
            ("[fd00::7]:8000", "[fd00::7]"),
            ("[fd00::7]", "[fd00::7]"),
        ];
        for (header, host) in hosts {
            assert_eq!(without_port(header), Some(host), "{header}");
            for endpoint in ["tcp://*:5557", "tcp://[::]:5557", "tcp://0.0.0.0:5557"] {
                assert_eq!(reachable(endpoint, without_port(header)), format!("tcp://{host}:5557"));
            }
        }
        for endpoint in ["tcp://router:5557", "ipc:///run/kv", "tcp://10.0.0.1:5557"] {
            assert_eq!(reachable(endpoint, Some("10.0.0.7")), endpoint);
        }
        assert_eq!(without_port(":8000"), None);
        assert_eq!(reachable("tcp://*:5557", None), "tcp://*:5557");
    }
}
