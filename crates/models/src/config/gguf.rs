//! Configuration from the metadata of a GGUF file: the parts that families share.

use octavo_ops::{GluKind, HeadShape, RopeStyle};

use super::rope::yarn_magnitude;
use super::{
    ConfigError, InputConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig, RopeScaling, RopeSections,
    default_head_dim, repeated,
};
use crate::checkpoint::{Format, MetadataView};
use crate::family::Family;
use crate::program::names::Role;

/// Architecture of a file with an encoder, which does not contain the model.
pub(crate) const CLIP: &str = "clip";

/// Keys that begin with the architecture's name, and the tensors of the file.
pub(crate) struct Keys<'a> {
    metadata: &'a MetadataView<'a>,
    prefix: &'static str,
    has_tensor: &'a dyn Fn(&str) -> bool,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(
        metadata: &'a MetadataView<'a>,
        prefix: &'static str,
        has_tensor: &'a dyn Fn(&str) -> bool,
    ) -> Self {
        Self { metadata, prefix, has_tensor }
    }

    /// Returns whether the file has a tensor.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        (self.has_tensor)(name)
    }

    /// Returns a key with the prefix of the architecture.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(crate) fn usize(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let name = self.name(key);
        let found = self.metadata.u64(&name)?;
        found.map(|n| usize::try_from(n).map_err(|_| ConfigError::wrong_type(&name, "a size"))).transpose()
    }

    pub(crate) fn required(&self, key: &str) -> Result<usize, ConfigError> {
        self.usize(key)?.ok_or_else(|| ConfigError::missing(&self.name(key)))
    }

    /// Returns the sliding window in tokens, if there is one.
    pub(crate) fn window(&self) -> Result<Option<usize>, ConfigError> {
        Ok(self.usize("attention.sliding_window")?.filter(|&window| window > 0))
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.metadata.bool(&self.name(key))
    }

    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.metadata.f64(&self.name(key))
    }
}

/// Reads a decoder whose layers are alike: pre-norm, full attention. Families change the rest.
pub(crate) fn decoder(family: &'static Family, keys: &Keys<'_>, style: RopeStyle) -> Result<ModelConfig, ConfigError> {
    let heads = heads(keys, keys.required("embedding_length")?)?;
    decoder_of(family, keys, style, heads)
}

/// Reads such a decoder with attention heads that the family knows.
pub(crate) fn decoder_of(
    family: &'static Family,
    keys: &Keys<'_>,
    style: RopeStyle,
    heads: HeadShape,
) -> Result<ModelConfig, ConfigError> {
    let has_weight = |role| keys.has_tensor(&family.names.weight(Format::Gguf, role, 0));
    let has_bias = |role| keys.has_tensor(&family.names.bias(Format::Gguf, role, 0));
    let rope = rope(keys, style, heads.dim)?;
    let mlp = MlpConfig {
        intermediate_size: keys.required("feed_forward_length")?,
        activation: GluKind::Silu,
        gated: true,
        bias: has_bias(Role::Up),
    };
    let mut layer = LayerConfig::plain(heads, rope, mlp);
    (layer.attention.qkv_bias, layer.attention.output_bias) = (has_bias(Role::Q), has_bias(Role::Output));
    const EPS: &str = "attention.layer_norm_rms_epsilon";
    let eps = keys.f64(EPS)?.ok_or_else(|| ConfigError::missing(&keys.name(EPS)))? as f32;
    Ok(ModelConfig {
        family,
        vocab_size: vocab_size(keys)?,
        hidden_size: keys.required("embedding_length")?,
        layers: repeated(layer, keys.required("block_count")?)?,
        embedding_scale: 1.0,
        input: InputConfig::default(),
        norm: NormConfig::rms(eps),
        final_norm: true,
        logits_scale: 1.0,
        logits_softcap: None,
        max_position_embeddings: keys.required("context_length")?,
        tie_word_embeddings: !has_weight(Role::Head),
        dtype: String::new(),
        vision: None,
        vectors: None,
    })
}

fn heads(keys: &Keys<'_>, hidden_size: usize) -> Result<HeadShape, ConfigError> {
    let q = keys.required("attention.head_count")?;
    let dim = match keys.usize("attention.key_length")? {
        Some(dim) => dim,
        None => default_head_dim(hidden_size, q)?,
    };
    match keys.usize("attention.value_length")?.filter(|&value_dim| value_dim != dim) {
        None => Ok(HeadShape::new(q, keys.usize("attention.head_count_kv")?.unwrap_or(q), dim)),
        Some(other) => Err(ConfigError::Unsupported(format!("a value size of {other} beside a key size of {dim}"))),
    }
}

/// Returns the number of tokens, from the vocabulary or else from its own key.
fn vocab_size(keys: &Keys<'_>) -> Result<usize, ConfigError> {
    match keys.metadata.array_len("tokenizer.ggml.tokens") {
        Some(tokens) => Ok(tokens),
        None => keys.required("vocab_size"),
    }
}

fn rope(keys: &Keys<'_>, style: RopeStyle, head_dim: usize) -> Result<RopeConfig, ConfigError> {
    Ok(RopeConfig {
        style,
        theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
        rotary_dim: keys.usize("rope.dimension_count")?.unwrap_or(head_dim),
        scaling: scaling(keys)?,
        sections: sections(keys)?,
    })
}

/// Reads the division of the pairs among time, height and width. The format has no key for their order: of the
/// architectures with such a division, all take turns.
fn sections(keys: &Keys<'_>) -> Result<Option<RopeSections>, ConfigError> {
    let name = keys.name("rope.dimension_sections");
    let sizes = match keys.metadata.i32s(&name)? {
        Some(sizes) => sizes,
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
