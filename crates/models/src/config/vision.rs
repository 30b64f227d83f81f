//! Configuration of an encoder of images.

use octavo_ops::{GluKind, HeadShape};

use super::hf::activation_named;
use super::{
    Architecture, ConfigError, Fields, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_VOCAB, ModelConfig,
};
use crate::checkpoint::MetadataView;

const MAX_PATCH: usize = 256;
const MAX_MERGE: usize = 16;
const MAX_TABLE: usize = 1 << 20;
/// `clip.projector_type` of Qwen3-VL's encoder.
const QWEN3_VL_PROJECTOR: &str = "qwen3vl_merger";
/// Value under the root of Qwen3-VL's norms; no configuration contains it.
const QWEN3_VL_EPS: f32 = 1e-6;
/// Base of the rotary frequencies if a configuration omits it.
const DEFAULT_THETA: f64 = 10_000.0;

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
    /// Ids of Qwen3-VL.
    const QWEN3_VL: Self = Self { image: 151_655, video: Some(151_656), start: Some(151_652), end: Some(151_653) };
    /// Id of Idefics3, if a configuration omits it.
    const IDEFICS3: u32 = 128_257;

    /// Reads the ids of a `config.json`; `default` has those that it omits.
    fn from_hf(fields: &Fields<'_>, default: Self) -> Result<Self, ConfigError> {
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

    /// Finds the tokens in the vocabulary of a GGUF file, which has no keys for them.
    pub(crate) fn in_vocabulary(metadata: &MetadataView<'_>) -> Result<Self, ConfigError> {
        let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(Self::QWEN3_VL) };
        let id = |text: &str| {
            let found = tokens.iter().position(|token| *token == text).and_then(|id| u32::try_from(id).ok());
            found.ok_or_else(|| ConfigError::Invalid(format!("the vocabulary has no token '{text}'")))
        };
        Ok(Self {
            image: id("<|image_pad|>")?,
            video: Some(id("<|video_pad|>")?),
            start: Some(id("<|vision_start|>")?),
            end: Some(id("<|vision_end|>")?),
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
    /// Tokens of images.
    pub tokens: ImageTokens,
}

impl VisionConfig {
    /// Reads the encoder's part of a `config.json`, if the architecture has one.
    pub(super) fn from_hf(fields: &Fields<'_>, architecture: Architecture) -> Result<Option<Self>, ConfigError> {
        let read = match architecture {
            Architecture::Qwen3Vl => Self::qwen3_vl,
            Architecture::Idefics3 => Self::idefics3,
            _ => return Ok(None),
        };
        let vision = fields.object("vision_config")?.ok_or_else(|| ConfigError::missing("vision_config"))?;
        read(fields, &vision).map(Some)
    }

    fn qwen3_vl(fields: &Fields<'_>, vision: &Fields<'_>) -> Result<Self, ConfigError> {
        let size = |key: &str, default: usize| Ok::<_, ConfigError>(vision.usize(key)?.unwrap_or(default));
        let positions = size("num_position_embeddings", 2304)?;
        let table_side = positions.isqrt();
        if table_side * table_side != positions {
            let reason = format!("'num_position_embeddings' is {positions}, but the table must be square");
            return Err(ConfigError::Invalid(reason));
        }
        let theta = match vision.object("rope_parameters")? {
            Some(parameters) => parameters.f64("rope_theta")?,
            None => None,
        };
        Ok(Self {
            layers: vision.required("depth")?,
            hidden_size: vision.required("hidden_size")?,
            intermediate_size: vision.required("intermediate_size")?,
            heads: vision.required("num_heads")?,
            activation: activation(vision)?,
            channels: size("in_channels", 3)?,
            patch_size: size("patch_size", 16)?,
            temporal_patch_size: size("temporal_patch_size", 2)?,
            merge_size: size("spatial_merge_size", 2)?,
            table_side,
            table: PositionTable::Stretched,
            out_hidden_size: vision.required("out_hidden_size")?,
            deepstack_layers: vision.usizes("deepstack_visual_indexes")?.unwrap_or_else(|| vec![8, 16, 24]),
            norm_eps: QWEN3_VL_EPS,
            theta: Some(theta.unwrap_or(DEFAULT_THETA)),
            tokens: ImageTokens::from_hf(fields, ImageTokens::QWEN3_VL)?,
        })
    }

    fn idefics3(fields: &Fields<'_>, vision: &Fields<'_>) -> Result<Self, ConfigError> {
        let size = |key: &str, default: usize| Ok::<_, ConfigError>(vision.usize(key)?.unwrap_or(default));
        let text = fields.object("text_config")?.ok_or_else(|| ConfigError::missing("text_config"))?;
        let (image_size, patch_size) = (size("image_size", 224)?, size("patch_size", 32)?);
        // Pixels beyond the last whole patch are left out.
        let table_side = image_size.checked_div(patch_size).filter(|side| *side > 0).ok_or_else(|| {
            let reason = format!("'image_size' is {image_size}, and a patch size of {patch_size} does not fit it");
            ConfigError::Invalid(reason)
        })?;
        let merge_size = fields.usize("scale_factor")?.unwrap_or(2);
        if merge_size == 0 || !table_side.is_multiple_of(merge_size) {
            let reason =
                format!("'scale_factor' is {merge_size}, which does not divide the {table_side} patches of a side");
            return Err(ConfigError::Invalid(reason));
        }
        Ok(Self {
            layers: size("num_hidden_layers", 12)?,
            hidden_size: size("hidden_size", 1152)?,
            intermediate_size: size("intermediate_size", 3072)?,
            heads: size("num_attention_heads", 16)?,
            activation: activation(vision)?,
            channels: size("num_channels", 3)?,
            patch_size,
            temporal_patch_size: 1,
            merge_size,
            table_side,
            table: PositionTable::Exact,
            out_hidden_size: text.required("hidden_size")?,
            deepstack_layers: vec![],
            norm_eps: vision.f64("layer_norm_eps")?.unwrap_or(1e-6) as f32,
            theta: None,
            tokens: ImageTokens::from_hf(
                fields,
                ImageTokens { image: ImageTokens::IDEFICS3, video: None, start: None, end: None },
            )?,
        })
    }

    /// Reads the metadata of an mmproj file. `frames` is the number of convolutions over patches in the file, one for
    /// each frame, and `out_hidden_size` the decoder's hidden size.
    ///
    /// # Errors
    /// Returns an error if the encoder is another architecture's, or if it does not fit the decoder.
    pub(crate) fn from_mmproj(
        metadata: &MetadataView<'_>,
        frames: usize,
        model: &ModelConfig,
        tokens: ImageTokens,
    ) -> Result<Self, ConfigError> {
        let vision = |key: &str| format!("clip.vision.{key}");
        let size = |key: &str| {
            let key = vision(key);
            let found = metadata.u64(&key)?.and_then(|n| usize::try_from(n).ok());
            found.ok_or_else(|| ConfigError::missing(&key))
        };
        let projector = match metadata.str("clip.projector_type")? {
            Some(projector) => projector,
            None => metadata.str(&vision("projector_type"))?.unwrap_or("unknown"),
        };
        if projector != QWEN3_VL_PROJECTOR {
            return Err(ConfigError::Invalid(format!(
                "it is the encoder of another model: its projector is '{}', and '{QWEN3_VL_PROJECTOR}' is needed",
                projector.escape_debug()
            )));
        }
        let out_hidden_size = size("projection_dim")?;
        if out_hidden_size != model.hidden_size {
            return Err(ConfigError::Invalid(format!(
                "it is the encoder of another model: its outputs have {out_hidden_size} columns, and the model has {}",
                model.hidden_size
            )));
        }
        let patch_size = size("patch_size")?;
        let deepstack = metadata.bools(&vision("is_deepstack_layers"))?.unwrap_or_default();
        let encoder = Self {
            layers: size("block_count")?,
            hidden_size: size("embedding_length")?,
            intermediate_size: size("feed_forward_length")?,
            heads: size("attention.head_count")?,
            activation: match (metadata.bool("clip.use_gelu")?, metadata.bool("clip.use_silu")?) {
                (Some(true), _) => GluKind::GeluTanh,
                (_, Some(true)) => GluKind::Silu,
                _ => return Err(ConfigError::Unsupported("the activation 'quick_gelu'".into())),
            },
            channels: 3,
            patch_size,
            temporal_patch_size: frames,
            merge_size: metadata.u64(&vision("spatial_merge_size"))?.map_or(2, |n| n as usize),
            table_side: size("image_size")?.checked_div(patch_size).unwrap_or(0),
            table: PositionTable::Stretched,
            out_hidden_size,
            deepstack_layers: (0..).zip(&deepstack).filter(|&(_, &is_deep)| is_deep).map(|(layer, _)| layer).collect(),
            norm_eps: QWEN3_VL_EPS,
            theta: Some(DEFAULT_THETA),
            tokens,
        };
        encoder.check(model)?;
        Ok(encoder)
    }

    /// Returns the heads of every layer.
    pub const fn head_shape(&self) -> HeadShape {
        HeadShape { q: self.heads, kv: self.heads, dim: self.hidden_size / self.heads }
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
    pub(super) fn check(&self, decoder: &ModelConfig) -> Result<(), ConfigError> {
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
        if self.deepstack_layers.len() > decoder.layers {
            return invalid(format!("the decoder has {} layers for {:?}", decoder.layers, self.deepstack_layers));
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

fn activation(vision: &Fields<'_>) -> Result<GluKind, ConfigError> {
    activation_named(vision.str("hidden_act")?.unwrap_or("gelu_pytorch_tanh"))
}
