//! Waiting: a short while awake, since the others are mostly about to come, then asleep.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a thread stays awake. Longer than a phase of a step lasts for a thread that has no work in it, and short
/// enough that an idle server uses no processor.
const AWAKE: Duration = Duration::from_micros(50);

/// Looks at the clock only after so many rounds.
const ROUNDS: usize = 64;

/// A number that grows, for which threads can wait.
#[derive(Default)]
pub(crate) struct Generation {
    current: AtomicUsize,
    /// Threads that sleep or are about to.
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    condvar: Condvar,
}

impl Generation {
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Acquire)
    }

    /// Moves on and wakes who waits. What was done before is seen by those who waited.
    pub(crate) fn advance(&self) {
        // Sequentially consistent, as is the sleepers' side: either they are counted here, or they see the new number.
        self.current.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.condvar.notify_all();
        }
    }

    /// Waits until the number is not `seen` any more; what it is then.
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
            // With more threads than processors the others come only if this one makes way.
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

/// Where a fixed number of threads meet again and again.
pub(crate) struct Rendezvous {
    threads: usize,
    arrived: AtomicUsize,
    met: Generation,
    /// A thread has gone for good: nobody waits any more in this region.
    abandoned: AtomicBool,
    /// Threads that have left the region.
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

    /// Waits for the others; the last to come does `last` first. False if one of them will never come.
    #[must_use]
    pub(crate) fn meet(&self, last: impl FnOnce()) -> bool {
        let seen = self.met.current();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            last();
            self.met.advance();
            return true;
        }
        if !self.abandoned.load(Ordering::SeqCst) {
            self.met.wait_beyond(seen);
        }
        !self.abandoned.load(Ordering::SeqCst)
    }

    /// Tells everyone who waits, now or later in this region, that this thread will not come.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.met.advance();
    }

    /// Ends this thread's part in the region and waits until all have.
    pub(crate) fn leave(&self) {
        let seen = self.gone.current();
        if self.left.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.left.store(0, Ordering::Relaxed);
            self.gone.advance();
        } else {
            self.gone.wait_beyond(seen);
        }
    }

    /// Makes ready for the next region. Only when all have left.
    pub(crate) fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.abandoned.store(false, Ordering::Relaxed);
    }
}
