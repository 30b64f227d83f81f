//! The normalised configuration of a model of texts, for every family and both formats.

mod error;
pub(crate) mod experts;
mod fields;
pub(crate) mod gguf;
pub(crate) mod hf;
mod latent;
pub(crate) mod mmproj;
mod rope;
pub(crate) mod vectors;
mod vision;

pub use error::ConfigError;
pub use experts::{ExpertsConfig, SharedExpertConfig};
pub use latent::LatentConfig;
pub use rope::{RopeConfig, RopeScaling, RopeSections};
pub use vectors::{Dimensions, HeadLayer, HeadNorm, PooledRow, ScoreActivation, TokenRows, VectorConfig, VectorKind};
pub use vision::{ImageTokens, PositionTable, VisionConfig};

pub(crate) use fields::Fields;
pub(crate) use gguf::{CLIP, Keys};
pub(crate) use rope::yarn_magnitude;

use octavo_ops::{GluKind, HeadShape, NormKind};

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

/// Sizes and options of a decoder or an encoder of texts, normalised and checked: every value is within its limits and
/// they are consistent.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub family: &'static Family,
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// The layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Factor of the embedding rows.
    pub embedding_scale: f32,
    /// What is added to the embedding rows.
    pub input: InputConfig,
    /// Norms outside and inside the layers.
    pub norm: NormConfig,
    /// Whether a norm follows the last layer.
    pub final_norm: bool,
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
    /// The vectors that the model returns, if it predicts no tokens.
    pub vectors: Option<VectorConfig>,
}

/// What is added to the embeddings of tokens. Decoders add nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InputConfig {
    /// Learned positions.
    pub positions: Option<LearnedPositions>,
    /// Number of token types, each with a learned row; 0 if there are none.
    pub token_types: usize,
    /// Whether a norm follows the sum.
    pub norm: bool,
}

/// A table of learned positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedPositions {
    /// Number of rows.
    pub rows: usize,
    /// Row of the first position.
    pub offset: usize,
}

/// The norms of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// Value added under the root.
    pub eps: f32,
    /// Whether the factor is `1 + w` instead of `w`.
    pub unit_offset: bool,
    /// Whether there is a bias.
    pub bias: bool,
}

impl NormConfig {
    /// Returns RMS norms with the factor `w`.
    pub(crate) const fn rms(eps: f32) -> Self {
        Self { kind: NormKind::Rms, eps, unit_offset: false, bias: false }
    }
}

/// A layer: attention, then an MLP or a mixture of such experts, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Attention.
    pub attention: AttentionConfig,
    /// Gated MLP, or that of each expert.
    pub mlp: MlpConfig,
    /// Experts, of which each token uses some, if the layer has them.
    pub experts: Option<ExpertsConfig>,
    /// Norms around the attention.
    pub attention_norms: NormPlaces,
    /// Norms around the MLP.
    pub mlp_norms: NormPlaces,
    /// Factor of what each of the two adds to the residual stream.
    pub residual_scale: f32,
}

/// Places of the norms around a block, which is attention or an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// `x += block(x)`.
    None,
    /// `x += block(norm(x))`.
    Before,
    /// `x += norm(block(x))`.
    After,
    /// `x += norm(block(norm(x)))`.
    Both,
    /// `x = norm(x + block(x))`.
    Sum,
}

/// The attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query and key-value heads.
    pub heads: HeadShape,
    /// Sizes of latent attention; `None` if keys and values have projections of their own.
    pub latent: Option<LatentConfig>,
    /// Rotary embedding, if there is one.
    pub rope: Option<RopeConfig>,
    /// Whether a token sees only those up to its own. Otherwise it sees all tokens of its text.
    pub causal: bool,
    /// Sliding window in tokens, or tokens on each side unless `causal`; `None` if unlimited.
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

/// An MLP: `down(act(gate(x)) · up(x))`, or `down(act(up(x)))` without a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// Number of columns of the activation.
    pub intermediate_size: usize,
    /// Activation.
    pub activation: GluKind,
    /// Whether there is a gate.
    pub gated: bool,
    /// Whether the projections have biases.
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
        self.ropes_mut().for_each(|rope| rope.serve(tokens));
    }

    /// Returns the rotary embeddings of the layers that have one.
    pub(crate) fn ropes_mut(&mut self) -> impl Iterator<Item = &mut RopeConfig> {
        self.layers.iter_mut().filter_map(|layer| layer.attention.rope.as_mut())
    }

    /// Returns the rotary embedding of the first layer that has one.
    pub fn rope(&self) -> Option<&RopeConfig> {
        self.layers.iter().find_map(|layer| layer.attention.rope.as_ref())
    }

    /// Returns whether each token sees only those up to its own, as a model that predicts tokens must.
    pub fn is_causal(&self) -> bool {
        self.layers.iter().all(|layer| layer.attention.causal)
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
        self.check_texts()?;
        Ok(self)
    }
}

impl ModelConfig {
    /// Checks what only encoders of texts have.
    fn check_texts(&self) -> Result<(), ConfigError> {
        range("the number of token types", self.input.token_types, 0, MAX_POSITIONS)?;
        if let Some(LearnedPositions { rows, offset }) = self.input.positions {
            range("the number of positions", rows, 1, MAX_POSITIONS)?;
            range("the context length", self.max_position_embeddings, 1, rows.saturating_sub(offset))?;
        }
        if let Some(vectors) = &self.vectors {
            vectors.check(self)?;
        }
        match (self.is_causal(), &self.vectors) {
            (false, None) => {
                Err(ConfigError::Invalid("attention to later tokens in a model that predicts them".into()))
            }
            (false, Some(_)) if self.layers.iter().any(|layer| layer.attention.causal) => {
                Err(ConfigError::Unsupported("attention to later tokens in some layers only".into()))
            }
            _ => Ok(()),
        }
    }
}

impl AttentionConfig {
    /// Returns attention to all tokens of a text, without a rotary embedding and biases.
    pub(crate) fn whole(heads: HeadShape) -> Self {
        Self { causal: false, rope: None, ..Self::plain(heads) }
    }

    /// Returns attention to all tokens up to a token's own, without a rotary embedding and biases.
    fn plain(heads: HeadShape) -> Self {
        let scale = (heads.dim as f32).sqrt().recip();
        let (latent, window, softcap, qk_norm) = (None, None, None, None);
        let (sinks, qkv_bias, output_bias) = (false, false, false);
        Self { heads, latent, rope: None, causal: true, window, scale, softcap, qk_norm, sinks, qkv_bias, output_bias }
    }
}

impl LayerConfig {
    /// Returns a layer with the same norms around both blocks.
    pub(crate) fn with_norms(attention: AttentionConfig, mlp: MlpConfig, norms: NormPlaces) -> Self {
        Self { attention, mlp, experts: None, attention_norms: norms, mlp_norms: norms, residual_scale: 1.0 }
    }

    /// Returns a layer of Llama: norms before the blocks, attention to all positions, no biases.
    fn plain(heads: HeadShape, rope: RopeConfig, mlp: MlpConfig) -> Self {
        Self::with_norms(AttentionConfig { rope: Some(rope), ..AttentionConfig::plain(heads) }, mlp, NormPlaces::Before)
    }

    /// Sets the norms around both blocks.
    pub(crate) fn set_norms(&mut self, norms: NormPlaces) {
        (self.attention_norms, self.mlp_norms) = (norms, norms);
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
            if self.mlp_norms != NormPlaces::Before {
                return Err(ConfigError::Unsupported("norms after a mixture of experts".into()));
            }
        }
        if let Some(latent) = &self.attention.latent {
            latent.check(&self.attention)?;
        }
        rope.as_ref().map_or(Ok(()), |rope| rope.check(heads.dim))
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
