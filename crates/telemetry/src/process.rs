//! `process_*` metrics, which a scrape reads from `/proc`. They exist on Linux only.

use std::fs::{self, File};
use std::io::Read;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Name, help and type of each family, in the order of [`values`].
pub(crate) const FAMILIES: [(&str, &str, &str); 6] = [
    ("process_virtual_memory_bytes", "Virtual memory.", "gauge"),
    ("process_resident_memory_bytes", "Resident memory.", "gauge"),
    ("process_cpu_seconds_total", "User and system CPU time.", "counter"),
    ("process_start_time_seconds", "Unix time of the process's start.", "gauge"),
    ("process_open_fds", "Open file descriptors.", "gauge"),
    ("process_max_fds", "Most file descriptors allowed.", "gauge"),
];

/// Constants of the process.
struct Fixed {
    page_bytes: f64,
    ticks_per_second: f64,
    start_seconds: Option<f64>,
    max_fds: Option<f64>,
}

/// The values of the families, as far as they can be read.
pub(crate) type Values = [Option<f64>; FAMILIES.len()];

/// Time for which values are reused. With frequent scrapes, opening these files would be a sixth of the cost.
const FRESH: Duration = Duration::from_millis(500);

/// The values that were read within the last half second.
pub(crate) fn values() -> Values {
    static LATEST: Mutex<Option<(Instant, Values)>> = Mutex::new(None);
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    match *latest {
        Some((when, values)) if when.elapsed() < FRESH => values,
        _ => {
            let values = read();
            *latest = Some((Instant::now(), values));
            values
        }
    }
}

fn read() -> Values {
    static FIXED: OnceLock<Option<Fixed>> = OnceLock::new();
    let Some(fixed) = FIXED.get_or_init(Fixed::read) else { return [None; FAMILIES.len()] };
    let stat = Stat::read();
    let of = |value: fn(&Stat, &Fixed) -> f64| stat.as_ref().map(|stat| value(stat, fixed));
    [
        of(|stat, _| stat.virtual_bytes),
        of(|stat, fixed| stat.resident_pages * fixed.page_bytes),
        of(|stat, fixed| (stat.user_ticks + stat.system_ticks) / fixed.ticks_per_second),
        fixed.start_seconds,
        open_fds().map(|open| open as f64),
        fixed.max_fds,
    ]
}

impl Fixed {
    fn read() -> Option<Self> {
        let (page_bytes, ticks_per_second) = auxiliary_vector(&fs::read("/proc/self/auxv").ok()?)?;
        let boot = fs::read_to_string("/proc/stat")
            .ok()
            .and_then(|stat| stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse::<f64>().ok());
        let start_seconds = boot.zip(Stat::read()).map(|(boot, stat)| boot + stat.start_ticks / ticks_per_second);
        let max_fds = fs::read_to_string("/proc/self/limits").ok().and_then(|limits| {
            limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?.parse().ok()
        });
        Some(Self { page_bytes, ticks_per_second, start_seconds, max_fds })
    }
}

/// Page size and clock ticks per second from the auxiliary vector of the process.
fn auxiliary_vector(bytes: &[u8]) -> Option<(f64, f64)> {
    const AT_PAGESZ: usize = 6;
    const AT_CLKTCK: usize = 17;
    const WORD: usize = size_of::<usize>();
    let words: Vec<usize> =
        bytes.chunks_exact(WORD).filter_map(|word| word.try_into().ok().map(usize::from_ne_bytes)).collect();
    let find = |key| words.chunks_exact(2).find(|pair| pair[0] == key).map(|pair| pair[1] as f64);
    Some((find(AT_PAGESZ)?, find(AT_CLKTCK)?))
}

/// The fields of `/proc/self/stat` in use.
struct Stat {
    user_ticks: f64,
    system_ticks: f64,
    /// Time since the machine started.
    start_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    fn read() -> Option<Self> {
        // One line of a few hundred bytes: fifty numbers and a name of at most 15 bytes.
        let mut line = [0; 2048];
        let read = File::open("/proc/self/stat").ok()?.read(&mut line).ok()?;
        let text = String::from_utf8_lossy(&line[..read]);
        // The second field is the program's name, which may contain any character.
        let (_, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        // The argument skips fields of the rest.
        let mut number = |skipped| fields.nth(skipped)?.parse::<f64>().ok();
        Some(Self {
            // Fields 14, 15, 22, 23 and 24.
            user_ticks: number(11)?,
            system_ticks: number(0)?,
            start_ticks: number(6)?,
            virtual_bytes: number(0)?,
            resident_pages: number(0)?,
        })
    }
}

fn open_fds() -> Option<u64> {
    // Linux 6.2 and later report the count. Before, the entries must be listed, one of which is the directory.
    match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as u64),
        open => Some(open),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_process_has_memory_time_and_files() {
        let values = read().map(Option::unwrap);
        let value = |name| values[FAMILIES.iter().position(|family| family.0 == name).unwrap()];
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert!((3.0..=value("process_max_fds")).contains(&value("process_open_fds")));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-5.0..86_400.0).contains(&age), "{age}");
    }

    #[test]
    fn values_are_read_again_after_a_while() {
        let of = |name| values()[FAMILIES.iter().position(|family| family.0 == name).unwrap()].unwrap();
        let before = of("process_open_fds");
        let files: Vec<File> = (0..50).map(|_| File::open("/proc/self/stat").unwrap()).collect();
        let begin = Instant::now();
        while of("process_open_fds") < before + 25.0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "the old values stay");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(files);
    }
}
