//! Configuration from a `config.json`, as written by transformers 4 and 5.

use octavo_ops::{GluKind, RopeStyle};

use super::rope::yarn_magnitude;
use super::{
    Architecture, ConfigError, Fields, ModelConfig, RopeConfig, RopeScaling, RopeSections, VisionConfig, architecture,
    default_head_dim, windows,
};

/// Head size of Qwen3 if its configuration omits it.
const QWEN3_HEAD_DIM: usize = 128;
/// Defaults of values that old configurations omit.
const DEFAULT_NORM_EPS: f64 = 1e-6;
const DEFAULT_THETA: f64 = 10_000.0;
const DEFAULT_MISTRAL_WINDOW: usize = 4096;
const DEFAULT_QWEN_MAX_WINDOW_LAYERS: usize = 28;

impl ModelConfig {
    /// Reads a `config.json`.
    pub(crate) fn from_hf(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let architecture = architecture(
            fields.str("model_type")?.ok_or_else(|| ConfigError::missing("model_type"))?,
            Architecture::model_types(),
        )?;
        check_task(fields, architecture)?;
        // A model of several parts has the decoder's values in an object of their own.
        let (whole, vision) = (fields, VisionConfig::from_hf(fields, architecture)?);
        let text = match vision {
            Some(_) => Some(fields.object("text_config")?.ok_or_else(|| ConfigError::missing("text_config"))?),
            None => None,
        };
        let fields = text.as_ref().unwrap_or(fields);
        let decoder = decoder(fields, architecture)?;
        let (layers, heads) = (fields.required("num_hidden_layers")?, fields.required("num_attention_heads")?);
        let hidden_size = fields.required("hidden_size")?;
        let head_dim = match (fields.usize("head_dim")?, decoder) {
            (Some(dim), _) => dim,
            (None, Architecture::Qwen3) => QWEN3_HEAD_DIM,
            (None, _) => default_head_dim(hidden_size, heads)?,
        };
        let max_position_embeddings = fields.required("max_position_embeddings")?;
        let flag = |key| Ok::<_, ConfigError>(fields.bool(key)?.unwrap_or(false));
        let attention_bias = flag("attention_bias")?;
        let mut dtype = None;
        for (fields, key) in [(whole, "dtype"), (whole, "torch_dtype"), (fields, "dtype"), (fields, "torch_dtype")] {
            dtype = dtype.or(fields.str(key)?);
        }
        Self {
            architecture,
            vocab_size: fields.required("vocab_size")?,
            hidden_size,
            layers,
            heads,
            kv_heads: fields.usize("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            intermediate_size: fields.required("intermediate_size")?,
            activation: activation(fields)?,
            norm_eps: fields.f64("rms_norm_eps")?.unwrap_or(DEFAULT_NORM_EPS) as f32,
            rope: rope(fields, head_dim, max_position_embeddings)?,
            max_position_embeddings,
            windows: layer_windows(fields, decoder, layers)?,
            tie_word_embeddings: whole.bool("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: decoder == Architecture::Qwen2 || attention_bias && decoder != Architecture::Mistral,
            output_bias: attention_bias && matches!(decoder, Architecture::Llama | Architecture::Qwen3),
            mlp_bias: decoder == Architecture::Llama && flag("mlp_bias")?,
            dtype: dtype.unwrap_or("float32").to_owned(),
            vision,
        }
        .checked()
    }
}

/// Returns the architecture of the decoder. The configuration of a decoder beside an encoder has a name of its own.
fn decoder(fields: &Fields<'_>, architecture: Architecture) -> Result<Architecture, ConfigError> {
    let decoder = architecture.decoder();
    match fields.str("model_type")? {
        Some(name) if architecture == Architecture::Idefics3 && name != decoder.name() => {
            Err(ConfigError::Unsupported(format!("the decoder '{}' of this model", name.escape_debug())))
        }
        _ => Ok(decoder),
    }
}

/// Refuses models that share a `model_type` with a decoder without being one, and weights quantised in a format of
/// their own.
fn check_task(fields: &Fields<'_>, architecture: Architecture) -> Result<(), ConfigError> {
    let classes = fields.strs("architectures")?.unwrap_or_default();
    let suffix = match architecture {
        Architecture::Qwen3Vl | Architecture::Idefics3 => "ForConditionalGeneration",
        _ => "ForCausalLM",
    };
    if !classes.is_empty() && !classes.iter().any(|class| class.ends_with(suffix)) {
        return Err(ConfigError::Unsupported(format!("a model of class {}", classes.join(", ").escape_debug())));
    }
    if let Some(quantization) = fields.object("quantization_config")? {
        let method = quantization.str("quant_method")?.unwrap_or("unknown").escape_debug();
        return Err(ConfigError::Unsupported(format!("the quantisation method '{method}' of this checkpoint")));
    }
    Ok(())
}

fn activation(fields: &Fields<'_>) -> Result<GluKind, ConfigError> {
    activation_named(fields.str("hidden_act")?.unwrap_or("silu"))
}

/// Returns the activation of a name in `hidden_act`.
pub(super) fn activation_named(name: &str) -> Result<GluKind, ConfigError> {
    match name {
        "silu" | "swish" => Ok(GluKind::Silu),
        "gelu" => Ok(GluKind::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(GluKind::GeluTanh),
        other => Err(ConfigError::Unsupported(format!("the activation '{}'", other.escape_debug()))),
    }
}

/// Returns the sliding window of each layer. Mistral: all layers. Qwen: the layers of `layer_types`, else from
/// `max_window_layers` on, and only with `use_sliding_window`. Llama: none.
fn layer_windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = fields.usize("sliding_window")?;
    match architecture {
        // `null` means that there is no window.
        Architecture::Mistral if !fields.contains("sliding_window") => {
            windows(layers, Some(DEFAULT_MISTRAL_WINDOW), |_| true)
        }
        Architecture::Mistral => windows(layers, window, |_| true),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = window.filter(|_| matches!(fields.bool("use_sliding_window"), Ok(Some(true))));
            match fields.strs("layer_types")? {
                Some(types) if types.len() != layers => {
                    Err(ConfigError::Invalid(format!("'layer_types' has {} entries for {layers} layers", types.len())))
                }
                Some(types) => windows(layers, window, |layer| types[layer] == "sliding_attention"),
                None => {
                    let first = fields.usize("max_window_layers")?.unwrap_or(DEFAULT_QWEN_MAX_WINDOW_LAYERS);
                    windows(layers, window, |layer| layer >= first)
                }
            }
        }
        _ => windows(layers, None, |_| false),
    }
}

/// Reads the rotary embedding: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).
fn rope(fields: &Fields<'_>, head_dim: usize, context: usize) -> Result<RopeConfig, ConfigError> {
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let number = |key: &str| match parameters.map(|p| p.f64(key)).transpose()?.flatten() {
        Some(x) => Ok(Some(x)),
        None => fields.f64(key),
    };
    let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
    Ok(RopeConfig {
        style: RopeStyle::NeoX,
        theta: number("rope_theta")?.unwrap_or(DEFAULT_THETA),
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
        Some("yarn") => yarn(parameters, original_context()?, context),
        Some(other) => Err(ConfigError::Unsupported(format!(
            "the rotary scaling '{}' (supported: linear, llama3, yarn)",
            other.escape_debug()
        ))),
    }
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
