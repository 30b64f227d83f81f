//! Phi-3, Phi-3.5 and Phi-4: Llama whose q, k and v are one tensor, and gate and up another. Long contexts have rotary
//! frequencies of their own.

use octavo_ops::RopeStyle;

use super::{Family, Gguf};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, RopeScaling, gguf, hf};
use crate::program::names::{LONG_ROPE_FACTORS, Names};

pub(super) static FAMILY: Family = Family {
    model_types: &["phi3"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "phi3", read: from_gguf }),
    names: Names { fused: true, ..Names::DEFAULT },
    images: None,
    layout: None,
    vectors: None,
};

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(&FAMILY, fields, Defaults { norm_eps: 1e-5, ..Defaults::default() })?;
    config.set_window(fields.usize("sliding_window")?);
    Ok(config)
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = gguf::decoder(&FAMILY, keys, RopeStyle::NeoX)?;
    config.set_window(keys.window()?);
    if keys.has_tensor(LONG_ROPE_FACTORS) {
        let scaling = RopeScaling::LongRope {
            short: vec![],
            long: vec![],
            original_context: keys.required("rope.scaling.original_context_length")? as f64,
            context: config.max_position_embeddings,
            attention_factor: keys.f64("rope.scaling.attn_factor")?.unwrap_or(1.0),
        };
        config.ropes_mut().for_each(|rope| rope.scaling = scaling.clone());
    }
    Ok(config)
}
