//! The locks that the engine thread shares with the threads of callers, and what waits for them cost.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Waits of a thread for locks that another thread held.
#[derive(Clone, Copy, Debug, Default)]
pub struct LockWaits {
    /// Number of waits.
    pub count: u64,
    /// Sum of their times.
    pub total: Duration,
    /// Longest of them.
    pub longest: Duration,
}

thread_local! {
    static WAITS: Cell<LockWaits> = Cell::default();
}

/// Returns the waits of the calling thread so far.
pub(crate) fn waits() -> LockWaits {
    WAITS.get()
}

/// Locks a mutex, whatever happened to its former holders: their changes are whole, or the engine is gone. A wait is counted.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => return guard,
        Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => {}
    }
    let begun = Instant::now();
    let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    let (time, waits) = (begun.elapsed(), WAITS.get());
    WAITS.set(LockWaits { count: waits.count + 1, total: waits.total + time, longest: waits.longest.max(time) });
    guard
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_by_the_thread_that_waits() {
        let mutex = Mutex::new(0);
        drop(lock(&mutex));
        assert_eq!(waits().count, 0);
        std::thread::scope(|scope| {
            let held = lock(&mutex);
            let waiter = scope.spawn(|| {
                drop(lock(&mutex));
                waits()
            });
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
            let waits = waiter.join().unwrap();
            // The thread may have started late.
            assert!(waits.count <= 1 && waits.longest == waits.total && waits.total < Duration::from_secs(20));
        });
        assert_eq!(waits().count, 0);
    }
}
