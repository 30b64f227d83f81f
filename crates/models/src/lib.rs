//! Builds a [`Program`](octavo_ops::Program) and weights from a configuration and a checkpoint; contains the catalog
//! and the hub client.
//!
//! A [`Checkpoint`] is a memory-mapped GGUF file or Hugging Face directory. It provides its [`ModelConfig`], its
//! tensors in their storage types ([`octavo_ops::WeightSource`]) and the data of the text layer: tokenizer data, chat
//! template and generation defaults. [`build_program`] turns it into the program that a backend runs.
//!
//! **Invariants:** this crate knows no device. It checks every value of a checkpoint's header against the actual bytes
//! before using it; a hostile file is an error, never a panic or a large allocation.

mod adapter;
pub mod catalog;
mod checkpoint;
mod config;
mod family;
mod fetch;
mod hub;
mod image;
mod inspect;
mod installed;
mod pieces;
mod program;
pub mod progress;
mod resolve;
pub mod testing;

pub use adapter::{
    AdapterError, AdapterTargets, MergeOptions, Merged, ServedAdapter, adapter_base, adapter_version, merge,
};
pub use catalog::CatalogEntry;
pub use checkpoint::{
    Checkpoint, CheckpointError, Format, GenerationConfig, GgufError, GgufTokenizer, GridType, ImageSize, KvScheme,
    OpenOptions, ProcessorConfig, Resample, SentenceSettings, StorageTotal, TokenizerData, ViewText,
};
pub use config::{
    AttentionConfig, ConfigError, Dimensions, ExpertsConfig, HeadLayer, HeadNorm, ImageTokens, InputConfig,
    LatentConfig, LayerConfig, LearnedPositions, MlpConfig, ModelConfig, NormConfig, NormPlaces, PooledRow,
    PositionTable, QkNormWidth, RopeConfig, RopeScaling, RopeSections, ScoreActivation, SharedExpertConfig, TokenRows,
    VectorConfig, VectorKind, VisionConfig,
};
pub use family::{FAMILIES, Family, Runner};
pub use fetch::{PipError, StorageError, WheelError};
pub use hub::HubError;
pub use image::{EncodedImage, ImageGrid, ImagePositions, ImageSpan};
pub use inspect::{InspectOptions, inspect, inspect_encoder};
pub use installed::{InstalledModel, installed};
pub use program::{ModelError, Programs, build_program, build_programs};
pub use progress::{Progress, ProgressTask, human_bytes, progress_for};
pub use resolve::{HubOptions, ResolveError, ResolveOptions, ResolvedModel, Retry, resolve};
