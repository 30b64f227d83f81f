//! Placement of the threads on processors.

use std::path::Path;

/// Folders in which Linux describes its processors, and the NUMA nodes with their memory.
const PROCESSORS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";

/// Place of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// NUMA node, counted among those that have threads.
    pub(crate) node: usize,
    /// Processor to which the thread is pinned, if it is.
    pub(crate) processor: Option<usize>,
}

/// Returns the number of cores that this process may use, limited by the quota of its cgroup. The hardware threads of a
/// core count once: they share the units that compute, and each waits at the barriers for the other.
pub(crate) fn available_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match allowed() {
        Some(allowed) => processors.min(one_of_each_core(&allowed, Path::new(PROCESSORS)).len().max(1)),
        None => processors,
    }
}

/// Returns a place for each of `threads`: a core each, node by node, if there are exactly as many cores that this process
/// may use. With fewer threads, or under a quota, the system places them better, and nothing is known about their nodes.
pub(super) fn places(threads: usize) -> Vec<Place> {
    let cores = allowed().map(|allowed| one_of_each_core(&allowed, Path::new(PROCESSORS)));
    match cores {
        Some(cores) if cores.len() == threads && available_threads() == threads => by_node(&cores, Path::new(NODES)),
        _ => vec![Place::default(); threads],
    }
}

/// Returns the places of processors in the order of their nodes, according to the lists of processors in a folder.
/// Processors that are in no list are together on a node of their own.
fn by_node(processors: &[usize], nodes: &Path) -> Vec<Place> {
    let numbers = std::fs::read_dir(nodes).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix("node")?.parse::<usize>().ok()
    });
    let mut numbers: Vec<usize> = numbers.collect();
    numbers.sort_unstable();
    let lists: Vec<String> = numbers
        .iter()
        .map(|number| std::fs::read_to_string(nodes.join(format!("node{number}/cpulist"))).unwrap_or_default())
        .collect();
    let node_of = |processor| lists.iter().position(|list| is_listed(list, processor)).unwrap_or(lists.len());
    let mut found: Vec<(usize, usize)> = processors.iter().map(|&processor| (node_of(processor), processor)).collect();
    found.sort_unstable();
    let mut used: Vec<usize> = found.iter().map(|&(node, _)| node).collect();
    used.dedup();
    let place = |&(node, processor): &(usize, usize)| Place {
        node: used.partition_point(|&other| other < node),
        processor: Some(processor),
    };
    found.iter().map(place).collect()
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

/// Returns the processors that the calling thread may use, in order.
fn allowed() -> Option<Vec<usize>> {
    Affinity::current().map(|affinity| affinity.processors())
}

/// Pins the calling thread to a processor. A failure is ignored.
pub(super) fn pin(processor: usize) {
    Affinity::of(processor).set();
}

/// Moves the calling thread to a processor, if there is one and it runs on another, and pins it until the value is dropped. A thread
/// that is there already is not pinned: this would take longer than to ask, and the system seldom moves a thread that does not sleep.
pub(super) fn pin_for_a_time(processor: Option<usize>) -> impl Drop {
    let before = processor.filter(|&processor| current().is_some_and(|now| now != processor)).and_then(|processor| {
        let before = Affinity::current();
        pin(processor);
        before
    });
    Pinned { before }
}

/// Returns the processor on which the calling thread runs.
#[cfg(target_os = "linux")]
fn current() -> Option<usize> {
    // SAFETY: the call has no conditions.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

#[cfg(not(target_os = "linux"))]
fn current() -> Option<usize> {
    None
}

/// A pinned thread.
struct Pinned {
    /// The processors that it may use again.
    before: Option<Affinity>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            before.set();
        }
    }
}

/// Processors that a thread may use.
#[cfg(target_os = "linux")]
struct Affinity(libc::cpu_set_t);

#[cfg(target_os = "linux")]
impl Affinity {
    fn none() -> Self {
        // SAFETY: a set of all zeros is the empty set.
        Self(unsafe { std::mem::zeroed() })
    }

    fn of(processor: usize) -> Self {
        let mut affinity = Self::none();
        if processor < libc::CPU_SETSIZE as usize {
            // SAFETY: the index is below the set's size.
            unsafe { libc::CPU_SET(processor, &mut affinity.0) };
        }
        affinity
    }

    /// Returns that of the calling thread, if the set is large enough.
    fn current() -> Option<Self> {
        let mut affinity = Self::none();
        // SAFETY: the call writes to the set, whose size it receives.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&affinity.0), &mut affinity.0) };
        (result == 0).then_some(affinity)
    }

    /// Makes it that of the calling thread. A failure is ignored.
    fn set(&self) {
        // SAFETY: the call reads the set, whose size it receives.
        unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &self.0) };
    }

    fn processors(&self) -> Vec<usize> {
        // SAFETY: the indices are below the set's size.
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &self.0) }).collect()
    }
}

/// Processors that a thread may use, of which other systems tell nothing.
#[cfg(not(target_os = "linux"))]
struct Affinity;

#[cfg(not(target_os = "linux"))]
impl Affinity {
    fn of(_: usize) -> Self {
        Self
    }

    fn current() -> Option<Self> {
        None
    }

    fn set(&self) {}

    fn processors(&self) -> Vec<usize> {
        Vec::new()
    }
}

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
    fn threads_are_placed_node_by_node() {
        let root = std::env::temp_dir().join(format!("octavo-nodes-{}", std::process::id()));
        // A node without processors has memory only.
        for (node, list) in [(0, "0-1,4-5"), (2, ""), (10, "2-3,6-7")] {
            let folder = root.join(format!("node{node}"));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), format!("{list}\n")).unwrap();
        }
        std::fs::write(root.join("online"), "0,2,10\n").unwrap();
        let places = |processors: &[usize]| -> Vec<(usize, usize)> {
            by_node(processors, &root).iter().map(|place| (place.node, place.processor.unwrap())).collect()
        };
        assert_eq!(places(&[0, 1, 2, 3, 4, 6]), [(0, 0), (0, 1), (0, 4), (1, 2), (1, 3), (1, 6)]);
        assert_eq!(places(&[2, 6]), [(0, 2), (0, 6)], "only nodes with threads count");
        assert_eq!(places(&[6, 8]), [(0, 6), (1, 8)], "a processor without a node");
        let _ = std::fs::remove_dir_all(&root);
        assert_eq!(places(&[3, 5]), [(0, 3), (0, 5)], "a system without a description");
    }

    #[test]
    fn a_thread_is_pinned_for_a_time() {
        let Some(before) = allowed() else { return };
        let [first, .., last] = before[..] else { return };
        for (from, to) in [(first, last), (last, first), (last, last)] {
            pin(from);
            let pinned = pin_for_a_time(Some(to));
            assert_eq!((current(), allowed()), (Some(to), Some(vec![to])));
            drop(pinned);
            assert_eq!(allowed(), Some(vec![from]));
        }
        drop(pin_for_a_time(None));
        assert_eq!(allowed(), Some(vec![last]));
    }

    #[test]
    fn this_process_has_a_thread() {
        assert!((1..=std::thread::available_parallelism().unwrap().get()).contains(&available_threads()));
    }
}
