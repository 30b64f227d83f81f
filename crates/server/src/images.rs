//! Images of requests: from the parts of messages to the images of prompts.

use std::sync::Arc;

use futures::StreamExt;
use octavo_engine::{ImageHash, ImageInput, ImageSpan, PromptImage};
use octavo_media::{ImageProcessor, ImageRequest, MediaError, MediaLoader, ProcessedImage};
use octavo_text::ImagePart;

use crate::app::{App, AppState};
use crate::error::ApiError;

/// Images of a request that are loaded at the same time.
const LOADED_AT_ONCE: usize = 8;

/// How a model takes images.
#[derive(Clone, Debug)]
pub struct ImageModel {
    /// Loads images.
    pub loader: MediaLoader,
    /// What is done to them.
    pub processor: Arc<ImageProcessor>,
    /// The token that a prompt has in place of each token of an image.
    pub token: u32,
    /// The text of an image in a prompt, which has the token once.
    pub placeholder: Arc<str>,
    /// Maximum number of images in a prompt (`--limit-mm-per-prompt`).
    pub max_images: usize,
}

/// The images of a prompt in order, loaded.
pub(crate) type LoadedImages = Vec<Arc<ProcessedImage>>;

impl App {
    /// The requests for the images in parts of messages; `scope` are the clients that share names of images.
    pub(crate) fn image_requests(
        &self,
        parts: &[ImagePart<'_>],
        scope: Option<&Arc<str>>,
    ) -> Result<Vec<ImageRequest>, ApiError> {
        let limit = self.text.images.as_ref().map_or(0, |images| images.max_images);
        if parts.len() > limit {
            return Err(ApiError::too_many_images(limit, self.text.images.is_some()));
        }
        let Some(images) = &self.text.images else { return Ok(vec![]) };
        let request = |part: &ImagePart<'_>| ImageRequest {
            source: part.url.map(Arc::from),
            uuid: part.uuid.map(Arc::from),
            scope: scope.cloned(),
            processor: Arc::clone(&images.processor),
        };
        Ok(parts.iter().map(request).collect())
    }
}

/// Loads images. Dropping the future cancels the work.
pub(crate) async fn load(state: &AppState, requests: Vec<ImageRequest>) -> Result<LoadedImages, ApiError> {
    let Some(images) = &state.text.images else { return Ok(vec![]) };
    let limit = state.config.max_model_len;
    let (mut loaded, mut tokens) = (Vec::with_capacity(requests.len()), 0);
    let mut loading =
        futures::stream::iter(requests).map(|request| images.loader.load(request)).buffered(LOADED_AT_ONCE);
    while let Some(image) = loading.next().await {
        let image = image.map_err(|error| ApiError::from_media(&error))?;
        // Before more of them are in memory.
        tokens += image.patches.tokens();
        if tokens > limit {
            return Err(ApiError::prompt_too_long(tokens, true, limit));
        }
        loaded.push(image);
    }
    Ok(loaded)
}

/// A prompt with the tokens of its images.
#[derive(Debug)]
pub(crate) struct WithImages {
    pub(crate) tokens: Vec<u32>,
    pub(crate) images: Arc<[PromptImage]>,
}

impl WithImages {
    pub(crate) fn none(tokens: Vec<u32>) -> Self {
        Self { tokens, images: Arc::default() }
    }

    /// Puts the tokens of each image in the place of its `token`.
    pub(crate) fn new(prompt: Vec<u32>, token: u32, images: &[Arc<ProcessedImage>]) -> Result<Self, ApiError> {
        let places: Vec<usize> = (0..prompt.len()).filter(|&at| prompt[at] == token).collect();
        if places.len() != images.len() {
            let message = format!(
                "The prompt has {} placeholders for images, but the messages have {} images. The texts of messages must \
                 not contain the model's tokens of images, and its chat template must place each image once.",
                places.len(),
                images.len()
            );
            return Err(ApiError::bad_request(message).with_param("messages"));
        }
        let total = images.iter().map(|image| image.patches.tokens()).sum::<usize>() + prompt.len() - places.len();
        let (mut tokens, mut placed, mut done) = (Vec::with_capacity(total), Vec::with_capacity(images.len()), 0);
        for (&at, image) in places.iter().zip(images) {
            tokens.extend_from_slice(&prompt[done..at]);
            let span = span(tokens.len(), image);
            tokens.extend(std::iter::repeat_n(token, span.tokens() as usize));
            placed.push(PromptImage { span, hash: ImageHash(image.identity.digest()), input: input(image) });
            done = at + 1;
        }
        tokens.extend_from_slice(&prompt[done..]);
        Ok(Self { tokens, images: placed.into() })
    }
}

/// The tokens of an image that begin at a position.
fn span(start: usize, image: &ProcessedImage) -> ImageSpan {
    let (grid, merge) = (image.patches.grid(), image.patches.layout().merge);
    ImageSpan { start: start as u32, rows: (grid.height / merge) as u32, cols: (grid.width / merge) as u32 }
}

fn input(image: &Arc<ProcessedImage>) -> Arc<ImageInput> {
    let grid = image.patches.grid();
    let patches = Box::new(Pixels(Arc::clone(image)));
    Arc::new(ImageInput { rows: grid.height as u32, cols: grid.width as u32, patches })
}

/// The pixels of an image that other requests may use too.
struct Pixels(Arc<ProcessedImage>);

impl AsRef<[u8]> for Pixels {
    fn as_ref(&self) -> &[u8] {
        self.0.patches.data()
    }
}

impl ApiError {
    /// An image that cannot be used. The messages are vLLM's where it has one.
    fn from_media(error: &MediaError) -> Self {
        let message = error.to_string();
        match error.status() {
            422 => Self::unprocessable(message),
            429 => Self::busy(message),
            _ => Self::bad_request(message),
        }
        .with_param("image_url")
    }
}
