//! Description of the machine on which a run was measured.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Processor features that servers here use, as the system names them.
const FEATURES: [&str; 10] =
    ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"];

/// Machine, date and source.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) threads: usize,
    /// Processor features that matter here.
    pub(super) features: Vec<String>,
    /// Size of memory.
    pub(super) bytes: u64,
    pub(super) unix_time: u64,
    /// Date in UTC, if the system provides it.
    pub(super) date: Option<String>,
    /// Commit of the source, marked if it has local changes.
    pub(super) commit: Option<String>,
}

impl Machine {
    /// Describes this machine at this time.
    pub(super) fn this(threads: usize) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |text: &str| field(text, "MemTotal")?.split_whitespace().next()?.parse::<u64>().ok();
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        Self {
            processor: field(&info, "model name").unwrap_or("unknown").to_owned(),
            threads,
            features: features(&info),
            bytes: kib(&memory).unwrap_or_default() << 10,
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            date: output(Command::new("date").args(["-u", "+%F"])),
            commit: output(
                Command::new("git").args(["describe", "--always", "--dirty", "--exclude=*"]).current_dir(source),
            ),
        }
    }

    /// Formats the description as one line.
    pub(super) fn line(&self) -> String {
        let Self { processor, threads, features, bytes, unix_time, date, commit } = self;
        let date = date.clone().unwrap_or_else(|| format!("unix time {unix_time}"));
        let commit = commit.as_deref().unwrap_or("unknown");
        let features = if features.is_empty() { "none known".to_owned() } else { features.join(" ") };
        let gib = *bytes as f64 / f64::from(1 << 30);
        format!("{processor}, {threads} threads ({features}), {gib:.1} GiB; {date}; commit {commit}")
    }
}

/// Returns the CPU time that the hypervisor gave to others, in seconds since the start of the system.
pub(super) fn stolen_seconds() -> f64 {
    // Linux shows ticks of 1/100 s.
    let ticks = |text: String| text.lines().next()?.split_whitespace().nth(8)?.parse::<f64>().ok();
    fs::read_to_string("/proc/stat").ok().and_then(ticks).map_or(0.0, |ticks| ticks / 100.0)
}

fn features(info: &str) -> Vec<String> {
    let flags: Vec<&str> = field(info, "flags").unwrap_or_default().split_whitespace().collect();
    FEATURES.into_iter().filter(|feature| flags.contains(feature)).map(str::to_owned).collect()
}

/// Returns the value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
    value.map(str::trim)
}

/// Returns the output of a command, if it succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_described() {
        let info = "processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\nflags\t\t: sse avx2 amx_int8 avx512f\n";
        assert_eq!(field(info, "model name"), Some("Some CPU @ 2.0 GHz"));
        assert_eq!(features(info), ["avx2", "avx512f", "amx_int8"]);
        assert!(Machine::this(2).line().contains("2 threads"));
        assert!(stolen_seconds() >= 0.0);
    }
}
