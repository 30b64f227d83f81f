//! The normalised configuration of a decoder, for every family and both formats.

mod error;
pub(crate) mod experts;
mod fields;
pub(crate) mod gguf;
pub(crate) mod hf;
mod rope;
mod vision;

pub use error::ConfigError;
pub use experts::{ExpertsConfig, SharedExpertConfig};
pub use rope::{RopeConfig, RopeScaling, RopeSections};
pub use vision::{ImageTokens, PositionTable, VisionConfig};

pub(crate) use fields::Fields;
pub(crate) use gguf::{CLIP, Keys};

use octavo_ops::{GluKind, HeadShape};

use crate::family::Family;

/// Limits on the values of a checkpoint, far above any published model. They keep every later product within `usize`
/// and every loop short, whatever a hostile file contains.
const MAX_LAYERS: usize = 1024;
const MAX_HIDDEN: usize = 1 << 18;
const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 28;

/// Sizes and options of a decoder, normalised and checked: every value is within its limits and they are consistent.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub family: &'static Family,
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// The layers of the decoder, in order.
    pub layers: Vec<LayerConfig>,
    /// Factor of the embedding rows.
    pub embedding_scale: f32,
    /// Norms outside and inside the layers.
    pub norm: NormConfig,
    /// Factor of the logits.
    pub logits_scale: f32,
    /// Cap of the logits.
    pub logits_softcap: Option<f32>,
    /// Context length the model was trained for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Element type for display: `bfloat16`, `Q4_1`.
    pub dtype: String,
    /// Encoder of images, if the model has one.
    pub vision: Option<VisionConfig>,
}

/// The RMS norms of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// Value added under the root.
    pub eps: f32,
    /// Whether the factor is `1 + w` instead of `w`.
    pub unit_offset: bool,
}

/// A layer of a decoder: attention, then a gated MLP or a mixture of such experts, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Attention.
    pub attention: AttentionConfig,
    /// Gated MLP, or that of each expert.
    pub mlp: MlpConfig,
    /// Experts, of which each token uses some, if the layer has them.
    pub experts: Option<ExpertsConfig>,
    /// Norms around each of the two.
    pub norms: NormPlaces,
    /// Factor of what each of the two adds to the residual stream.
    pub residual_scale: f32,
}

/// Places of the norms around a block, which is attention or an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// `x += block(norm(x))`.
    Before,
    /// `x += norm(block(x))`.
    After,
    /// `x += norm(block(norm(x)))`.
    Both,
}

/// The attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query and key-value heads.
    pub heads: HeadShape,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether q and k are rotated.
    pub rotary: bool,
    /// Sliding window in tokens; `None` if unlimited.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
    /// Cap of the scores.
    pub softcap: Option<f32>,
    /// RMS norm of q and k before the rotary embedding, if there is one.
    pub qk_norm: Option<QkNormWidth>,
    /// Whether each query head has an attention sink.
    pub sinks: bool,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
}

/// Elements that share a norm of q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormWidth {
    /// Each head on its own.
    Head,
    /// All heads of q, and all heads of k.
    Whole,
}

/// A gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// Number of columns of the gate.
    pub intermediate_size: usize,
    /// Activation of the gate.
    pub activation: GluKind,
    /// Whether the three projections have biases.
    pub bias: bool,
}

impl ModelConfig {
    /// Returns the query and key-value heads of the first layer.
    pub fn head_shape(&self) -> HeadShape {
        self.layers[0].attention.heads
    }

    /// Returns the longest sliding window, if any layer has one.
    pub fn sliding_window(&self) -> Option<usize> {
        self.windows().flatten().max()
    }

    /// Gives all layers the same sliding window.
    pub(crate) fn set_window(&mut self, window: Option<usize>) {
        self.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    }

    /// Returns the sliding window of each layer.
    pub fn windows(&self) -> impl Iterator<Item = Option<usize>> {
        self.layers.iter().map(|layer| layer.attention.window)
    }

    /// Sets the context length that is served, which decides on the rotary embedding of models with two of them. Without
    /// it, the whole context is served.
    pub(crate) fn serve(&mut self, tokens: usize) {
        self.layers.iter_mut().for_each(|layer| layer.attention.rope.serve(tokens));
    }

    /// Adds an encoder of images.
    pub(crate) fn with_vision(self, vision: VisionConfig) -> Result<Self, ConfigError> {
        vision.check(&self)?;
        Ok(Self { vision: Some(vision), ..self })
    }

    /// Checks every limit and the consistency of the values.
    pub(crate) fn checked(self) -> Result<Self, ConfigError> {
        range("the vocabulary size", self.vocab_size, 1, MAX_VOCAB)?;
        range("the hidden size", self.hidden_size, 1, MAX_HIDDEN)?;
        range("the number of layers", self.layers.len(), 1, MAX_LAYERS)?;
        range("the context length", self.max_position_embeddings, 1, MAX_POSITIONS)?;
        let eps = self.norm.eps;
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(ConfigError::Invalid(format!("the norm's epsilon is {eps}")));
        }
        self.layers.iter().try_for_each(LayerConfig::check)?;
        factor("the embedding's scale", self.embedding_scale)?;
        factor("the logits' scale", self.logits_scale)?;
        self.logits_softcap.map_or(Ok(()), |cap| factor("the logits' cap", cap))?;
        if let Some(vision) = &self.vision {
            vision.check(&self)?;
        }
        Ok(self)
    }
}

impl LayerConfig {
    /// Returns a layer of Llama: norms before the blocks, attention to all positions, no biases.
    fn plain(heads: HeadShape, rope: RopeConfig, mlp: MlpConfig) -> Self {
        let scale = (heads.dim as f32).sqrt().recip();
        let (window, softcap, qk_norm) = (None, None, None);
        let (rotary, sinks, qkv_bias, output_bias) = (true, false, false, false);
        let attention =
            AttentionConfig { heads, rope, rotary, window, scale, softcap, qk_norm, sinks, qkv_bias, output_bias };
        Self { attention, mlp, experts: None, norms: NormPlaces::Before, residual_scale: 1.0 }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let AttentionConfig { heads, rope, window, scale, softcap, .. } = &self.attention;
        check_heads(heads.q, heads.kv)?;
        range("the head size", heads.dim, 1, MAX_HEAD_DIM)?;
        range("the intermediate size", self.mlp.intermediate_size, 1, MAX_INTERMEDIATE)?;
        if let Some(window) = *window {
            range("the sliding window", window, 1, MAX_POSITIONS)?;
        }
        factor("the attention's scale", *scale)?;
        factor("the residual's scale", self.residual_scale)?;
        softcap.map_or(Ok(()), |cap| factor("the attention's cap", cap))?;
        if let Some(experts) = &self.experts {
            experts.check()?;
            if self.norms != NormPlaces::Before {
                return Err(ConfigError::Unsupported("norms after a mixture of experts".into()));
            }
        }
        rope.check(heads.dim)
    }
}

/// Returns whether a layer has a window, in a model where all but the last of each `pattern` layers have one.
pub(crate) fn slides(layer: usize, pattern: usize) -> bool {
    pattern > 0 && !(layer + 1).is_multiple_of(pattern)
}

/// Checks that `heads` share `kv_heads` evenly.
fn check_heads(heads: usize, kv_heads: usize) -> Result<(), ConfigError> {
    range("the number of attention heads", heads, 1, MAX_HEADS)?;
    range("the number of key-value heads", kv_heads, 1, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Invalid(format!(
            "{heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )));
    }
    Ok(())
}

fn range(key: &str, found: usize, low: usize, high: usize) -> Result<(), ConfigError> {
    if (low..=high).contains(&found) {
        return Ok(());
    }
    Err(ConfigError::Range { key: key.into(), found: found as u64, low: low as u64, high: high as u64 })
}

/// Checks that a factor or cap is a number above 0.
fn factor(key: &str, found: f32) -> Result<(), ConfigError> {
    if found.is_finite() && found > 0.0 {
        return Ok(());
    }
    Err(ConfigError::Invalid(format!("{key} is {found}, but it must be above 0")))
}

/// Returns `hidden / heads`, the head size of a checkpoint that does not specify it.
fn default_head_dim(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(ConfigError::Invalid(format!("{hidden} hidden units cannot be shared by {heads} attention heads")));
    }
    Ok(hidden / heads)
}

/// Returns as many copies of a layer. The number is checked before it determines an allocation.
fn repeated(layer: LayerConfig, layers: usize) -> Result<Vec<LayerConfig>, ConfigError> {
    range("the number of layers", layers, 1, MAX_LAYERS)?;
    Ok(vec![layer; layers])
}

#[cfg(test)]
mod tests;
