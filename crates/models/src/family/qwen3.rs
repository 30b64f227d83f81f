//! Qwen3 dense: q and k are normalised per head before the rotary embedding, and the head size is a separate number.

use octavo_ops::RopeStyle;

use super::{Family, Gguf, qwen2};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, QkNormWidth, gguf, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["qwen3"],
    class: hf::DECODER,
    hf: |fields| decoder(&FAMILY, fields),
    gguf: Some(Gguf { architecture: "qwen3", read: |keys| gguf_decoder(&FAMILY, keys) }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

/// Reads the decoder of a family that is Qwen3 otherwise.
pub(super) fn decoder(family: &'static Family, fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(family, fields, Defaults { head_dim: Some(128), ..Defaults::default() })?;
    hf::attention_bias(fields, &mut config)?;
    qwen2::windows(fields, &mut config, |layer, bound| layer >= bound)?;
    Ok(with_qk_norm(config))
}

/// Reads the GGUF metadata of such a decoder.
pub(super) fn gguf_decoder(family: &'static Family, keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    Ok(with_qk_norm(gguf::decoder(family, keys, RopeStyle::NeoX)?))
}

fn with_qk_norm(mut config: ModelConfig) -> ModelConfig {
    config.layers.iter_mut().for_each(|layer| layer.attention.qk_norm = Some(QkNormWidth::Head));
    config
}
