//! Getting whole, checked files into folders that several processes share.
//!
//! **Invariant:** a file under its final name is complete and had the checksum that was asked for. It is written under
//! another name beside it, checked, synced to the disk and renamed; so a process killed at any moment leaves the whole
//! file or none, and what it leaves besides is removed or resumed by the next one.

mod artifact;
mod pip;
mod staged;
#[cfg(test)]
mod tests;
mod wheel;

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::progress::{Progress, human_bytes};

pub(crate) use artifact::{Artifact, ArtifactError};
pub use pip::PipError;
pub(crate) use staged::{Leftover, StagedFile, WriteError, sha256_of};
pub use wheel::WheelError;

/// Why a folder could not be used. The messages name the folder and the variable that moves it.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The folder, or the file system it is on, cannot be written.
    #[error("the folder {folder} cannot be written ({source}): make it writable, or set {variable} to one that is")]
    ReadOnly {
        /// The folder.
        folder: PathBuf,
        /// The environment variable that moves it.
        variable: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no room left.
    #[error("no space is left for {} more in {folder} ({source}): free some, or set {variable} to another disk", human_bytes(*.needed))]
    Full {
        /// The folder.
        folder: PathBuf,
        /// The environment variable that moves it.
        variable: &'static str,
        /// Bytes that were still to be written.
        needed: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Errors of one cache folder: knows which variable moves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) variable: &'static str,
}

impl Place {
    /// Octavo's own cache.
    pub(crate) const OCTAVO: Place = Place { variable: "OCTAVO_CACHE" };
    /// The cache shared with the hub's Python clients.
    pub(crate) const HUB: Place = Place { variable: "HF_HUB_CACHE" };

    /// An error of `action` on `path`, with `needed` bytes still to be written.
    pub(crate) fn error(self, action: &'static str, path: &Path, needed: u64, source: io::Error) -> StorageError {
        let folder = || if path.is_dir() { path } else { path.parent().unwrap_or(path) }.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                StorageError::ReadOnly { folder: folder(), variable: self.variable, source }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StorageError::Full { folder: folder(), variable: self.variable, needed, source }
            }
            _ => StorageError::Io { action, path: path.to_owned(), source },
        }
    }

    /// Makes a folder and those above it.
    pub(crate) fn create_folder(self, folder: &Path) -> Result<(), StorageError> {
        std::fs::create_dir_all(folder).map_err(|source| self.error("make the folder", folder, 0, source))
    }

    /// Removes a folder that an earlier process left, if there is one.
    pub(crate) fn remove_folder(self, folder: &Path) -> Result<(), StorageError> {
        match std::fs::remove_dir_all(folder) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(self.error("remove the folder", folder, 0, source))
            }
            _ => Ok(()),
        }
    }
}

/// An exclusive lock between processes, on a file of its own; released when dropped or when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    /// Holds the lock.
    _file: File,
}

impl Lock {
    /// Takes the lock, waiting for whoever holds it. The file stays behind: removing it would let two processes lock two
    /// files of one name.
    pub(crate) fn acquire(
        place: Place,
        path: &Path,
        what: &str,
        progress: &dyn Progress,
    ) -> Result<Lock, StorageError> {
        if let Some(folder) = path.parent() {
            place.create_folder(folder)?;
        }
        let failed = |source| place.error("lock", path, 0, source);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.message(&format!("waiting for another process that is fetching {what}"));
                file.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        Ok(Lock { _file: file })
    }
}
