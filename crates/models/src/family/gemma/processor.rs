//! The image processor of Gemma 3: every image becomes a square of one size.

use crate::checkpoint::{ImageSize, ProcessorRules, Resample, ViewText};
use crate::config::{ConfigError, Fields, VisionConfig};

pub(super) static RULES: ProcessorRules = ProcessorRules {
    classes: &["Gemma3ImageProcessor"],
    // The length follows from the encoder. The limits of crops mean nothing without crops, which are refused.
    keys: &[
        "image_seq_length",
        "image_seq_len",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ],
    resample: Resample::Bilinear,
    size,
    text: Some(ViewText { placeholder: Some(START), write: text }),
};

/// Tokens before and after an image. A chat template writes the first one for an image.
pub(super) const START: &str = "<start_of_image>";
pub(super) const END: &str = "<end_of_image>";

fn size(fields: &Fields<'_>, vision: &VisionConfig) -> Result<ImageSize, ConfigError> {
    let expected = vision.table_side * vision.patch_size;
    let Some(size) = fields.object("size")? else { return side(expected) };
    let sides = [size.usize("height")?, size.usize("width")?];
    match sides {
        [Some(height), Some(width)] if [height, width] == [expected; 2] => side(expected),
        [Some(height), Some(width)] => Err(ConfigError::Invalid(format!(
            "'size' of the image processor is {width} x {height}, but the encoder takes {expected} x {expected}"
        ))),
        _ => Err(ConfigError::Unsupported("'size' of the image processor without 'height' and 'width'".into())),
    }
}

fn side(side: usize) -> Result<ImageSize, ConfigError> {
    let too_large = |_| ConfigError::Invalid(format!("the encoder takes images of {side} x {side}"));
    Ok(ImageSize::Fixed { side: u32::try_from(side).map_err(too_large)? })
}

fn text(image: &str, _: usize, _: usize) -> String {
    format!("\n\n{START}{image}{END}\n\n")
}
