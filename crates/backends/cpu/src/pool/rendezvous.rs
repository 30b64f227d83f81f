//! Waiting of threads: they spin for a short time, because the others usually arrive soon, and then sleep.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time for which a thread spins. It is longer than a phase of a step in which a thread has no work, and so short that
/// an idle server uses no processor.
const AWAKE: Duration = Duration::from_micros(50);

/// Number of rounds between two reads of the clock.
const ROUNDS: usize = 64;

/// A number that only grows, on whose changes threads can wait.
#[derive(Default)]
pub(crate) struct Generation {
    current: AtomicUsize,
    /// Number of threads that sleep or are about to.
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    condvar: Condvar,
}

impl Generation {
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Acquire)
    }

    /// Increments the number and wakes the waiting threads. Earlier writes are visible to them.
    pub(crate) fn advance(&self) {
        // This is sequentially consistent, as is the sleepers' side: either they are counted here, or they see the new
        // number.
        self.current.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.condvar.notify_all();
        }
    }

    /// Waits until the number differs from `seen` and returns it.
    pub(crate) fn wait_beyond(&self, seen: usize) -> usize {
        let changed = || Some(self.current()).filter(|&current| current != seen);
        let mut begun = None;
        loop {
            for _ in 0..ROUNDS {
                if let Some(current) = changed() {
                    return current;
                }
                spin_loop();
            }
            // With more threads than processors, the others arrive only if this one yields.
            std::thread::yield_now();
            if begun.get_or_insert_with(Instant::now).elapsed() > AWAKE {
                break;
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while self.current.load(Ordering::SeqCst) == seen {
            guard = self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.current()
    }
}

/// A reusable barrier for a fixed number of threads.
pub(crate) struct Rendezvous {
    threads: usize,
    arrived: AtomicUsize,
    met: Generation,
    /// Whether a thread has gone for good, after which no thread waits in this region.
    abandoned: AtomicBool,
    /// Number of threads that have left the region.
    left: AtomicUsize,
    gone: Generation,
}

impl Rendezvous {
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: AtomicUsize::new(0),
            met: Generation::default(),
            abandoned: AtomicBool::new(false),
            left: AtomicUsize::new(0),
            gone: Generation::default(),
        }
    }

    /// Waits for the others. Returns `false` if one of them will never arrive.
    #[must_use]
    pub(crate) fn meet(&self) -> bool {
        let seen = self.met.current();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.met.advance();
            return true;
        }
        if !self.abandoned.load(Ordering::SeqCst) {
            self.met.wait_beyond(seen);
        }
        !self.abandoned.load(Ordering::SeqCst)
    }

    /// Tells all threads that wait, now or later in this region, that this thread will not arrive.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.met.advance();
    }

    /// Ends this thread's part in the region and waits until all threads have left.
    pub(crate) fn leave(&self) {
        let seen = self.gone.current();
        if self.left.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.left.store(0, Ordering::Relaxed);
            self.gone.advance();
        } else {
            self.gone.wait_beyond(seen);
        }
    }

    /// Prepares the next region. Must be called when all threads have left.
    pub(crate) fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.abandoned.store(false, Ordering::Relaxed);
    }
}
