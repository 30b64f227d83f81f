//! The heap while images are fetched, decoded and kept. Each test runs alone, because all of them share one heap.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod bombs;
#[path = "../common/mod.rs"]
mod common;
mod memory;

use tokio::sync::{Mutex, MutexGuard};

#[global_allocator]
static HEAP: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// The heap, for one test at a time.
struct Heap {
    before: usize,
    _alone: MutexGuard<'static, ()>,
}

impl Heap {
    /// Waits until no other test uses the heap.
    async fn alone() -> Self {
        static TESTS: Mutex<()> = Mutex::const_new(());
        let alone = TESTS.lock().await;
        let mut heap = Self { before: 0, _alone: alone };
        heap.start();
        heap
    }

    /// Measures from here on.
    fn start(&mut self) {
        self.before = HEAP.current_usage();
        HEAP.reset_peak_usage();
    }

    /// The most bytes in use since the start, beyond those in use at the start.
    fn peak(&self) -> u64 {
        HEAP.peak_usage().saturating_sub(self.before) as u64
    }

    /// The bytes in use now, beyond those in use at the start.
    fn kept(&self) -> u64 {
        HEAP.current_usage().saturating_sub(self.before) as u64
    }
}
