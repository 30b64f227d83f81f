//! The file of answers, which is named `FILE.partial` until it is complete.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tracing::warn;

use crate::batch::answer::Answer;
use crate::batch::failures::{self, Failures};
use crate::batch::input::Input;

/// An unfinished output. The lock on the file ends with the process.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    answers: usize,
    failures: Failures,
}

/// An output file as it was found.
#[derive(Debug)]
pub(crate) enum Opened<T> {
    /// All requests are answered; these failed.
    Complete(Failures),
    /// Some requests have no answer yet.
    Unfinished(T),
}

/// The parts of an answer that identify its request and tell whether it failed.
#[derive(Deserialize)]
struct Owner {
    custom_id: Option<String>,
    error: Option<IgnoredAny>,
}

/// The answers that a file already holds.
#[derive(Debug, Default)]
struct Kept {
    answers: usize,
    bytes: u64,
    failures: Failures,
}

impl Output {
    /// Opens `path` for the answers that are missing, and moves `input` past the requests that are answered.
    ///
    /// # Errors
    /// Another process writes the file, it answers other requests, or it cannot be written.
    pub(crate) fn open(path: &Path, input: &mut Input, requests: usize) -> Result<Opened<Self>> {
        let named = || format!("--output-file {}", path.display());
        let mut partial = OsString::from(path);
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let finished = path.try_exists().with_context(named)?;
        if finished && partial.try_exists().with_context(named)? {
            bail!("{}: {} exists as well; remove one of the two files", named(), partial.display());
        }
        let current = if finished { path } else { &partial };
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(!finished).open(current).with_context(named)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{}: another process is writing this file", named()),
            Err(TryLockError::Error(error)) => return Err(error).with_context(named),
        }
        let Kept { answers, bytes, failures } = kept(&file, input).with_context(|| current.display().to_string())?;
        let length = file.metadata().with_context(named)?.len();
        if finished && answers == requests && bytes == length {
            return Ok(Opened::Complete(failures));
        }
        if bytes < length {
            warn!("{}: removed {} bytes of an incomplete answer", named(), length - bytes);
            file.set_len(bytes).with_context(named)?;
        }
        file.seek(SeekFrom::Start(bytes)).with_context(named)?;
        if finished {
            std::fs::rename(path, &partial).with_context(named)?;
        }
        Ok(Opened::Unfinished(Self { file, partial, path: path.to_owned(), answers, failures }))
    }

    /// The requests that failed so far.
    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Number of answers that are written.
    pub(crate) fn answers(&self) -> usize {
        self.answers
    }

    /// Path of the unfinished file.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Adds an answer.
    pub(crate) fn append(&mut self, answer: Answer) -> Result<()> {
        let written = [&answer.line[..], b"\n"].concat();
        self.file.write_all(&written).with_context(|| format!("{} cannot be written", self.partial.display()))?;
        self.answers += 1;
        if let Some(failure) = answer.failure {
            self.failures.add(|| failure);
        }
        Ok(())
    }

    /// Syncs the complete file to disk, gives it its final name and returns the requests that failed.
    pub(crate) fn finish(self) -> Result<Failures> {
        let named = || format!("--output-file {}", self.path.display());
        self.file.sync_all().with_context(named)?;
        std::fs::rename(&self.partial, &self.path).with_context(named)?;
        // Syncing the folder makes the new name durable.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).with_context(named)?;
        Ok(self.failures)
    }
}

/// Reads the answers that are there, up to the first incomplete one.
fn kept(file: &File, input: &mut Input) -> Result<Kept> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut kept, mut line) = (Kept::default(), vec![]);
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        if line.pop() != Some(b'\n') {
            return Ok(kept);
        }
        let Ok(owner) = serde_json::from_slice::<Owner>(&line) else { return Ok(kept) };
        let request = input.next().transpose()?.filter(|request| request.custom_id == owner.custom_id);
        let request = request.with_context(|| {
            format!(
                "answer {} belongs to another request: use another output file, or remove this one",
                kept.answers + 1
            )
        })?;
        if owner.error.is_some() {
            kept.failures.add(|| failures::name(request.number, request.custom_id.as_deref()));
        }
        kept.answers += 1;
        kept.bytes += line.len() as u64 + 1;
    }
}
