//! Keep-alive comments in silent streams, for proxies that close idle connections.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::{Body as HttpBody, Frame};
use tokio::time::{Instant, Sleep, sleep};

/// A comment, which readers of server-sent events skip.
pub(crate) const COMMENT: &[u8] = b": keep-alive\n\n";

/// Whether a response is a stream of events.
fn is_event_stream(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

/// Adds a comment to event streams whenever nothing was sent for `interval`.
pub(crate) async fn comment(State(interval): State<Duration>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if !is_event_stream(response.headers()) {
        return response;
    }
    response.map(|body| Body::new(KeepAlive::new(body, interval)))
}

/// A body whose frames are whole events, so that a comment fits between any two.
struct KeepAlive {
    body: Body,
    interval: Duration,
    /// Time of the last frame.
    last: Instant,
    /// A timer that expires no later than the next comment is due. It is reset when it has expired too early rather than
    /// for each frame, since frames are many.
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    fn new(body: Body, interval: Duration) -> Self {
        Self { body, interval, last: Instant::now(), timer: Box::pin(sleep(interval)) }
    }
}

impl HttpBody for KeepAlive {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.last = Instant::now();
            return Poll::Ready(frame);
        }
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let (now, interval) = (Instant::now(), self.interval);
            let silent = now.duration_since(self.last);
            if silent >= interval {
                self.last = now;
                self.timer.as_mut().reset(now + interval);
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
            }
            self.timer.as_mut().reset(now + (interval - silent));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use http_body_util::BodyExt;
    use tokio::sync::mpsc;

    use super::*;

    fn channel(interval: Duration) -> (mpsc::Sender<Bytes>, KeepAlive) {
        let (sender, receiver) = mpsc::channel::<Bytes>(1);
        let frames = stream::unfold(receiver, |mut receiver| async {
            let bytes = receiver.recv().await?;
            Some((Ok::<_, std::convert::Infallible>(bytes), receiver))
        });
        (sender, KeepAlive::new(Body::from_stream(frames), interval))
    }

    async fn next(body: &mut KeepAlive) -> Option<Bytes> {
        Some(body.frame().await?.unwrap().into_data().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn comments_come_in_silence_and_after_an_event_the_silence_starts_anew() {
        let interval = Duration::from_millis(40);
        let begun = Instant::now();
        let (sender, mut body) = channel(interval);
        for count in 1..=3 {
            assert_eq!(next(&mut body).await.unwrap(), COMMENT);
            assert!(begun.elapsed() >= interval * count);
        }
        for _ in 0..3 {
            tokio::time::sleep(interval / 2).await;
            let begun = Instant::now();
            sender.send("data: x\n\n".into()).await.unwrap();
            assert_eq!(next(&mut body).await.unwrap(), "data: x\n\n", "an event goes before a comment");
            assert_eq!(next(&mut body).await.unwrap(), COMMENT);
            assert!(begun.elapsed() >= interval);
        }
        drop(sender);
        assert_eq!(next(&mut body).await, None);
    }

    #[tokio::test]
    async fn a_stream_that_talks_has_no_comments() {
        let (sender, mut body) = channel(Duration::from_secs(3600));
        let talking = tokio::spawn(async move {
            for _ in 0..1000 {
                sender.send("data: x\n\n".into()).await.unwrap();
            }
        });
        let mut frames = 0;
        while let Some(frame) = next(&mut body).await {
            assert_eq!(frame, "data: x\n\n");
            frames += 1;
        }
        assert_eq!(frames, 1000);
        talking.await.unwrap();
    }
}
