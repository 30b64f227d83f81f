//! Qwen3-VL dense: Qwen3 with an encoder of images, whose outputs also enter the decoder's first layers.

mod encoder;
mod processor;

use octavo_ops::GluKind;

use super::{Family, Gguf, Images, Mmproj, qwen3};
use crate::checkpoint::MetadataView;
use crate::config::mmproj::{EncoderKeys, Vocabulary};
use crate::config::{ConfigError, Fields, ImageTokens, Keys, ModelConfig, PositionTable, VisionConfig, hf};
use crate::program::names::Names;

pub(super) static FAMILY: Family = Family {
    model_types: &["qwen3_vl"],
    class: hf::WITH_IMAGES,
    hf: from_hf,
    gguf: Some(Gguf { architecture: "qwen3vl", read: from_gguf }),
    names: Names { prefix: "model.language_model.", ..Names::DEFAULT },
    images: Some(Images {
        encoder: encoder::program,
        processor: &processor::RULES,
        mmproj: Some(Mmproj { tokens, vision: mmproj_vision, optional: false }),
    }),
    layout: None,
    vectors: None,
};

/// `clip.projector_type` of the encoder.
const PROJECTOR: &str = "qwen3vl_merger";
/// Value under the root of the encoder's norms; no configuration contains it.
const NORM_EPS: f32 = 1e-6;
/// Base of the encoder's rotary frequencies if a configuration omits it.
const DEFAULT_THETA: f64 = 10_000.0;
/// Ids of the published models.
const TOKENS: ImageTokens =
    ImageTokens { image: 151_655, video: Some(151_656), start: Some(151_652), end: Some(151_653) };

fn from_hf(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let config = hf::decoder_of(fields, |text| qwen3::decoder(&FAMILY, text))?;
    Ok(ModelConfig { vision: Some(vision(fields)?), ..config })
}

fn from_gguf(keys: &Keys<'_>) -> Result<ModelConfig, ConfigError> {
    let config = qwen3::gguf_decoder(&FAMILY, keys)?;
    match config.rope().and_then(|rope| rope.sections) {
        Some(_) => Ok(config),
        None => Err(ConfigError::missing(&keys.name("rope.dimension_sections"))),
    }
}

fn vision(fields: &Fields<'_>) -> Result<VisionConfig, ConfigError> {
    let vision = fields.object("vision_config")?.ok_or_else(|| ConfigError::missing("vision_config"))?;
    let size = |key: &str, default: usize| Ok::<_, ConfigError>(vision.usize(key)?.unwrap_or(default));
    let positions = size("num_position_embeddings", 2304)?;
    let table_side = positions.isqrt();
    if table_side * table_side != positions {
        let reason = format!("'num_position_embeddings' is {positions}, but the table must be square");
        return Err(ConfigError::Invalid(reason));
    }
    let theta = match vision.object("rope_parameters")? {
        Some(parameters) => parameters.f64("rope_theta")?,
        None => None,
    };
    Ok(VisionConfig {
        layers: vision.required("depth")?,
        hidden_size: vision.required("hidden_size")?,
        intermediate_size: vision.required("intermediate_size")?,
        heads: vision.required("num_heads")?,
        activation: hf::activation(vision.str("hidden_act")?.unwrap_or("gelu_pytorch_tanh"))?,
        channels: size("in_channels", 3)?,
        patch_size: size("patch_size", 16)?,
        temporal_patch_size: size("temporal_patch_size", 2)?,
        merge_size: size("spatial_merge_size", 2)?,
        table_side,
        table: PositionTable::Stretched,
        out_hidden_size: vision.required("out_hidden_size")?,
        deepstack_layers: vision.usizes("deepstack_visual_indexes")?.unwrap_or_else(|| vec![8, 16, 24]),
        norm_eps: NORM_EPS,
        theta: Some(theta.unwrap_or(DEFAULT_THETA)),
        seen_whole: false,
        tokens: ImageTokens::from_hf(fields, TOKENS)?,
    })
}

/// Reads the metadata of an mmproj file. `frames` is the number of convolutions over patches in the file, one for
/// each frame, and `out_hidden_size` the decoder's hidden size.
///
/// # Errors
/// Returns an error if the encoder is another architecture's, or if it does not fit the decoder.
fn mmproj_vision(
    metadata: &MetadataView<'_>,
    frames: usize,
    model: &ModelConfig,
    tokens: ImageTokens,
) -> Result<VisionConfig, ConfigError> {
    let keys = EncoderKeys::for_projector(metadata, PROJECTOR, model)?;
    let size = |key: &str| keys.size(key);
    let patch_size = size("patch_size")?;
    let deepstack = keys.bools("is_deepstack_layers")?.unwrap_or_default();
    let encoder = VisionConfig {
        layers: size("block_count")?,
        hidden_size: size("embedding_length")?,
        intermediate_size: size("feed_forward_length")?,
        heads: size("attention.head_count")?,
        activation: match (metadata.bool("clip.use_gelu")?, metadata.bool("clip.use_silu")?) {
            (Some(true), _) => GluKind::GeluTanh,
            (_, Some(true)) => GluKind::Silu,
            _ => return Err(ConfigError::Unsupported("the activation 'quick_gelu'".into())),
        },
        channels: 3,
        patch_size,
        temporal_patch_size: frames,
        merge_size: keys.optional_size("spatial_merge_size")?.unwrap_or(2),
        table_side: size("image_size")?.checked_div(patch_size).unwrap_or(0),
        table: PositionTable::Stretched,
        out_hidden_size: model.hidden_size,
        deepstack_layers: (0..).zip(&deepstack).filter(|&(_, &is_deep)| is_deep).map(|(layer, _)| layer).collect(),
        norm_eps: NORM_EPS,
        theta: Some(DEFAULT_THETA),
        seen_whole: false,
        tokens,
    };
    encoder.check(model)?;
    Ok(encoder)
}

/// Finds the tokens in the vocabulary of a GGUF file, which has no keys for them.
fn tokens(metadata: &MetadataView<'_>) -> Result<ImageTokens, ConfigError> {
    let Some(vocabulary) = Vocabulary::read(metadata)? else { return Ok(TOKENS) };
    let id = |text| vocabulary.id(text);
    Ok(ImageTokens {
        image: id("<|image_pad|>")?,
        video: Some(id("<|video_pad|>")?),
        start: Some(id("<|vision_start|>")?),
        end: Some(id("<|vision_end|>")?),
    })
}
