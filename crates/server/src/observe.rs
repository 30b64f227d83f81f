//! HTTP metrics: every request is observed once, when its response is complete or its client has disconnected.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body::Body;
use octavo_telemetry::{HttpExchange, HttpMetrics};

use crate::route_table::is_counted;
use crate::watch::watched;

/// The status for requests whose client disconnected before the response, as in nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Observes a request.
pub(crate) async fn observe(State(metrics): State<HttpMetrics>, request: Request, next: Next) -> Response {
    let handler = request.extensions().get::<MatchedPath>().cloned();
    if handler.as_ref().is_some_and(|path| !is_counted(path.as_str())) {
        return next.run(request).await;
    }
    let mut observation = Observation {
        metrics,
        method: request.method().clone(),
        handler,
        started: Instant::now(),
        request_bytes: request.body().size_hint().lower(),
        status: CLIENT_CLOSED_REQUEST,
        response_bytes: 0,
    };
    let response = next.run(request).await;
    observation.status = response.status().as_u16();
    response.map(|body| watched(body, move |bytes| observation.count(bytes)))
}

/// Reports the request when dropped.
struct Observation {
    metrics: HttpMetrics,
    method: Method,
    handler: Option<MatchedPath>,
    started: Instant,
    request_bytes: u64,
    status: u16,
    response_bytes: u64,
}

impl Observation {
    /// A method, so that a closure that calls it captures the whole observation rather than one field.
    fn count(&mut self, bytes: &Bytes) {
        self.response_bytes += bytes.len() as u64;
    }
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
