//! Request ids: in the headers of the response and, unless the body sets another, in the engine and the log.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderValue;
use uuid::Uuid;

/// The header field, of requests and of responses.
const HEADER: &str = "x-request-id";

/// Maximum length of a client's id in bytes, since every chunk of a stream repeats it.
const MAX_BYTES: usize = 256;

/// The id of a request, as an extension of it: the client's header, or a new id. It exists only if the server returns
/// ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(String);

impl RequestId {
    /// The id: printable ASCII, at most 256 bytes.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    fn given(value: &HeaderValue) -> Option<Self> {
        let id = value.to_str().ok().filter(|id| !id.is_empty() && id.len() <= MAX_BYTES)?;
        Some(Self(id.to_owned()))
    }

    fn fresh() -> Self {
        Self(Uuid::new_v4().simple().to_string())
    }
}

/// Sets the id of a request. A header that is not a usable id is removed, so that later code does not use it.
pub(crate) async fn identify(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(HEADER).and_then(RequestId::given);
    let id = given.unwrap_or_else(|| {
        request.headers_mut().remove(HEADER);
        RequestId::fresh()
    });
    let value = HeaderValue::from_str(id.as_str());
    request.extensions_mut().insert(id);
    let mut response = next.run(request).await;
    if let Ok(value) = value {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_are_short_and_printable() {
        let given = |bytes: &[u8]| RequestId::given(&HeaderValue::from_bytes(bytes).unwrap());
        assert_eq!(given(b"abc-1").unwrap().as_str(), "abc-1");
        assert!(given(&[b'x'; MAX_BYTES]).is_some());
        for unusable in [&b""[..], &[b'x'; MAX_BYTES + 1], "Ğ".as_bytes(), b"\xff"] {
            assert_eq!(given(unusable), None);
        }
        let fresh = RequestId::fresh();
        assert!(fresh.as_str().len() == 32 && fresh.as_str().bytes().all(|b| b.is_ascii_hexdigit()));
    }

    proptest! {
        #[test]
        fn a_usable_id_comes_back_as_it_came(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(value) = HeaderValue::from_bytes(&bytes)
                && let Some(id) = RequestId::given(&value)
            {
                prop_assert_eq!(id.as_str().as_bytes(), &bytes[..]);
                prop_assert_eq!(HeaderValue::from_str(id.as_str()).unwrap(), value);
            }
        }
    }
}
