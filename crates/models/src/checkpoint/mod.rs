//! Checkpoints: GGUF files and Hugging Face directories.

mod derived;
mod generation;
mod gguf;
mod hf;
mod kv_scales;
mod mapped;
mod processor;
mod quantised;
mod safetensors;
mod sentence;
mod tokenizer;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use octavo_ops::{StorageType, TensorData, WeightError, WeightSource};

pub use generation::GenerationConfig;
pub use gguf::{GgufError, GridType};
pub use kv_scales::KvScheme;
pub use processor::{ImageSize, ProcessorConfig, Resample, ViewText};
pub use sentence::SentenceSettings;
pub use tokenizer::{GgufTokenizer, TokenizerData};

pub(crate) use derived::{Derived, ExpertTensor, HeadTensor, Packed, RowDifference, UnpackedExperts};
pub(crate) use gguf::{MetadataView, takes_images};
pub(crate) use hf::read_object;
pub(crate) use quantised::{BY_GROUP, ORDER, QUANTISATION, Quantisation, is_side_file};
pub(crate) use safetensors::{INDEX, Shards, StoredTensor, other_names};

use crate::config::{ConfigError, HeadLayer, ModelConfig, PooledRow, TokenRows, VectorKind};
use crate::family::Runner;
use crate::program::names::Role;
use processor::Origin;
pub(crate) use processor::ProcessorRules;

/// Reason why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system returned an error.
    #[error("cannot read '{}': {source}", path.display())]
    Io {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The path is neither a GGUF file nor a Hugging Face directory.
    #[error("'{}' is not a checkpoint: {reason}", path.display())]
    Unrecognised {
        /// Path of the file or directory.
        path: PathBuf,
        /// Reason, which names the missing part.
        reason: String,
    },
    /// The GGUF header is damaged or hostile.
    #[error("'{}': {source}", path.display())]
    Gguf {
        /// Path of the file.
        path: PathBuf,
        /// Defect of the header.
        source: GgufError,
    },
    /// A file of a Hugging Face directory is damaged or hostile.
    #[error("'{}': {reason}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect.
        reason: String,
    },
    /// The model's configuration is missing, wrong or unsupported.
    #[error("'{}': {source}", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Defect of the configuration.
        source: ConfigError,
    },
    /// A setting that an operator has given for the image processor is wrong or unsupported.
    #[error("{0}")]
    GivenSetting(ConfigError),
}

/// Format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A GGUF file, and a second one with the encoder of images if the model has one.
    Gguf,
    /// A directory with `config.json` and safetensors files.
    HuggingFace,
}

/// Number and size of the tensors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageTotal {
    /// Storage type as which they are read.
    pub storage: StorageType,
    /// Their type in the file, if it is read as another one.
    pub grid: Option<GridType>,
    /// Number of tensors.
    pub tensors: usize,
    /// Size of the tensors.
    pub bytes: u64,
}

/// Location of a tensor in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    /// Storage type, or the name of an unsupported element type.
    storage: Result<StorageType, String>,
    /// Type in the file, if it is not the storage type.
    grid: Option<GridType>,
    /// Shape, outermost dimension first.
    shape: Vec<usize>,
    /// Range of bytes in the file.
    range: Range<usize>,
}

/// What an operator says about a checkpoint in addition to its files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpenOptions {
    /// Values in place of those of `config.json` (`--hf-overrides`).
    pub overrides: Map<String, Value>,
    /// What the model is served for (`--runner`).
    pub runner: Runner,
    /// Rows of a text that become its vector (`--pooler-config`).
    pub pooling: Option<PooledRow>,
    /// Whether embeddings are scaled to length 1 (`--pooler-config`).
    pub normalise: Option<bool>,
}

impl OpenOptions {
    /// Changes the vectors of a model. They have no effect on a model that predicts tokens.
    fn apply(&self, config: &mut ModelConfig) {
        let Some(vectors) = &mut config.vectors else { return };
        if let Some(pooling) = self.pooling {
            vectors.pooling = pooling;
        }
        if let (Some(scaled), VectorKind::Embedding { normalise, .. }) = (self.normalise, &mut vectors.kind) {
            *normalise = scaled;
        }
    }
}

/// A model on disk: a GGUF file or a Hugging Face directory, memory-mapped.
///
/// Opening it reads and checks the headers and the configuration. Tensor data is read when it is used.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Files,
    config: ModelConfig,
    generation: GenerationConfig,
    chat_template: Option<String>,
    unpacked: derived::Unpacked,
}

#[derive(Debug)]
enum Files {
    Gguf {
        text: Box<gguf::GgufFile>,
        /// The encoder of images, a file of its own.
        vision: Option<Box<gguf::GgufFile>>,
    },
    HuggingFace {
        shards: safetensors::Shards,
        texts: Box<hf::Texts>,
        quantisation: Option<Quantisation>,
        kv_scheme: Option<KvScheme>,
    },
    /// A directory whose weights are ignored.
    Dummy { storage: StorageType, texts: Box<hf::Texts> },
}

impl Checkpoint {
    fn new(
        path: &Path,
        files: Files,
        config: ModelConfig,
        generation: GenerationConfig,
        chat_template: Option<String>,
    ) -> Self {
        let (path, unpacked) = (path.to_owned(), derived::Unpacked::default());
        Self { path, files, config, generation, chat_template, unpacked }
    }

    /// Opens a GGUF file or a Hugging Face directory. The encoder of images of a GGUF file is read from an mmproj file in
    /// the same folder. Without such a file, the model takes text only.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// Opens a checkpoint like [`Checkpoint::open`], with what an operator says about it.
    ///
    /// # Errors
    /// Returns an error for overrides or a runner of a GGUF file, which has neither.
    pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
        let kind = std::fs::metadata(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?;
        if kind.is_dir() {
            return Self::open_directory(path, options);
        }
        if !options.overrides.is_empty() || options.runner == Runner::Pooling {
            let reason = "vectors and changes of its configuration need a Hugging Face directory".into();
            return Err(CheckpointError::Unrecognised { path: path.to_owned(), reason });
        }
        Self::open_gguf(path)
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let text = Box::new(gguf::GgufFile::open(path)?);
        let metadata = text.metadata();
        let fail = |source| CheckpointError::Config { path: path.to_owned(), source };
        let mut config = ModelConfig::from_gguf(&metadata, &|name| text.find(name).is_some()).map_err(fail)?;
        let generation = gguf::generation_config(&metadata).map_err(fail)?;
        let chat_template = gguf::chat_template(&metadata).map_err(fail)?;
        if let Some(main) = totals(text.infos()).into_iter().max_by_key(|t| t.bytes) {
            config.dtype = main.storage.name().to_owned();
        }
        let mut vision = None;
        if let Some(reader) = config.family.mmproj()
            && let Some((file, encoder)) = gguf::encoder_beside(&text, &config, reader)?
        {
            (vision, config) = (Some(Box::new(file)), config.with_vision(encoder).map_err(fail)?);
        }
        Ok(Self::new(path, Files::Gguf { text, vision }, config, generation, chat_template))
    }

    fn open_directory(path: &Path, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
        let texts = hf::Texts::open(path, &options.overrides)?;
        let config = texts.model_config(options)?;
        let generation = texts.generation_config()?;
        let chat_template = texts.chat_template()?;
        let mut shards = safetensors::Shards::open(path)?;
        for folder in &texts.sentence.folders {
            shards.add_module(path, folder)?;
        }
        let quantisation = texts.quantisation(config.family)?;
        let kv_scheme = texts.kv_scheme()?;
        let files = Files::HuggingFace { shards, texts: Box::new(texts), quantisation, kv_scheme };
        Ok(Self::new(path, files, config, generation, chat_template))
    }

    /// Opens a Hugging Face directory without its weights, which need not exist. Its program has tensors of the element
    /// type in `config.json`, to be filled with [`octavo_ops::dummy::DummyWeights`].
    ///
    /// # Errors
    /// Returns an error if the path is no such directory or its files are damaged.
    pub fn open_without_weights(path: &Path) -> Result<Checkpoint, CheckpointError> {
        Self::open_without_weights_with(path, &OpenOptions::default())
    }

    /// Opens a directory like [`Checkpoint::open_without_weights`], with what an operator says about it.
    ///
    /// # Errors
    /// Returns the errors of [`Checkpoint::open_without_weights`].
    pub fn open_without_weights_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
        if !path.is_dir() {
            return Err(CheckpointError::Unrecognised {
                path: path.to_owned(),
                reason: "weights are made up (dummy) for a directory with a config.json only".into(),
            });
        }
        let texts = hf::Texts::open(path, &options.overrides)?;
        let config = texts.model_config(options)?;
        let storage = match config.dtype.as_str() {
            "float16" | "half" => StorageType::F16,
            "bfloat16" => StorageType::BF16,
            _ => StorageType::F32,
        };
        let (generation, chat_template) = (texts.generation_config()?, texts.chat_template()?);
        let files = Files::Dummy { storage, texts: Box::new(texts) };
        Ok(Self::new(path, files, config, generation, chat_template))
    }

    /// Opens a checkpoint to read its shape. It is opened with its weights if there are any, because they determine the
    /// storage types more exactly than `config.json`, else without.
    ///
    /// # Errors
    /// Returns the errors of [`Self::open`] and [`Self::open_without_weights`].
    pub fn open_shape(path: &Path) -> Result<Checkpoint, CheckpointError> {
        if path.is_dir() && !safetensors::Shards::are_in(path) {
            return Self::open_without_weights(path);
        }
        Self::open(path)
    }

    /// Sets the context length that is served, in tokens. It decides on the rotary embedding of models that have one for
    /// short and one for long contexts. Without it, the whole context is served.
    pub fn serve(&mut self, tokens: usize) {
        self.config.serve(tokens);
    }

    /// Returns whether the checkpoint has no weights and uses dummy weights.
    pub const fn is_dummy(&self) -> bool {
        matches!(self.files, Files::Dummy { .. })
    }

    /// Returns the path of the file or directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the format.
    pub const fn format(&self) -> Format {
        match self.files {
            Files::Gguf { .. } => Format::Gguf,
            Files::HuggingFace { .. } | Files::Dummy { .. } => Format::HuggingFace,
        }
    }

    /// Returns the model's checked configuration.
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the sampling defaults and end-of-sequence ids.
    pub const fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Returns the settings of texts that a folder of sentence-transformers has; none in other checkpoints.
    pub fn sentence_settings(&self) -> SentenceSettings {
        match &self.files {
            Files::Gguf { .. } => SentenceSettings::default(),
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.sentence.settings.clone(),
        }
    }

    /// Returns the source of the chat template, if the checkpoint has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the data of the tokenizer. The data is copied, so call this once.
    pub fn tokenizer(&self) -> Result<TokenizerData<'_>, CheckpointError> {
        match &self.files {
            Files::Gguf { text, .. } => {
                let missing = || ConfigError::missing("tokenizer.ggml.tokens");
                gguf::tokenizer_data(&text.metadata())
                    .and_then(|data| data.ok_or_else(missing))
                    .map_err(|source| CheckpointError::Config { path: self.path.clone(), source })
            }
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.tokenizer(),
        }
    }

    /// Returns the parameters of the model's image processor, changed by those that are `given`
    /// (`--mm-processor-kwargs`); `None` if the model takes no images. A checkpoint without such parameters has the
    /// published ones.
    pub fn image_processor(&self, given: &Map<String, Value>) -> Result<Option<ProcessorConfig>, CheckpointError> {
        let images = self.config.vision.as_ref().zip(self.config.family.images.as_ref());
        let Some((vision, images)) = images else { return Ok(None) };
        let (file, settings) = match &self.files {
            Files::Gguf { .. } => Default::default(),
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.image_processor()?,
        };
        let config = ProcessorConfig::read(&settings, given, images.processor, vision);
        config.map(Some).map_err(|(origin, source)| match origin {
            Origin::File => CheckpointError::Config { path: self.path.join(file), source },
            Origin::Given => CheckpointError::GivenSetting(source),
        })
    }

    /// Returns the name of the method by which the weights of a Hugging Face directory are quantised, as in `quant_method`.
    pub fn quantisation(&self) -> Option<&'static str> {
        match &self.files {
            Files::HuggingFace { quantisation: Some(quantisation), .. } => Some(quantisation.name()),
            Files::HuggingFace { quantisation: None, texts, .. } if texts.is_quantised() => {
                self.config.family.layout.as_ref()?.method
            }
            _ => None,
        }
    }

    /// Returns whether the checkpoint is made for products whose inputs are rounded to FP8.
    pub(crate) fn has_fp8_inputs(&self) -> bool {
        match &self.files {
            Files::HuggingFace { quantisation: Some(quantisation), .. } => quantisation.has_fp8_inputs(),
            _ => false,
        }
    }

    /// Returns whether the checkpoint has tokenizer data.
    pub fn has_tokenizer(&self) -> bool {
        match &self.files {
            Files::Gguf { .. } => true,
            Files::HuggingFace { texts, .. } | Files::Dummy { texts, .. } => texts.has_tokenizer(),
        }
    }

    /// Returns the number and size of tensors by storage type, largest first.
    pub fn storage_summary(&self) -> Vec<StorageTotal> {
        match &self.files {
            Files::Gguf { text, vision } => totals(std::iter::once(text).chain(vision).flat_map(|file| file.infos())),
            Files::HuggingFace { shards, .. } => totals(shards.infos()),
            Files::Dummy { .. } => Vec::new(),
        }
    }

    /// Returns the names of the tensors of a Hugging Face directory, each after that of its file, in no order.
    pub(crate) fn stored_names(&self) -> impl Iterator<Item = (&str, &str)> {
        let shards = match &self.files {
            Files::HuggingFace { shards, .. } => Some(shards),
            Files::Gguf { .. } | Files::Dummy { .. } => None,
        };
        shards.into_iter().flat_map(Shards::files_and_names)
    }

    /// Returns a tensor of a Hugging Face directory as it is stored.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredTensor<'_>> {
        match &self.files {
            Files::HuggingFace { shards, .. } => shards.stored(name),
            Files::Gguf { .. } | Files::Dummy { .. } => None,
        }
    }

    /// Returns the quantised module of whose weight a tensor is a part.
    pub(crate) fn quantised_module<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        let Files::HuggingFace { quantisation: Some(quantisation), .. } = &self.files else { return None };
        let ends = tensor.match_indices('.').filter(|(at, _)| &tensor[*at..] != ".bias").map(|(at, _)| &tensor[..at]);
        ends.into_iter().find(|module| quantisation.weight(self, &format!("{module}.weight")).is_some())
    }

    /// Returns the tensor of all experts of which another one has blocks or scales.
    pub(crate) fn packed_experts<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        let stem = tensor.strip_suffix("_blocks").or_else(|| tensor.strip_suffix("_scales"))?;
        matches!(self.derived(stem), Some(Derived::Unpacked(_))).then_some(stem)
    }

    /// Returns whether there is a tensor with this name, of any type.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Returns the tensor's description and the file that contains it.
    fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        match &self.files {
            Files::Gguf { text, vision } => std::iter::once(text).chain(vision).find_map(|file| file.find(name)),
            Files::HuggingFace { shards, .. } => shards.find(name),
            Files::Dummy { .. } => None,
        }
    }

    /// Returns storage type and shape of a tensor. A dummy tensor has the shape that is needed.
    pub(crate) fn describe(&self, name: &str, needed: &[usize]) -> Result<(StorageType, Vec<usize>), WeightError> {
        if let Files::Dummy { storage, .. } = &self.files {
            return Ok((*storage, needed.to_vec()));
        }
        match (self.derived(name), self.find(name)) {
            (Some(derived), _) => derived.describe(self),
            // Its bytes are made when they are read.
            (None, Some((info, _))) if info.grid.is_some() => Ok((info.storage(name)?, info.shape.clone())),
            (None, _) => self.tensor(name).map(|tensor| (tensor.storage, tensor.shape)),
        }
    }

    /// Returns the inputs of the columns of a weight in order of their groups, if [`BY_GROUP`] has it in fewer bytes.
    pub(crate) fn column_order(&self, weight: &str) -> Result<Option<Vec<u32>>, WeightError> {
        match self.derived(weight) {
            Some(Derived::Quantised(weight)) => weight.order(self),
            _ => Ok(None),
        }
    }

    /// Returns how a tensor is made from others, if the file does not have it.
    fn derived(&self, name: &str) -> Option<Derived<'_>> {
        if let Files::HuggingFace { quantisation: Some(quantisation), .. } = &self.files
            && let Some(weight) = quantisation.weight(self, name)
        {
            return Some(Derived::Quantised(weight));
        }
        if self.has_tensor(name) || matches!(self.files, Files::Dummy { .. }) {
            return None;
        }
        let head = self.config.vectors.as_ref().and_then(|vectors| vectors.head.first());
        if let Some(HeadLayer { tensor, tokens: Some(TokenRows::Difference(from, to)), .. }) = head
            && name.strip_suffix(".weight") == Some(tensor)
        {
            return Some(Derived::Difference(RowDifference { source: self.head_name(), from: *from, to: *to }));
        }
        (self.config.family.layout.as_ref()?.derived)(self, name)
    }

    /// Returns the name of the language-model head, which may be the embedding table.
    pub(crate) fn head_name(&self) -> String {
        let names = &self.config.family.names;
        let head = names.weight(self.format(), Role::Head, 0);
        match self.config.tie_word_embeddings || !self.has_tensor(&head) {
            true => names.weight(self.format(), Role::Embedding, 0),
            false => head,
        }
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        if let Files::Gguf { vision: Some(vision), .. } = &self.files
            && let Some(joined) = vision.joined_frames(name)?
        {
            return Ok(joined);
        }
        if let Some(derived) = self.derived(name) {
            return derived.read(self);
        }
        let (info, file) = self.find(name).ok_or_else(|| WeightError::Missing(name.to_owned()))?;
        info.read(name, file)
    }
}

impl TensorInfo {
    /// Returns the tensor from its file.
    fn read<'a>(&self, name: &str, file: &'a [u8]) -> Result<TensorData<'a>, WeightError> {
        // The ranges were checked against the file when it was opened.
        let stored = &file[self.range.clone()];
        let bytes = self.grid.map_or_else(|| stored.into(), |grid| grid.transcode(stored).into());
        Ok(TensorData { storage: self.storage(name)?, shape: self.shape.clone(), bytes })
    }

    fn storage(&self, name: &str) -> Result<StorageType, WeightError> {
        self.storage.clone().map_err(|dtype| unsupported(name, &dtype))
    }
}

/// Returns the error of a tensor whose element type has no storage type.
fn unsupported(name: &str, dtype: &str) -> WeightError {
    let reason = format!("its element type {dtype} is not supported (supported: F32, F16, BF16)");
    WeightError::Invalid { name: name.to_owned(), reason }
}

fn totals<'a>(infos: impl Iterator<Item = &'a TensorInfo>) -> Vec<StorageTotal> {
    let mut by_name = BTreeMap::new();
    for info in infos {
        let Ok(storage) = info.storage else { continue };
        let name = info.grid.map_or(storage.name(), GridType::name);
        let total = by_name.entry(name).or_insert(StorageTotal { storage, grid: info.grid, tensors: 0, bytes: 0 });
        total.tensors += 1;
        total.bytes += info.range.len() as u64;
    }
    let mut totals: Vec<_> = by_name.into_values().collect();
    totals.sort_by_key(|t| std::cmp::Reverse(t.bytes));
    totals
}
