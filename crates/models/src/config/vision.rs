//! Configuration of an encoder of images.

use octavo_ops::{GluKind, HeadShape};

use super::{ConfigError, Fields, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_VOCAB, ModelConfig};

const MAX_PATCH: usize = 256;
const MAX_MERGE: usize = 16;
const MAX_TABLE: usize = 1 << 20;

/// Ids of the tokens that mark images in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageTokens {
    /// Token that stands for each row of an image.
    pub image: u32,
    /// Token that stands for each row of a video, if the model takes videos.
    pub video: Option<u32>,
    /// Token before an image, if it is always the same.
    pub start: Option<u32>,
    /// Token after an image, if it is always the same.
    pub end: Option<u32>,
}

impl ImageTokens {
    /// Reads the ids of a `config.json`; `default` has those that it omits.
    pub(crate) fn from_hf(fields: &Fields<'_>, default: Self) -> Result<Self, ConfigError> {
        let id = |key: &str, default: Option<u32>| match default {
            Some(default) => Ok::<_, ConfigError>(Some(fields.u32(key)?.unwrap_or(default))),
            None => Ok(None),
        };
        Ok(Self {
            image: fields.u32("image_token_id")?.unwrap_or(default.image),
            video: id("video_token_id", default.video)?,
            start: id("vision_start_token_id", default.start)?,
            end: id("vision_end_token_id", default.end)?,
        })
    }
}

/// How the table of learned positions covers the patches of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionTable {
    /// The table is stretched over every grid, and its rows are interpolated.
    Stretched,
    /// Every image has the grid of the table.
    Exact,
}

/// Sizes and options of an encoder of images, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Number of layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Number of columns of the MLP.
    pub intermediate_size: usize,
    /// Number of attention heads, a divisor of the hidden size.
    pub heads: usize,
    /// Activation of the MLP.
    pub activation: GluKind,
    /// Number of colour channels.
    pub channels: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Number of frames in a patch. An image has its frame as often.
    pub temporal_patch_size: usize,
    /// Side of the square of patches that becomes one row of the decoder.
    pub merge_size: usize,
    /// Side of the square table of learned positions.
    pub table_side: usize,
    /// How the table covers an image.
    pub table: PositionTable,
    /// Hidden size of the decoder.
    pub out_hidden_size: usize,
    /// Layers whose outputs are added to the decoder's first layers, in order.
    pub deepstack_layers: Vec<usize>,
    /// Value added under the root of every norm.
    pub norm_eps: f32,
    /// Base of the rotary frequencies, if the encoder has rotary positions.
    pub theta: Option<f64>,
    /// Whether the decoder's tokens of an image see each other in both directions.
    pub seen_whole: bool,
    /// Tokens of images.
    pub tokens: ImageTokens,
}

impl VisionConfig {
    /// Returns the number of patches of a side of a square image. Pixels beyond the last whole patch are left out.
    pub(crate) fn patches_of_side(image_size: usize, patch_size: usize) -> Result<usize, ConfigError> {
        image_size.checked_div(patch_size).filter(|side| *side > 0).ok_or_else(|| {
            let reason = format!("'image_size' is {image_size}, and a patch size of {patch_size} does not fit it");
            ConfigError::Invalid(reason)
        })
    }

    /// Returns the heads of every layer.
    pub const fn head_shape(&self) -> HeadShape {
        HeadShape::new(self.heads, self.heads, self.hidden_size / self.heads)
    }

    /// Returns the number of elements of a patch, over all frames.
    pub const fn patch_elements(&self) -> usize {
        self.frame_elements() * self.temporal_patch_size
    }

    /// Returns the number of elements of a patch in one frame.
    pub const fn frame_elements(&self) -> usize {
        self.channels * self.patch_size * self.patch_size
    }

    /// Returns the number of patches that become one row of the decoder.
    pub const fn merged_patches(&self) -> usize {
        self.merge_size * self.merge_size
    }

    /// Checks every limit, and the consistency with the decoder.
    pub(crate) fn check(&self, decoder: &ModelConfig) -> Result<(), ConfigError> {
        let limits = [
            ("the encoder's number of layers", self.layers, MAX_LAYERS),
            ("the encoder's hidden size", self.hidden_size, MAX_HIDDEN),
            ("the encoder's intermediate size", self.intermediate_size, MAX_INTERMEDIATE),
            ("the encoder's number of heads", self.heads, MAX_HEADS),
            ("the number of channels", self.channels, 4),
            ("the patch size", self.patch_size, MAX_PATCH),
            ("the number of frames in a patch", self.temporal_patch_size, MAX_PATCH),
            ("the merge size", self.merge_size, MAX_MERGE),
            ("the side of the table of positions", self.table_side, MAX_TABLE.isqrt()),
        ];
        for (key, found, high) in limits {
            if found == 0 || found > high {
                return Err(ConfigError::Range { key: key.into(), found: found as u64, low: 1, high: high as u64 });
            }
        }
        let invalid = |reason: String| Err(ConfigError::Invalid(format!("the image encoder: {reason}")));
        // A quarter of a head's elements are the frequencies of rows, and of columns.
        let parts = if self.theta.is_some() { 4 } else { 1 };
        if !self.hidden_size.is_multiple_of(self.heads) || !self.head_shape().dim.is_multiple_of(parts) {
            return invalid(format!(
                "{} columns are not whole heads of {} in {parts} parts",
                self.hidden_size, self.heads
            ));
        }
        if self.out_hidden_size != decoder.hidden_size {
            let (found, expected) = (self.out_hidden_size, decoder.hidden_size);
            return invalid(format!("'out_hidden_size' is {found}, but the decoder has {expected} columns"));
        }
        let ascends = self.deepstack_layers.is_sorted_by(|a, b| a < b);
        if !ascends || self.deepstack_layers.last().is_some_and(|&last| last >= self.layers) {
            let (found, layers) = (&self.deepstack_layers, self.layers);
            return invalid(format!("'deepstack_visual_indexes' is {found:?}, but there are {layers} layers"));
        }
        if self.deepstack_layers.len() > decoder.layers.len() {
            return invalid(format!("the decoder has {} layers for {:?}", decoder.layers.len(), self.deepstack_layers));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return invalid(format!("the norm's epsilon is {}", self.norm_eps));
        }
        if let Some(theta) = self.theta.filter(|theta| !(theta.is_finite() && *theta > 1.0)) {
            return invalid(format!("the rotary base is {theta}"));
        }
        let ImageTokens { image, video, start, end } = self.tokens;
        let ids = [Some(image), video, start, end];
        match ids.into_iter().flatten().find(|&id| id as usize >= decoder.vocab_size.min(MAX_VOCAB)) {
            Some(id) => invalid(format!("the token {id} is beyond the vocabulary")),
            None => Ok(()),
        }
    }
}
