//! A response body with an observer.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

/// Wraps a body and calls `see` with every piece as it is sent. `see` is dropped with the body, when the response is
/// complete or the client has disconnected.
pub(crate) fn watched(body: Body, see: impl FnMut(&Bytes) + Send + Unpin + 'static) -> Body {
    Body::new(Watched { body, see })
}

struct Watched<F> {
    body: Body,
    see: F,
}

impl<F: FnMut(&Bytes) + Unpin> HttpBody for Watched<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(bytes) = frame.data_ref()
        {
            (self.see)(bytes);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
