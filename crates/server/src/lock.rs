//! Locks whose data is valid at every moment, so that a panic of a holder makes them no worse.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, whether or not a holder has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
