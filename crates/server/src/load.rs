//! The number of running generation requests, for load balancers that do not read metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::Method;

use crate::watch::watched;

/// Routes that use the engine, including routes that are not supported yet.
const GENERATING: [&str; 17] = [
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/embed",
    "/v2/rerank",
    "/invocations",
    "/generate",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/inference/v1/generate",
];

/// Whether a route uses the engine.
pub(crate) fn generates(path: &str) -> bool {
    GENERATING.contains(&path)
}

/// A count of running generation requests. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load(Arc<AtomicUsize>);

impl Load {
    /// The current number.
    pub(crate) fn current(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn enter(&self) -> Running {
        self.0.fetch_add(1, Ordering::Relaxed);
        Running(self.clone())
    }
}

/// A running request; dropping it decreases the count.
struct Running(Load);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a request until its response is complete or its client has disconnected.
pub(crate) async fn track(State(load): State<Load>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    if *request.method() != Method::POST || !path.is_some_and(generates) {
        return next.run(request).await;
    }
    let running = load.enter();
    let response = next.run(request).await;
    response.map(|body| {
        watched(body, move |_| {
            let _counted = &running;
        })
    })
}
