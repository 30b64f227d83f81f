//! Which processors the threads run on.

/// Processors that this process may use, the quota of its cgroup considered.
pub(crate) fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A processor for each of `threads`, if they are just as many as this process may use; with fewer threads, or under a
/// quota, the system places them better.
#[cfg(target_os = "linux")]
pub(super) fn places(threads: usize) -> Option<Vec<usize>> {
    // SAFETY: a set of all zeros is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to `set`, whose size it is told.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return None;
    }
    // SAFETY: the indices are below the set's size.
    let allowed = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    let allowed: Vec<usize> = allowed.collect();
    (allowed.len() == threads && available_threads() == threads).then_some(allowed)
}

/// Keeps the calling thread on a processor. Where that fails it just runs anywhere.
#[cfg(target_os = "linux")]
pub(super) fn pin(place: usize) {
    // SAFETY: a set of all zeros is the empty one, and `place` was in a set of the same size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(place, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn places(_: usize) -> Option<Vec<usize>> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_: usize) {}
