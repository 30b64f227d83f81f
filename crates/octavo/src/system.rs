//! The resources that the machine or the container gives this process.

use std::fs;

pub(crate) use octavo_models::human_bytes;

/// Available memory in bytes: the kernel's estimate, limited by the control group.
pub(crate) fn available_memory() -> Option<u64> {
    let host = meminfo("MemAvailable:");
    let group = cgroup_free();
    match (host, group) {
        (Some(host), Some(group)) => Some(host.min(group)),
        (host, group) => host.or(group),
    }
}

/// Bytes of memory in the machine.
pub(crate) fn total_memory() -> Option<u64> {
    meminfo("MemTotal:")
}

/// Number of CPUs that this process may use, limited by control group and affinity.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes resident in memory.
pub(crate) fn resident_memory() -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The processor's name.
pub(crate) fn processor() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn meminfo(name: &str) -> Option<u64> {
    field(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// A `Name:  123 kB` line in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(name))?;
    line[name.len()..].split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Limit minus usage of the control group (version 2, then 1); `None` without a limit.
fn cgroup_free() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let v2 = || Some((read("/sys/fs/cgroup/memory.max")?, read("/sys/fs/cgroup/memory.current")?));
    let v1 = || {
        let limit = read("/sys/fs/cgroup/memory/memory.limit_in_bytes").filter(|&l| l < 1 << 60)?;
        Some((limit, read("/sys/fs/cgroup/memory/memory.usage_in_bytes")?))
    };
    let (limit, used) = v2().or_else(v1)?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_fields_are_kibibytes() {
        assert_eq!(field("MemTotal:       24684000 kB\n", "MemTotal:"), Some(24_684_000 * 1024));
        assert_eq!(field("MemTotal: x kB\n", "MemTotal:"), None);
    }
}
