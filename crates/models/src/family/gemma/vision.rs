//! Configuration of the encoder of images of Gemma 3.

use octavo_ops::GluKind;

use super::processor::{END, START};
use crate::checkpoint::MetadataView;
use crate::config::mmproj::{EncoderKeys, Vocabulary};
use crate::config::{ConfigError, Fields, ImageTokens, ModelConfig, PositionTable, VisionConfig, hf};

/// `clip.projector_type` of the encoder.
const PROJECTOR: &str = "gemma3";
/// Token that stands for each row of an image.
const IMAGE: &str = "<image_soft_token>";
/// Side of the square of patches that becomes a row of the decoder, if an mmproj file omits it.
const MERGE: usize = 4;
const NORM_EPS: f64 = 1e-6;

pub(super) fn from_hf(fields: &Fields<'_>, decoder: &ModelConfig) -> Result<VisionConfig, ConfigError> {
    let vision = fields.object("vision_config")?.ok_or_else(|| ConfigError::missing("vision_config"))?;
    let size = |key: &str, default: usize| Ok::<_, ConfigError>(vision.usize(key)?.unwrap_or(default));
    let table_side = VisionConfig::patches_of_side(size("image_size", 224)?, size("patch_size", 16)?)?;
    let tokens = fields.usize("mm_tokens_per_image")?.unwrap_or(256);
    let token_side = tokens.isqrt();
    if token_side == 0 || token_side * token_side != tokens || !table_side.is_multiple_of(token_side) {
        return Err(ConfigError::Invalid(format!(
            "'mm_tokens_per_image' is {tokens}, which are no squares of the {table_side} patches of a side"
        )));
    }
    let id = |new: &str, old: &str, default: u32| {
        Ok::<_, ConfigError>(match fields.u32(new)? {
            Some(id) => id,
            None => fields.u32(old)?.unwrap_or(default),
        })
    };
    checked(
        VisionConfig {
            layers: size("num_hidden_layers", 12)?,
            hidden_size: size("hidden_size", 768)?,
            intermediate_size: size("intermediate_size", 3072)?,
            heads: size("num_attention_heads", 12)?,
            activation: hf::activation(vision.str("hidden_act")?.unwrap_or("gelu_pytorch_tanh"))?,
            channels: size("num_channels", 3)?,
            patch_size: size("patch_size", 16)?,
            temporal_patch_size: 1,
            merge_size: table_side / token_side,
            table_side,
            table: PositionTable::Exact,
            out_hidden_size: decoder.hidden_size,
            deepstack_layers: vec![],
            norm_eps: vision.f64("layer_norm_eps")?.unwrap_or(NORM_EPS) as f32,
            theta: None,
            seen_whole: true,
            tokens: ImageTokens {
                image: id("image_token_id", "image_token_index", 262_144)?,
                video: None,
                start: Some(id("boi_token_id", "boi_token_index", 255_999)?),
                end: Some(id("eoi_token_id", "eoi_token_index", 256_000)?),
            },
        },
        decoder,
    )
}

/// Reads the metadata of an mmproj file.
///
/// # Errors
/// Returns an error if the encoder is another architecture's, or if it does not fit the decoder.
pub(super) fn mmproj(
    metadata: &MetadataView<'_>,
    frames: usize,
    decoder: &ModelConfig,
    tokens: ImageTokens,
) -> Result<VisionConfig, ConfigError> {
    let keys = EncoderKeys::for_projector(metadata, PROJECTOR, decoder)?;
    let patch_size = keys.size("patch_size")?;
    let vision = VisionConfig {
        layers: keys.size("block_count")?,
        hidden_size: keys.size("embedding_length")?,
        intermediate_size: keys.size("feed_forward_length")?,
        heads: keys.size("attention.head_count")?,
        activation: GluKind::GeluTanh,
        channels: 3,
        patch_size,
        temporal_patch_size: frames,
        merge_size: keys.optional_size("projector.scale_factor")?.unwrap_or(MERGE),
        table_side: VisionConfig::patches_of_side(keys.size("image_size")?, patch_size)?,
        table: PositionTable::Exact,
        out_hidden_size: decoder.hidden_size,
        deepstack_layers: vec![],
        norm_eps: keys.f64("attention.layer_norm_epsilon")?.unwrap_or(NORM_EPS) as f32,
        theta: None,
        seen_whole: true,
        tokens,
    };
    let vision = checked(vision, decoder)?;
    vision.check(decoder)?;
    Ok(vision)
}

/// Finds the tokens in the vocabulary of a GGUF file, which has no keys for them.
pub(super) fn tokens(metadata: &MetadataView<'_>) -> Result<ImageTokens, ConfigError> {
    let vocabulary = Vocabulary::read(metadata)?.ok_or_else(|| ConfigError::missing("tokenizer.ggml.tokens"))?;
    let id = |text| vocabulary.id(text);
    Ok(ImageTokens { image: id(IMAGE)?, video: None, start: Some(id(START)?), end: Some(id(END)?) })
}

/// Checks that the patches are whole squares, and that a window does not cut an image: PyTorch's layers with a window see
/// all of an image.
fn checked(vision: VisionConfig, decoder: &ModelConfig) -> Result<VisionConfig, ConfigError> {
    let VisionConfig { table_side, merge_size, .. } = vision;
    if merge_size == 0 || !table_side.is_multiple_of(merge_size) {
        return Err(ConfigError::Invalid(format!(
            "the image encoder: squares of {merge_size} patches do not divide the {table_side} patches of a side"
        )));
    }
    let tokens = (table_side / merge_size).pow(2);
    match decoder.layers.iter().filter_map(|layer| layer.attention.window).min() {
        Some(window) if window < tokens => Err(ConfigError::Unsupported(format!(
            "a window of {window} tokens, which is less than the {tokens} tokens of an image"
        ))),
        _ => Ok(vision),
    }
}
