//! Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files are those of Llama, with experts.

use super::Family;
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, ModelConfig, experts, hf};
use crate::program::names::{Names, Role};

pub(super) static FAMILY: Family = Family {
    model_types: &["mixtral"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: None,
    names: Names {
        others: &[
            (Role::Router, ("model.layers.{}.block_sparse_moe.gate", "")),
            (Role::ExpertGate, ("model.layers.{}.block_sparse_moe.experts.{e}.w1", "")),
            (Role::ExpertUp, ("model.layers.{}.block_sparse_moe.experts.{e}.w3", "")),
            (Role::ExpertDown, ("model.layers.{}.block_sparse_moe.experts.{e}.w2", "")),
        ],
        ..Names::DEFAULT
    },
    images: None,
    layout: None,
    vectors: None,
};

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let defaults = Defaults { norm_eps: 1e-5, theta: 1e6, ..Defaults::default() };
    let mut config = hf::decoder(&FAMILY, fields, defaults)?;
    config.set_window(fields.usize("sliding_window")?);
    let experts = experts::from_hf(fields)?;
    config.set_experts(&experts, fields.required("intermediate_size")?, |_| true);
    Ok(config)
}
