//! Admission by API key: which routes need one, and the limits of its holder.

use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use crate::api::messages::stream::MessagesFormat;
use crate::api::shared::stream::ResponseFormat;
use crate::error::ApiError;
use crate::keys::{Accepted, ApiKeys, Meter};
use crate::route_table::{ErrorStyle, Route, Work};
use crate::trace::RequestTrace;
use crate::watch::watched;

/// The header in which Anthropic's clients send the key.
pub(crate) const X_API_KEY: &str = "x-api-key";

/// The client whose key a request carries.
fn accept(keys: &ApiKeys, headers: &HeaderMap) -> Option<Accepted> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = split_once(value.as_bytes(), b' ')?;
        scheme.eq_ignore_ascii_case(b"bearer").then_some(token)
    });
    let plain = headers.get(X_API_KEY).map(HeaderValue::as_bytes);
    bearer.and_then(|token| keys.find(token)).or_else(|| plain.and_then(|token| keys.find(token)))
}

/// Whether a request needs no key. All paths without a route are protected. The check uses the matched route rather than
/// the path as spelled, so no spelling opens a route that is not open.
fn is_open(request: &Request) -> bool {
    *request.method() == Method::OPTIONS || Route::matched(request).is_some_and(|route| route.open)
}

/// Whether a request counts against the limits of its key.
fn is_limited(request: &Request) -> bool {
    Route::matched(request).is_some_and(|route| route.work != Work::Nothing)
}

/// Rejects requests that need a key and have none, and those whose key is over a limit.
pub(crate) async fn guard(State(keys): State<ApiKeys>, mut request: Request, next: Next) -> Response {
    if !keys.required() || is_open(&request) {
        return next.run(request).await;
    }
    let Some(accepted) = accept(&keys, request.headers()) else {
        let body = serde_json::json!({"error": "Unauthorized"});
        return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], Json(body)).into_response();
    };
    let account = accepted.account.clone();
    request.extensions_mut().insert(accepted);
    let Some(account) = account else { return next.run(request).await };
    RequestTrace::from_request(&request).name_key(account.name());
    if !is_limited(&request) {
        return next.run(request).await;
    }
    let mut response = match account.admit(Instant::now()) {
        Ok(permit) => metered(Meter::new(permit), request, next).await,
        Err(error) => refuse(&request, &error),
    };
    account.report(response.headers_mut(), Instant::now());
    response
}

/// Runs a request that counts as running until its response is complete or its client has disconnected.
async fn metered(meter: Meter, mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(meter.clone());
    let response = next.run(request).await;
    response.map(|body| {
        watched(body, move |_| {
            let _running = &meter;
        })
    })
}

/// The refusal in the form of the route's errors.
fn refuse(request: &Request, error: &ApiError) -> Response {
    match Route::matched(request).map(|route| route.errors) {
        Some(ErrorStyle::Anthropic) => MessagesFormat::refuse(error),
        Some(ErrorStyle::OpenAi) | None => error.clone().into_response(),
    }
}

fn split_once(bytes: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&b| b == separator)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::keys;

    #[test]
    fn a_key_must_match_whole() {
        let keys = keys(&["secret", "other", ""], &[]);
        let accepts = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            accept(&keys, &headers).is_some()
        };
        assert!(accepts("Bearer secret") && accepts("bearer other"));
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "Basic secret", "secret", "Bearer  secret"]
        {
            assert!(!accepts(wrong), "{wrong}");
        }
        assert!(accept(&keys, &HeaderMap::new()).is_none());
    }

    #[test]
    fn a_key_may_come_in_either_header() {
        let keys = keys(&["secret"], &[]);
        let accepts = |fields: &[(&'static str, &str)]| {
            let headers = fields.iter().map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            accept(&keys, &headers.collect()).is_some()
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
