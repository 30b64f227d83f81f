//! A file that gets its final name only when it is complete.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Place, StorageError};

/// Size of one read in bytes.
const BUFFER: usize = 1 << 20;

/// Treatment of the unfinished file after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// The file is removed because it cannot be resumed.
    Remove,
    /// The file is kept for the next attempt.
    Keep,
}

/// Reason why a reader could not be copied into a staged file.
#[derive(Debug)]
pub(crate) enum WriteError {
    /// Reading failed.
    Source(io::Error),
    /// The reader returned more bytes than the limit.
    TooLong,
    /// Writing failed.
    Storage(StorageError),
}

/// A file being written next to its final name, with the SHA-256 of its current content. The caller holds the lock of
/// the final name.
#[derive(Debug)]
pub(crate) struct StagedFile {
    place: Place,
    target: PathBuf,
    staging: PathBuf,
    file: File,
    hash: Sha256,
    written: u64,
    leftover: Leftover,
    renamed: bool,
}

impl StagedFile {
    /// Creates an empty file and removes one left by an earlier process.
    pub(crate) fn create(place: Place, target: &Path, leftover: Leftover) -> Result<StagedFile, StorageError> {
        let staging = staging_path(target);
        let file = OpenOptions::new().create(true).write(true).truncate(true).open(&staging);
        let file = file.map_err(|source| place.error("create", &staging, 0, source))?;
        let target = target.to_owned();
        Ok(StagedFile { place, target, staging, file, hash: Sha256::new(), written: 0, leftover, renamed: false })
    }

    /// Resumes the file of an earlier attempt, if it is not longer than `size`.
    pub(crate) fn resume(place: Place, target: &Path, size: u64) -> Result<StagedFile, StorageError> {
        let staging = staging_path(target);
        let failed = |source| place.error("read", &staging, 0, source);
        // The file is opened for writing too, because the same handle appends to it.
        let file = match OpenOptions::new().read(true).write(true).open(&staging) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return StagedFile::create(place, target, Leftover::Keep);
            }
            Err(error) => return Err(failed(error)),
        };
        let there = file.metadata().map_err(failed)?.len();
        if there > size {
            return StagedFile::create(place, target, Leftover::Keep);
        }
        let mut hash = Sha256::new();
        // Reading to the end leaves the cursor at the position for writing.
        let written = hash_reader(&mut (&file).take(there), &mut hash).map_err(failed)?;
        let (target, leftover) = (target.to_owned(), Leftover::Keep);
        Ok(StagedFile { place, target, staging, file, hash, written, leftover, renamed: false })
    }

    /// Truncates the file and starts again.
    pub(crate) fn restart(&mut self) -> Result<(), StorageError> {
        if self.written == 0 {
            return Ok(());
        }
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .map_err(|source| self.place.error("empty", &self.staging, 0, source))?;
        self.hash = Sha256::new();
        self.written = 0;
        Ok(())
    }

    /// Returns the number of bytes in the file.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Appends the content of `reader`, at most `limit` bytes. `advanced` is called after each buffer.
    pub(crate) fn append(
        &mut self,
        reader: &mut dyn Read,
        limit: u64,
        advanced: &mut dyn FnMut(u64),
    ) -> Result<(), WriteError> {
        let mut buffer = vec![0; BUFFER];
        let mut left = limit;
        loop {
            let read = match reader.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(WriteError::Source(error)),
            };
            let Some(rest) = left.checked_sub(read as u64) else {
                return Err(WriteError::TooLong);
            };
            let bytes = &buffer[..read];
            if let Err(source) = self.file.write_all(bytes) {
                return Err(WriteError::Storage(self.place.error("write", &self.staging, left, source)));
            }
            left = rest;
            self.hash.update(bytes);
            self.written += read as u64;
            advanced(self.written);
        }
    }

    /// Returns the SHA-256 of the content in lower-case hex.
    pub(crate) fn sha256(&self) -> String {
        hex(&self.hash.clone().finalize())
    }

    /// Renames the file to its final name. The caller has checked size and checksum.
    pub(crate) fn commit(mut self) -> Result<(), StorageError> {
        self.file.sync_all().map_err(|source| self.place.error("write", &self.staging, self.written, source))?;
        std::fs::rename(&self.staging, &self.target)
            .map_err(|source| self.place.error("rename to", &self.target, 0, source))?;
        self.renamed = true;
        // Syncing the folder makes the name survive a power failure. File systems that cannot sync a folder do not need
        // it.
        if let Some(Ok(folder)) = self.target.parent().map(File::open) {
            let _ = folder.sync_all();
        }
        Ok(())
    }

    /// Deletes the content because it is not the requested one.
    pub(crate) fn discard(mut self) {
        self.leftover = Leftover::Remove;
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.renamed && self.leftover == Leftover::Remove {
            let _ = std::fs::remove_file(&self.staging);
        }
    }
}

/// Returns the path of an unfinished file. The hub's Python client uses the same name, so its partial downloads are
/// resumed too.
fn staging_path(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".incomplete");
    name.into()
}

/// Returns the SHA-256 of a file in lower-case hex.
pub(crate) fn sha256_of(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash_reader(&mut File::open(path)?, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

fn hash_reader(reader: &mut dyn Read, hash: &mut Sha256) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER];
    let mut total = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(read) => {
                hash.update(&buffer[..read]);
                total += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns lower-case hex.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
