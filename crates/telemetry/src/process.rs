//! `process_*` metrics, read from `/proc` when they are scraped. Other systems than Linux have none.

use std::fs;
use std::sync::OnceLock;

use crate::registry::push_family;

/// Constants of the process.
struct Fixed {
    page_bytes: f64,
    ticks_per_second: f64,
    start_seconds: Option<f64>,
    max_fds: Option<f64>,
}

/// Appends what can be read.
pub(crate) fn render(out: &mut String) {
    static FIXED: OnceLock<Option<Fixed>> = OnceLock::new();
    let Some(fixed) = FIXED.get_or_init(Fixed::read) else { return };
    if let Some((virtual_pages, resident_pages)) = statm() {
        gauge(out, "process_virtual_memory_bytes", "Virtual memory.", virtual_pages * fixed.page_bytes);
        gauge(out, "process_resident_memory_bytes", "Resident memory.", resident_pages * fixed.page_bytes);
    }
    if let Some(start) = fixed.start_seconds {
        gauge(out, "process_start_time_seconds", "Unix time of the process's start.", start);
    }
    if let Some(ticks) = cpu_ticks() {
        let help = "User and system CPU time.";
        push_family(out, "process_cpu_seconds_total", help, "counter", ticks / fixed.ticks_per_second);
    }
    if let Ok(entries) = fs::read_dir("/proc/self/fd") {
        // One of them is this directory.
        gauge(out, "process_open_fds", "Open file descriptors.", entries.count().saturating_sub(1) as f64);
    }
    if let Some(max) = fixed.max_fds {
        gauge(out, "process_max_fds", "Most file descriptors allowed.", max);
    }
}

fn gauge(out: &mut String, name: &str, help: &str, value: f64) {
    push_family(out, name, help, "gauge", value);
}

impl Fixed {
    fn read() -> Option<Self> {
        let (page_bytes, ticks_per_second) = auxiliary_vector(&fs::read("/proc/self/auxv").ok()?)?;
        let boot = fs::read_to_string("/proc/stat")
            .ok()
            .and_then(|stat| stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse::<f64>().ok());
        // Field 22 of the stat line, in ticks since boot.
        let since_boot = stat_fields().and_then(|fields| fields.get(19)?.parse::<f64>().ok());
        let start_seconds = boot.zip(since_boot).map(|(boot, ticks)| boot + ticks / ticks_per_second);
        let max_fds = fs::read_to_string("/proc/self/limits").ok().and_then(|limits| {
            limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?.parse().ok()
        });
        Some(Self { page_bytes, ticks_per_second, start_seconds, max_fds })
    }
}

/// Page size and clock ticks a second, out of the pairs of words that the kernel gives every process.
fn auxiliary_vector(bytes: &[u8]) -> Option<(f64, f64)> {
    const AT_PAGESZ: usize = 6;
    const AT_CLKTCK: usize = 17;
    const WORD: usize = size_of::<usize>();
    let words: Vec<usize> =
        bytes.chunks_exact(WORD).filter_map(|word| word.try_into().ok().map(usize::from_ne_bytes)).collect();
    let find = |key| words.chunks_exact(2).find(|pair| pair[0] == key).map(|pair| pair[1] as f64);
    Some((find(AT_PAGESZ)?, find(AT_CLKTCK)?))
}

/// Virtual and resident pages.
fn statm() -> Option<(f64, f64)> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let mut fields = text.split_whitespace().map(str::parse::<f64>);
    Some((fields.next()?.ok()?, fields.next()?.ok()?))
}

fn cpu_ticks() -> Option<f64> {
    let fields = stat_fields()?;
    let user: f64 = fields.get(11)?.parse().ok()?;
    let system: f64 = fields.get(12)?.parse().ok()?;
    Some(user + system)
}

/// The fields of `/proc/self/stat` from the third on; the second is the program's name and may hold anything.
fn stat_fields() -> Option<Vec<String>> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_process_has_memory_time_and_files() {
        let mut text = String::new();
        super::render(&mut text);
        let value = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
            line.and_then(|line| line.rsplit_once(' ')).unwrap().1.parse().unwrap()
        };
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert!((3.0..=value("process_max_fds")).contains(&value("process_open_fds")));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-5.0..86_400.0).contains(&age), "{age}");
    }
}
