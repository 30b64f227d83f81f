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

/// The factors of a configuration, 1 if it omits them.
struct Factors {
    embedding: f64,
    attention: f64,
    residual: f64,
    /// Divides the logits.
    logits: f64,
}

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let config = llama::decoder(&FAMILY, fields)?;
    let factor = |key: &str| Ok::<_, ConfigError>(fields.f64(key)?.unwrap_or(1.0));
    let factors = Factors {
        embedding: factor("embedding_multiplier")?,
        attention: factor("attention_multiplier")?,
        residual: factor("residual_multiplier")?,
        logits: factor("logits_scaling")?,
    };
    Ok(scaled(config, &factors))
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let config = gguf::decoder(&FAMILY, keys, RopeStyle::GptJ)?;
    let factor = |key: &str| Ok::<_, ConfigError>(keys.f64(key)?.unwrap_or(1.0));
    let factors = Factors {
        embedding: factor("embedding_scale")?,
        attention: factor("attention.scale")?,
        residual: factor("residual_scale")?,
        logits: factor("logit_scale")?,
    };
    Ok(scaled(config, &factors))
}

fn scaled(mut config: ModelConfig, factors: &Factors) -> ModelConfig {
    config.embedding_scale = factors.embedding as f32;
    config.logits_scale = (1.0 / factors.logits) as f32;
    for layer in &mut config.layers {
        layer.attention.scale = factors.attention as f32;
        layer.residual_scale = factors.residual as f32;
    }
    config
}
