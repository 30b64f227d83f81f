//! Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window on some layers.

use octavo_ops::RopeStyle;

use super::{Family, Gguf};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, ModelConfig, gguf, hf};
use crate::program::names::Names;

const DEFAULT_MAX_WINDOW_LAYERS: usize = 28;

pub(super) static FAMILY: Family = Family {
    model_types: &["qwen2"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "qwen2", read: |keys| gguf::decoder(&FAMILY, keys, RopeStyle::NeoX) }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(&FAMILY, fields, Defaults::default())?;
    config.layers.iter_mut().for_each(|layer| layer.attention.qkv_bias = true);
    windows(fields, &mut config, |layer, bound| layer >= bound)?;
    Ok(config)
}

/// Reads the windows of Qwen2, Qwen3 and their relatives: on the layers of `layer_types`, else where `sliding` is true for
/// the layer and `max_window_layers`, and only with `use_sliding_window`.
pub(super) fn windows(
    fields: &Fields<'_>,
    config: &mut ModelConfig,
    sliding: impl Fn(usize, usize) -> bool,
) -> Result<(), ConfigError> {
    let is_used = hf::flag(fields, "use_sliding_window")?;
    let window = fields.usize("sliding_window")?.filter(|_| is_used);
    let bound = fields.usize("max_window_layers")?.unwrap_or(DEFAULT_MAX_WINDOW_LAYERS);
    hf::windows(fields, config, window, |layer| sliding(layer, bound))
}
