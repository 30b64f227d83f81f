//! The normalised configuration for every architecture and both formats.

mod error;
mod fields;
mod gguf;
mod hf;
mod rope;
mod vision;

pub use error::ConfigError;
pub use rope::{RopeConfig, RopeScaling, RopeSections};
pub use vision::{ImageTokens, PositionTable, VisionConfig};

pub(crate) use fields::Fields;
pub(crate) use gguf::CLIP;

use octavo_ops::{GluKind, HeadShape};
use serde_json::Value;

/// Limits on the values of a checkpoint, far above any published model. They keep every later product within `usize`
/// and every loop short, whatever a hostile file contains.
const MAX_LAYERS: usize = 1024;
const MAX_HIDDEN: usize = 1 << 18;
const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 28;

/// Architectures that Octavo can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.x and models with the same architecture (SmolLM2).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and 2.5, with biases on q, k and v.
    Qwen2,
    /// Qwen3 dense, with q and k normalised per head.
    Qwen3,
    /// Qwen3-VL dense: Qwen3 with an encoder of images.
    Qwen3Vl,
    /// Idefics3 and SmolVLM: Llama with an encoder of images.
    Idefics3,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Architecture; 6] =
        [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Qwen3Vl, Self::Idefics3];

    /// Returns every `model_type` of a Hugging Face configuration, with its architecture.
    fn model_types() -> impl Iterator<Item = (&'static str, Self)> + Clone {
        Self::ALL.into_iter().map(|a| (a.name(), a)).chain([("smolvlm", Self::Idefics3)])
    }

    /// Returns the name in `model_type` of a Hugging Face configuration; the first one if there are several.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Vl => "qwen3_vl",
            Self::Idefics3 => "idefics3",
        }
    }

    /// Returns the architecture of the decoder, if this one also has an encoder.
    pub(crate) const fn decoder(self) -> Self {
        match self {
            Self::Qwen3Vl => Self::Qwen3,
            Self::Idefics3 => Self::Llama,
            other => other,
        }
    }

    /// Returns the name in `general.architecture` of a GGUF file, where Mistral is `llama`.
    pub(crate) const fn gguf_name(self) -> &'static str {
        match self {
            Self::Qwen3Vl => "qwen3vl",
            other => other.name(),
        }
    }
}

/// Sizes and options of a decoder, normalised and checked: every value is within its limits and they are consistent.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture.
    pub architecture: Architecture,
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Number of elements of a head; not always `hidden_size / heads`.
    pub head_dim: usize,
    /// Number of columns of the gated MLP.
    pub intermediate_size: usize,
    /// Activation of the gated MLP.
    pub activation: GluKind,
    /// Value added under the root of every norm.
    pub norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Context length the model was trained for.
    pub max_position_embeddings: usize,
    /// Sliding window of each layer in tokens; `None` if unlimited.
    pub windows: Vec<Option<usize>>,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// Element type for display: `bfloat16`, `Q4_1`.
    pub dtype: String,
    /// Encoder of images, if the model has one.
    pub vision: Option<VisionConfig>,
}

impl ModelConfig {
    /// Returns the query and key-value heads of every layer.
    pub const fn head_shape(&self) -> HeadShape {
        HeadShape { q: self.heads, kv: self.kv_heads, dim: self.head_dim }
    }

    /// Returns the sliding window, if any layer has one.
    pub fn sliding_window(&self) -> Option<usize> {
        self.windows.iter().flatten().max().copied()
    }

    /// Adds an encoder of images.
    pub(crate) fn with_vision(self, vision: VisionConfig) -> Result<Self, ConfigError> {
        vision.check(&self)?;
        Ok(Self { vision: Some(vision), ..self })
    }

    /// Checks every limit and the consistency of the values.
    fn checked(self) -> Result<Self, ConfigError> {
        let range = |key: &str, found: usize, low: usize, high: usize| {
            if (low..=high).contains(&found) {
                return Ok(());
            }
            Err(ConfigError::Range { key: key.into(), found: found as u64, low: low as u64, high: high as u64 })
        };
        range("the vocabulary size", self.vocab_size, 1, MAX_VOCAB)?;
        range("the hidden size", self.hidden_size, 1, MAX_HIDDEN)?;
        range("the number of layers", self.layers, 1, MAX_LAYERS)?;
        range("the number of attention heads", self.heads, 1, MAX_HEADS)?;
        range("the number of key-value heads", self.kv_heads, 1, self.heads)?;
        range("the head size", self.head_dim, 1, MAX_HEAD_DIM)?;
        range("the intermediate size", self.intermediate_size, 1, MAX_INTERMEDIATE)?;
        range("the context length", self.max_position_embeddings, 1, MAX_POSITIONS)?;
        for window in self.windows.iter().flatten() {
            range("the sliding window", *window, 1, MAX_POSITIONS)?;
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::Invalid(format!(
                "{} attention heads cannot share {} key-value heads evenly",
                self.heads, self.kv_heads
            )));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(ConfigError::Invalid(format!("the norm's epsilon is {}", self.norm_eps)));
        }
        self.rope.check(self.head_dim)?;
        if let Some(vision) = &self.vision {
            vision.check(&self)?;
        }
        Ok(self)
    }
}

/// Returns `hidden / heads`, the head size of a checkpoint that does not specify it.
fn default_head_dim(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(ConfigError::Invalid(format!("{hidden} hidden units cannot be shared by {heads} attention heads")));
    }
    Ok(hidden / heads)
}

/// Returns the window list of a model with identical layers.
fn same_window(layers: usize, window: Option<usize>) -> Result<Vec<Option<usize>>, ConfigError> {
    windows(layers, window, |_| true)
}

/// Returns the window list of a model whose layers have the window if `sliding(layer)` is true.
fn windows(
    layers: usize,
    window: Option<usize>,
    sliding: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ConfigError> {
    // The number is checked before it determines an allocation.
    if layers > MAX_LAYERS {
        let (found, high) = (layers as u64, MAX_LAYERS as u64);
        return Err(ConfigError::Range { key: "the number of layers".into(), found, low: 1, high });
    }
    Ok((0..layers).map(|layer| window.filter(|_| sliding(layer))).collect())
}

/// Checks that a `config.json` names an architecture that has a program. One that cannot be read is left to the reader of
/// the whole configuration.
pub(crate) fn check_architecture(config: &[u8]) -> Result<(), ConfigError> {
    let config: Value = serde_json::from_slice(config).unwrap_or_default();
    config["model_type"].as_str().map_or(Ok(()), |name| architecture(name, Architecture::model_types()).map(drop))
}

/// The architecture of that name, out of the `known` ones of its format.
fn architecture(
    name: &str,
    mut known: impl Iterator<Item = (&'static str, Architecture)> + Clone,
) -> Result<Architecture, ConfigError> {
    let supported = known.clone().map(|(name, _)| name);
    let found = known.find(|(known, _)| *known == name).map(|(_, architecture)| architecture);
    found.ok_or_else(|| ConfigError::UnknownArchitecture {
        found: name.escape_debug().to_string(),
        supported: supported.collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests;
