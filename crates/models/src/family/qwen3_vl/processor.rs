//! The image processor of the Qwen-VL family: one view, whose area is between two limits.

use crate::checkpoint::{ImageSize, ProcessorRules, Resample};
use crate::config::{ConfigError, Fields, VisionConfig};

pub(super) static RULES: ProcessorRules = ProcessorRules {
    classes: &["Qwen2VLImageProcessor", "Qwen3VLImageProcessor"],
    keys: &["min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"],
    resample: Resample::Bicubic,
    size,
    text: None,
};

/// Limits that are published with Qwen3-VL.
const MIN_PIXELS: u64 = 65_536;
const MAX_PIXELS: u64 = 16_777_216;

fn size(fields: &Fields<'_>, vision: &VisionConfig) -> Result<ImageSize, ConfigError> {
    for (key, expected) in [
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.merge_size),
    ] {
        if let Some(found) = fields.usize(key)?.filter(|found| *found != expected) {
            let reason =
                format!("'{key}' of the image processor is {found}, but {expected} in the model's configuration");
            return Err(ConfigError::Invalid(reason));
        }
    }
    let size = fields.object("size")?;
    let limit = |older: &str, key: &str, default: u64| -> Result<u64, ConfigError> {
        let limit = match fields.usize(older)? {
            Some(limit) => Some(limit),
            None => size.map(|size| size.usize(key)).transpose()?.flatten(),
        };
        Ok(limit.map_or(default, |limit| limit as u64))
    };
    Ok(ImageSize::Area {
        min: limit("min_pixels", "shortest_edge", MIN_PIXELS)?,
        max: limit("max_pixels", "longest_edge", MAX_PIXELS)?,
    })
}
