//! Gemma 2 and 3: norms before and after each block, with factors `1 + w`; embeddings times √H; a GELU gate; a sliding
//! window on most layers. Gemma 2 caps scores and logits. Gemma 3 normalises q and k instead, and its layers with a window
//! have a rotary embedding of their own. Most models of Gemma 3 take images, whose tokens see each other in both
//! directions.

mod encoder;
mod processor;
mod vision;

use octavo_ops::{GluKind, RopeStyle};

use super::{Family, Gguf, Images, Mmproj, OwnLayout};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, NormPlaces, QkNormWidth, RopeScaling, gguf, hf, slides};
use crate::program::names::{Names, Role};

pub(super) static GEMMA2: Family = Family {
    model_types: &["gemma2"],
    class: hf::DECODER,
    hf: gemma2,
    gguf: Some(Gguf { architecture: "gemma2", read: gemma2_gguf }),
    names: NAMES,
    images: None,
    layout: None,
    vectors: None,
};

/// Gemma 3 without images, and every GGUF file, whose encoder is in an mmproj file.
pub(super) static GEMMA3: Family = Family {
    model_types: &["gemma3_text"],
    class: hf::DECODER,
    hf: gemma3,
    gguf: Some(Gguf { architecture: "gemma3", read: gemma3_gguf }),
    names: NAMES,
    images: Some(IMAGES),
    layout: Some(LAYOUT),
    vectors: None,
};

/// Gemma 3 with an encoder of images.
pub(super) static GEMMA3_WITH_IMAGES: Family = Family {
    model_types: &["gemma3"],
    class: hf::WITH_IMAGES,
    hf: gemma3_with_images,
    gguf: None,
    names: Names { prefix: "model.language_model.", ..NAMES },
    images: Some(IMAGES),
    layout: Some(LAYOUT),
    vectors: None,
};

const IMAGES: Images = Images {
    encoder: encoder::program,
    processor: &processor::RULES,
    mmproj: Some(Mmproj { tokens: vision::tokens, vision: vision::mmproj, optional: true }),
};

/// The projection of images is stored the other way round.
const LAYOUT: OwnLayout = OwnLayout { method: None, derived: encoder::derived };

/// What other families call the norm after attention is the norm before the MLP.
const NAMES: Names = Names {
    others: &[(Role::MlpNorm, ("model.layers.{}.pre_feedforward_layernorm", "blk.{}.ffn_norm"))],
    ..Names::DEFAULT
};

/// One layer in as many has full attention.
const GEMMA2_PATTERN: usize = 2;
const GEMMA3_PATTERN: usize = 6;

const DEFAULT_WINDOW: usize = 4096;

/// Base of the rotary frequencies of layers with a window.
const LOCAL_THETA: f64 = 10_000.0;
const GEMMA3_THETA: f64 = 1_000_000.0;

/// Values that the configurations of models with images omit, in which the decoder's are an object of their own.
const GEMMA3_TEXT: [(&str, usize); 7] = [
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("max_position_embeddings", 131_072),
];

fn defaults() -> Defaults {
    Defaults { head_dim: Some(256), tie_word_embeddings: true, ..Defaults::default() }
}

fn gemma2(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = common(&GEMMA2, fields, defaults())?;
    let cap = |key: &str, default: f64| Ok::<_, ConfigError>(fields.unless_missing(key, fields.f64(key)?, default));
    caps(&mut config, cap("attn_logit_softcapping", 50.0)?, cap("final_logit_softcapping", 30.0)?);
    windows(fields, &mut config, GEMMA2_PATTERN)?;
    Ok(config)
}

fn gemma3(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    gemma3_decoder(&GEMMA3, fields)
}

fn gemma3_with_images(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let read = |text: &Fields<'_>| {
        let text = text.completed(&GEMMA3_TEXT);
        gemma3_decoder(&GEMMA3_WITH_IMAGES, &Fields::new(&text))
    };
    let mut config = hf::decoder_of(fields, read)?;
    config.tie_word_embeddings = fields.bool("tie_word_embeddings")?.unwrap_or(true);
    config.vision = Some(vision::from_hf(fields, &config)?);
    Ok(config)
}

fn gemma3_decoder(family: &'static Family, fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    // The rotary embedding of transformers 5 is in an object for each kind of layer; that of layers with full attention is
    // read first.
    let parameters = fields.object("rope_parameters")?;
    let local = match parameters.map(|p| p.object("sliding_attention")).transpose()?.flatten() {
        Some(local) => local.f64("rope_theta")?,
        None => fields.f64("rope_local_base_freq")?,
    };
    let mut config = common(family, fields, Defaults { theta: GEMMA3_THETA, ..defaults() })?;
    caps(&mut config, fields.f64("attn_logit_softcapping")?, fields.f64("final_logit_softcapping")?);
    windows(fields, &mut config, fields.usize("sliding_window_pattern")?.unwrap_or(GEMMA3_PATTERN))?;
    local_rope(&mut config, local.unwrap_or(LOCAL_THETA));
    Ok(config)
}

/// Reads what both have.
fn common(family: &'static Family, fields: &Fields<'_>, defaults: Defaults) -> Result<ModelConfig, ConfigError> {
    if hf::flag(fields, "use_bidirectional_attention")? {
        return Err(ConfigError::Unsupported("a Gemma with attention in both directions".into()));
    }
    let mut config = hf::decoder(family, fields, defaults)?;
    let activation = hf::activation(fields.str("hidden_activation")?.unwrap_or("gelu_pytorch_tanh"))?;
    let scalar = fields.f64("query_pre_attn_scalar")?.unwrap_or(256.0);
    for layer in &mut config.layers {
        layer.mlp.activation = activation;
        layer.attention.scale = scalar.sqrt().recip() as f32;
    }
    hf::attention_bias(fields, &mut config)?;
    config.norm.unit_offset = true;
    Ok(shape(config))
}

/// Sets what no configuration says.
fn shape(mut config: ModelConfig) -> ModelConfig {
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    for layer in &mut config.layers {
        layer.set_norms(NormPlaces::Both);
        layer.attention.qk_norm = (config.family != &GEMMA2).then_some(QkNormWidth::Head);
    }
    config
}

fn caps(config: &mut ModelConfig, attention: Option<f64>, logits: Option<f64>) {
    let [attention, logits] = [attention, logits].map(|cap| cap.map(|cap| cap as f32));
    config.logits_softcap = logits;
    config.layers.iter_mut().for_each(|layer| layer.attention.softcap = attention);
}

fn windows(fields: &Fields<'_>, config: &mut ModelConfig, pattern: usize) -> Result<(), ConfigError> {
    const WINDOW: &str = "sliding_window";
    let window = fields.unless_missing(WINDOW, fields.usize(WINDOW)?, DEFAULT_WINDOW);
    hf::windows(fields, config, window, |layer| slides(layer, pattern))
}

/// Sets the rotary embedding of the layers with a window, which is not scaled.
fn local_rope(config: &mut ModelConfig, theta: f64) {
    for attention in config.layers.iter_mut().map(|layer| &mut layer.attention) {
        if let Some(rope) = attention.rope.as_mut().filter(|_| attention.window.is_some()) {
            (rope.theta, rope.scaling) = (theta, RopeScaling::None);
        }
    }
}

fn gemma2_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = common_gguf(&GEMMA2, keys, GEMMA2_PATTERN)?;
    let cap = |key: &str, default: f64| Ok::<_, ConfigError>(Some(keys.f64(key)?.unwrap_or(default)));
    caps(&mut config, cap("attn_logit_softcapping", 50.0)?, cap("final_logit_softcapping", 30.0)?);
    Ok(config)
}

fn gemma3_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = common_gguf(&GEMMA3, keys, GEMMA3_PATTERN)?;
    caps(&mut config, None, keys.f64("final_logit_softcapping")?.filter(|cap| *cap > 0.0));
    if keys.f64("rope.freq_base")?.is_none() {
        config.ropes_mut().for_each(|rope| rope.theta = GEMMA3_THETA);
    }
    local_rope(&mut config, keys.f64("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA));
    Ok(config)
}

fn common_gguf(family: &'static Family, keys: &Keys<'_>, pattern: usize) -> Result<ModelConfig, ConfigError> {
    let mut config = shape(gguf::decoder(family, keys, RopeStyle::NeoX)?);
    // The converter has added 1 to the factors of norms.
    config.norm.unit_offset = false;
    let pattern = keys.usize("attention.sliding_window_pattern")?.unwrap_or(pattern);
    let window = keys.window()?;
    // The 27B models of both divide by the width of a head's share of the hidden size; the format has no key for it.
    let is_27b = matches!((family.name(), config.layers.len()), ("gemma2", 46) | ("gemma3_text", 62));
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        layer.mlp.activation = GluKind::GeluTanh;
        attention.window = window.filter(|_| slides(index, pattern));
        if is_27b {
            attention.scale = ((config.hidden_size / attention.heads.q.max(1)) as f32).sqrt().recip();
        }
    }
    Ok(config)
}
