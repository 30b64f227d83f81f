//! What the threads synchronise with. The model of the protocol (`tests/pool.rs`) replaces this module.

use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Largest number of threads that share a counter at a barrier. Processors often have a cache for every eight cores.
pub(crate) const GROUP: usize = 8;

/// Time for which a thread polls. It is longer than a phase of a step in which a thread has no work, and so short that
/// an idle server uses no processor.
const AWAKE: Duration = Duration::from_micros(50);

/// Number of rounds between two reads of the clock.
const ROUNDS: usize = 64;

/// Asks for a value for a short time.
pub(crate) fn poll<T>(value: impl Fn() -> Option<T>) -> Option<T> {
    let mut begun = None;
    loop {
        for _ in 0..ROUNDS {
            if let Some(value) = value() {
                return Some(value);
            }
            spin_loop();
        }
        // With more threads than processors, the others arrive only if this one yields.
        std::thread::yield_now();
        if begun.get_or_insert_with(Instant::now).elapsed() > AWAKE {
            return None;
        }
    }
}
