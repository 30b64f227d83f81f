//! Placement of the threads on processors.

use std::path::Path;

/// Folder in which Linux describes its processors.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// Returns the number of cores that this process may use, limited by the quota of its cgroup. The hardware threads of a
/// core count once: they share the units that compute, and each waits at the barriers for the other.
pub(crate) fn available_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match allowed() {
        Some(allowed) => processors.min(one_of_each_core(&allowed, Path::new(PROCESSORS)).len().max(1)),
        None => processors,
    }
}

/// Returns a processor for each of `threads` if there are exactly as many cores that this process may use. With fewer
/// threads, or under a quota, the system places them better.
pub(super) fn places(threads: usize) -> Option<Vec<usize>> {
    let places = one_of_each_core(&allowed()?, Path::new(PROCESSORS));
    (places.len() == threads && available_threads() == threads).then_some(places)
}

/// Returns the first of the processors of each core, in order, according to the lists of siblings in a folder. A processor
/// without a list is a core of its own.
fn one_of_each_core(allowed: &[usize], processors: &Path) -> Vec<usize> {
    let is_first = |&cpu: &usize| {
        let path = processors.join(format!("cpu{cpu}/topology/thread_siblings_list"));
        let siblings = std::fs::read_to_string(path).unwrap_or_default();
        let first = allowed.iter().find(|&&other| is_listed(&siblings, other));
        first.is_none_or(|&first| first >= cpu)
    };
    allowed.iter().copied().filter(is_first).collect()
}

/// Returns whether a list such as `0-2,8` has a number.
fn is_listed(list: &str, number: usize) -> bool {
    list.trim().split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&number),
            _ => false,
        }
    })
}

/// Returns the processors that this process may use, in order.
#[cfg(target_os = "linux")]
fn allowed() -> Option<Vec<usize>> {
    // SAFETY: a set of all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to `set`, whose size it receives.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return None;
    }
    // SAFETY: the indices are below the set's size.
    Some((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Option<Vec<usize>> {
    None
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
pub(super) fn pin(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a folder with the siblings of each processor.
    fn folder(name: &str, siblings: &[&str]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("octavo-processors-{name}-{}", std::process::id()));
        for (cpu, list) in siblings.iter().enumerate() {
            let topology = root.join(format!("cpu{cpu}/topology"));
            std::fs::create_dir_all(&topology).unwrap();
            std::fs::write(topology.join("thread_siblings_list"), format!("{list}\n")).unwrap();
        }
        root
    }

    #[test]
    fn hardware_threads_of_a_core_count_once() {
        for (name, siblings, allowed, expected) in [
            ("apart", &["0,2", "1,3", "0,2", "1,3"][..], &[0, 1, 2, 3][..], &[0, 1][..]),
            ("adjacent", &["0-1", "0-1", "2-3", "2-3"], &[0, 1, 2, 3], &[0, 2]),
            ("part", &["0-1", "0-1", "2-3", "2-3"], &[1, 2, 3], &[1, 2]),
            // Cores with two threads and cores with one.
            ("hybrid", &["0-1", "0-1", "2", "3"], &[0, 1, 2, 3], &[0, 2, 3]),
            ("unknown", &[], &[4, 5], &[4, 5]),
            ("broken", &["zero", "1-"], &[0, 1], &[0, 1]),
        ] {
            let root = folder(name, siblings);
            assert_eq!(one_of_each_core(allowed, &root), expected, "{name}");
            let _ = std::fs::remove_dir_all(root);
        }
    }

    #[test]
    fn this_process_has_a_thread() {
        assert!((1..=std::thread::available_parallelism().unwrap().get()).contains(&available_threads()));
    }
}
