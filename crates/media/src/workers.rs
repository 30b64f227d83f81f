//! Decoding and resizing outside the threads that serve sockets.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Semaphore, oneshot};

use crate::budget::Lease;
use crate::error::MediaError;

/// Niceness of decoding relative to the threads that serve sockets: a tenth of their weight. An image takes a processor for
/// up to seconds, and a request of text only for moments.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;

/// A number of threads that decode.
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
    /// `threads` at a time, and no more than there are processors: further ones would only take memory.
    pub(crate) fn new(threads: usize) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Semaphore::new(threads.clamp(1, processors))))
    }

    /// Runs `work` on a thread of low priority once there is a place. The place and the lease are held until the work
    /// ends, even if nobody waits for it any more.
    ///
    /// # Errors
    /// The work's own; that no thread can be started; or that the work panicked: decoders are other people's code, and the
    /// file is somebody else's.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        lease: Lease,
        work: impl FnOnce(&Cancel) -> Result<T, MediaError> + Send + 'static,
    ) -> Result<T, MediaError> {
        let place = Arc::clone(&self.0).acquire_owned().await.expect("the semaphore is never closed");
        let cancel = Cancel::default();
        let _guard = SetOnDrop(cancel.clone());
        let (done, result) = oneshot::channel();
        // Threads of the runtime serve others afterwards, and a priority cannot be raised again.
        let decoder = std::thread::Builder::new().name("octavo-decode".to_owned()).spawn(move || {
            make_way();
            let result = catch_unwind(AssertUnwindSafe(|| work(&cancel)));
            drop((place, lease));
            // Nobody may wait for the result any more.
            let _ = done.send(result.unwrap_or_else(|_| Err(failed())));
        });
        decoder.map_err(|_| MediaError::Busy)?;
        result.await.unwrap_or_else(|_| Err(failed()))
    }
}

/// Lowers the priority of this thread.
fn make_way() {
    // On Linux, niceness is per thread; elsewhere it would apply to the whole process.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::debug!(%error, "cannot lower the priority of decoding");
    }
}

fn failed() -> MediaError {
    MediaError::Image("the decoder failed".to_owned())
}

/// Runs short work that would delay a thread that serves sockets.
///
/// # Errors
/// The work panicked.
pub(crate) async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, MediaError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| failed())
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
    async fn no_more_images_are_decoded_than_there_are_processors() {
        let workers = Workers::new(1 << 20);
        let processors = std::thread::available_parallelism().unwrap().get();
        assert_eq!(workers.0.available_permits(), processors);
        assert_eq!(Workers::new(0).0.available_permits(), 1);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn decoding_has_a_lower_priority_than_the_threads_of_the_runtime() {
        let own = || rustix::process::nice(0).unwrap();
        let (workers, budget, before) = (Workers::new(1), Budget::new(1 << 20), own());
        let decoding = workers.run(budget.reserve(1).await, move |_| Ok(own())).await.unwrap();
        assert_eq!((decoding, own()), ((before + NICENESS).min(19), before));
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
