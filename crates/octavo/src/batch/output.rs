//! The file of answers: appended to as `FILE.partial`, renamed when it is complete.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use tracing::warn;

use crate::batch::input::Input;

/// An output that is being written. The lock on it ends with the process.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    answers: usize,
}

/// What of an answer tells whose it is.
#[derive(Deserialize)]
struct Owner {
    custom_id: Option<String>,
}

impl Output {
    /// Opens `path` for what is left to answer, and moves `input` past what is answered. `None` if `path` is complete.
    ///
    /// # Errors
    /// Another process writes it, it answers other requests, or it cannot be written.
    pub(crate) fn open(path: &Path, input: &mut Input, requests: usize) -> Result<Option<Self>> {
        let named = || format!("--output-file {}", path.display());
        let mut partial = OsString::from(path);
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let finished = path.try_exists().with_context(named)?;
        if finished && partial.try_exists().with_context(named)? {
            bail!("{}: there is {} as well; remove the one that is not wanted", named(), partial.display());
        }
        let current = if finished { path } else { &partial };
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(!finished).open(current).with_context(named)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{}: another process is writing it", named()),
            Err(TryLockError::Error(error)) => return Err(error).with_context(named),
        }
        let (answers, bytes) = kept(&file, input).with_context(|| current.display().to_string())?;
        let length = file.metadata().with_context(named)?.len();
        if finished && answers == requests && bytes == length {
            return Ok(None);
        }
        if bytes < length {
            warn!("{}: {} bytes of an answer that was not written to its end are cut", named(), length - bytes);
            file.set_len(bytes).with_context(named)?;
        }
        file.seek(SeekFrom::Start(bytes)).with_context(named)?;
        if finished {
            std::fs::rename(path, &partial).with_context(named)?;
        }
        Ok(Some(Self { file, partial, path: path.to_owned(), answers }))
    }

    /// Lines that are written.
    pub(crate) fn answers(&self) -> usize {
        self.answers
    }

    /// Where they are.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Adds an answer, which is one line without its end.
    pub(crate) fn append(&mut self, line: &[u8]) -> Result<()> {
        let written = [line, b"\n"].concat();
        self.file.write_all(&written).with_context(|| format!("{} cannot be written", self.partial.display()))?;
        self.answers += 1;
        Ok(())
    }

    /// All is written: makes it last, under its final name.
    pub(crate) fn finish(self) -> Result<()> {
        let named = || format!("--output-file {}", self.path.display());
        self.file.sync_all().with_context(named)?;
        std::fs::rename(&self.partial, &self.path).with_context(named)?;
        // The name is the folder's content.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).with_context(named)
    }
}

/// Answers that are there, and the bytes they take. Stops at the first that is not whole.
fn kept(file: &File, input: &mut Input) -> Result<(usize, u64)> {
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut answers, mut bytes, mut line) = (0, 0, vec![]);
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        if line.pop() != Some(b'\n') {
            return Ok((answers, bytes));
        }
        let Ok(owner) = serde_json::from_slice::<Owner>(&line) else { return Ok((answers, bytes)) };
        let request = input.next().transpose()?;
        ensure!(
            request.is_some_and(|request| request.custom_id == owner.custom_id),
            "answer {} is not to the request at its place in the input: name another output, or remove this one",
            answers + 1
        );
        answers += 1;
        bytes += line.len() as u64 + 1;
    }
}
