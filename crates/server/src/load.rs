//! How many generation requests run: what load balancers that know no metrics ask for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::Method;

use crate::watch::watched;

/// Routes that put work on the engine, whether they are served yet or not.
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

/// Whether a route puts work on the engine.
pub(crate) fn generates(path: &str) -> bool {
    GENERATING.contains(&path)
}

/// Generation requests that run. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load(Arc<AtomicUsize>);

impl Load {
    /// How many there are now.
    pub(crate) fn current(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn enter(&self) -> Running {
        self.0.fetch_add(1, Ordering::Relaxed);
        Running(self.clone())
    }
}

/// One of them; dropped, it runs no more.
struct Running(Load);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts the request that passes through until its response is out or its client has gone.
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
