//! A mapped GGUF file with its header.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{Header, MetadataView};
use crate::checkpoint::mapped::MappedFile;
use crate::checkpoint::{CheckpointError, TensorInfo};

/// A GGUF file whose header has been checked.
#[derive(Debug)]
pub(in crate::checkpoint) struct GgufFile {
    path: PathBuf,
    file: MappedFile,
    header: Header,
}

impl GgufFile {
    pub(in crate::checkpoint) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = MappedFile::open(path)?;
        let header =
            Header::parse(file.bytes()).map_err(|source| CheckpointError::Gguf { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the key-value pairs.
    pub(in crate::checkpoint) fn metadata(&self) -> MetadataView<'_> {
        self.header.metadata().view(self.file.bytes())
    }

    /// Returns the tensors by name.
    pub(in crate::checkpoint) const fn tensors(&self) -> &HashMap<String, TensorInfo> {
        self.header.tensors()
    }

    /// Returns a tensor's description and the bytes of the file.
    pub(in crate::checkpoint) fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        self.tensors().get(name).map(|info| (info, self.file.bytes()))
    }
}
