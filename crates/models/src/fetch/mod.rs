//! Downloads of whole, verified files into folders that several processes share.
//!
//! **Invariant:** a file under its final name is complete and had the expected checksum. It is written under another
//! name next to it, checked, synced to the disk and renamed. A process killed at any moment leaves the whole file or
//! none, and the next process removes or resumes the rest.

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

/// Reason why a folder could not be used. The messages name the folder and the variable that changes it.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The folder or its file system is read-only.
    #[error("the folder {folder} cannot be written ({source}): make it writable, or set {variable} to one that is")]
    ReadOnly {
        /// Path of the folder.
        folder: PathBuf,
        /// Environment variable that changes the folder.
        variable: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space is left for {} more in {folder} ({source}): free some, or set {variable} to another disk", human_bytes(*.needed))]
    Full {
        /// Path of the folder.
        folder: PathBuf,
        /// Environment variable that changes the folder.
        variable: &'static str,
        /// Number of bytes that were still to be written.
        needed: u64,
        /// Error of the system.
        source: io::Error,
    },
    /// Any other error.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// A cache folder, for its errors: it knows the variable that changes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) variable: &'static str,
}

impl Place {
    /// Octavo's own cache.
    pub(crate) const OCTAVO: Place = Place { variable: "OCTAVO_CACHE" };
    /// The cache shared with the Python clients of the hub.
    pub(crate) const HUB: Place = Place { variable: "HF_HUB_CACHE" };

    /// Returns the error of `action` on `path`, with `needed` bytes still to be written.
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

    /// Creates a folder and its parents.
    pub(crate) fn create_folder(self, folder: &Path) -> Result<(), StorageError> {
        std::fs::create_dir_all(folder).map_err(|source| self.error("make the folder", folder, 0, source))
    }

    /// Removes a folder left by an earlier process, if there is one.
    pub(crate) fn remove_folder(self, folder: &Path) -> Result<(), StorageError> {
        match std::fs::remove_dir_all(folder) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(self.error("remove the folder", folder, 0, source))
            }
            _ => Ok(()),
        }
    }
}

/// An exclusive lock between processes, on its own file. It is released when dropped or when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    /// Open file that holds the lock.
    _file: File,
}

impl Lock {
    /// Takes the lock and waits for its current holder. The file is not removed afterwards, because two processes could
    /// then lock two files with the same name.
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
