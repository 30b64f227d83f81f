//! Decoding and resizing outside the threads that serve sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use crate::budget::Lease;
use crate::error::MediaError;

/// A number of places on the runtime's blocking pool.
#[derive(Clone, Debug)]
pub(crate) struct Workers(Arc<Semaphore>);

/// Set once nobody waits for the work any more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Sets the flag when the future that waits for the work is dropped.
struct SetOnDrop(Cancel);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

impl Workers {
    pub(crate) fn new(threads: usize) -> Self {
        Self(Arc::new(Semaphore::new(threads.clamp(1, Semaphore::MAX_PERMITS))))
    }

    /// Runs `work` on the blocking pool once there is a place. The place and the lease are held until the work ends, even
    /// if nobody waits for it any more.
    ///
    /// # Errors
    /// The work's own, or that it panicked: decoders are other people's code, and the file is somebody else's.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        lease: Lease,
        work: impl FnOnce(&Cancel) -> Result<T, MediaError> + Send + 'static,
    ) -> Result<T, MediaError> {
        let place = Arc::clone(&self.0).acquire_owned().await.expect("the semaphore is never closed");
        let cancel = Cancel::default();
        let _guard = SetOnDrop(cancel.clone());
        off_thread(move || {
            let result = work(&cancel);
            drop((place, lease));
            result
        })
        .await?
    }
}

/// Runs short work that would delay a thread that serves sockets.
///
/// # Errors
/// The work panicked.
pub(crate) async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, MediaError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| MediaError::Image("the decoder failed".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::budget::Budget;

    #[tokio::test]
    async fn a_panic_is_an_error_and_frees_its_place() {
        let (workers, budget) = (Workers::new(1), Budget::new(1 << 20));
        for _ in 0..3 {
            let result: Result<(), _> = workers.run(budget.reserve(1).await, |_| panic!("a bug")).await;
            assert!(matches!(result, Err(MediaError::Image(_))), "{result:?}");
        }
        assert_eq!(budget.free(), 1 << 20);
    }

    #[tokio::test]
    async fn work_learns_that_nobody_waits() {
        let (workers, budget) = (Workers::new(1), Budget::new(1 << 20));
        let (started, has_started) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        let lease = budget.reserve(1 << 20).await;
        let task = tokio::spawn(async move {
            let work = move |cancel: &Cancel| {
                started.send(()).unwrap();
                while !cancel.is_set() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                ended.send(()).unwrap();
                Ok(())
            };
            workers.run(lease, work).await
        });
        tokio::task::spawn_blocking(move || has_started.recv_timeout(Duration::from_secs(60))).await.unwrap().unwrap();
        assert_eq!(budget.free(), 0, "running work keeps its memory");
        task.abort();
        tokio::task::spawn_blocking(move || has_ended.recv_timeout(Duration::from_secs(60))).await.unwrap().unwrap();
        let _freed = budget.reserve(1 << 20).await;
    }
}
