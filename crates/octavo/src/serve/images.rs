//! Images of requests: the settings of flags and variables, and what a model makes of images.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use octavo_media::resize::Filter;
use octavo_media::{ImageProcessor, MediaLoader, MediaObserver, MediaSettings, Normalize, PatchLayout, SizeRule};
use octavo_models::{ImageTokens, ProcessorConfig, VisionConfig};
use octavo_ops::Channel;
use octavo_runner::ImageConfig;
use octavo_server::ImageModel;
use octavo_telemetry::EngineMetrics;
use octavo_text::Tokenizer;

use crate::cli::{Environment, MediaArgs, TextList};
use crate::system;

/// vLLM's default of `--limit-mm-per-prompt`.
const DEFAULT_LIMIT: usize = 999;

/// vLLM's variables.
const TIMEOUT: &str = "VLLM_IMAGE_FETCH_TIMEOUT";
const ATTEMPTS: &str = "VLLM_MEDIA_FETCH_MAX_RETRIES";
const REDIRECTS: &str = "VLLM_MEDIA_URL_ALLOW_REDIRECTS";
const LARGEST_FILE: &str = "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB";
const LARGEST_IMAGE: &str = "VLLM_MAX_IMAGE_PIXELS";
const THREADS: &str = "VLLM_MEDIA_LOADING_THREAD_COUNT";

/// The colour below transparent pixels.
const BACKGROUND: [u8; 3] = [255; 3];

/// A model's encoder of images and its processor.
#[derive(Clone, Debug)]
pub(crate) struct Vision {
    pub(crate) encoder: VisionConfig,
    pub(crate) processor: ProcessorConfig,
    /// Maximum number of images in a prompt, at least 1.
    pub(crate) max_images: usize,
}

/// The maximum number of images in a prompt, by `--limit-mm-per-prompt` and `--language-model-only`.
pub(crate) fn limit(args: &MediaArgs) -> Result<usize> {
    if args.language_model_only {
        return Ok(0);
    }
    let mut limit = DEFAULT_LIMIT;
    for (kind, value) in args.limit_mm_per_prompt.iter().flat_map(|object| &object.0) {
        let count = value.get("count").unwrap_or(value).as_u64().and_then(|count| usize::try_from(count).ok());
        let Some(count) = count else { bail!("--limit-mm-per-prompt: '{kind}' is {value}, but must be a number") };
        match kind.as_str() {
            "image" => limit = count,
            "video" | "audio" | "vision_chunk" => {}
            _ => bail!("--limit-mm-per-prompt: unknown kind of input '{kind}'; known: image, video, audio"),
        }
    }
    Ok(limit)
}

/// The settings of the loader, except for the name of the model.
pub(crate) fn media_settings(args: &MediaArgs, environment: &Environment<'_>) -> Result<MediaSettings> {
    let mut settings = MediaSettings { cache_bytes: args.mm_processor_cache_gb, ..MediaSettings::default() };
    settings.processed_bytes = settings.processed_bytes.max(settings.cache_bytes.saturating_mul(2));
    let number = |name: &str, default: u64| match environment(name).as_deref().map(str::trim) {
        None | Some("") => Ok(default),
        Some(value) => value.parse().with_context(|| format!("{name}='{value}' is not a whole number of at least 0")),
    };
    let fetch = &mut settings.fetch;
    fetch.timeout = Duration::from_secs(number(TIMEOUT, fetch.timeout.as_secs())?.max(1));
    fetch.attempts = u32::try_from(number(ATTEMPTS, u64::from(fetch.attempts))?.clamp(1, 100))?;
    fetch.redirects = number(REDIRECTS, 1)? != 0;
    fetch.max_bytes = number(LARGEST_FILE, fetch.max_bytes >> 20)?.saturating_mul(1 << 20);
    fetch.domains = TextList::flat(&args.allowed_media_domains);
    fetch.private_networks.clone_from(&args.allowed_media_networks);
    fetch.folder.clone_from(&args.allowed_local_media_path);
    settings.max_pixels = number(LARGEST_IMAGE, settings.max_pixels)?;
    settings.threads = usize::try_from(number(THREADS, settings.threads as u64)?)?.max(1);
    Ok(settings)
}

impl Vision {
    /// The number of tokens of the largest image.
    pub(crate) fn largest_image(&self) -> usize {
        let cell = (self.encoder.patch_size * self.encoder.merge_size) as u64;
        usize::try_from(self.processor.max_pixels / (cell * cell)).unwrap_or(usize::MAX)
    }

    /// The number of tokens of images that a step encodes and the encoder cache holds: those of the largest image that fits
    /// a prompt of `max_model_len` tokens.
    pub(crate) fn tokens_at_once(&self, max_model_len: usize) -> usize {
        self.largest_image().min(max_model_len)
    }

    /// What a runner needs to encode images, with a cache for images of so many tokens.
    pub(crate) fn config(&self, cache_tokens: usize) -> ImageConfig {
        let channel = |(shift, divisor)| Channel { shift, divisor };
        ImageConfig {
            vision: self.encoder.clone(),
            channels: self.normalize().of_bytes().map(channel).to_vec(),
            media_rows: cache_tokens,
        }
    }

    fn normalize(&self) -> Normalize {
        let ProcessorConfig { mean, std, rescale, .. } = self.processor;
        Normalize { rescale, mean, std }
    }

    fn image_processor(&self) -> Result<ImageProcessor> {
        let ProcessorConfig { min_pixels, max_pixels, .. } = self.processor;
        let VisionConfig { patch_size, merge_size, temporal_patch_size, .. } = self.encoder;
        let processor = ImageProcessor {
            background: BACKGROUND,
            size: SizeRule::Area { min: min_pixels, max: max_pixels },
            filter: Filter::Bicubic,
            normalize: self.normalize(),
            layout: PatchLayout { patch: patch_size, merge: merge_size, frames: temporal_patch_size },
        };
        processor.validate()?;
        Ok(processor)
    }

    /// What the server needs to take images.
    pub(crate) fn model(
        &self,
        tokenizer: &Tokenizer,
        settings: MediaSettings,
        metrics: EngineMetrics,
    ) -> Result<ImageModel> {
        let ImageTokens { image, start, end, .. } = self.encoder.tokens;
        let text = |id: u32| tokenizer.id_to_token(id).with_context(|| format!("the vocabulary has no token {id}"));
        let placeholder = [start, Some(image), end].into_iter().flatten().map(text).collect::<Result<String>>()?;
        Ok(ImageModel {
            loader: MediaLoader::new(settings, Lookups(metrics))?,
            processor: Arc::new(self.image_processor()?),
            token: image,
            placeholder: placeholder.into(),
            max_images: self.max_images,
        })
    }
}

/// Counts the lookups of processed images.
struct Lookups(EngineMetrics);

impl MediaObserver for Lookups {
    fn queried(&self, hit: bool) {
        self.0.media_lookup(1, u64::from(hit));
    }
}

/// The settings with no more memory for processed images than a quarter of what is available.
pub(crate) fn within_memory(mut settings: MediaSettings) -> MediaSettings {
    if let Some(available) = system::available_memory() {
        settings.processed_bytes = settings.processed_bytes.min(available / 4);
    }
    settings
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::JsonObject;

    fn limited(limits: Value) -> Result<usize> {
        let Value::Object(object) = limits else { panic!("an object") };
        limit(&MediaArgs { limit_mm_per_prompt: Some(JsonObject(object)), ..MediaArgs::default() })
    }

    #[test]
    fn the_number_of_images_is_limited() {
        assert_eq!(limit(&MediaArgs::default()).unwrap(), 999);
        assert_eq!(limited(json!({"image": 4, "video": 0})).unwrap(), 4);
        assert_eq!(limited(json!({"image": {"count": 2, "width": 512, "height": 512}})).unwrap(), 2);
        let only = MediaArgs { language_model_only: true, ..MediaArgs::default() };
        assert_eq!(limit(&only).unwrap(), 0);
        assert!(limited(json!({"image": "many"})).unwrap_err().to_string().contains("must be a number"));
        assert!(limited(json!({"images": 4})).unwrap_err().to_string().contains("unknown kind"));
    }

    #[test]
    fn variables_of_vllm_set_the_limits_of_fetching() {
        let variable = |name: &str| match name {
            TIMEOUT => Some("9".to_owned()),
            REDIRECTS => Some("0".to_owned()),
            LARGEST_IMAGE => Some("1000".to_owned()),
            _ => None,
        };
        let args = MediaArgs { mm_processor_cache_gb: 1 << 30, ..MediaArgs::default() };
        let settings = media_settings(&args, &variable).unwrap();
        assert_eq!((settings.fetch.timeout, settings.fetch.redirects), (Duration::from_secs(9), false));
        assert_eq!((settings.max_pixels, settings.cache_bytes), (1000, 1 << 30));
        assert_eq!(settings.fetch.max_bytes, MediaSettings::default().fetch.max_bytes);
        let error = media_settings(&args, &|_| Some("soon".to_owned())).unwrap_err().to_string();
        assert!(error.starts_with("VLLM_IMAGE_FETCH_TIMEOUT='soon'"), "{error}");
    }
}
