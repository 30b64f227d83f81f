//! Programs: one file an architecture, over one decoder builder.
//!
//! To add an architecture: a variant of [`Architecture`], what is particular in its configuration
//! (`config/{hf,gguf}.rs`), and a file here that strings the decoder's parts together.

mod decoder;
mod llama;
mod mistral;
pub(crate) mod names;
mod qwen2;
mod qwen3;

use octavo_ops::{Program, ProgramError, WeightError};

use crate::checkpoint::Checkpoint;
use crate::config::Architecture;
use decoder::Decoder;

/// A checkpoint's tensors do not make the program its configuration describes.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A tensor is missing or cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A tensor has another shape than the configuration says.
    #[error("tensor '{name}' has the shape {found:?}, but the configuration needs {expected:?}")]
    Shape {
        /// Tensor.
        name: String,
        /// Its shape, outermost dimension first.
        found: Vec<usize>,
        /// The shape needed.
        expected: Vec<usize>,
    },
    /// The program itself is inconsistent.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// The decoder program of a checkpoint. Every tensor it names exists and has the right shape.
pub fn build_program(checkpoint: &Checkpoint) -> Result<Program, ModelError> {
    let decoder = Decoder::new(checkpoint)?;
    match checkpoint.config().architecture {
        Architecture::Llama => llama::program(decoder),
        Architecture::Mistral => mistral::program(decoder),
        Architecture::Qwen2 => qwen2::program(decoder),
        Architecture::Qwen3 => qwen3::program(decoder),
    }
}
