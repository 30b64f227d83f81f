//! A mapped GGUF file with its header, or one in several pieces.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{GgufError, Header, Metadata, MetadataView};
use crate::checkpoint::mapped::MappedFile;
use crate::checkpoint::{CheckpointError, TensorInfo};
use crate::config::ConfigError;
use crate::pieces::{Piece, pieces};

/// A GGUF file whose header has been checked. The first of several pieces has the metadata.
#[derive(Debug)]
pub(in crate::checkpoint) struct GgufFile {
    path: PathBuf,
    files: Vec<MappedFile>,
    metadata: Metadata,
    /// Tensors by name, each with the index of its file.
    tensors: HashMap<String, (usize, TensorInfo)>,
}

impl GgufFile {
    /// Opens a file. Any piece of a split one stands for all of them.
    pub(in crate::checkpoint) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let mut paths = pieces(name).into_iter().map(|name| path.with_file_name(name));
        let first = paths.next().unwrap_or_else(|| path.to_owned());
        let mut file = Self::open_one(&first)?;
        let count = file.metadata().u64("split.count").map_err(file.fail())?.filter(|&count| count > 1);
        let Some(count) = count else { return Ok(file) };
        if Piece::parse(name).is_none_or(|piece| piece.count as u64 != count) {
            let reason = format!(
                "it is one of {count} pieces, and its name must end with '-00001-of-{count:05}.gguf', so that the others are \
                 found"
            );
            return Err(file.fail()(ConfigError::Invalid(reason)));
        }
        for (index, path) in paths.enumerate() {
            file.add(Self::open_one(&path)?, (index as u64 + 1, count))?;
        }
        let expected = file.metadata().u64("split.tensors.count").map_err(file.fail())?;
        match expected.filter(|&expected| expected != file.tensors.len() as u64) {
            Some(expected) => {
                let reason = format!("its pieces have {} tensors, and {expected} are stated", file.tensors.len());
                Err(file.fail()(ConfigError::Invalid(reason)))
            }
            None => Ok(file),
        }
    }

    /// Opens one file, which may be the first of several pieces.
    pub(super) fn open_one(path: &Path) -> Result<Self, CheckpointError> {
        let file = MappedFile::open(path)?;
        let header =
            Header::parse(file.bytes()).map_err(|source| CheckpointError::Gguf { path: path.to_owned(), source })?;
        let (metadata, tensors) = header.into_parts();
        let tensors = tensors.into_iter().map(|(name, info)| (name, (0, info))).collect();
        Ok(Self { path: path.to_owned(), files: vec![file], metadata, tensors })
    }

    /// Adds the tensors of a piece, which must have this number, counted from 0, of so many.
    fn add(&mut self, piece: Self, (number, count): (u64, u64)) -> Result<(), CheckpointError> {
        let read = |key: &str| piece.metadata().u64(key).map_err(piece.fail());
        let found = (read("split.no")?, read("split.count")?);
        if found != (Some(number), Some(count)) {
            let reason = format!("it is not piece {} of {count} of {}", number + 1, self.path.display());
            return Err(piece.fail()(ConfigError::Invalid(reason)));
        }
        let index = self.files.len();
        self.files.extend(piece.files);
        for (name, (_, info)) in piece.tensors {
            if self.tensors.contains_key(&name) {
                return Err(CheckpointError::Gguf { path: piece.path, source: GgufError::DuplicateTensor { name } });
            }
            self.tensors.insert(name, (index, info));
        }
        Ok(())
    }

    fn fail(&self) -> impl Fn(ConfigError) -> CheckpointError + use<> {
        let path = self.path.clone();
        move |source| CheckpointError::Config { path: path.clone(), source }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the key-value pairs.
    pub(in crate::checkpoint) fn metadata(&self) -> MetadataView<'_> {
        self.metadata.view(self.files[0].bytes())
    }

    /// Returns the descriptions of all tensors.
    pub(in crate::checkpoint) fn infos(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|(_, info)| info)
    }

    /// Returns a tensor's description and the bytes of its file.
    pub(in crate::checkpoint) fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        self.tensors.get(name).map(|(file, info)| (info, self.files[*file].bytes()))
    }
}
