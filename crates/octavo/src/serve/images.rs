//! Images of requests: the settings of flags and variables, and what a model makes of images.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use octavo_media::resize::Filter;
use octavo_media::{ImageProcessor, MediaLoader, MediaObserver, MediaSettings, Normalize, PatchLayout, SizeRule};
use octavo_models::{
    Checkpoint, CheckpointError, ImageSize, ImageTokens, ProcessorConfig, Resample, ViewText, VisionConfig,
};
use octavo_ops::Channel;
use octavo_runner::ImageConfig;
use octavo_server::{ImageModel, ViewWriter};
use octavo_telemetry::EngineMetrics;
use octavo_text::Tokenizer;
use serde_json::{Map, Value};
use tracing::info;

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

/// The flag that changes settings of the image processor.
const PROCESSOR_FLAG: &str = "--mm-processor-kwargs";

/// The colour below transparent pixels.
const BACKGROUND: [u8; 3] = [255; 3];

/// A model's encoder of images and its processor.
#[derive(Clone, Debug)]
pub(crate) struct Vision {
    encoder: VisionConfig,
    processor: Arc<ImageProcessor>,
    text: Option<ViewText>,
    /// Maximum number of images in a prompt, at least 1.
    max_images: usize,
    /// Whether an operator has set the sizes of images.
    sized: bool,
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
    /// The encoder of a checkpoint and its processor, changed by flags; `None` if the model takes no images.
    pub(crate) fn from_checkpoint(
        checkpoint: &Checkpoint,
        args: &MediaArgs,
        max_images: usize,
    ) -> Result<Option<Self>> {
        let given = args.mm_processor_kwargs.clone().unwrap_or_default().0;
        let config = match checkpoint.image_processor(&given) {
            Err(CheckpointError::GivenSetting(error)) => bail!("{PROCESSOR_FLAG}: {error}"),
            config => config?,
        };
        let Some((encoder, config)) = checkpoint.config().vision.clone().zip(config) else { return Ok(None) };
        let processor = image_processor(&encoder, &config);
        if let Err(error) = processor.validate() {
            // An error that the model's files have on their own is theirs.
            let files = checkpoint.image_processor(&Map::new())?;
            let own = files.is_some_and(|files| image_processor(&encoder, &files).validate() == Err(error.clone()));
            if own { bail!(error) } else { bail!("{PROCESSOR_FLAG}: {error}") }
        }
        let sized = has_size(&given);
        Ok(Some(Self { encoder, processor: Arc::new(processor), text: config.text, max_images, sized }))
    }

    /// Makes images smaller than `pixels`, unless an operator has set their sizes.
    pub(crate) fn limit_area(&mut self, pixels: u64) {
        if !self.sized && Arc::make_mut(&mut self.processor).limit_area(pixels) {
            info!(
                "images: resized to at most {pixels} pixels on a processor; {PROCESSOR_FLAG} '{{\"max_pixels\": ...}}' sets another limit"
            );
        }
    }

    /// The number of tokens of the largest image.
    pub(crate) fn largest_image(&self) -> usize {
        self.processor.largest_image()
    }

    /// The number of tokens of images that a step encodes and the encoder cache holds: those of the largest image that fits
    /// a prompt of `max_model_len` tokens.
    pub(crate) fn tokens_at_once(&self, max_model_len: usize) -> usize {
        self.largest_image().min(max_model_len)
    }

    /// The number of tokens of an image that a step of the decoder must have room for; 0 if it may compute a part of them.
    pub(crate) fn tokens_of_a_step(&self, max_model_len: usize) -> usize {
        if self.encoder.seen_whole { self.processor.largest_view().min(max_model_len) } else { 0 }
    }

    /// The number of patches of the largest view that fits a prompt of `max_model_len` tokens.
    pub(crate) fn patches_of_a_view(&self, max_model_len: usize) -> usize {
        self.processor.largest_view().min(max_model_len).saturating_mul(self.encoder.merged_patches())
    }

    /// What a runner needs to encode images, with a cache for images of so many tokens.
    pub(crate) fn config(&self, cache_tokens: usize) -> ImageConfig {
        let channel = |(shift, divisor)| Channel { shift, divisor };
        ImageConfig {
            vision: self.encoder.clone(),
            channels: self.processor.normalize.of_bytes().map(channel).to_vec(),
            media_rows: cache_tokens,
        }
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
        let placeholder = match self.text.and_then(|views| views.placeholder) {
            Some(placeholder) => placeholder.to_owned(),
            None => [start, Some(image), end].into_iter().flatten().map(text).collect::<Result<String>>()?,
        };
        let writer = |views: ViewText| {
            let token = text(image)?;
            let place = views.placeholder.unwrap_or(&token).into();
            anyhow::Ok(ViewWriter { place, token: token.into(), write: views.write })
        };
        Ok(ImageModel {
            loader: MediaLoader::new(settings, Lookups(metrics))?,
            processor: Arc::clone(&self.processor),
            token: image,
            placeholder: placeholder.into(),
            views: self.text.map(writer).transpose()?,
            max_images: self.max_images,
        })
    }
}

/// Whether settings of an image processor have a size.
fn has_size(settings: &Map<String, Value>) -> bool {
    let scoped = settings.get("images_kwargs").and_then(Value::as_object);
    let has = |settings: &Map<String, Value>| {
        ["size", "min_pixels", "max_pixels"].iter().any(|key| settings.contains_key(*key))
    };
    has(settings) || scoped.is_some_and(has)
}

/// The processor of an encoder's images.
fn image_processor(encoder: &VisionConfig, config: &ProcessorConfig) -> ImageProcessor {
    let ProcessorConfig { mean, std, rescale, .. } = *config;
    let VisionConfig { patch_size, merge_size, temporal_patch_size, .. } = *encoder;
    ImageProcessor {
        background: BACKGROUND,
        size: match config.size {
            ImageSize::Area { min, max } => SizeRule::Area { min, max },
            ImageSize::Fixed { side } => SizeRule::Fixed { width: side, height: side },
            ImageSize::Square { longest, side } => SizeRule::Square { longest, side },
            ImageSize::Tiles { longest, side } => SizeRule::Tiles { longest, side },
        },
        filter: match config.resample {
            Resample::Lanczos => Filter::Lanczos,
            Resample::Bilinear => Filter::Bilinear,
            Resample::Bicubic => Filter::Bicubic,
        },
        normalize: Normalize { rescale, mean, std },
        layout: PatchLayout { patch: patch_size, merge: merge_size, frames: temporal_patch_size },
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
    use serde_json::json;

    use super::*;
    use crate::cli::JsonObject;

    fn limited(limits: Value) -> Result<usize> {
        let Value::Object(object) = limits else { panic!("an object") };
        limit(&MediaArgs { limit_mm_per_prompt: Some(JsonObject(object)), ..MediaArgs::default() })
    }

    #[test]
    fn images_are_smaller_on_a_processor_unless_their_size_is_given() {
        let shape = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/qwen3-vl-8b");
        let checkpoint = Checkpoint::open_shape(&shape).unwrap();
        let tokens = |given: Value| {
            let Value::Object(object) = given else { panic!("an object") };
            let args = MediaArgs { mm_processor_kwargs: Some(JsonObject(object)), ..MediaArgs::default() };
            let mut vision = Vision::from_checkpoint(&checkpoint, &args, 1).unwrap().unwrap();
            vision.limit_area(1 << 20);
            vision.largest_image()
        };
        assert_eq!(tokens(json!({})), 1024);
        assert_eq!(tokens(json!({"max_pixels": 4 << 20})), 4096);
        assert_eq!(tokens(json!({"images_kwargs": {"size": {"longest_edge": 2 << 20, "shortest_edge": 65536}}})), 2048);
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
