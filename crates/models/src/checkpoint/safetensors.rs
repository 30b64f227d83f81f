//! The weights of a Hugging Face directory: one safetensors file, or shards listed by an index.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path};

use ::safetensors::{Dtype, SafeTensors};
use octavo_ops::{StorageType, TensorData, WeightError};
use serde::Deserialize;

use super::mapped::MappedFile;
use super::{CheckpointError, TensorInfo, hf};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Maximum number of shards accepted; the largest published models have a few hundred.
const MAX_SHARDS: usize = 4096;

/// Prefix of the names of a SigLIP encoder, and a shorter one.
const ENCODER: &str = "vision_tower.vision_model.";
const SHORT_ENCODER: &str = "vision_tower.";
/// Prefixes of the model's names in a file that has a head too.
const BASES: [&str; 3] = ["model.", "bert.", "roberta."];

/// All tensors of a directory.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    files: Vec<Shard>,
    /// Index into `files`, and the location there.
    tensors: HashMap<String, (usize, TensorInfo)>,
}

/// A file with some of the tensors.
#[derive(Debug)]
struct Shard {
    name: String,
    data: MappedFile,
}

/// A tensor as its file has it.
pub(crate) struct StoredTensor<'a> {
    /// Element type by its name in the file.
    pub(crate) dtype: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
}

/// Content of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    /// Tensor name → file name.
    weight_map: HashMap<String, String>,
}

impl Shards {
    /// Returns whether the directory contains any file of weights.
    pub(super) fn are_in(directory: &Path) -> bool {
        let names = std::fs::read_dir(directory).into_iter().flatten().flatten();
        names.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|it| it == "safetensors"))
    }

    /// Maps `model.safetensors`, or every shard in the index.
    pub(super) fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let mut shards = Self::default();
        let index_path = directory.join(INDEX);
        match hf::read_bounded(&index_path, hf::MAX_INDEX_BYTES)? {
            Some(text) => shards.open_index(directory, &index_path, &text)?,
            None if directory.join(SINGLE).exists() => shards.add(&directory.join(SINGLE), "")?,
            None => {
                return Err(CheckpointError::Unrecognised {
                    path: directory.to_owned(),
                    reason: format!("the directory has neither {SINGLE} nor {INDEX}"),
                });
            }
        }
        Ok(shards)
    }

    /// Maps one file.
    pub(crate) fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let mut shards = Self::default();
        shards.add(path, "")?;
        Ok(shards)
    }

    fn open_index(&mut self, directory: &Path, index_path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
        let fail = |reason: String| CheckpointError::Malformed { path: index_path.to_owned(), reason };
        let index: Index = serde_json::from_slice(text).map_err(|e| fail(e.to_string()))?;
        let names: BTreeSet<&String> = index.weight_map.values().collect();
        if names.is_empty() || names.len() > MAX_SHARDS {
            return Err(fail(format!("it names {} files; 1 to {MAX_SHARDS} are possible", names.len())));
        }
        for name in names {
            if !is_plain_file_name(name) {
                return Err(fail(format!("the shard name '{}' is not a plain file name", name.escape_debug())));
            }
            self.add(&directory.join(name), "")?;
        }
        match index.weight_map.keys().find(|tensor| !self.tensors.contains_key(*tensor)) {
            Some(tensor) => Err(fail(format!("it lists tensor '{tensor}', which its shard does not hold"))),
            None => Ok(()),
        }
    }

    /// Maps the weights of a module in a folder of its own, whose tensors get the folder's name and a slash.
    pub(super) fn add_module(&mut self, directory: &Path, folder: &str) -> Result<(), CheckpointError> {
        self.add(&directory.join(folder).join(SINGLE), &format!("{folder}/"))
    }

    /// Maps a file. The names of its tensors get a prefix.
    fn add(&mut self, path: &Path, prefix: &str) -> Result<(), CheckpointError> {
        let fail = |reason: String| CheckpointError::Malformed { path: path.to_owned(), reason };
        let file = MappedFile::open(path)?;
        let (header_len, metadata) = SafeTensors::read_metadata(file.bytes())
            .map_err(|e| fail(format!("the safetensors header is invalid ({e}); the file is truncated or damaged")))?;
        // `read_metadata` has checked that the tensors fill the file contiguously to its last byte.
        let data_start = 8 + header_len;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let place = TensorInfo {
                storage: storage_type(info.dtype).ok_or_else(|| format!("{:?}", info.dtype)),
                grid: None,
                shape: info.shape.clone(),
                range: data_start + start..data_start + end,
            };
            if self.tensors.insert(format!("{prefix}{name}"), (self.files.len(), place)).is_some() {
                return Err(fail(format!("tensor '{name}' is in another shard too")));
            }
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.files.push(Shard { name, data: file });
        Ok(())
    }

    /// Returns a tensor's description and the file that contains it, also under another name that it may have.
    pub(super) fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        let other = || other_names(name).find_map(|name| self.tensors.get(&*name));
        let found = self.tensors.get(name).or_else(other);
        found.map(|(file, info)| (info, self.files[*file].data.bytes()))
    }

    /// Returns the names of all tensors, in no order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the names of all tensors with those of their files, in no order.
    pub(super) fn files_and_names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.iter().map(|(name, (file, _))| (self.files[*file].name.as_str(), name.as_str()))
    }

    /// Returns a tensor as it is stored.
    pub(super) fn stored(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (file, info) = self.tensors.get(name)?;
        let dtype = info.storage.as_ref().map_or_else(String::as_str, |storage| storage.name());
        Some(StoredTensor { dtype, shape: &info.shape, bytes: &self.files[*file].data.bytes()[info.range.clone()] })
    }

    /// Returns a tensor of plain numbers.
    pub(crate) fn plain(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        let (info, file) = self.find(name).ok_or_else(|| WeightError::Missing(name.to_owned()))?;
        info.read(name, file)
    }

    /// Returns the descriptions of all tensors.
    pub(super) fn infos(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|(_, info)| info)
    }
}

/// Returns the other names of a tensor. The parts of a model with images had names of their own before transformers 4.52,
/// and an encoder has shorter ones since transformers 5.
/// A model that was stored without a head, such as Qwen3-Embedding, has names without the prefix. The first files of BERT
/// have other names for the two tensors of a norm.
pub(crate) fn other_names(name: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let with_images = name.strip_prefix("model.language_model.").map(|rest| format!("language_model.model.{rest}"));
    let encoder = name.contains(ENCODER).then(|| name.replace(ENCODER, SHORT_ENCODER));
    let old = name.rsplit_once(".LayerNorm.").map(|(norm, kind)| {
        let kind = if kind == "weight" { "gamma" } else { "beta" };
        format!("{norm}.LayerNorm.{kind}")
    });
    let bare_encoder = encoder.as_deref().and_then(without_base).map(str::to_owned);
    let changed = [with_images, encoder, bare_encoder, old];
    changed.into_iter().flatten().map(Cow::from).chain(without_base(name).map(Cow::from))
}

fn without_base(name: &str) -> Option<&str> {
    BASES.iter().find_map(|base| name.strip_prefix(base))
}

/// Returns whether `name` is one normal path component on every platform: no separator, no `..`, not absolute.
pub(super) fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(components.next(), Some(Component::Normal(only)) if only == name)
        && components.next().is_none()
        && !name.contains(['/', '\\', ':', '\0'])
}

fn storage_type(dtype: Dtype) -> Option<StorageType> {
    match dtype {
        Dtype::F32 => Some(StorageType::F32),
        Dtype::F16 => Some(StorageType::F16),
        Dtype::BF16 => Some(StorageType::BF16),
        _ => None,
    }
}
