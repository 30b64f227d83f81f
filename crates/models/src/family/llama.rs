//! Llama 1 to 3.x and models with the same architecture: SmolLM2, TinyLlama, Yi, ...
//!
//! A pre-norm decoder with rotary embedding, grouped-query attention and a gated MLP.

use octavo_ops::RopeStyle;

use super::{Family, Gguf};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, experts, gguf, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["llama"],
    class: hf::DECODER,
    hf: |fields| decoder(&FAMILY, fields, Defaults::default()),
    // Converters write Mistral and Mixtral as `llama` too.
    gguf: Some(Gguf { architecture: "llama", read: from_gguf }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

/// Reads the decoder of a family that is Llama otherwise.
pub(super) fn decoder(
    family: &'static Family,
    fields: &Fields<'_>,
    defaults: Defaults,
) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(family, fields, defaults)?;
    hf::attention_bias(fields, &mut config)?;
    let mlp_bias = hf::flag(fields, "mlp_bias")?;
    config.layers.iter_mut().for_each(|layer| layer.mlp.bias = mlp_bias);
    Ok(config)
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    // The converter permutes the rows of q and k for rotation of neighbours.
    let mut config = gguf::decoder(&FAMILY, keys, RopeStyle::GptJ)?;
    config.set_window(keys.window()?);
    // Mixtral is a Llama with experts.
    if keys.usize("expert_count")?.is_some_and(|count| count > 0) {
        let (experts, intermediate_size) = experts::from_gguf(keys)?;
        config.set_experts(&experts, intermediate_size, |_| true);
    }
    Ok(config)
}
