//! Waiting of threads: they poll for a short time, because the others usually arrive soon, and then sleep.

use std::sync::PoisonError;

use super::sync::{AtomicBool, AtomicUsize, Condvar, GROUP, Mutex, MutexGuard, Ordering, poll};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that only grows, on whose changes threads can wait.
///
/// The lowest bit tells whether a thread sleeps. It is in the same variable as the number, so that a thread that goes to
/// sleep and one that advances the number cannot miss each other.
// Processors fetch lines of 64 bytes in pairs.
#[repr(align(128))]
pub(crate) struct Generation {
    current: AtomicUsize,
    /// Held where the bit changes.
    mutex: Mutex<()>,
    condvar: Condvar,
}

const SLEEPING: usize = 1;
const STEP: usize = 2;

impl Generation {
    pub(crate) fn new() -> Self {
        Self { current: AtomicUsize::new(0), mutex: Mutex::new(()), condvar: Condvar::new() }
    }

    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Acquire) & !SLEEPING
    }

    /// Advances the number and wakes the waiting threads. Earlier writes are visible to them.
    pub(crate) fn advance(&self) {
        if self.current.fetch_add(STEP, Ordering::AcqRel) & SLEEPING != 0 {
            let _guard = lock(&self.mutex);
            self.current.fetch_and(!SLEEPING, Ordering::Relaxed);
            self.condvar.notify_all();
        }
    }

    /// Waits until the number differs from `seen` and returns it.
    pub(crate) fn wait_beyond(&self, seen: usize) -> usize {
        if let Some(current) = poll(|| Some(self.current()).filter(|&current| current != seen)) {
            return current;
        }
        let fall_asleep =
            || match self.current.compare_exchange(seen, seen | SLEEPING, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(now) | Err(now) => now & !SLEEPING == seen,
            };
        let mut guard = lock(&self.mutex);
        while fall_asleep() {
            guard = self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.current()
    }
}

/// A counter that shares its cache lines with no other.
#[repr(align(128))]
struct Counter(AtomicUsize);

/// Counts the threads that have arrived.
///
/// [`GROUP`] adjacent threads share a counter, and the last of them counts for the group on the next level. With one
/// counter for all, as many additions as there are threads would follow each other.
struct Arrivals {
    threads: usize,
    levels: Vec<Box<[Counter]>>,
}

impl Arrivals {
    fn new(threads: usize) -> Self {
        let (mut levels, mut width) = (Vec::new(), threads);
        loop {
            width = width.div_ceil(GROUP);
            levels.push((0..width).map(|_| Counter(AtomicUsize::new(0))).collect());
            if width == 1 {
                return Self { threads, levels };
            }
        }
    }

    /// Returns whether all other threads have arrived before. The counters are then ready for the next time.
    fn arrive(&self, thread: usize) -> bool {
        let (mut index, mut width) = (thread, self.threads);
        for counters in &self.levels {
            let group = index / GROUP;
            let members = GROUP.min(width - group * GROUP);
            let arrived = &counters[group].0;
            if arrived.fetch_add(1, Ordering::AcqRel) + 1 < members {
                return false;
            }
            arrived.store(0, Ordering::Relaxed);
            (index, width) = (group, counters.len());
        }
        true
    }

    fn reset(&self) {
        self.levels.iter().flatten().for_each(|counter| counter.0.store(0, Ordering::Relaxed));
    }
}

/// A reusable barrier for a fixed number of threads.
pub(crate) struct Rendezvous {
    arrived: Arrivals,
    met: Generation,
    /// Whether a thread has gone for good, after which no thread waits in this region.
    abandoned: AtomicBool,
    /// Counts the threads that have left the region.
    left: Arrivals,
    gone: Generation,
}

impl Rendezvous {
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            arrived: Arrivals::new(threads),
            met: Generation::new(),
            abandoned: AtomicBool::new(false),
            left: Arrivals::new(threads),
            gone: Generation::new(),
        }
    }

    /// Waits for the others. Returns `false` if one of them will never arrive.
    #[must_use]
    pub(crate) fn meet(&self, thread: usize) -> bool {
        let seen = self.met.current();
        if self.arrived.arrive(thread) {
            self.met.advance();
            return true;
        }
        // If the flag is not visible yet, neither was the advance that follows it, and the wait ends.
        if !self.abandoned.load(Ordering::Relaxed) {
            self.met.wait_beyond(seen);
        }
        !self.abandoned.load(Ordering::Relaxed)
    }

    /// Tells all threads that wait, now or later in this region, that this thread will not arrive.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.met.advance();
    }

    /// Ends a thread's part in the region. Thread 0 waits until all have left; then the next region can begin.
    pub(crate) fn leave(&self, thread: usize) {
        let seen = self.gone.current();
        if self.left.arrive(thread) {
            self.gone.advance();
        } else if thread == 0 {
            self.gone.wait_beyond(seen);
        }
        if thread == 0 && self.abandoned.load(Ordering::Relaxed) {
            self.arrived.reset();
            self.abandoned.store(false, Ordering::Relaxed);
        }
    }
}
