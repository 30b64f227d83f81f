//! Configuration from the metadata of a GGUF file.

use octavo_ops::{GluKind, RopeStyle};

use super::rope::yarn_magnitude;
use super::{
    Architecture, ConfigError, ModelConfig, RopeConfig, RopeScaling, RopeSections, architecture, default_head_dim,
    same_window,
};
use crate::arch::names;
use crate::checkpoint::{Format, MetadataView};

/// Architectures in GGUF files. Converters write Mistral as `llama`.
const ARCHITECTURES: [Architecture; 4] =
    [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Qwen3Vl];
/// Architecture of a file with an encoder, which does not contain the model.
pub(crate) const CLIP: &str = "clip";

/// Keys that begin with the architecture's name.
struct Keys<'a> {
    metadata: &'a MetadataView<'a>,
    prefix: &'static str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn usize(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let name = self.name(key);
        let found = self.metadata.u64(&name)?;
        found.map(|n| usize::try_from(n).map_err(|_| ConfigError::wrong_type(&name, "a size"))).transpose()
    }

    fn required(&self, key: &str) -> Result<usize, ConfigError> {
        self.usize(key)?.ok_or_else(|| ConfigError::missing(&self.name(key)))
    }

    fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.metadata.f64(&self.name(key))
    }
}

impl ModelConfig {
    /// Reads the metadata. `has_tensor` returns whether the file contains a tensor: in a GGUF file only the tensors
    /// show whether the head is tied and where there are biases.
    pub(crate) fn from_gguf(
        metadata: &MetadataView<'_>,
        has_tensor: &dyn Fn(&str) -> bool,
    ) -> Result<Self, ConfigError> {
        let name = metadata.str("general.architecture")?.ok_or_else(|| ConfigError::missing("general.architecture"))?;
        if name == CLIP {
            return Err(ConfigError::Unsupported(
                "an image encoder without its model (give the model's GGUF file, and keep this mmproj file beside it)"
                    .into(),
            ));
        }
        let architecture = architecture(name, ARCHITECTURES.into_iter().map(|a| (a.gguf_name(), a)))?;
        if metadata.u64("split.count")?.is_some_and(|parts| parts > 1) {
            return Err(ConfigError::Unsupported("a GGUF file in several parts (merge them into one first)".into()));
        }
        let keys = Keys { metadata, prefix: architecture.gguf_name() };
        if keys.usize("expert_count")?.is_some_and(|n| n > 0) {
            return Err(ConfigError::Unsupported("a mixture of experts".into()));
        }
        let (layers, heads) = (keys.required("block_count")?, keys.required("attention.head_count")?);
        let hidden_size = keys.required("embedding_length")?;
        let head_dim = match keys.usize("attention.key_length")? {
            Some(dim) => dim,
            None => default_head_dim(hidden_size, heads)?,
        };
        if let Some(value_dim) = keys.usize("attention.value_length")?
            && value_dim != head_dim
        {
            return Err(ConfigError::Unsupported(format!(
                "a value size of {value_dim} beside a key size of {head_dim}"
            )));
        }
        let window = match architecture.decoder() {
            Architecture::Llama | Architecture::Mistral => keys.usize("attention.sliding_window")?,
            _ => None,
        };
        let has_bias = |role| has_tensor(&names::bias(Format::Gguf, role, 0));
        let norm_eps = keys.f64("attention.layer_norm_rms_epsilon")?;
        Self {
            architecture,
            vocab_size: vocab_size(metadata, &keys)?,
            hidden_size,
            layers,
            heads,
            kv_heads: keys.usize("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            intermediate_size: keys.required("feed_forward_length")?,
            activation: GluKind::Silu,
            norm_eps: norm_eps.ok_or_else(|| ConfigError::missing("attention.layer_norm_rms_epsilon"))? as f32,
            rope: rope(&keys, architecture, head_dim)?,
            max_position_embeddings: keys.required("context_length")?,
            windows: same_window(layers, window.filter(|&w| w > 0))?,
            tie_word_embeddings: !has_tensor(&names::weight(Format::Gguf, names::Role::Head, 0)),
            qkv_bias: has_bias(names::Role::Q),
            output_bias: has_bias(names::Role::Output),
            mlp_bias: has_bias(names::Role::Up),
            dtype: String::new(),
            vision: None,
        }
        .checked()
    }
}

/// Returns the number of tokens, from the vocabulary or else from its own key.
fn vocab_size(metadata: &MetadataView<'_>, keys: &Keys<'_>) -> Result<usize, ConfigError> {
    match metadata.array_len("tokenizer.ggml.tokens") {
        Some(tokens) => Ok(tokens),
        None => keys.required("vocab_size"),
    }
}

fn rope(keys: &Keys<'_>, architecture: Architecture, head_dim: usize) -> Result<RopeConfig, ConfigError> {
    // The converter permutes the q and k rows only of Llama models, for rotation of neighbours.
    let style = match architecture.decoder() {
        Architecture::Llama | Architecture::Mistral => RopeStyle::GptJ,
        _ => RopeStyle::NeoX,
    };
    Ok(RopeConfig {
        style,
        theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
        rotary_dim: keys.usize("rope.dimension_count")?.unwrap_or(head_dim),
        scaling: scaling(keys)?,
        sections: sections(keys, architecture)?,
    })
}

/// Reads the division of the pairs among time, height and width. The format has no key for their order: of the
/// architectures with such a division, all take turns.
fn sections(keys: &Keys<'_>, architecture: Architecture) -> Result<Option<RopeSections>, ConfigError> {
    let name = keys.name("rope.dimension_sections");
    let sizes = match keys.metadata.i32s(&name)? {
        Some(sizes) => sizes,
        None if architecture == Architecture::Qwen3Vl => return Err(ConfigError::missing(&name)),
        None => return Ok(None),
    };
    // The fourth number is a position that no image has.
    let [time, height, width] = match sizes[..] {
        [time, height, width] | [time, height, width, 0] => [time, height, width],
        _ => return Err(ConfigError::wrong_type(&name, "an array of three sizes")),
    }
    .map(usize::try_from);
    let (Ok(time), Ok(height), Ok(width)) = (time, height, width) else {
        return Err(ConfigError::wrong_type(&name, "an array of three sizes"));
    };
    Ok(Some(RopeSections { sizes: [time, height, width], interleaved: true }))
}

fn scaling(keys: &Keys<'_>) -> Result<RopeScaling, ConfigError> {
    let kind = keys.metadata.str(&keys.name("rope.scaling.type"))?;
    // Files from 2023 use the second spelling.
    let factor = match keys.f64("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.f64("rope.scale_linear")?,
    };
    match (kind, factor) {
        (None | Some("none"), None) | (Some("none"), _) => Ok(RopeScaling::None),
        // Files with `rope_freqs.weight` may have a factor of 0 or 1, which means none.
        (_, Some(0.0 | 1.0)) | (Some("linear"), None) => Ok(RopeScaling::None),
        (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
        (Some("yarn"), Some(factor)) => Ok(RopeScaling::Yarn {
            factor,
            beta_fast: keys.f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_context: keys.required("rope.scaling.original_context_length")? as f64,
            attention_factor: keys.f64("rope.scaling.attn_factor")?.unwrap_or(1.0) * yarn_magnitude(factor, 1.0),
            truncate: true,
        }),
        (Some("yarn"), None) => Err(ConfigError::missing(&keys.name("rope.scaling.factor"))),
        (Some(other), _) => Err(ConfigError::Unsupported(format!("the rotary scaling '{}'", other.escape_debug()))),
    }
}
