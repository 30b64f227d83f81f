//! The `Host` header, which says for whom a request is meant.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::uri::Authority;
use http::{HeaderMap, Version, header};

use crate::error::ApiError;

/// Refuses a request as RFC 9112 demands (section 3.2): without `Host` in HTTP/1.1, with more than one, or with one that
/// is no host. A proxy and the server could otherwise take such a request for different ones.
pub(crate) async fn check(request: Request, next: Next) -> Response {
    match valid(request.version(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(message) => ApiError::bad_request(message).into_response(),
    }
}

fn valid(version: Version, headers: &HeaderMap) -> Result<(), &'static str> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let Some(host) = hosts.next() else {
        let required = version == Version::HTTP_11;
        return if required { Err("The request has no Host header, which HTTP/1.1 requires.") } else { Ok(()) };
    };
    if hosts.next().is_some() {
        return Err("The request has more than one Host header.");
    }
    let host = host.as_bytes();
    let named = Authority::try_from(host).is_ok_and(|authority| !authority.as_str().contains('@'));
    if named || host.is_empty() { Ok(()) } else { Err("The Host header is not a host with an optional port.") }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn is_valid(version: Version, hosts: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
        }
        valid(version, &headers).is_ok()
    }

    #[test]
    fn http_1_1_has_exactly_one_host() {
        for host in ["", "example.org", "example.org:8000", "my_service.namespace.svc", "127.0.0.1:80", "[::1]:80"] {
            assert!(is_valid(Version::HTTP_11, &[host]), "{host}");
        }
        for host in ["a b", "a/b", "user@example.org", "a,b/c"] {
            assert!(!is_valid(Version::HTTP_11, &[host]), "{host}");
        }
        assert!(!is_valid(Version::HTTP_11, &[]));
        assert!(!is_valid(Version::HTTP_11, &["a", "a"]));
        assert!(is_valid(Version::HTTP_10, &[]));
        assert!(!is_valid(Version::HTTP_10, &["a", "b"]));
        assert!(is_valid(Version::HTTP_2, &[]));
    }
}
