//! API keys.

use std::hint::black_box;
use std::sync::Arc;

use axum::Json;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use crate::caller::KeyIndex;

/// Routes that need no key: probes, metrics and pages that only describe the server. All other paths are protected, even
/// those without a route. vLLM protects only /v1, /v2, /inference and /cohere, and leaves /invocations, /pooling and
/// /tokenize open.
const OPEN: [&str; 14] = [
    "/",
    "/assets/{*file}",
    "/docs",
    "/favicon.ico",
    "/health",
    "/kv_event_sources",
    "/live",
    "/load",
    "/metrics",
    "/metrics/",
    "/openapi.json",
    "/ping",
    "/redoc",
    "/version",
];

/// The header in which Anthropic's clients send the key.
pub(crate) const X_API_KEY: &str = "x-api-key";

/// The accepted keys; without keys, every route is open.
#[derive(Clone, Debug)]
pub(crate) struct ApiKeys(Arc<[String]>);

impl ApiKeys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().filter(|key| !key.is_empty()).cloned().collect())
    }

    /// The index of the accepted key that a request carries.
    fn accept(&self, headers: &HeaderMap) -> Option<KeyIndex> {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, token) = split_once(value.as_bytes(), b' ')?;
            scheme.eq_ignore_ascii_case(b"bearer").then_some(token)
        });
        let plain = headers.get(X_API_KEY).map(HeaderValue::as_bytes);
        let found = bearer.and_then(|token| self.find(token)).or_else(|| plain.and_then(|token| self.find(token)));
        found.map(KeyIndex)
    }

    fn find(&self, token: &[u8]) -> Option<usize> {
        // All keys are compared, so that the time does not reveal which one is similar.
        let keys = self.0.iter().enumerate();
        keys.fold(None, |found, (index, key)| if equal(key.as_bytes(), token) { Some(index) } else { found })
    }
}

/// Whether a request needs no key. The check uses the matched route rather than the path as spelled, so no spelling
/// opens a route that is not listed.
fn is_open(request: &Request) -> bool {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    match *request.method() {
        Method::OPTIONS => true,
        Method::GET | Method::HEAD => route.is_some_and(|route| OPEN.contains(&route)),
        Method::POST => route == Some("/ping"),
        _ => false,
    }
}

/// Rejects requests that need a key and have none.
pub(crate) async fn guard(State(keys): State<ApiKeys>, mut request: Request, next: Next) -> Response {
    if keys.0.is_empty() || is_open(&request) {
        return next.run(request).await;
    }
    if let Some(key) = keys.accept(request.headers()) {
        request.extensions_mut().insert(key);
        return next.run(request).await;
    }
    let body = serde_json::json!({"error": "Unauthorized"});
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], Json(body)).into_response()
}

/// Compares in time that depends only on the lengths.
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
            keys.accept(&headers).is_some()
        };
        assert!(accepts("Bearer secret") && accepts("bearer other"));
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "Basic secret", "secret", "Bearer  secret"]
        {
            assert!(!accepts(wrong), "{wrong}");
        }
        assert!(keys.accept(&HeaderMap::new()).is_none());
    }

    #[test]
    fn a_key_may_come_in_either_header() {
        let keys = ApiKeys::new(&["secret".into()]);
        let accepts = |fields: &[(&'static str, &str)]| {
            let headers = fields.iter().map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            keys.accept(&headers.collect()).is_some()
        };
        assert!(accepts(&[("x-api-key", "secret")]));
        assert!(accepts(&[("x-api-key", "secret"), ("authorization", "Bearer wrong")]));
        assert!(accepts(&[("x-api-key", ""), ("authorization", "Bearer secret")]));
        for wrong in ["", "Secret", "secret ", "Bearer secret", "secretsecret"] {
            assert!(!accepts(&[("x-api-key", wrong)]), "{wrong}");
        }
        assert!(!accepts(&[("api-key", "secret")]) && !accepts(&[("cookie", "x-api-key=secret")]));
    }
}
