//! Parameters of a model's image processor.

use serde_json::{Map, Value};

use crate::config::{ConfigError, Fields, VisionConfig};

/// The parameters of an image processor of the Qwen-VL family: `preprocessor_config.json`, or the object
/// `image_processor` of `processor_config.json`. Images are resized with a bicubic filter.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessorConfig {
    /// Smallest area of an image in pixels.
    pub min_pixels: u64,
    /// Largest area of an image in pixels.
    pub max_pixels: u64,
    /// Mean of the rescaled values of each channel.
    pub mean: [f32; 3],
    /// Standard deviation of the rescaled values of each channel.
    pub std: [f32; 3],
    /// Factor of the 8-bit values.
    pub rescale: f64,
}

impl Default for ProcessorConfig {
    /// The parameters that are published with Qwen3-VL.
    fn default() -> Self {
        Self { min_pixels: 65_536, max_pixels: 16_777_216, mean: [0.5; 3], std: [0.5; 3], rescale: 1.0 / 255.0 }
    }
}

/// Number of the bicubic filter among Pillow's.
const BICUBIC: usize = 3;

/// Keys that are read, or that say nothing about pixels.
const KNOWN: [&str; 20] = [
    "size",
    "min_pixels",
    "max_pixels",
    "image_mean",
    "image_std",
    "rescale_factor",
    "resample",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_resize",
    "do_rescale",
    "do_normalize",
    "do_convert_rgb",
    "data_format",
    "image_processor_type",
    "processor_class",
    "feature_extractor_type",
    "default_to_square",
    "auto_map",
];

impl ProcessorConfig {
    /// Reads the parameters of a file, changed by those that an operator has `given` (`--mm-processor-kwargs`). A setting
    /// that is not known is an error, because the model would see other pixels than it was trained on.
    pub(super) fn read(
        file: &Map<String, Value>,
        given: &Map<String, Value>,
        vision: &VisionConfig,
    ) -> Result<Self, ConfigError> {
        let mut settings = file.clone();
        let scoped = given.get("images_kwargs").and_then(Value::as_object);
        for (key, value) in given.iter().filter(|(key, _)| *key != "images_kwargs").chain(scoped.into_iter().flatten())
        {
            if key == "size" {
                // The older names of the same limits would win over it.
                settings.retain(|key, _| !matches!(key.as_str(), "min_pixels" | "max_pixels"));
            }
            settings.insert(key.clone(), value.clone());
        }
        let unknown = |(key, value): &(&String, &Value)| {
            !KNOWN.contains(&key.as_str()) && !matches!(value, Value::Null | Value::Bool(false))
        };
        if let Some((key, value)) = settings.iter().find(unknown) {
            return Err(ConfigError::Unsupported(format!("the setting '{key}': {value} of the image processor")));
        }
        let fields = Fields::new(&settings);
        check(&fields, vision)?;
        let (default, size) = (Self::default(), fields.object("size")?);
        let limit = |older: &str, key: &str, default: u64| -> Result<u64, ConfigError> {
            let limit = match fields.usize(older)? {
                Some(limit) => Some(limit),
                None => size.map(|size| size.usize(key)).transpose()?.flatten(),
            };
            Ok(limit.map_or(default, |limit| limit as u64))
        };
        let colours = |key: &str, default: [f32; 3]| match fields.f64s(key)?.as_deref() {
            None => Ok(default),
            Some(&[r, g, b]) => Ok([r as f32, g as f32, b as f32]),
            Some(_) => Err(ConfigError::wrong_type(key, "a list of three numbers")),
        };
        Ok(Self {
            min_pixels: limit("min_pixels", "shortest_edge", default.min_pixels)?,
            max_pixels: limit("max_pixels", "longest_edge", default.max_pixels)?,
            mean: colours("image_mean", default.mean)?,
            std: colours("image_std", default.std)?,
            rescale: fields.f64("rescale_factor")?.unwrap_or(default.rescale),
        })
    }
}

/// Checks the settings that have one possible value.
fn check(fields: &Fields<'_>, vision: &VisionConfig) -> Result<(), ConfigError> {
    let unsupported =
        |key: &str, value: String| Err(ConfigError::Unsupported(format!("'{key}': {value} of the image processor")));
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        if fields.bool(key)? == Some(false) {
            return unsupported(key, "false".to_owned());
        }
    }
    if let Some(format) = fields.str("data_format")?.filter(|format| *format != "channels_first") {
        return unsupported("data_format", format!("\"{format}\""));
    }
    let known = |kind: &&str| !kind.starts_with("Qwen2VLImageProcessor") && !kind.starts_with("Qwen3VLImageProcessor");
    if let Some(kind) = fields.str("image_processor_type")?.filter(known) {
        return unsupported("image_processor_type", format!("\"{kind}\""));
    }
    if let Some(filter) = fields.usize("resample")?.filter(|filter| *filter != BICUBIC) {
        return unsupported("resample", filter.to_string());
    }
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
    Ok(())
}
