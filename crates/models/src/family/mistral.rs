//! Mistral: Llama without biases and with a sliding window on all layers.

use super::Family;
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, ModelConfig, hf};
use crate::program::names::Names;

const DEFAULT_WINDOW: usize = 4096;

pub(super) static FAMILY: Family = Family {
    model_types: &["mistral"],
    class: hf::DECODER,
    hf: from_hf,
    gguf: None,
    names: Names::DEFAULT,
    images: None,
    layout: None,
    vectors: None,
};

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let mut config = hf::decoder(&FAMILY, fields, Defaults::default())?;
    const WINDOW: &str = "sliding_window";
    config.set_window(fields.unless_missing(WINDOW, fields.usize(WINDOW)?, DEFAULT_WINDOW));
    Ok(config)
}
