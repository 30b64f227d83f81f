//! Programs of checkpoints: one builder for decoders and encoders of texts, which the configuration describes layer by layer, and one for
//! encoders of images.

mod decoder;
pub(crate) mod encoder;
mod experts;
mod latent;
pub(crate) mod names;
mod vectors;

use octavo_ops::{Program, ProgramError, WeightError};

use crate::checkpoint::Checkpoint;
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
    let config = checkpoint.config();
    match config.vision.as_ref().zip(config.family.images.as_ref()) {
        None => Ok(Programs { decoder: build_program(checkpoint)?, encoder: None }),
        Some((vision, images)) => Ok(Programs {
            decoder: Decoder::with_images(checkpoint)?.program()?,
            encoder: Some((images.encoder)(checkpoint, vision)?),
        }),
    }
}

/// Builds the decoder of a checkpoint, without images.
pub fn build_program(checkpoint: &Checkpoint) -> Result<Program, ModelError> {
    Decoder::new(checkpoint)?.program()
}
