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
    Gguf {
        file: MappedFile,
        header: gguf::Header,
    },
    HuggingFace {
        shards: safetensors::Shards,
        texts: Box<hf::Texts>,
    },
    /// A directory whose weights are not looked at.
    Dummy {
        storage: StorageType,
        texts: Box<hf::Texts>,
    },
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

    /// Opens a Hugging Face directory without its weights, which need not be there: its program is that of tensors in the
    /// element type that `config.json` names, to be filled with [`octavo_ops::dummy::DummyWeights`].
    ///
    /// # Errors
    /// It is no such directory, or its files are damaged.
    pub fn open_without_weights(path: &Path) -> Result<Checkpoint, CheckpointError> {
        if !path.is_dir() {
            return Err(CheckpointError::Unrecognised {
                path: path.to_owned(),
                reason: "weights are made up (dummy) for a directory with a config.json only".into(),
            });
        }
        let texts = hf::Texts::open(path)?;
        let config = texts.model_config()?;
        let storage = match config.dtype.as_str() {
            "float16" | "half" => StorageType::F16,
            "bfloat16" => StorageType::BF16,
            _ => StorageType::F32,
        };
        let (generation, chat_template) = (texts.generation_config()?, texts.chat_template()?);
        let files = Files::Dummy { storage, texts: Box::new(texts) };
        Ok(Self { path: path.to_owned(), files, config, generation, chat_template })
    }

    /// Opens a checkpoint to look at its shape: with its weights if there are any, which say more exactly than `config.json` how
    /// they are stored, else without.
    ///
    /// # Errors
    /// As those of [`Self::open`] and [`Self::open_without_weights`].
    pub fn open_shape(path: &Path) -> Result<Checkpoint, CheckpointError> {
        if path.is_dir() && !safetensors::Shards::are_in(path) {
            return Self::open_without_weights(path);
        }
        Self::open(path)
    }

    /// Whether there are no weights, and they are to be made up.
    pub const fn is_dummy(&self) -> bool {
        matches!(self.files, Files::Dummy { .. })
    }

    /// The file or directory it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which kind it is.
    pub const fn format(&self) -> Format {
        match self.files {
            Files::Gguf { .. } => Format::Gguf,
            Files::HuggingFace { .. } | Files::Dummy { .. } => Format::HuggingFace,
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
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.tokenizer(),
        }
    }

    /// Whether there is something to make a tokenizer from.
    pub fn has_tokenizer(&self) -> bool {
        match &self.files {
            Files::Gguf { .. } => true,
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.has_tokenizer(),
        }
    }

    /// Tensors and bytes by storage type, largest first.
    pub fn storage_summary(&self) -> Vec<StorageTotal> {
        match &self.files {
            Files::Gguf { header, .. } => totals(header.tensors().values()),
            Files::HuggingFace { shards, .. } => totals(shards.infos()),
            Files::Dummy { .. } => Vec::new(),
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
            Files::Dummy { .. } => None,
        }
    }

    /// Storage type and shape of a tensor; of one that is made up, the shape that is needed.
    pub(crate) fn describe(&self, name: &str, needed: &[usize]) -> Result<(StorageType, Vec<usize>), WeightError> {
        if let Files::Dummy { storage, .. } = &self.files {
            return Ok((*storage, needed.to_vec()));
        }
        self.tensor(name).map(|tensor| (tensor.storage, tensor.shape))
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
