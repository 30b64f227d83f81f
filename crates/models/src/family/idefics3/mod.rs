//! Idefics3 and SmolVLM: Llama with an encoder of images.

mod encoder;
mod processor;

use super::{Family, Images, llama};
use crate::config::hf::Defaults;
use crate::config::{ConfigError, Fields, ImageTokens, ModelConfig, PositionTable, VisionConfig, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["idefics3", "smolvlm"],
    class: hf::WITH_IMAGES,
    hf: from_hf,
    gguf: None,
    names: Names { prefix: "model.text_model.", ..Names::DEFAULT },
    images: Some(Images { encoder: encoder::program, processor: &processor::RULES, mmproj: None }),
    layout: None,
    vectors: None,
};

/// Id of the token of images, if a configuration omits it.
const IMAGE_TOKEN: u32 = 128_257;

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let config = hf::decoder_of(fields, |text| match text.str("model_type")? {
        Some(name) if name != llama::FAMILY.name() => {
            Err(ConfigError::Unsupported(format!("the decoder '{}' of this model", name.escape_debug())))
        }
        _ => llama::decoder(&FAMILY, text, Defaults::default()),
    })?;
    Ok(ModelConfig { vision: Some(vision(fields, config.hidden_size)?), ..config })
}

fn vision(fields: &Fields<'_>, hidden_size: usize) -> Result<VisionConfig, ConfigError> {
    let vision = fields.object("vision_config")?.ok_or_else(|| ConfigError::missing("vision_config"))?;
    let size = |key: &str, default: usize| Ok::<_, ConfigError>(vision.usize(key)?.unwrap_or(default));
    let (image_size, patch_size) = (size("image_size", 224)?, size("patch_size", 32)?);
    let table_side = VisionConfig::patches_of_side(image_size, patch_size)?;
    let merge_size = fields.usize("scale_factor")?.unwrap_or(2);
    if merge_size == 0 || !table_side.is_multiple_of(merge_size) {
        let reason =
            format!("'scale_factor' is {merge_size}, which does not divide the {table_side} patches of a side");
        return Err(ConfigError::Invalid(reason));
    }
    Ok(VisionConfig {
        layers: size("num_hidden_layers", 12)?,
        hidden_size: size("hidden_size", 1152)?,
        intermediate_size: size("intermediate_size", 3072)?,
        heads: size("num_attention_heads", 16)?,
        activation: hf::activation(vision.str("hidden_act")?.unwrap_or("gelu_pytorch_tanh"))?,
        channels: size("num_channels", 3)?,
        patch_size,
        temporal_patch_size: 1,
        merge_size,
        table_side,
        table: PositionTable::Exact,
        out_hidden_size: hidden_size,
        deepstack_layers: vec![],
        norm_eps: vision.f64("layer_norm_eps")?.unwrap_or(1e-6) as f32,
        theta: None,
        seen_whole: false,
        tokens: ImageTokens::from_hf(fields, ImageTokens { image: IMAGE_TOKEN, video: None, start: None, end: None })?,
    })
}
