//! OLMo 2: norms after the blocks and none before them; q and k are normalised over all heads together.

use octavo_ops::RopeStyle;

use super::{Family, Gguf};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, Keys, ModelConfig, NormPlaces, QkNormWidth, gguf, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["olmo2"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "olmo2", read: from_gguf }),
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(&FAMILY, fields, Defaults { norm_eps: 1e-5, ..Defaults::default() })?;
    hf::attention_bias(fields, &mut config)?;
    Ok(with_norms(config))
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    Ok(with_norms(gguf::decoder(&FAMILY, keys, RopeStyle::NeoX)?))
}

fn with_norms(mut config: ModelConfig) -> ModelConfig {
    for layer in &mut config.layers {
        layer.set_norms(NormPlaces::After);
        layer.attention.qk_norm = Some(QkNormWidth::Whole);
    }
    config
}
