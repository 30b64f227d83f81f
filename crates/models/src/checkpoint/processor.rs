//! Parameters of a model's image processor.

use serde_json::{Map, Value};

use crate::config::{ConfigError, Fields, VisionConfig};

/// The parameters of an image processor: `preprocessor_config.json`, or the object `image_processor` of
/// `processor_config.json`.
#[derive(Clone, Debug)]
pub struct ProcessorConfig {
    /// The sizes of an image and its views.
    pub size: ImageSize,
    /// Filter of every resize.
    pub resample: Resample,
    /// Mean of the rescaled values of each channel.
    pub mean: [f32; 3],
    /// Standard deviation of the rescaled values of each channel.
    pub std: [f32; 3],
    /// Factor of the 8-bit values.
    pub rescale: f64,
    /// Text of an image in a prompt, if the image's token alone is not enough.
    pub text: Option<ViewText>,
}

/// The text of an image in a prompt.
#[derive(Clone, Copy, Debug)]
pub struct ViewText {
    /// Text that a chat template writes for an image; `None` if it is that of the image's token.
    pub placeholder: Option<&'static str>,
    /// Writes the text that stands in its place, with the text `image` of the image's token once for each view, in the
    /// order of the views. `rows` and `columns` are those of the tiles, or 0 if the image is not cut.
    pub write: fn(image: &str, rows: usize, columns: usize) -> String,
}

/// The sizes of an image and of its views, which the encoder reads one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageSize {
    /// One view whose area is between two limits, in pixels.
    Area {
        /// Smallest area.
        min: u64,
        /// Largest area.
        max: u64,
    },
    /// One square view of the same size for every image, whatever its aspect ratio.
    Fixed {
        /// Side of the square in pixels.
        side: u32,
    },
    /// One square view, made in two steps.
    Square {
        /// Longest side after the first step in pixels.
        longest: u32,
        /// Side of the square in pixels.
        side: u32,
    },
    /// Square tiles, and a view of the whole image after them.
    Tiles {
        /// Longest side before the sides become multiples of a tile's, in pixels.
        longest: u32,
        /// Side of a tile in pixels.
        side: u32,
    },
}

/// Filter of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resample {
    /// Lanczos with three lobes.
    Lanczos,
    /// Linear in both directions.
    Bilinear,
    /// Cubic in both directions.
    Bicubic,
}

impl Resample {
    /// The filter of a number in Pillow.
    fn from_pillow(number: usize) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }
}

/// Rules of the image processors that have the same settings.
pub(crate) struct ProcessorRules {
    /// Beginnings of the names of their classes.
    pub(crate) classes: &'static [&'static str],
    /// Keys that no other family has, which are read or say nothing about the pixels of an image.
    pub(crate) keys: &'static [&'static str],
    /// Filter if the settings omit it.
    pub(crate) resample: Resample,
    /// Reads the sizes.
    pub(crate) size: fn(&Fields<'_>, &VisionConfig) -> Result<ImageSize, ConfigError>,
    /// Writes the text of an image.
    pub(crate) text: Option<ViewText>,
}

/// Keys of all families that are read, or that say nothing about pixels.
const KNOWN: [&str; 15] = [
    "size",
    "image_mean",
    "image_std",
    "rescale_factor",
    "resample",
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

/// Mean and standard deviation if the settings omit them.
const CENTRED: [f32; 3] = [0.5; 3];

/// Origin of an impossible setting.
#[derive(Debug)]
pub(super) enum Origin {
    /// The model's file.
    File,
    /// The settings that an operator has given.
    Given,
}

impl ProcessorConfig {
    /// Reads the parameters of a file, changed by those that an operator has `given` (`--mm-processor-kwargs`). A setting
    /// that is not known is an error, because the model would see other pixels than it was trained on.
    pub(super) fn read(
        file: &Map<String, Value>,
        given: &Map<String, Value>,
        rules: &ProcessorRules,
        vision: &VisionConfig,
    ) -> Result<Self, (Origin, ConfigError)> {
        Self::from_settings(rules, &changed(file, given), vision).map_err(|error| {
            // An error that the file has on its own is the file's.
            let own = Self::from_settings(rules, file, vision).is_err_and(|own| own.to_string() == error.to_string());
            (if own { Origin::File } else { Origin::Given }, error)
        })
    }

    fn from_settings(
        rules: &ProcessorRules,
        settings: &Map<String, Value>,
        vision: &VisionConfig,
    ) -> Result<Self, ConfigError> {
        let unknown = |(key, value): &(&String, &Value)| {
            let known = KNOWN.iter().chain(rules.keys).any(|known| known == key);
            !known && !matches!(value, Value::Null | Value::Bool(false))
        };
        if let Some((key, value)) = settings.iter().find(unknown) {
            return Err(ConfigError::Unsupported(format!("the setting '{key}': {value} of the image processor")));
        }
        let fields = Fields::new(settings);
        check(&fields, rules)?;
        let colours = |key: &str| match fields.f64s(key)?.as_deref() {
            None => Ok(CENTRED),
            Some(&[r, g, b]) => Ok([r as f32, g as f32, b as f32]),
            Some(_) => Err(ConfigError::wrong_type(key, "a list of three numbers")),
        };
        let resample = match fields.usize("resample")? {
            Some(number) => {
                Resample::from_pillow(number).ok_or_else(|| unsupported("resample", &number.to_string()))?
            }
            None => rules.resample,
        };
        Ok(Self {
            size: (rules.size)(&fields, vision)?,
            resample,
            mean: colours("image_mean")?,
            std: colours("image_std")?,
            rescale: fields.f64("rescale_factor")?.unwrap_or(1.0 / 255.0),
            text: rules.text,
        })
    }
}

/// The settings of a file with those that are given in their place.
fn changed(file: &Map<String, Value>, given: &Map<String, Value>) -> Map<String, Value> {
    let mut settings = file.clone();
    let scoped = given.get("images_kwargs").and_then(Value::as_object);
    for (key, value) in given.iter().filter(|(key, _)| *key != "images_kwargs").chain(scoped.into_iter().flatten()) {
        if key == "size" {
            // The older names of the same limits would win over it.
            settings.retain(|key, _| !matches!(key.as_str(), "min_pixels" | "max_pixels"));
        }
        settings.insert(key.clone(), value.clone());
    }
    settings
}

fn unsupported(key: &str, value: &str) -> ConfigError {
    ConfigError::Unsupported(format!("'{key}': {value} of the image processor"))
}

/// Checks the settings that have one possible value.
fn check(fields: &Fields<'_>, rules: &ProcessorRules) -> Result<(), ConfigError> {
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        if fields.bool(key)? == Some(false) {
            return Err(unsupported(key, "false"));
        }
    }
    if let Some(format) = fields.str("data_format")?.filter(|format| *format != "channels_first") {
        return Err(unsupported("data_format", &format!("\"{format}\"")));
    }
    let unknown = |class: &&str| !rules.classes.iter().any(|known| class.starts_with(known));
    if let Some(class) = fields.str("image_processor_type")?.filter(unknown) {
        return Err(unsupported("image_processor_type", &format!("\"{class}\"")));
    }
    Ok(())
}
