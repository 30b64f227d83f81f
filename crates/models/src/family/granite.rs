//! Granite 3 dense: Llama with factors of embeddings, scores, residuals and logits.

use octavo_ops::RopeStyle;

use super::{Family, Gguf, llama};
use crate::config::{ConfigError, Fields, Keys, ModelConfig, gguf, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["granite"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "granite", read: from_gguf }),
    names: Names::DEFAULT,
    images: None,
};

/// Keys of the factors, which are 1 if a configuration omits them.
struct FactorKeys {
    embedding: &'static str,
    attention: &'static str,
    residual: &'static str,
    /// Divides the logits.
    logits: &'static str,
}

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let keys = FactorKeys {
        embedding: "embedding_multiplier",
        attention: "attention_multiplier",
        residual: "residual_multiplier",
        logits: "logits_scaling",
    };
    scaled(llama::decoder(&FAMILY, fields)?, &keys, |key| fields.f64(key))
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let names = FactorKeys {
        embedding: "embedding_scale",
        attention: "attention.scale",
        residual: "residual_scale",
        logits: "logit_scale",
    };
    scaled(gguf::decoder(&FAMILY, keys, RopeStyle::GptJ)?, &names, |key| keys.f64(key))
}

fn scaled(
    mut config: ModelConfig,
    keys: &FactorKeys,
    read: impl Fn(&str) -> Result<Option<f64>, ConfigError>,
) -> Result<ModelConfig, ConfigError> {
    let factor = |key| Ok::<_, ConfigError>(read(key)?.unwrap_or(1.0));
    config.embedding_scale = factor(keys.embedding)? as f32;
    let (attention, residual) = (factor(keys.attention)? as f32, factor(keys.residual)? as f32);
    config.logits_scale = (1.0 / factor(keys.logits)?) as f32;
    for layer in &mut config.layers {
        (layer.attention.scale, layer.residual_scale) = (attention, residual);
    }
    Ok(config)
}
