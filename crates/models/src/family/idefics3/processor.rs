//! The image processor of Idefics3 and SmolVLM: square tiles and the whole image, or one square.

use std::fmt::Write;

use crate::checkpoint::{ImageSize, ProcessorRules, Resample, ViewText};
use crate::config::{ConfigError, Fields, VisionConfig};

pub(super) static RULES: ProcessorRules = ProcessorRules {
    classes: &["Idefics3ImageProcessor", "SmolVLMImageProcessor"],
    // Padding is for batches of images, the sampling for videos, and the length follows from the encoder.
    keys: &["do_image_splitting", "max_image_size", "do_pad", "return_row_col_info", "video_sampling", "image_seq_len"],
    resample: Resample::Lanczos,
    size,
    text: Some(ViewText { placeholder: None, write: text }),
};

/// Side of a tile, and longest side of an image, if the settings omit them.
const SIDE: u32 = 364;
const LONGEST: u32 = 4 * SIDE;

fn size(fields: &Fields<'_>, vision: &VisionConfig) -> Result<ImageSize, ConfigError> {
    let edge = |key: &str, default: u32| match fields.object(key)? {
        None => Ok(default),
        Some(size) => size
            .u32("longest_edge")?
            .ok_or_else(|| ConfigError::Unsupported(format!("'{key}' of the image processor without 'longest_edge'"))),
    };
    let (longest, side) = (edge("size", LONGEST)?, edge("max_image_size", SIDE)?);
    let (patches, expected) = (side as usize / vision.patch_size, vision.table_side);
    if patches != expected {
        return Err(ConfigError::Invalid(format!(
            "'max_image_size' of the image processor is {side}, which is {patches} patches, but the encoder takes \
             {expected} on each side"
        )));
    }
    let splits = fields.bool("do_image_splitting")?.unwrap_or(true);
    Ok(if splits { ImageSize::Tiles { longest, side } } else { ImageSize::Square { longest, side } })
}

/// Each tile follows a tag with its place, and the whole image a tag of its own.
fn text(image: &str, rows: usize, columns: usize) -> String {
    const EDGE: &str = "<fake_token_around_image>";
    let mut text = String::new();
    for row in 1..=rows {
        for column in 1..=columns {
            // Writing to a string does not fail.
            let _ = write!(text, "{EDGE}<row_{row}_col_{column}>{image}");
        }
        text.push('\n');
    }
    if rows > 0 {
        text.push('\n');
    }
    text + EDGE + "<global-img>" + image + EDGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_tagged_with_their_places() {
        let one = "<fake_token_around_image><global-img>I<fake_token_around_image>";
        assert_eq!(text("I", 0, 0), one);
        let rows = [1, 2].map(|row| {
            format!("<fake_token_around_image><row_{row}_col_1>I<fake_token_around_image><row_{row}_col_2>I\n")
        });
        assert_eq!(text("I", 2, 2), format!("{}{}\n{one}", rows[0], rows[1]));
    }
}
