//! Images of requests: from the parts of messages to the images of prompts.

use std::borrow::Cow;
use std::sync::Arc;

use futures::StreamExt;
use octavo_engine::{ImageHash, ImageInput, ImageSpan, PromptImage};
use octavo_media::{ImageProcessor, ImageRequest, MediaError, MediaLoader, Patches, ProcessedImage};
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
    /// The text of an image in a rendered prompt, which has the token once.
    pub placeholder: Arc<str>,
    /// Writes the views of an image in place of its token. `None` if every image is one view and its token is all.
    pub views: Option<ViewWriter>,
    /// Maximum number of images in a prompt (`--limit-mm-per-prompt`).
    pub max_images: usize,
}

/// Writes the text of an image with `rows` and `columns` of tiles, or 0 of them. It has the text `token` of the image's
/// token once for each view, in the order of the views.
pub type WriteViews = fn(token: &str, rows: usize, columns: usize) -> String;

/// Writes the views of images.
#[derive(Clone, Debug)]
pub struct ViewWriter {
    /// The text in a rendered prompt in whose place an image is written.
    pub place: Arc<str>,
    /// The text of the image's token.
    pub token: Arc<str>,
    /// Writes one image.
    pub write: WriteViews,
}

impl ViewWriter {
    /// Writes every image of a rendered prompt in its place.
    fn write(&self, text: &str, images: &[Arc<ProcessedImage>]) -> Result<String, ApiError> {
        let pieces: Vec<_> = text.split(&*self.place).collect();
        let places = pieces.len() - 1;
        if places != images.len() {
            return Err(misplaced(places, images.len()));
        }
        let written = images.iter().map(|image| {
            let tiles = image.views.tiles();
            (self.write)(&self.token, tiles.rows, tiles.columns)
        });
        let written: Vec<_> = written.chain([String::new()]).collect();
        Ok(pieces.into_iter().zip(&written).flat_map(|(piece, image)| [piece, image]).collect())
    }
}

impl ImageModel {
    /// A rendered prompt in which the token of each image stands once for each of its views.
    pub(crate) fn with_views<'a>(
        &self,
        text: &'a str,
        images: &[Arc<ProcessedImage>],
    ) -> Result<Cow<'a, str>, ApiError> {
        match &self.views {
            Some(writer) => writer.write(text, images).map(Cow::Owned),
            None => Ok(Cow::Borrowed(text)),
        }
    }
}

/// The images of a prompt in order, loaded.
pub(crate) type LoadedImages = Vec<Arc<ProcessedImage>>;

impl App {
    /// Maximum number of images in a prompt; 0 if the model takes none.
    pub(crate) fn max_images(&self) -> usize {
        self.text.images.as_ref().map_or(0, |images| images.max_images)
    }

    /// The requests for the images in parts of messages; `scope` are the clients that share names of images.
    pub(crate) fn image_requests(
        &self,
        parts: &[ImagePart<'_>],
        scope: Option<&Arc<str>>,
    ) -> Result<Vec<ImageRequest>, ApiError> {
        let limit = self.max_images();
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
        tokens += image.views.tokens();
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

    /// Puts the tokens of each view of the images in the place of its `token`.
    pub(crate) fn new(prompt: Vec<u32>, token: u32, images: &[Arc<ProcessedImage>]) -> Result<Self, ApiError> {
        let views: Vec<_> = images.iter().flat_map(View::all).collect();
        let places: Vec<usize> = (0..prompt.len()).filter(|&at| prompt[at] == token).collect();
        if places.len() != views.len() {
            return Err(misplaced(places.len(), images.len()));
        }
        let total = views.iter().map(|view| view.patches().tokens()).sum::<usize>() + prompt.len() - places.len();
        let (mut tokens, mut placed, mut done) = (Vec::with_capacity(total), Vec::with_capacity(views.len()), 0);
        for (&at, view) in places.iter().zip(views) {
            tokens.extend_from_slice(&prompt[done..at]);
            let span = view.span(tokens.len());
            tokens.extend(std::iter::repeat_n(token, span.tokens() as usize));
            let hash = ImageHash(view.image.identity.of_view(view.index));
            placed.push(PromptImage { span, hash, input: view.input() });
            done = at + 1;
        }
        tokens.extend_from_slice(&prompt[done..]);
        Ok(Self { tokens, images: placed.into() })
    }
}

/// The error of a prompt whose placeholders are not those of its images.
fn misplaced(places: usize, images: usize) -> ApiError {
    let message = format!(
        "The prompt has {places} placeholders for images, but the messages have {images} images. The texts of messages must \
         not contain the model's tokens of images, and its chat template must place each image once."
    );
    ApiError::bad_request(message).with_param("messages")
}

/// A view of an image, which is an image of its own to the engine. Other requests may use its pixels too.
struct View {
    image: Arc<ProcessedImage>,
    index: usize,
}

impl View {
    fn all(image: &Arc<ProcessedImage>) -> impl Iterator<Item = Self> {
        (0..image.views.patches().len()).map(|index| Self { image: Arc::clone(image), index })
    }

    fn patches(&self) -> &Patches {
        &self.image.views.patches()[self.index]
    }

    /// The tokens of the view if they begin at a position.
    fn span(&self, start: usize) -> ImageSpan {
        let (grid, merge) = (self.patches().grid(), self.patches().layout().merge);
        ImageSpan { start: start as u32, rows: (grid.height / merge) as u32, cols: (grid.width / merge) as u32 }
    }

    fn input(self) -> Arc<ImageInput> {
        let grid = self.patches().grid();
        Arc::new(ImageInput { rows: grid.height as u32, cols: grid.width as u32, patches: Box::new(self) })
    }
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        self.patches().data()
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
