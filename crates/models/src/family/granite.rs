//! Granite 3: Llama with factors of embeddings, scores, residuals and logits; dense, or with a mixture of experts.

use octavo_ops::RopeStyle;

use super::{Family, Gguf, llama};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, experts, gguf, hf};
use crate::program::names::{Names, Role};

pub(super) static FAMILY: Family = Family {
    model_types: &["granite"],
    class: hf::DECODER,
    hf: |fields| from_hf(&FAMILY, fields),
    gguf: Some(Gguf { architecture: "granite", read: |keys| from_gguf(&FAMILY, keys) }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

pub(super) static MOE: Family = Family {
    model_types: &["granitemoe"],
    class: hf::DECODER,
    hf: moe,
    gguf: Some(Gguf { architecture: "granitemoe", read: moe_gguf }),
    names: Names {
        others: &[
            (Role::Router, ("model.layers.{}.block_sparse_moe.router.layer", "blk.{}.ffn_gate_inp")),
            (Role::ExpertGateUp, ("model.layers.{}.block_sparse_moe.input_linear", "blk.{}.ffn_gate_up_exps")),
            (Role::ExpertDown, ("model.layers.{}.block_sparse_moe.output_linear", "blk.{}.ffn_down_exps")),
        ],
        fused_experts: true,
        ..Names::DEFAULT
    },
    images: None,
    layout: None,
    vectors: None,
};

/// Keys of the factors, which are 1 if a configuration omits them.
struct FactorKeys {
    embedding: &'static str,
    attention: &'static str,
    residual: &'static str,
    /// Divides the logits.
    logits: &'static str,
}

fn from_hf(family: &'static Family, fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let keys = FactorKeys {
        embedding: "embedding_multiplier",
        attention: "attention_multiplier",
        residual: "residual_multiplier",
        logits: "logits_scaling",
    };
    scaled(llama::decoder(family, fields, Defaults::default())?, &keys, |key| fields.f64(key))
}

fn from_gguf(family: &'static Family, keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let names = FactorKeys {
        embedding: "embedding_scale",
        attention: "attention.scale",
        residual: "residual_scale",
        logits: "logit_scale",
    };
    scaled(gguf::decoder(family, keys, RopeStyle::GptJ)?, &names, |key| keys.f64(key))
}

fn moe(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = from_hf(&MOE, fields)?;
    let experts = experts::from_hf(fields)?;
    config.set_experts(&experts, fields.required("intermediate_size")?, |_| true);
    Ok(config)
}

fn moe_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = from_gguf(&MOE, keys)?;
    let (experts, intermediate_size) = experts::from_gguf(keys)?;
    config.set_experts(&experts, intermediate_size, |_| true);
    Ok(config)
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
