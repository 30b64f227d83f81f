//! Programs of the architectures: one file each, over one decoder builder.
//!
//! To add an architecture, add a variant of [`Architecture`], the reading of its configuration (`config/{hf,gguf}.rs`)
//! and a file here that combines the decoder's parts.

mod decoder;
mod idefics3;
mod llama;
mod mistral;
pub(crate) mod names;
mod qwen2;
mod qwen3;
mod qwen3_vl;
mod vision;

use octavo_ops::{Program, ProgramError, WeightError};

use crate::checkpoint::Checkpoint;
use crate::config::Architecture;
use decoder::Decoder;

/// Reason why no program can be built from a checkpoint.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A tensor is missing or cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The shape of a tensor does not match the configuration.
    #[error("tensor '{name}' has the shape {found:?}, but the configuration needs {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape found, outermost dimension first.
        found: Vec<usize>,
        /// Shape expected.
        expected: Vec<usize>,
    },
    /// The program itself is inconsistent.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// The programs of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Programs {
    /// Predicts tokens.
    pub decoder: Program,
    /// Computes the rows that images take in the decoder, if the model has an encoder.
    pub encoder: Option<Program>,
}

/// Builds the programs of a checkpoint. Every tensor they name exists and has the right shape.
pub fn build_programs(checkpoint: &Checkpoint) -> Result<Programs, ModelError> {
    match &checkpoint.config().vision {
        None => Ok(Programs { decoder: build_program(checkpoint)?, encoder: None }),
        Some(vision) => Ok(Programs {
            decoder: decoder_program(Decoder::with_images(checkpoint)?)?,
            encoder: Some(match checkpoint.config().architecture {
                Architecture::Idefics3 => idefics3::encoder(checkpoint, vision)?,
                _ => qwen3_vl::encoder(checkpoint, vision)?,
            }),
        }),
    }
}

/// Builds the decoder of a checkpoint, without images.
pub fn build_program(checkpoint: &Checkpoint) -> Result<Program, ModelError> {
    decoder_program(Decoder::new(checkpoint)?)
}

fn decoder_program(decoder: Decoder<'_>) -> Result<Program, ModelError> {
    match decoder.config().architecture {
        Architecture::Llama | Architecture::Idefics3 => llama::program(decoder),
        Architecture::Mistral => mistral::program(decoder),
        Architecture::Qwen2 => qwen2::program(decoder),
        Architecture::Qwen3 | Architecture::Qwen3Vl => qwen3::program(decoder),
    }
}
