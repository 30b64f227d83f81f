//! CPU time and memory of a process, from `/proc`.

use std::fs;
use std::time::Duration;

/// The resources that a process has used so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// User and system time of all its threads, in steps of 10 ms.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Number of threads.
    pub threads: u64,
}

impl ProcessUsage {
    /// The usage of a process by its id, where the system has `/proc`.
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::read(&pid.to_string())
    }

    /// The usage of this process.
    pub fn own() -> Option<Self> {
        Self::read("self")
    }

    fn read(process: &str) -> Option<Self> {
        // Linux reports clock ticks of 1/100 s, whatever the kernel's own tick is.
        const TICK: Duration = Duration::from_millis(10);
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The second field is the program's name in parentheses, which may contain any character.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = fields.get(11)?.parse::<u32>().ok()?.checked_add(fields.get(12)?.parse().ok()?)?;
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let number = |name: &str| -> Option<u64> {
            status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
        };
        Some(Self { cpu: TICK * ticks, resident_bytes: number("VmRSS:")? * 1024, threads: number("Threads:")? })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::ProcessUsage;

    #[test]
    fn this_process_uses_memory() {
        let own = ProcessUsage::own().unwrap();
        assert!(own.resident_bytes > 100_000 && own.threads >= 1);
        assert!(ProcessUsage::of_process(std::process::id()).is_some());
        assert_eq!(ProcessUsage::of_process(u32::MAX), None);
    }
}
