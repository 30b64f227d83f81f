//! The number of running generation requests, for load balancers that do not read metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::route_table::Route;
use crate::watch::watched;

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
    if !Route::generates(&request) {
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
