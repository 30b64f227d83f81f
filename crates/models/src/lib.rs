//! Config and checkpoint to [`Program`](octavo_ops::Program) and weights; the catalog and the hub.
//!
//! A [`Checkpoint`] is a GGUF file or a Hugging Face directory, memory-mapped. It knows its [`ModelConfig`], hands out its
//! tensors in their storage types ([`octavo_ops::WeightSource`]) and carries what the text layer needs: tokenizer data,
//! chat template, generation defaults. [`build_program`] turns it into the program that a backend runs.
//!
//! **Invariants:** this crate knows no device. Nothing that a checkpoint's header claims is believed before it has been
//! checked against the bytes that are there; a hostile file is an error, never a panic or a large allocation.

mod arch;
pub mod catalog;
mod checkpoint;
mod config;
mod fetch;
mod hub;
mod inspect;
mod installed;
pub mod progress;
mod resolve;
pub mod testing;

pub use arch::{ModelError, build_program};
pub use catalog::CatalogEntry;
pub use checkpoint::{
    Checkpoint, CheckpointError, Format, GenerationConfig, GgufError, GgufTokenizer, StorageTotal, TokenizerData,
};
pub use config::{Architecture, ConfigError, ModelConfig, RopeConfig, RopeScaling};
pub use fetch::{PipError, StorageError, WheelError};
pub use hub::HubError;
pub use inspect::{InspectOptions, inspect};
pub use installed::{InstalledModel, installed};
pub use progress::{Progress, ProgressTask, progress_for};
pub use resolve::{HubOptions, ResolveError, ResolveOptions, ResolvedModel, Retry, resolve};
