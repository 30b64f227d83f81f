//! HTTP metrics: every request is observed once, when the last byte of its response is out or its client has gone.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body::{Body as HttpBody, Frame, SizeHint};
use octavo_telemetry::{HttpExchange, HttpMetrics};

/// What a request whose client left before the response counts as, after nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Observes the request that passes through.
pub(crate) async fn observe(State(metrics): State<HttpMetrics>, request: Request, next: Next) -> Response {
    let mut observation = Observation {
        metrics,
        method: request.method().clone(),
        handler: request.extensions().get::<MatchedPath>().cloned(),
        started: Instant::now(),
        request_bytes: request.body().size_hint().lower(),
        status: CLIENT_CLOSED_REQUEST,
        response_bytes: 0,
    };
    let response = next.run(request).await;
    observation.status = response.status().as_u16();
    response.map(|body| Body::new(Observed { body, observation }))
}

/// Reports when dropped.
struct Observation {
    metrics: HttpMetrics,
    method: Method,
    handler: Option<MatchedPath>,
    started: Instant,
    request_bytes: u64,
    status: u16,
    response_bytes: u64,
}

impl Drop for Observation {
    fn drop(&mut self) {
        let duration = self.started.elapsed();
        let handler = self.handler.as_ref().map(MatchedPath::as_str);
        self.metrics.observe(&HttpExchange {
            method: self.method.as_str(),
            handler,
            status: self.status,
            duration,
            request_bytes: self.request_bytes,
            response_bytes: self.response_bytes,
        });
        if self.status != StatusCode::OK {
            tracing::debug!(method = %self.method, handler, status = self.status, ?duration, "request");
        }
    }
}

/// A body that carries its request's observation to the end.
struct Observed {
    body: Body,
    observation: Observation,
}

impl HttpBody for Observed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            self.observation.response_bytes += bytes as u64;
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
