//! Receives request bodies, with limits on the size, the time and the memory of all bodies together.

mod budget;

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::ConnectionLimits;
use crate::error::ApiError;

pub(crate) use budget::BodyBudget;
use budget::{FREE_BYTES, Share};

/// Minimum rate of a body that holds shared memory, in bytes per second.
const MIN_RATE: usize = 1 << 10;

/// Bytes of an oversized body that are read and discarded, so that its client can read the answer.
const DISCARDED_BYTES: usize = 64 << 20;

/// Time limit for discarding an oversized body.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// A received body, with its share of the budget.
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Bytes,
    _share: Share,
}

impl BodyBudget {
    /// Receives the JSON body of `request`.
    pub(crate) async fn receive(
        &self,
        request: Request<Body>,
        limits: &ConnectionLimits,
    ) -> Result<ReceivedBody, ApiError> {
        let (head, body) = request.into_parts();
        let result = match is_json(&head.headers) {
            false => Err((ApiError::media_type(), body)),
            true => match timeout(limits.body_timeout, self.collect(body, limits)).await {
                Ok(result) => result,
                Err(_) => return Err(ApiError::body_timeout(limits.body_timeout)),
            },
        };
        match result {
            Ok(body) => Ok(body),
            Err((error, rest)) => {
                discard(&head.headers, rest).await;
                Err(error)
            }
        }
    }

    /// The body, or the error and the rest of the body.
    async fn collect(&self, mut body: Body, limits: &ConnectionLimits) -> Result<ReceivedBody, (ApiError, Body)> {
        let limit = limits.max_body_bytes;
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > limit {
            return Err((ApiError::body_too_large(limit), body));
        }
        let mut bytes = BytesMut::with_capacity(announced.min(FREE_BYTES));
        let (share, mut pace) = (self.share(), Pace::new(limits.body_stall_timeout));
        loop {
            let frame = tokio::select! {
                biased;
                () = share.gives_way() => return Err((ApiError::body_gave_way(), Body::empty())),
                frame = body.frame() => frame,
                () = pace.too_slow(bytes.len()) => {
                    return Err((ApiError::body_stalled(MIN_RATE, limits.body_stall_timeout), Body::empty()));
                }
            };
            let data = match frame {
                None => break,
                Some(Err(_)) => return Err((ApiError::bad_request("The request body could not be read."), body)),
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            };
            if bytes.len() + data.len() > limit {
                return Err((ApiError::body_too_large(limit), body));
            }
            bytes.extend_from_slice(&data);
            if !share.grow(bytes.len(), Instant::now()) {
                return Err((ApiError::busy("too many large request bodies are being received"), body));
            }
        }
        match share.complete(bytes.len()) {
            Some(share) => Ok(ReceivedBody { bytes: bytes.freeze(), _share: share }),
            None => Err((ApiError::body_gave_way(), body)),
        }
    }
}

/// Measures whether a body that holds shared memory keeps its minimum rate.
struct Pace {
    period: Duration,
    /// The end of the present period, and the length of the body at its begin.
    end: Option<Instant>,
    before: usize,
}

impl Pace {
    fn new(period: Duration) -> Self {
        Self { period, end: Instant::now().checked_add(period), before: 0 }
    }

    /// Returns when a body of `len` bytes has grown too little over a period. A body without shared memory is never too
    /// slow.
    async fn too_slow(&mut self, len: usize) {
        while let Some(end) = self.end {
            sleep_until(end).await;
            let least = self.period.as_secs_f64() * MIN_RATE as f64;
            if len > FREE_BYTES && ((len - self.before) as f64) < least {
                return;
            }
            (self.end, self.before) = (end.checked_add(self.period), len);
        }
        std::future::pending().await
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let media_type = value.split(';').next().unwrap_or_default();
    media_type.trim().eq_ignore_ascii_case("application/json")
}

/// Reads and discards the rest of the body of a request with these headers. Closing a connection with unread bytes resets it, and the
/// reset can destroy a response in flight. A client that asks first whether to send the body is told by the response.
pub(crate) async fn discard(headers: &HeaderMap, mut body: Body) {
    if headers.contains_key(header::EXPECT) {
        return;
    }
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
