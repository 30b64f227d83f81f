//! A server as a child process: start, readiness, resource usage and end.

use std::error::Error;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, StatusCode};
use octavo_bench::ProcessUsage;
use octavo_http_client::{Certificates, Connection, Target};
use tokio::runtime::Runtime;

use super::servers::Instance;
use super::settings::Settings;

/// Maximum time until a server is ready; some compile first.
const START: Duration = Duration::from_secs(600);

/// Maximum time until a server ends when asked to.
const END: Duration = Duration::from_secs(30);

/// Polling interval.
const TICK: Duration = Duration::from_millis(10);

/// Number of log lines shown of a server that did not start.
const QUOTED: usize = 15;

/// A running server, which is ended when dropped.
pub(super) struct Process {
    child: Child,
    log: PathBuf,
    pub(super) url: String,
    /// Time of its start.
    pub(super) started: Instant,
}

/// Memory of a process and its descendants, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Total resident memory.
    pub(super) resident: u64,
    /// Total proportional memory, in which shared pages count once (as far as no other process shares them).
    pub(super) proportional: u64,
}

impl Process {
    /// Starts the server and waits until it reports that it is ready.
    pub(super) fn start(
        instance: &Instance,
        settings: &Settings,
        logs: &Path,
        runtime: &Runtime,
    ) -> Result<Self, Box<dyn Error>> {
        fs::create_dir_all(logs)?;
        let log = logs.join(instance.file_name()).with_extension("log");
        let port = free_port()?;
        let mut command = instance.command(port, settings);
        let output = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let started = Instant::now();
        let child = command.spawn().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        let mut process = Self { child, log, url: format!("http://127.0.0.1:{port}"), started };
        process.wait_until_ready(runtime)?;
        Ok(process)
    }

    fn wait_until_ready(&mut self, runtime: &Runtime) -> Result<(), Box<dyn Error>> {
        let target = Target::new(&self.url, None, &Certificates::Trusted)?;
        while self.started.elapsed() < START {
            if let Some(status) = self.child.try_wait()? {
                return Err(self.no_start(&format!("it ended ({status})")).into());
            }
            if runtime.block_on(is_ready(&target)) {
                return Ok(());
            }
            std::thread::sleep(TICK);
        }
        Err(self.no_start(&format!("it was not ready within {START:?}")).into())
    }

    /// Returns the process and its descendants.
    pub(super) fn tree(&self) -> Vec<u32> {
        tree(self.child.id(), &parents())
    }

    /// Returns their total CPU time.
    pub(super) fn cpu(&self) -> Duration {
        self.tree().into_iter().filter_map(ProcessUsage::of_process).map(|usage| usage.cpu).sum()
    }

    /// Returns their total memory.
    pub(super) fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        for pid in self.tree() {
            let resident = ProcessUsage::of_process(pid).map_or(0, |usage| usage.resident_bytes);
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            memory.resident += resident;
            memory.proportional += kib(&rollup, "Pss:").map_or(resident, |kib| kib << 10);
        }
        memory
    }

    /// Returns a line for the report and prints the end of the log.
    fn no_start(&self, what: &str) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("{what}; the end of its log:\n{}", lines[lines.len().saturating_sub(QUOTED)..].join("\n"));
        format!("{what}; its log is {}", self.log.display())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let tree: Vec<_> = self.tree().into_iter().map(|pid| (pid, born(pid))).collect();
        signal("-TERM", &[self.child.id()]);
        let asked = Instant::now();
        while asked.elapsed() < END && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(TICK);
        }
        // These are the server itself, if it ignored the signal, and processes that it left behind, but no other
        // process that got the same id.
        let left = tree.into_iter().filter(|&(pid, then)| then.is_some() && born(pid) == then);
        signal("-KILL", &left.map(|(pid, _)| pid).collect::<Vec<_>>());
        // The process was killed; nothing else can be done.
        let _ = self.child.wait();
    }
}

/// Returns whether `GET /health` is answered with 200.
async fn is_ready(target: &Target) -> bool {
    let answer = async {
        let request = target.request(Method::GET, "/health", Bytes::new()).ok()?;
        Connection::new(target.clone()).send(request).await.ok()
    };
    let answer = tokio::time::timeout(Duration::from_secs(2), answer).await;
    answer.ok().flatten().is_some_and(|response| response.status() == StatusCode::OK)
}

/// Returns a port on which nothing listened a moment ago.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn signal(name: &str, pids: &[u32]) {
    if !pids.is_empty() {
        // A process that has ended needs no signal.
        let _ = Command::new("kill").arg(name).args(pids.iter().map(u32::to_string)).stderr(Stdio::null()).status();
    }
}

/// Returns all processes, each with its parent.
fn parents() -> Vec<(u32, u32)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter_map(|pid: u32| Some((pid, field(&stat(pid)?, 4)?))).collect()
}

/// Returns the start time of a process in the system's ticks.
fn born(pid: u32) -> Option<u64> {
    field(&stat(pid)?, 22)
}

fn stat(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

/// Returns a field after the second of a process's `stat`, counted from 1. The second is its name, in parentheses, and
/// may contain anything.
fn field<T: FromStr>(stat: &str, number: usize) -> Option<T> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(number - 3)?.parse().ok()
}

/// Returns a process and all its descendants.
fn tree(root: u32, parents: &[(u32, u32)]) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(parents.iter().filter(|&&(_, of)| of == parent).map(|&(pid, _)| pid));
        next += 1;
    }
    found
}

/// Returns the number in a line `Name:  123 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_all_generations() {
        let parents = [(2, 1), (3, 2), (4, 3), (5, 1), (6, 9)];
        assert_eq!(tree(2, &parents), [2, 3, 4]);
        assert_eq!(tree(7, &parents), [7]);
    }

    #[test]
    fn what_the_system_tells_is_read() {
        assert_eq!(field("12 (a) b) S 7 12 12 0", 4), Some(7));
        assert_eq!(field::<u64>("12 (a) b) S 7", 22), None);
        assert_eq!(kib("Rss:   20 kB\nPss:\t 17 kB\n", "Pss:"), Some(17));
        assert_eq!(kib("Rss: 20 kB", "Pss:"), None);
        if cfg!(target_os = "linux") {
            let own = std::process::id();
            assert!(born(own).is_some() && parents().iter().any(|&(pid, _)| pid == own));
        }
    }
}
