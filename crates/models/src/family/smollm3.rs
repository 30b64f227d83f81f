//! SmolLM3: Llama whose every fourth layer has no rotary embedding.

use octavo_ops::RopeStyle;

use super::{Family, Gguf, llama};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, gguf, hf, slides};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["smollm3"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "smollm3", read: from_gguf }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

/// One layer in as many has no rotary embedding, if a configuration does not list them. GGUF files have no key for it.
const PATTERN: usize = 4;
const THETA: f64 = 2_000_000.0;

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let defaults = Defaults { theta: THETA, tie_word_embeddings: true, ..Defaults::default() };
    let mut config = llama::decoder(&FAMILY, fields, defaults)?;
    let pattern = fields.usize("no_rope_layer_interval")?.unwrap_or(PATTERN);
    if pattern == 0 {
        return Err(ConfigError::Invalid("'no_rope_layer_interval' is 0".into()));
    }
    let (listed, layers) = (fields.usizes("no_rope_layers")?, config.layers.len());
    if let Some(listed) = listed.as_ref().filter(|listed| listed.len() < layers) {
        let entries = listed.len();
        return Err(ConfigError::Invalid(format!("'no_rope_layers' has {entries} entries for {layers} layers")));
    }
    // Despite its name, the list has a 1 for layers with a rotary embedding.
    let rotates = |layer: usize| listed.as_ref().map_or_else(|| slides(layer, pattern), |listed| listed[layer] != 0);
    let has_window = hf::flag(fields, "use_sliding_window")?;
    let window = fields.usize("sliding_window")?.filter(|_| has_window);
    hf::windows(fields, &mut config, window, |layer| !rotates(layer))?;
    set_rotary(&mut config, rotates);
    Ok(config)
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = gguf::decoder(&FAMILY, keys, RopeStyle::GptJ)?;
    set_rotary(&mut config, |layer| slides(layer, PATTERN));
    Ok(config)
}

fn set_rotary(config: &mut ModelConfig, rotates: impl Fn(usize) -> bool) {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.attention.rope.take_if(|_| !rotates(index));
    }
}
