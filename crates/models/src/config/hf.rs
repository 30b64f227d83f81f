//! Configuration from a `config.json`, as written by transformers 4 and 5: the parts that families share.

use octavo_ops::{GluKind, HeadShape, RopeStyle};

use super::rope::yarn_magnitude;
use super::{
    ConfigError, Fields, InputConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RopeConfig, RopeScaling,
    RopeSections, default_head_dim, repeated,
};
use crate::family::Family;

/// End of the names of classes that predict tokens.
pub(crate) const DECODER: &str = "ForCausalLM";
/// End of the names of encoders of texts as they are trained, one of the classes whose rows become vectors.
pub(crate) const MASKED: &str = "ForMaskedLM";
/// End of the names of classifiers.
pub(crate) const CLASSIFIER: &str = "ForSequenceClassification";
/// End of the names of models without a head.
pub(crate) const BARE: &str = "Model";
/// End of the names of classes that take images and predict tokens.
pub(crate) const WITH_IMAGES: &str = "ForConditionalGeneration";

/// Values of keys that a configuration omits because they are the defaults of its family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// Head size; `None` for `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) norm_eps: f64,
    pub(crate) theta: f64,
    pub(crate) tie_word_embeddings: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { head_dim: None, norm_eps: 1e-6, theta: 10_000.0, tie_word_embeddings: false }
    }
}

/// Reads a decoder whose layers are alike: pre-norm, full attention, no biases. Families change the rest.
pub(crate) fn decoder(
    family: &'static Family,
    fields: &Fields<'_>,
    defaults: Defaults,
) -> Result<ModelConfig, ConfigError> {
    let heads = fields.required("num_attention_heads")?;
    let hidden_size = fields.required("hidden_size")?;
    let dim = match fields.usize("head_dim")?.or(defaults.head_dim) {
        Some(dim) => dim,
        None => default_head_dim(hidden_size, heads)?,
    };
    let max_position_embeddings = fields.required("max_position_embeddings")?;
    let heads = HeadShape::new(heads, fields.usize("num_key_value_heads")?.unwrap_or(heads), dim);
    let rope = rope(fields, dim, defaults.theta, max_position_embeddings)?;
    let mlp = MlpConfig {
        intermediate_size: fields.required("intermediate_size")?,
        activation: activation(fields.str("hidden_act")?.unwrap_or("silu"))?,
        gated: true,
        bias: false,
    };
    let layer = LayerConfig::plain(heads, rope, mlp);
    let eps = fields.f64("rms_norm_eps")?.unwrap_or(defaults.norm_eps) as f32;
    Ok(ModelConfig {
        family,
        vocab_size: fields.required("vocab_size")?,
        hidden_size,
        layers: repeated(layer, fields.required("num_hidden_layers")?)?,
        embedding_scale: 1.0,
        input: InputConfig::default(),
        norm: NormConfig::rms(eps),
        final_norm: true,
        logits_scale: 1.0,
        logits_softcap: None,
        max_position_embeddings,
        tie_word_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(defaults.tie_word_embeddings),
        dtype: dtype(fields)?.unwrap_or("float32").to_owned(),
        vision: None,
        vectors: None,
    })
}

/// Returns `hidden / heads`, the head size of encoders.
pub(crate) fn head_dim(hidden_size: usize, heads: usize) -> Result<usize, ConfigError> {
    default_head_dim(hidden_size, heads)
}

/// Reads an encoder of texts whose layers are alike. Families change the rest.
pub(crate) fn encoder(
    family: &'static Family,
    fields: &Fields<'_>,
    layer: LayerConfig,
    norm: NormConfig,
) -> Result<ModelConfig, ConfigError> {
    Ok(ModelConfig {
        family,
        vocab_size: fields.required("vocab_size")?,
        hidden_size: fields.required("hidden_size")?,
        layers: repeated(layer, fields.required("num_hidden_layers")?)?,
        embedding_scale: 1.0,
        input: InputConfig::default(),
        norm,
        final_norm: true,
        logits_scale: 1.0,
        logits_softcap: None,
        max_position_embeddings: fields.required("max_position_embeddings")?,
        tie_word_embeddings: true,
        dtype: dtype(fields)?.unwrap_or("float32").to_owned(),
        vision: None,
        vectors: None,
    })
}

/// Reads the decoder of a model with images, whose values are in an object of their own. The head is tied, and the
/// elements have a type, as the whole configuration says.
pub(crate) fn decoder_of(
    whole: &Fields<'_>,
    read: impl FnOnce(&Fields<'_>) -> Result<ModelConfig, ConfigError>,
) -> Result<ModelConfig, ConfigError> {
    let text = whole.object("text_config")?.ok_or_else(|| ConfigError::missing("text_config"))?;
    let mut config = read(&text)?;
    config.tie_word_embeddings = flag(whole, "tie_word_embeddings")?;
    if let Some(dtype) = dtype(whole)? {
        config.dtype = dtype.to_owned();
    }
    Ok(config)
}

/// Returns the element type, under its new or its old key.
fn dtype<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ConfigError> {
    Ok(fields.str("dtype")?.or(fields.str("torch_dtype")?))
}

/// Returns a flag that is false if it is omitted.
pub(crate) fn flag(fields: &Fields<'_>, key: &str) -> Result<bool, ConfigError> {
    Ok(fields.bool(key)?.unwrap_or(false))
}

/// Reads whether the four projections of attention have biases.
pub(crate) fn attention_bias(fields: &Fields<'_>, config: &mut ModelConfig) -> Result<(), ConfigError> {
    let bias = flag(fields, "attention_bias")?;
    for attention in config.layers.iter_mut().map(|layer| &mut layer.attention) {
        (attention.qkv_bias, attention.output_bias) = (bias, bias);
    }
    Ok(())
}

/// Returns the activation of a name in `hidden_act`.
pub(crate) fn activation(name: &str) -> Result<GluKind, ConfigError> {
    match name {
        "silu" | "swish" => Ok(GluKind::Silu),
        "gelu" => Ok(GluKind::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(GluKind::GeluTanh),
        other => Err(ConfigError::Unsupported(format!("the activation '{}'", other.escape_debug()))),
    }
}

/// Sets the sliding window of the layers that `layer_types` calls sliding, or of those for which `sliding` is true if
/// the configuration has no such list.
pub(crate) fn windows(
    fields: &Fields<'_>,
    config: &mut ModelConfig,
    window: Option<usize>,
    sliding: impl Fn(usize) -> bool,
) -> Result<(), ConfigError> {
    let (types, layers) = (fields.strs("layer_types")?, config.layers.len());
    if let Some(types) = types.as_ref().filter(|types| types.len() != layers) {
        return Err(ConfigError::Invalid(format!("'layer_types' has {} entries for {layers} layers", types.len())));
    }
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let slides = types.as_ref().map_or_else(|| sliding(index), |types| types[index] == "sliding_attention");
        layer.attention.window = window.filter(|_| slides);
    }
    Ok(())
}

/// Reads the rotary embedding: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).
fn rope(fields: &Fields<'_>, head_dim: usize, theta: f64, context: usize) -> Result<RopeConfig, ConfigError> {
    let parameters = match fields.object("rope_parameters")? {
        // The layers with a window may have a rotary embedding of their own.
        Some(parameters) => Some(parameters.object("full_attention")?.unwrap_or(parameters)),
        None => fields.object("rope_scaling")?,
    };
    let number = |key: &str| match parameters.map(|p| p.f64(key)).transpose()?.flatten() {
        Some(x) => Ok(Some(x)),
        None => fields.f64(key),
    };
    let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
    Ok(RopeConfig {
        style: RopeStyle::NeoX,
        theta: number("rope_theta")?.unwrap_or(theta),
        rotary_dim: (head_dim as f64 * partial) as usize,
        scaling: match parameters {
            Some(parameters) => scaling(&parameters, fields, context)?,
            None => RopeScaling::None,
        },
        sections: match &parameters {
            Some(parameters) => sections(parameters)?,
            None => None,
        },
    })
}

/// Reads the division of the pairs among time, height and width.
fn sections(parameters: &Fields<'_>) -> Result<Option<RopeSections>, ConfigError> {
    let Some(sizes) = parameters.usizes("mrope_section")? else { return Ok(None) };
    let sizes = sizes.try_into().map_err(|_| ConfigError::wrong_type("mrope_section", "a list of three sizes"))?;
    Ok(Some(RopeSections { sizes, interleaved: parameters.bool("mrope_interleaved")?.unwrap_or(false) }))
}

fn scaling(parameters: &Fields<'_>, fields: &Fields<'_>, context: usize) -> Result<RopeScaling, ConfigError> {
    let kind = match parameters.str("rope_type")? {
        Some(kind) => Some(kind),
        None => parameters.str("type")?,
    };
    let required = |key: &str| parameters.f64(key)?.ok_or_else(|| ConfigError::missing(key));
    // A value outside the parameters has priority, as in transformers.
    let original_context = || {
        let beside = fields.f64("original_max_position_embeddings")?;
        let inside = parameters.f64("original_max_position_embeddings")?;
        Ok::<_, ConfigError>(beside.or(inside).unwrap_or(context as f64))
    };
    match kind {
        None | Some("default" | "mrope") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: required("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_context: original_context()?,
        }),
        // Phi-3's first configurations have the second name.
        Some("longrope" | "su") => long_rope(parameters, original_context()?, context),
        Some("yarn") => yarn(parameters, original_context()?, context),
        Some(other) => Err(ConfigError::Unsupported(format!(
            "the rotary scaling '{}' (supported: linear, llama3, yarn, longrope)",
            other.escape_debug()
        ))),
    }
}

fn long_rope(parameters: &Fields<'_>, original_context: f64, context: usize) -> Result<RopeScaling, ConfigError> {
    let list = |key: &str| parameters.f64s(key)?.ok_or_else(|| ConfigError::missing(key));
    let factor = context as f64 / original_context;
    let attention_factor = match parameters.f64("attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original_context.ln()).sqrt(),
    };
    let (short, long) = (list("short_factor")?, list("long_factor")?);
    Ok(RopeScaling::LongRope { short, long, original_context, context, attention_factor })
}

fn yarn(parameters: &Fields<'_>, original_context: f64, context: usize) -> Result<RopeScaling, ConfigError> {
    let factor = parameters.f64("factor")?.unwrap_or(context as f64 / original_context);
    let attention_factor = match parameters.f64("attention_factor")? {
        Some(factor) => factor,
        None => match (parameters.f64("mscale")?, parameters.f64("mscale_all_dim")?) {
            (Some(m), Some(all)) if m != 0.0 && all != 0.0 => yarn_magnitude(factor, m) / yarn_magnitude(factor, all),
            _ => yarn_magnitude(factor, 1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: parameters.f64("beta_fast")?.unwrap_or(32.0),
        beta_slow: parameters.f64("beta_slow")?.unwrap_or(1.0),
        original_context,
        attention_factor,
        truncate: parameters.bool("truncate")?.unwrap_or(true),
    })
}
