//! Runs parsing, template rendering and tokenization outside the threads that serve sockets.

use std::sync::Arc;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;

use crate::error::ApiError;

/// Size in bytes above which a body uses the lane for large bodies.
const LARGE_BODY: usize = 64 << 10;

/// Two lanes onto the blocking pool, so that large prompts delay only other large prompts.
#[derive(Clone)]
pub(crate) struct Workers {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Workers {
    /// As many workers as cores, and half as many for large bodies.
    pub(crate) fn new() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self { small: Arc::new(Semaphore::new(cores)), large: Arc::new(Semaphore::new(cores.div_ceil(2))) }
    }

    /// Runs work whose time does not depend on the size of its input.
    pub(crate) async fn run_heavy<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run(usize::MAX, work).await
    }

    /// Runs `work` on a body of `bytes` bytes. If the caller is dropped while it waits, it never runs; once it runs, it
    /// holds its place in the lane until it is done.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let lane = if bytes > LARGE_BODY { &self.large } else { &self.small };
        let Ok(permit) = Arc::clone(lane).acquire_owned().await else { return Err(ApiError::internal()) };
        // Its log lines belong to the same request.
        let span = tracing::Span::current();
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            span.in_scope(work)
        });
        task.await.unwrap_or_else(|error| {
            tracing::error!(%error, "a request could not be prepared");
            Err(ApiError::internal())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_bodies_do_not_delay_small_ones() {
        let workers = Workers::new();
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(std::sync::Mutex::new(blocked));
        let large: Vec<_> = (0..64)
            .map(|_| {
                let (workers, blocked) = (workers.clone(), Arc::clone(&blocked));
                tokio::spawn(async move {
                    workers.run(LARGE_BODY + 1, move || Ok(blocked.lock().unwrap().recv().is_err())).await
                })
            })
            .collect();
        assert_eq!(workers.run(LARGE_BODY, || Ok(7)).await, Ok(7));
        drop(release);
        for task in large {
            assert_eq!(task.await.unwrap(), Ok(true));
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_gives_its_lane_back() {
        let workers = Workers::new();
        for _ in 0..100 {
            let result: Result<(), _> = workers.run(0, || panic!("on purpose")).await;
            assert_eq!(result.unwrap_err().status(), 500);
        }
    }
}
