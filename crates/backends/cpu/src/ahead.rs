//! Maps memory before it is used, while nothing else is to be done.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::memory::{HUGE, Lines, Plain};

/// Time without a step after which pages are mapped.
const IDLE: Duration = Duration::from_millis(100);

/// A thread that maps huge pages of a slice between steps.
///
/// The system maps a page when it is first written, and fills it with zeros. In a virtual machine that has no memory behind the page yet,
/// this takes milliseconds, for which all threads of a step wait.
#[derive(Default)]
pub(crate) struct MapAhead {
    /// Number of steps that have begun and that have ended: odd while one runs.
    steps: Arc<AtomicU64>,
    pages: Option<Sender<Range<usize>>>,
    thread: Option<JoinHandle<()>>,
}

impl MapAhead {
    /// Notes that a step begins, and that it ends when the result is dropped.
    pub(crate) fn step(&self) -> Step {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Step(Arc::clone(&self.steps))
    }

    /// Maps pages when there has been no step for a while, in place of those that it was to map before. Their content stays as it is,
    /// and they may be in use. Without a thread, pages are mapped when they are written.
    ///
    /// This must be dropped before the memory is freed.
    pub(crate) fn map<T: Plain>(&mut self, memory: &Lines<T>, pages: Range<usize>) {
        let sender = self.pages.get_or_insert_with(|| {
            let (sender, received) = channel();
            let (start, steps) = (memory.as_ptr().addr(), Arc::clone(&self.steps));
            let run = move || map_in_pauses(start, &steps, &received);
            self.thread = Builder::new().name("octavo-pages".into()).spawn(run).ok();
            sender
        });
        // If there is no thread, nothing receives it.
        let _ = sender.send(pages);
    }
}

/// A step that runs.
pub(crate) struct Step(Arc<AtomicU64>);

impl Drop for Step {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for MapAhead {
    fn drop(&mut self) {
        self.pages = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Maps the pages that were received last, of those from an address on, between steps.
fn map_in_pauses(start: usize, steps: &AtomicU64, received: &Receiver<Range<usize>>) {
    while let Ok(mut pages) = received.recv() {
        while !pages.is_empty() {
            let seen = steps.load(Ordering::Relaxed);
            match received.recv_timeout(IDLE) {
                Ok(newer) => pages = newer,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let is_idle = || seen.is_multiple_of(2) && steps.load(Ordering::Relaxed) == seen;
                    while is_idle()
                        && let Some(page) = pages.next()
                    {
                        map(start + page * HUGE);
                    }
                }
            }
        }
    }
}

/// Maps the huge page at an address if the system supports it, as Linux does from 5.14 on.
#[cfg(target_os = "linux")]
fn map(start: usize) {
    // SAFETY: the call changes no content, and fails if there is no memory.
    unsafe { libc::madvise(std::ptr::without_provenance_mut(start), HUGE, libc::MADV_POPULATE_WRITE) };
}

#[cfg(not(target_os = "linux"))]
fn map(_: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Returns whether a page is mapped, by page.
    fn mapped(memory: &[u8]) -> Vec<bool> {
        let all = memory.chunks(HUGE).map(|page| {
            let mut found = [0; HUGE / 4096];
            // SAFETY: the range belongs to the slice, and there is room for its smallest pages.
            assert_eq!(unsafe { libc::mincore(page.as_ptr().cast_mut().cast(), HUGE, found.as_mut_ptr()) }, 0);
            found[0] & 1 == 1
        });
        all.collect()
    }

    #[test]
    fn pages_are_mapped_when_no_step_runs() {
        let memory = Lines::<u8>::zeroed(4 * HUGE, || "a test".into()).unwrap();
        let mut ahead = MapAhead::default();
        let step = ahead.step();
        ahead.map(&memory, 0..1);
        ahead.map(&memory, 1..3);
        std::thread::sleep(3 * IDLE);
        assert_eq!(mapped(&memory), [false; 4]);
        drop(step);
        map(memory.as_ptr().addr() + HUGE);
        // Linux before 5.14 maps none, and emulators that ignore advice report success.
        let is_supported = mapped(&memory)[1];
        let begun = Instant::now();
        while is_supported && mapped(&memory) != [false, true, true, false] {
            assert!(begun.elapsed() < 100 * IDLE, "{:?}", mapped(&memory));
            std::thread::sleep(IDLE / 10);
        }
    }
}
