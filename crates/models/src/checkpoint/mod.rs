//! Checkpoints: GGUF files and Hugging Face directories.

mod generation;
mod gguf;
mod hf;
mod mapped;
mod safetensors;
mod tokenizer;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use octavo_ops::{StorageType, TensorData, WeightError, WeightSource};

pub use generation::GenerationConfig;
pub use gguf::GgufError;
pub use tokenizer::{GgufTokenizer, TokenizerData};

pub(crate) use gguf::MetadataView;

use crate::config::{ConfigError, ModelConfig};
use mapped::MappedFile;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("cannot read '{}': {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Neither a GGUF file nor a Hugging Face directory.
    #[error("'{}' is not a checkpoint: {reason}", path.display())]
    Unrecognised {
        /// File or directory.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A damaged or hostile GGUF header.
    #[error("'{}': {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: GgufError,
    },
    /// A damaged or hostile file of a Hugging Face directory.
    #[error("'{}': {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The model's configuration is missing, wrong or unsupported.
    #[error("'{}': {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
}

/// The two kinds of checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One GGUF file.
    Gguf,
    /// A directory with `config.json` and safetensors files.
    HuggingFace,
}

/// Tensors and bytes of one storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageTotal {
    /// Storage type.
    pub storage: StorageType,
    /// Tensors stored so.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// A tensor's place in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    /// How it is stored, or the name of an element type that cannot be read.
    storage: Result<StorageType, String>,
    /// Outermost dimension first.
    shape: Vec<usize>,
    /// Bytes of the file.
    range: Range<usize>,
}

/// A model on disk: a GGUF file or a Hugging Face directory, memory-mapped.
///
/// Opening reads and checks the headers and the configuration; tensor data is touched when it is used.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Files,
    config: ModelConfig,
    generation: GenerationConfig,
    chat_template: Option<String>,
}

#[derive(Debug)]
enum Files {
    Gguf { file: MappedFile, header: gguf::Header },
    HuggingFace { shards: safetensors::Shards, texts: Box<hf::Texts> },
}

impl Checkpoint {
    /// Opens a GGUF file or a Hugging Face directory.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let kind = std::fs::metadata(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?;
        if kind.is_dir() { Self::open_directory(path) } else { Self::open_gguf(path) }
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let file = MappedFile::open(path)?;
        let header = gguf::Header::parse(file.bytes())
            .map_err(|source| CheckpointError::Gguf { path: path.to_owned(), source })?;
        let metadata = header.metadata().view(file.bytes());
        let fail = |source| CheckpointError::Config { path: path.to_owned(), source };
        let has = |name: &str| header.tensors().contains_key(name);
        let mut config = ModelConfig::from_gguf(&metadata, &has).map_err(fail)?;
        let generation = gguf::generation_config(&metadata).map_err(fail)?;
        let chat_template = gguf::chat_template(&metadata).map_err(fail)?;
        if let Some(main) = totals(header.tensors().values()).into_iter().max_by_key(|t| t.bytes) {
            config.dtype = main.storage.name().to_owned();
        }
        Ok(Self { path: path.to_owned(), files: Files::Gguf { file, header }, config, generation, chat_template })
    }

    fn open_directory(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let texts = hf::Texts::open(path)?;
        let config = texts.model_config()?;
        let generation = texts.generation_config()?;
        let chat_template = texts.chat_template()?;
        let shards = safetensors::Shards::open(path)?;
        let files = Files::HuggingFace { shards, texts: Box::new(texts) };
        Ok(Self { path: path.to_owned(), files, config, generation, chat_template })
    }

    /// The file or directory it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which kind it is.
    pub const fn format(&self) -> Format {
        match self.files {
            Files::Gguf { .. } => Format::Gguf,
            Files::HuggingFace { .. } => Format::HuggingFace,
        }
    }

    /// The model's configuration, checked.
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sampling defaults and end-of-sequence ids.
    pub const fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The source of the chat template, if the checkpoint has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// What a tokenizer is made from. Copied out of the checkpoint, so call it once.
    pub fn tokenizer(&self) -> Result<TokenizerData, CheckpointError> {
        match &self.files {
            Files::Gguf { file, header } => {
                let missing = || ConfigError::missing("tokenizer.ggml.tokens");
                gguf::tokenizer_data(&header.metadata().view(file.bytes()))
                    .and_then(|data| data.ok_or_else(missing))
                    .map_err(|source| CheckpointError::Config { path: self.path.clone(), source })
            }
            Files::HuggingFace { texts, .. } => texts.tokenizer(),
        }
    }

    /// Tensors and bytes by storage type, largest first.
    pub fn storage_summary(&self) -> Vec<StorageTotal> {
        match &self.files {
            Files::Gguf { header, .. } => totals(header.tensors().values()),
            Files::HuggingFace { shards, .. } => totals(shards.infos()),
        }
    }

    /// Whether there is a tensor of that name, readable or not.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor's description and the file it lies in.
    fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        match &self.files {
            Files::Gguf { file, header } => header.tensors().get(name).map(|info| (info, file.bytes())),
            Files::HuggingFace { shards, .. } => shards.find(name),
        }
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        let (info, file) = self.find(name).ok_or_else(|| WeightError::Missing(name.to_owned()))?;
        let storage = info.storage.clone().map_err(|dtype| WeightError::Invalid {
            name: name.to_owned(),
            reason: format!("its element type {dtype} is not supported (supported: F32, F16, BF16)"),
        })?;
        // Ranges were checked against the file when it was opened.
        Ok(TensorData { storage, shape: info.shape.clone(), bytes: file[info.range.clone()].into() })
    }
}

fn totals<'a>(infos: impl Iterator<Item = &'a TensorInfo>) -> Vec<StorageTotal> {
    let mut by_name = BTreeMap::new();
    for info in infos {
        let Ok(storage) = info.storage else { continue };
        let total = by_name.entry(storage.name()).or_insert(StorageTotal { storage, tensors: 0, bytes: 0 });
        total.tensors += 1;
        total.bytes += info.range.len() as u64;
    }
    let mut totals: Vec<_> = by_name.into_values().collect();
    totals.sort_by_key(|t| std::cmp::Reverse(t.bytes));
    totals
}
