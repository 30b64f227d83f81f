//! DeepSeek-V2 and V3: latent attention, and a mixture of experts with shared ones in all but the first layers.
//!
//! Safetensors files have the matrices of all heads between the latent and its keys and values as one tensor, of which
//! each head has the rows of its keys and then those of its values. GGUF files have them apart, those of the keys
//! transposed.

use octavo_ops::{ExpertGroups, GroupScore, HeadShape, RopeStyle, RouteScores};

use super::{Family, Gguf, OwnLayout};
use crate::checkpoint::{Checkpoint, Derived, HeadTensor};
use crate::config::hf::Defaults;
use crate::config::{
    ConfigError, ExpertsConfig, Fields, Keys, LatentConfig, ModelConfig, RopeScaling, SharedExpertConfig, experts,
    gguf, hf, yarn_magnitude,
};
use crate::program::names::{Names, Role};

pub(super) static V2: Family = Family {
    model_types: &["deepseek_v2"],
    class: hf::DECODER,
    hf: |fields| from_hf(&V2, fields, &V2_DEFAULTS),
    gguf: Some(Gguf { architecture: "deepseek2", read: from_gguf }),
    names: NAMES,
    images: None,
    layout: Some(OwnLayout { method: None, derived }),
    vectors: None,
};

pub(super) static V3: Family = Family {
    model_types: &["deepseek_v3"],
    class: hf::DECODER,
    hf: |fields| from_hf(&V3, fields, &V3_DEFAULTS),
    // GGUF files name both architectures alike.
    gguf: None,
    names: NAMES,
    images: None,
    layout: Some(OwnLayout { method: None, derived }),
    vectors: None,
};

const NAMES: Names = Names {
    others: &[
        (Role::SharedGate, ("model.layers.{}.mlp.shared_experts.gate_proj", "blk.{}.ffn_gate_shexp")),
        (Role::SharedUp, ("model.layers.{}.mlp.shared_experts.up_proj", "blk.{}.ffn_up_shexp")),
        (Role::SharedDown, ("model.layers.{}.mlp.shared_experts.down_proj", "blk.{}.ffn_down_shexp")),
    ],
    ..Names::DEFAULT
};

/// Value added under the root of the norms inside attention, whatever that of the others is.
const NORM_EPS: f32 = 1e-6;

/// Values of keys that a configuration may omit.
struct Omitted {
    experts: usize,
    chosen: Option<usize>,
    expert_size: usize,
    shared_experts: usize,
    first_dense: usize,
    scale: f64,
    /// Number of groups of experts, and of those that are kept.
    groups: Option<(usize, usize)>,
    method: &'static str,
    scores: &'static str,
    normalise: bool,
}

const V2_DEFAULTS: Omitted = Omitted {
    experts: 64,
    chosen: None,
    expert_size: 1407,
    shared_experts: 2,
    first_dense: 0,
    scale: 1.0,
    groups: None,
    method: "greedy",
    scores: "softmax",
    normalise: false,
};

const V3_DEFAULTS: Omitted = Omitted {
    experts: 256,
    chosen: Some(8),
    expert_size: 2048,
    shared_experts: 1,
    first_dense: 3,
    scale: 2.5,
    groups: Some((8, 4)),
    method: "noaux_tc",
    scores: "sigmoid",
    normalise: true,
};

fn from_hf(family: &'static Family, fields: &Fields<'_>, omitted: &Omitted) -> Result<ModelConfig, ConfigError> {
    const QUERY_RANK: &str = "q_lora_rank";
    let size = |key: &str, default| Ok::<usize, ConfigError>(fields.usize(key)?.unwrap_or(default));
    let latent = LatentConfig {
        query_rank: fields.unless_missing(QUERY_RANK, fields.usize(QUERY_RANK)?, 1536),
        rank: size("kv_lora_rank", 512)?,
        content: size("qk_nope_head_dim", 128)?,
        rotated: size("qk_rope_head_dim", 64)?,
        value: size("v_head_dim", 128)?,
        norm_eps: NORM_EPS,
    };
    let defaults = Defaults { head_dim: Some(latent.rotated), ..Defaults::default() };
    let mut config = hf::decoder(family, fields, defaults)?;
    hf::attention_bias(fields, &mut config)?;
    if hf::flag(fields, "mlp_bias")? {
        return Err(ConfigError::Unsupported("a mixture of experts with biases".into()));
    }
    let interleaved = fields.bool("rope_interleave")?.unwrap_or(true);
    let style = if interleaved { RopeStyle::GptJ } else { RopeStyle::NeoX };
    config.ropes_mut().for_each(|rope| rope.style = style);
    config.set_latent(latent, score_magnitude(fields)?);

    let experts = experts_of(fields, omitted)?;
    let (first, step) = (size("first_k_dense_replace", omitted.first_dense)?, size("moe_layer_freq", 1)?.max(1));
    let has_experts = |layer: usize| layer >= first && layer.is_multiple_of(step);
    config.set_experts(&experts, size("moe_intermediate_size", omitted.expert_size)?, has_experts);
    Ok(config)
}

/// Returns the factor, of which the square multiplies the scores, of a rotary embedding that YaRN scales; else 1.
fn score_magnitude(fields: &Fields<'_>) -> Result<f64, ConfigError> {
    let parameters = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let Some(parameters) = parameters else { return Ok(1.0) };
    match (parameters.f64("factor")?, parameters.f64("mscale_all_dim")?) {
        (Some(factor), Some(all)) if all != 0.0 => Ok(yarn_magnitude(factor, all)),
        _ => Ok(1.0),
    }
}

fn experts_of(fields: &Fields<'_>, omitted: &Omitted) -> Result<ExpertsConfig, ConfigError> {
    const METHOD: &str = "topk_method";
    let count = fields.usize("n_routed_experts")?.unwrap_or(omitted.experts);
    let chosen = match fields.usize("num_experts_per_tok")?.or(omitted.chosen) {
        Some(chosen) => chosen,
        None => return Err(ConfigError::missing("num_experts_per_tok")),
    };
    let scores = match fields.str("scoring_func")?.unwrap_or(omitted.scores) {
        "softmax" => RouteScores::Softmax,
        "sigmoid" => RouteScores::Sigmoid,
        other => return Err(ConfigError::Unsupported(format!("'scoring_func' {}", other.escape_debug()))),
    };
    let groups = || -> Result<_, ConfigError> {
        let [count, kept] = [("n_group", 0), ("topk_group", 1)].map(|(key, index)| {
            let default = omitted.groups.map(|(count, kept)| [count, kept][index]);
            fields.usize(key)?.or(default).ok_or_else(|| ConfigError::missing(key))
        });
        Ok((count?, kept?))
    };
    let restricted = |score| groups().map(|(count, kept)| (count > 1).then_some(ExpertGroups { count, kept, score }));
    let (groups, correction) = match fields.str(METHOD)?.unwrap_or(omitted.method) {
        "greedy" => (None, false),
        "group_limited_greedy" => (restricted(GroupScore::Best)?, false),
        "noaux_tc" => (restricted(GroupScore::BestTwo)?, true),
        other => return Err(ConfigError::Unsupported(format!("'{METHOD}' {}", other.escape_debug()))),
    };
    let size = fields.usize("moe_intermediate_size")?.unwrap_or(omitted.expert_size);
    Ok(ExpertsConfig {
        scores,
        groups,
        correction,
        normalise: fields.bool("norm_topk_prob")?.unwrap_or(omitted.normalise),
        scale: fields.f64("routed_scaling_factor")?.unwrap_or(omitted.scale) as f32,
        shared: shared(size, fields.usize("n_shared_experts")?.unwrap_or(omitted.shared_experts)),
        ..ExpertsConfig::softmax(count, chosen)
    })
}

/// Returns the shared experts, which are one of their sizes together.
fn shared(size: usize, count: usize) -> Option<SharedExpertConfig> {
    let intermediate_size = size.saturating_mul(count);
    (count > 0).then_some(SharedExpertConfig { intermediate_size, gated: false })
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    if !keys.has_tensor("blk.0.attn_k_b.weight") {
        return Err(ConfigError::Unsupported(
            "a DeepSeek file from before 'attn_k_b' and 'attn_v_b' (convert it with a newer llama.cpp)".into(),
        ));
    }
    let rotated = keys.required("rope.dimension_count")?;
    let latent = LatentConfig {
        query_rank: keys.usize("attention.q_lora_rank")?.filter(|&rank| rank > 0),
        rank: keys.required("attention.kv_lora_rank")?,
        content: keys.required("attention.key_length_mla")?.saturating_sub(rotated),
        rotated,
        value: keys.required("attention.value_length_mla")?,
        norm_eps: NORM_EPS,
    };
    let heads = keys.required("attention.head_count")?;
    let mut config = gguf::decoder_of(&V2, keys, RopeStyle::GptJ, HeadShape::new(heads, heads, rotated))?;
    let mut magnitude = 1.0;
    for rope in config.ropes_mut() {
        if let RopeScaling::Yarn { factor, attention_factor, .. } = &mut rope.scaling {
            // The file has the factor of the scores alone: that of cosine and sine is 1.
            *attention_factor = 1.0;
            let multiplier = keys.f64("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
            magnitude = yarn_magnitude(*factor, 10.0 * multiplier);
        }
    }
    config.set_latent(latent, magnitude);

    let (experts, size) = experts::from_gguf(keys)?;
    let first = keys.usize("leading_dense_block_count")?.unwrap_or(0);
    let experts = ExpertsConfig {
        correction: keys.has_tensor(&format!("blk.{first}.exp_probs_b.bias")),
        shared: shared(size, keys.usize("expert_shared_count")?.unwrap_or(0)),
        ..routing(keys, experts)?
    };
    config.set_experts(&experts, size, |layer| layer >= first);
    Ok(config)
}

/// Reads the choice of experts of a GGUF file.
fn routing(keys: &Keys<'_>, experts: ExpertsConfig) -> Result<ExpertsConfig, ConfigError> {
    let (scores, score) = match keys.usize("expert_gating_func")? {
        None | Some(1) => (RouteScores::Softmax, GroupScore::Best),
        Some(2) => (RouteScores::Sigmoid, GroupScore::BestTwo),
        Some(other) => return Err(ConfigError::Unsupported(format!("the gating function {other} of experts"))),
    };
    let count = keys.usize("expert_group_count")?.filter(|&count| count > 1);
    let groups = match count {
        Some(count) => Some(ExpertGroups { count, kept: keys.required("expert_group_used_count")?, score }),
        None => None,
    };
    Ok(ExpertsConfig {
        scores,
        groups,
        normalise: keys.bool("expert_weights_norm")?.unwrap_or(false),
        scale: keys.f64("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0) as f32,
        ..experts
    })
}

/// Returns the matrix of one head, `STEM.kv_b_proj.HEAD.(k|v).weight`, as a part of that of all heads.
fn derived(checkpoint: &Checkpoint, name: &str) -> Option<Derived<'static>> {
    const TENSOR: &str = "kv_b_proj.";
    let attention = &checkpoint.config().layers.first()?.attention;
    let latent = attention.latent?;
    let (stem, rest) = name.split_once(TENSOR)?;
    let (head, part) = rest.split_once('.')?;
    let (rows, transposed) = match part {
        "k.weight" => (0..latent.content, true),
        "v.weight" => (latent.content..latent.content + latent.value, false),
        _ => return None,
    };
    let source = format!("{stem}{TENSOR}weight");
    Some(Derived::Head(HeadTensor { source, heads: attention.heads.q, head: head.parse().ok()?, rows, transposed }))
}
