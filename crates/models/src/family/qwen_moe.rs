//! Qwen2-MoE and Qwen3-MoE: their dense relatives with a mixture of experts in most layers. Qwen2-MoE has an expert of
//! all tokens too, whose output a gate multiplies.

use octavo_ops::RopeStyle;

use super::{Family, Gguf, qwen2, qwen3};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, ExpertsConfig, Fields, Keys, ModelConfig, SharedExpertConfig, experts, gguf, hf};
use crate::program::names::Names;

pub(super) static QWEN2_MOE: Family = Family {
    model_types: &["qwen2_moe"],
    class: hf::DECODER,
    hf: qwen2_moe,
    gguf: Some(Gguf { architecture: "qwen2moe", read: qwen2_moe_gguf }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

pub(super) static QWEN3_MOE: Family = Family {
    model_types: &["qwen3_moe"],
    class: hf::DECODER,
    hf: qwen3_moe,
    gguf: Some(Gguf { architecture: "qwen3moe", read: qwen3_moe_gguf }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

fn qwen2_moe(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(&QWEN2_MOE, fields, Defaults::default())?;
    let bias = fields.bool("qkv_bias")?.unwrap_or(true);
    config.layers.iter_mut().for_each(|layer| layer.attention.qkv_bias = bias);
    qwen2::windows(fields, &mut config, |layer, bound| layer % 2 == 0 && layer < bound)?;
    let intermediate_size = fields.required("shared_expert_intermediate_size")?;
    let shared = Some(SharedExpertConfig { intermediate_size, gated: true });
    set_experts(fields, &mut config, ExpertsConfig { shared, ..experts::from_hf(fields)? })?;
    Ok(config)
}

fn qwen3_moe(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = qwen3::decoder(&QWEN3_MOE, fields)?;
    set_experts(fields, &mut config, experts::from_hf(fields)?)?;
    Ok(config)
}

/// Gives experts to every layer that is a multiple of a step, counted from 1, and is not excepted.
fn set_experts(fields: &Fields<'_>, config: &mut ModelConfig, experts: ExpertsConfig) -> Result<(), ConfigError> {
    let experts = ExpertsConfig { normalise: hf::flag(fields, "norm_topk_prob")?, ..experts };
    let dense = fields.usizes("mlp_only_layers")?.unwrap_or_default();
    let step = fields.usize("decoder_sparse_step")?.unwrap_or(1).max(1);
    let has_experts = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    config.set_experts(&experts, fields.required("moe_intermediate_size")?, has_experts);
    Ok(())
}

fn qwen2_moe_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = gguf::decoder(&QWEN2_MOE, keys, RopeStyle::NeoX)?;
    let (experts, intermediate_size) = experts::from_gguf(keys)?;
    let shared = match keys.usize("expert_shared_feed_forward_length")? {
        Some(size) => size,
        None => keys.required("feed_forward_length")?,
    };
    let shared = Some(SharedExpertConfig { intermediate_size: shared, gated: true });
    config.set_experts(&ExpertsConfig { normalise: false, shared, ..experts }, intermediate_size, |_| true);
    Ok(config)
}

fn qwen3_moe_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = qwen3::gguf_decoder(&QWEN3_MOE, keys)?;
    let (experts, intermediate_size) = experts::from_gguf(keys)?;
    config.set_experts(&experts, intermediate_size, |_| true);
    Ok(config)
}
