//! Placement of the threads on processors.

/// Returns the number of processors that this process may use, limited by the quota of its cgroup.
pub(crate) fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns a processor for each of `threads` if there are exactly as many as this process may use. With fewer threads,
/// or under a quota, the system places them better.
#[cfg(target_os = "linux")]
pub(super) fn places(threads: usize) -> Option<Vec<usize>> {
    // SAFETY: a set of all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to `set`, whose size it receives.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return None;
    }
    // SAFETY: the indices are below the set's size.
    let allowed = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    let allowed: Vec<usize> = allowed.collect();
    (allowed.len() == threads && available_threads() == threads).then_some(allowed)
}

/// Pins the calling thread to a processor. A failure is ignored.
#[cfg(target_os = "linux")]
pub(super) fn pin(place: usize) {
    // SAFETY: a set of all zeros is the empty set, and `place` was in a set of the same size.
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
