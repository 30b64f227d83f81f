//! A file mapped into memory, read-only.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use super::CheckpointError;

/// Bytes of a regular file.
#[derive(Debug)]
pub(super) struct MappedFile(Mmap);

impl MappedFile {
    /// Maps `path`. Anything but a regular file is refused before it is opened, because opening a pipe would block.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let fail = |source| CheckpointError::Io { path: path.to_owned(), source };
        if !std::fs::metadata(path).map_err(fail)?.is_file() {
            return Err(CheckpointError::Unrecognised {
                path: path.to_owned(),
                reason: "it is not a regular file".into(),
            });
        }
        let file = File::open(path).map_err(fail)?;
        // SAFETY: the mapping is private to this process and is only read. The compiler assumes that no process changes
        // or truncates the file at the same time. Checkpoints are replaced by renaming, never in place (our own
        // downloads are), and the bytes are plain data that is validated or used as numbers, so a change could give
        // wrong numbers but no invalid value of any Rust type.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok(Self(map))
    }

    /// Returns the whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
