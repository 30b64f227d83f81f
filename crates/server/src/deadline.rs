//! The time limit of requests.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::error::ApiError;
use crate::keep_alive::is_event_stream;
use crate::sse::Events;
use crate::wire::{MessagesWire, Wire};

/// Ends a request after `limit`: with status 504 before its response has begun, with an error event later. Its sequences
/// are aborted at that time, however slowly the client reads.
pub(crate) async fn limit(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    let Some(deadline) = Instant::now().checked_add(limit) else { return next.run(request).await };
    let dialect = Dialect::of(request.uri().path());
    match timeout_at(deadline, next.run(request)).await {
        Err(_) => dialect.refuse(&ApiError::request_timeout(limit)),
        Ok(response) if is_event_stream(response.headers()) => {
            let last_words = dialect.error_event(&ApiError::request_timeout(limit));
            response.map(|body| Body::new(Bounded::new(body, deadline, last_words)))
        }
        Ok(response) => response,
    }
}

/// The form of a route's error events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    /// An unnamed event with the error body, and the end mark.
    Completions,
    /// An event of type `error` without an end mark, as Anthropic's streams have it.
    Messages,
    /// An error event of OpenAI's responses API.
    Responses,
}

impl Dialect {
    fn of(path: &str) -> Self {
        match path {
            "/v1/messages" => Self::Messages,
            "/v1/responses" => Self::Responses,
            _ => Self::Completions,
        }
    }

    /// The response to a request that failed before its first output.
    fn refuse(self, error: &ApiError) -> Response {
        match self {
            Self::Completions | Self::Responses => error.clone().into_response(),
            Self::Messages => MessagesWire::refuse(error),
        }
    }

    fn error_event(self, error: &ApiError) -> Bytes {
        let message = error.to_string();
        let named = match self {
            Self::Completions => {
                let mut events = Events::default();
                events.push(&error.body());
                let end = b"data: [DONE]\n\n";
                return [&events.into_bytes()[..], end].concat().into();
            }
            Self::Messages => json!({"type": "error", "error": {"type": "api_error", "message": message}}),
            Self::Responses => json!({"type": "error", "code": "timeout", "message": message, "param": null}),
        };
        format!("event: error\ndata: {named}\n\n").into()
    }
}

/// A stream that is dropped at its deadline, even while the client does not read.
struct Bounded {
    shared: Arc<Mutex<Shared>>,
    last_words: Option<Bytes>,
    /// The timer; ends with the body.
    _timer: JoinSet<()>,
}

struct Shared {
    /// The stream; `None` after the deadline.
    body: Option<Body>,
    /// The task that waits for the next frame.
    waker: Option<Waker>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bounded {
    fn new(body: Body, deadline: Instant, last_words: Bytes) -> Self {
        let shared = Arc::new(Mutex::new(Shared { body: Some(body), waker: None }));
        // Weak, so that the stream ends at once when the client disconnects, not when the timer's task next runs.
        let weak = Arc::downgrade(&shared);
        let mut timer = JoinSet::new();
        timer.spawn(async move {
            sleep_until(deadline).await;
            let Some(shared) = weak.upgrade() else { return };
            let (body, waker) = {
                let mut shared = lock(&shared);
                (shared.body.take(), shared.waker.take())
            };
            drop(body);
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        Self { shared, last_words: Some(last_words), _timer: timer }
    }
}

impl HttpBody for Bounded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let polled = {
            let mut shared = lock(&self.shared);
            let polled = shared.body.as_mut().map(|body| Pin::new(body).poll_frame(cx));
            if matches!(polled, Some(Poll::Pending)) {
                shared.waker = Some(cx.waker().clone());
            }
            polled
        };
        match polled {
            Some(Poll::Ready(None)) => {
                // The stream has ended in time.
                self.last_words = None;
                Poll::Ready(None)
            }
            Some(polled) => polled,
            None => Poll::Ready(self.last_words.take().map(|bytes| Ok(Frame::data(bytes)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::{StreamExt, stream};
    use http_body_util::BodyExt;

    use super::*;

    /// A stream of one event and then nothing, and what tells whether it is still there.
    fn silent() -> (Body, Arc<()>) {
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let first = stream::iter([Ok::<_, Infallible>(Bytes::from("data: x\n\n"))]);
        let forever = first.chain(stream::pending()).map(move |frame| {
            let _held = &held;
            frame
        });
        (Body::from_stream(forever), alive)
    }

    #[tokio::test]
    async fn a_stream_ends_at_its_deadline_with_an_error() {
        let (body, alive) = silent();
        let bounded = Bounded::new(body, Instant::now() + Duration::from_millis(20), "late".into());
        assert_eq!(bounded.collect().await.unwrap().to_bytes(), "data: x\n\nlate");
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn it_ends_though_nobody_reads() {
        let (body, alive) = silent();
        let bounded = Bounded::new(body, Instant::now() + Duration::from_millis(5), "late".into());
        while Arc::strong_count(&alive) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(bounded.collect().await.unwrap().to_bytes(), "late");
    }

    #[tokio::test]
    async fn it_goes_with_its_reader() {
        let (body, alive) = silent();
        drop(Bounded::new(body, Instant::now() + Duration::from_secs(3600), "late".into()));
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn one_that_ends_in_time_says_nothing_more() {
        let body = Body::from("data: x\n\n");
        let mut bounded = Bounded::new(body, Instant::now() + Duration::from_millis(1), "late".into());
        assert!(bounded.frame().await.unwrap().is_ok());
        assert!(bounded.frame().await.is_none());
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(bounded.frame().await.is_none());
    }

    #[test]
    fn every_dialect_has_its_error() {
        let error = ApiError::request_timeout(Duration::from_millis(1500));
        let event = |path| String::from_utf8(Dialect::of(path).error_event(&error).to_vec()).unwrap();
        let message = "The request did not finish within 1.5 seconds.";
        assert_eq!(
            event("/v1/completions"),
            format!(
                "data: {{\"error\":{{\"message\":\"{message}\",\"type\":\"Gateway Timeout\",\"param\":null,\
                 \"code\":504}}}}\n\ndata: [DONE]\n\n"
            )
        );
        assert_eq!(
            event("/v1/messages"),
            format!(
                "event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"api_error\",\"message\":\
                 \"{message}\"}}}}\n\n"
            )
        );
        assert!(event("/v1/responses").starts_with("event: error\ndata: {\"type\":\"error\",\"code\":\"timeout\","));
    }
}
