//! Receives request bodies, with limits on the size, the time and the memory of all bodies together.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::config::ConnectionLimits;
use crate::error::ApiError;

/// Bytes of each body that do not count against the shared budget.
const FREE_BYTES: usize = 64 << 10;

/// Bytes of one permit of the shared budget.
const PERMIT_BYTES: usize = 1 << 10;

/// Bytes of an oversized body that are read and discarded, so that its client can read the answer.
const DISCARDED_BYTES: usize = 64 << 20;

/// Time limit for discarding an oversized body.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Memory for bodies, shared by all connections.
#[derive(Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>);

/// A received body, with its share of the budget.
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Bytes,
    _permits: Option<OwnedSemaphorePermit>,
}

impl BodyBudget {
    pub(crate) fn new(limits: &ConnectionLimits) -> Self {
        let permits = (limits.max_buffered_bytes / PERMIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Semaphore::new(permits)))
    }

    /// Receives the JSON body of `request`.
    pub(crate) async fn receive(
        &self,
        request: Request<Body>,
        limits: &ConnectionLimits,
    ) -> Result<ReceivedBody, ApiError> {
        let (head, body) = request.into_parts();
        let result = match is_json(&head.headers) {
            false => Err((ApiError::media_type(), body)),
            true => match timeout(limits.body_timeout, self.collect(body, limits.max_body_bytes)).await {
                Ok(result) => result,
                Err(_) => return Err(ApiError::body_timeout(limits.body_timeout)),
            },
        };
        match result {
            Ok(body) => Ok(body),
            Err((error, rest)) => {
                if !head.headers.contains_key(header::EXPECT) {
                    discard(rest).await;
                }
                Err(error)
            }
        }
    }

    /// The body, or the error and the rest of the body.
    async fn collect(&self, mut body: Body, limit: usize) -> Result<ReceivedBody, (ApiError, Body)> {
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > limit {
            return Err((ApiError::body_too_large(limit), body));
        }
        let mut bytes = BytesMut::with_capacity(announced.min(FREE_BYTES));
        let mut permits: Option<OwnedSemaphorePermit> = None;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                return Err((ApiError::bad_request("The request body could not be read."), body));
            };
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err((ApiError::body_too_large(limit), body));
            }
            bytes.extend_from_slice(&data);
            if !self.charge(bytes.len(), &mut permits) {
                return Err((ApiError::busy("too many large request bodies are being received"), body));
            }
        }
        Ok(ReceivedBody { bytes: bytes.freeze(), _permits: permits })
    }

    /// Acquires the permits that a body of `len` bytes needs beyond `permits`. It never waits, because waiting bodies would
    /// hold permits that others wait for.
    fn charge(&self, len: usize, permits: &mut Option<OwnedSemaphorePermit>) -> bool {
        let needed = len.saturating_sub(FREE_BYTES).div_ceil(PERMIT_BYTES);
        let held = permits.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let Some(missing) = needed.checked_sub(held).filter(|&missing| missing > 0) else { return true };
        let Ok(missing) = u32::try_from(missing) else { return false };
        match Arc::clone(&self.0).try_acquire_many_owned(missing) {
            Ok(more) => {
                match permits {
                    Some(permits) => permits.merge(more),
                    None => *permits = Some(more),
                }
                true
            }
            Err(_) => false,
        }
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let media_type = value.split(';').next().unwrap_or_default();
    media_type.trim().eq_ignore_ascii_case("application/json")
}

/// Reads and discards the rest of a body. Closing a connection with unread bytes resets it, and the reset can destroy a
/// response in flight.
async fn discard(mut body: Body) {
    let read = async {
        let mut left = DISCARDED_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            let len = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(len) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    };
    // After the time limit, the connection is closed with bytes unread.
    let _ = timeout(DISCARD_TIMEOUT, read).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: Vec<u8>) -> Request<Body> {
        Request::builder().header(header::CONTENT_TYPE, "application/json").body(Body::from(body)).unwrap()
    }

    fn limits() -> ConnectionLimits {
        ConnectionLimits { max_body_bytes: 200 << 10, max_buffered_bytes: 150 << 10, ..ConnectionLimits::default() }
    }

    #[tokio::test]
    async fn bodies_share_a_budget_beyond_their_first_bytes() {
        let (limits, large) = (limits(), 128 << 10);
        let budget = BodyBudget::new(&limits);
        let first = budget.receive(request(vec![b' '; large]), &limits).await.ok().unwrap();
        let second = budget.receive(request(vec![b' '; large]), &limits).await.ok().unwrap();
        let third = budget.receive(request(vec![b' '; large]), &limits).await.err().unwrap();
        assert_eq!(third.status(), 429);
        assert!(budget.receive(request(vec![b' '; FREE_BYTES]), &limits).await.is_ok(), "small bodies always fit");
        drop((first, second));
        assert!(budget.receive(request(vec![b' '; large]), &limits).await.is_ok());
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_413_announced_or_not() {
        let limits = limits();
        let budget = BodyBudget::new(&limits);
        let announced = request(vec![b' '; limits.max_body_bytes + 1]);
        assert_eq!(budget.receive(announced, &limits).await.err().unwrap().status(), 413);
        let chunk = Bytes::from(vec![b' '; 4096]);
        let chunks = futures::stream::iter((0..60).map(move |_| Ok::<_, std::io::Error>(chunk.clone())));
        let mut chunked = request(vec![]);
        *chunked.body_mut() = Body::from_stream(chunks);
        assert_eq!(budget.receive(chunked, &limits).await.err().unwrap().status(), 413);
        assert!(budget.receive(request(vec![b' '; limits.max_body_bytes]), &limits).await.is_ok());
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_408() {
        let limits = ConnectionLimits { body_timeout: Duration::from_millis(10), ..limits() };
        let mut never = request(vec![]);
        *never.body_mut() = Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
        let error = BodyBudget::new(&limits).receive(never, &limits).await.err().unwrap();
        assert_eq!(error.status(), 408);
    }

    #[test]
    fn only_json_is_json() {
        let json = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            is_json(&headers)
        };
        assert!(json("application/json") && json("Application/JSON; charset=utf-8"));
        assert!(!json("text/plain") && !json("application/jsonp") && !json(""));
        assert!(!is_json(&HeaderMap::new()));
    }
}
