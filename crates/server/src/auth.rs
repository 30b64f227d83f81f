//! API keys.

use std::hint::black_box;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode, header};

/// Paths that a key opens; probes and metrics stay open.
const GUARDED: [&str; 4] = ["/v1", "/v2", "/inference", "/cohere"];

/// The keys, any of which will do. None: everything is open.
#[derive(Clone, Debug)]
pub(crate) struct ApiKeys(Arc<[String]>);

impl ApiKeys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().filter(|key| !key.is_empty()).cloned().collect())
    }

    fn accept(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(header::AUTHORIZATION) else { return false };
        let Some((scheme, token)) = split_once(value.as_bytes(), b' ') else { return false };
        // Every key is compared, so that the time tells nothing about which one came close.
        let matches = self.0.iter().fold(false, |any, key| any | equal(key.as_bytes(), token));
        scheme.eq_ignore_ascii_case(b"bearer") && matches
    }
}

/// Turns away requests for guarded paths that carry no valid key.
pub(crate) async fn guard(State(keys): State<ApiKeys>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let open = keys.0.is_empty()
        || *request.method() == Method::OPTIONS
        || !GUARDED.iter().any(|prefix| path.starts_with(prefix));
    if open || keys.accept(request.headers()) {
        return next.run(request).await;
    }
    let body = serde_json::json!({"error": "Unauthorized"});
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], Json(body)).into_response()
}

/// Compares in a time that depends on the lengths alone.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |difference, (x, y)| black_box(difference | (x ^ y)));
    a.len() == b.len() && difference == 0
}

fn split_once(bytes: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&b| b == separator)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_must_match_whole() {
        let keys = ApiKeys::new(&["secret".into(), "other".into(), String::new()]);
        let accepts = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            keys.accept(&headers)
        };
        assert!(accepts("Bearer secret") && accepts("bearer other"));
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "Basic secret", "secret", "Bearer  secret"]
        {
            assert!(!accepts(wrong), "{wrong}");
        }
        assert!(!keys.accept(&HeaderMap::new()));
    }
}
