//! Images of prompts: their tokens, their identity and the encoder's input.

mod cache;
mod check;
mod rows;

use std::fmt;
use std::sync::Arc;

pub(crate) use cache::{ImageCache, SequenceImages, overlapping};
pub(crate) use check::check;

/// Tokens of a prompt that stand for an image: `rows × cols` consecutive ones, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Position of the first token.
    pub start: u32,
    /// Number of rows of tokens.
    pub rows: u32,
    /// Number of columns of tokens.
    pub cols: u32,
}

impl ImageSpan {
    /// Returns the number of tokens, saturated.
    pub fn tokens(&self) -> u32 {
        self.rows.saturating_mul(self.cols)
    }

    /// Returns the position after the last token, saturated.
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.tokens())
    }
}

/// Identifies an image: a cryptographic hash of everything on which the encoder's output depends, such as the file and
/// the processor's parameters. Images with the same hash and grid share their encoder output, and prompts with them
/// share KV blocks, so it must not be a name that a client can choose.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageHash(pub [u8; 32]);

impl fmt::Display for ImageHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for ImageHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// An image as the encoder takes it.
pub struct ImageInput {
    /// Number of rows of patches.
    pub rows: u32,
    /// Number of columns of patches.
    pub cols: u32,
    /// Patches in the order of the model's processor, one byte for each element. They stay in memory until the request
    /// ends, because an image is encoded again after a preemption.
    pub patches: Box<dyn AsRef<[u8]> + Send + Sync>,
}

impl fmt::Debug for ImageInput {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = (*self.patches).as_ref().len();
        write!(out, "ImageInput {{ {} × {} patches, {bytes} bytes }}", self.rows, self.cols)
    }
}

/// An image of a prompt.
#[derive(Clone, Debug)]
pub struct PromptImage {
    /// Tokens that stand for the image. Their ids matter only as part of the prompt.
    pub span: ImageSpan,
    /// Identity of the image.
    pub hash: ImageHash,
    /// Input of the encoder.
    pub input: Arc<ImageInput>,
}

/// Images that an executor takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// Number of tokens of encoded images that the executor keeps: rows of its media cache.
    pub cache_tokens: usize,
    /// Number of rows of patches for a row of tokens; the same for columns.
    pub merge: u32,
    /// Size of a patch in bytes, with all its frames.
    pub patch_bytes: usize,
    /// Size of one frame of a patch in bytes. The patches of a still image have one frame, which is repeated.
    pub frame_bytes: usize,
    /// Whether the tokens of an image see each other. A step then computes all of those that are left.
    pub seen_whole: bool,
}
