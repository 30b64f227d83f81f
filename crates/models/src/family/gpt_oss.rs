//! GPT-OSS: attention sinks, a window on every other layer, biases everywhere, and experts with a clamped activation.
//!
//! Safetensors files have the experts as inputs by outputs, with the columns of gate and up in turn, or as MXFP4 blocks
//! with their scales in a tensor of their own. GGUF files have them as other families do.

use octavo_ops::{GluKind, RopeStyle};

use super::{Family, Gguf, OwnLayout};
use crate::checkpoint::{Checkpoint, Derived, ExpertTensor, Packed, UnpackedExperts};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, ExpertsConfig, Fields, Keys, ModelConfig, RopeScaling, experts, gguf, hf, slides};
use crate::program::names::{Names, Role};

pub(super) static FAMILY: Family = Family {
    model_types: &["gpt_oss"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "gpt-oss", read: from_gguf }),
    names: Names {
        others: &[
            (Role::MlpNorm, ("model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm")),
            (Role::Router, ("model.layers.{}.mlp.router", "blk.{}.ffn_gate_inp")),
        ],
        experts_in_turn: true,
        ..Names::DEFAULT
    },
    images: None,
    layout: Some(OwnLayout { method: Some("mxfp4"), derived }),
    vectors: None,
};

/// One layer in two has full attention.
const PATTERN: usize = 2;
const DEFAULT_WINDOW: usize = 128;

/// Factor of the gate in the sigmoid, and limit of gate and up.
const ALPHA: f32 = 1.702;
const LIMIT: f64 = 7.0;

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let defaults = Defaults { head_dim: Some(64), norm_eps: 1e-5, theta: 150_000.0, ..Defaults::default() };
    let mut config = hf::decoder(&FAMILY, fields, defaults)?;
    const WINDOW: &str = "sliding_window";
    let window = fields.unless_missing(WINDOW, fields.usize(WINDOW)?, DEFAULT_WINDOW);
    hf::windows(fields, &mut config, window, |layer| slides(layer, PATTERN))?;
    let bias = fields.bool("attention_bias")?.unwrap_or(true);
    let limit = fields.f64("swiglu_limit")?.unwrap_or(LIMIT) as f32;
    let experts = experts::from_hf(fields)?;
    complete(&mut config, experts, fields.required("intermediate_size")?, bias, limit);
    Ok(config)
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = gguf::decoder(&FAMILY, keys, RopeStyle::NeoX)?;
    let window = keys.window()?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.window = window.filter(|_| slides(index, PATTERN));
    }
    for rope in config.ropes_mut() {
        // The format has no key for this property of the model.
        if let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling {
            *truncate = false;
        }
    }
    let (experts, intermediate_size) = experts::from_gguf(keys)?;
    complete(&mut config, experts, intermediate_size, true, LIMIT as f32);
    Ok(config)
}

/// Sets what both formats leave unsaid.
fn complete(config: &mut ModelConfig, experts: ExpertsConfig, intermediate_size: usize, bias: bool, limit: f32) {
    config.set_experts(&ExpertsConfig { router_bias: true, ..experts }, intermediate_size, |_| true);
    for layer in &mut config.layers {
        let attention = &mut layer.attention;
        (attention.sinks, attention.qkv_bias, attention.output_bias) = (true, bias, bias);
        layer.mlp.activation = GluKind::ClampedSwiglu { alpha: ALPHA, limit };
        layer.mlp.bias = true;
    }
}

/// Returns the tensor of one expert, `STEM.experts.N.PROJECTION.KIND`, as a part of those of all experts, or a tensor of all
/// experts that is stored in blocks.
fn derived(checkpoint: &Checkpoint, name: &str) -> Option<Derived<'static>> {
    let packed = |tensor: &str| [format!("{tensor}_blocks"), format!("{tensor}_scales")];
    let (stem, rest) = name.split_once(".experts.")?;
    if matches!(rest, "gate_up_proj" | "down_proj") {
        let [blocks, scales] = packed(name);
        return checkpoint.has_tensor(&blocks).then_some(Derived::Unpacked(UnpackedExperts { blocks, scales }));
    }
    let (slab, rest) = rest.split_once('.')?;
    let (projection, kind) = rest.split_once('.')?;
    let (projection, first, step) = match projection {
        "gate_proj" => ("gate_up_proj", 0, 2),
        "up_proj" => ("gate_up_proj", 1, 2),
        "down_proj" => ("down_proj", 0, 1),
        _ => return None,
    };
    let tensor = format!("{stem}.experts.{projection}");
    let source = match kind {
        "bias" => Packed::Columns(format!("{tensor}_bias")),
        "weight" => {
            let [blocks, scales] = packed(&tensor);
            match checkpoint.has_tensor(&blocks) {
                true => Packed::Mxfp4 { blocks, scales },
                false => Packed::Columns(tensor),
            }
        }
        _ => return None,
    };
    Some(Derived::Expert(ExpertTensor { source, slab: slab.parse().ok()?, first, step }))
}
