//! Requests whose images must be loaded before their prompts are known.

use octavo_media::ImageRequest;
use octavo_text::image_parts;

use crate::api::chat::request::ChatRequest;
use crate::api::shared::headers::RequestHeaders;
use crate::app::AppState;
use crate::error::ApiError;
use crate::images::LoadedImages;

type Then<T> = Box<dyn FnOnce(&AppState, LoadedImages) -> Result<T, ApiError> + Send>;

/// A result, or the images that it waits for.
///
/// Loading takes no place in a lane, so that slow servers of images delay nobody else.
pub(crate) enum Staged<T> {
    /// The result.
    Ready(T),
    /// The images, and what is done when they are loaded.
    Images(Vec<ImageRequest>, Then<T>),
}

impl<T: 'static> Staged<T> {
    /// Goes on with `then` when images are loaded, at once if there are none.
    pub(crate) fn new(
        state: &AppState,
        images: Vec<ImageRequest>,
        then: impl FnOnce(&AppState, LoadedImages) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Self, ApiError> {
        if images.is_empty() { then(state, vec![]).map(Self::Ready) } else { Ok(Self::Images(images, Box::new(then))) }
    }
}

/// The images of a conversation, of which there are no more than the model takes.
pub(crate) fn images_of(
    state: &AppState,
    request: &ChatRequest,
    headers: &RequestHeaders,
) -> Result<Vec<ImageRequest>, ApiError> {
    let parts = image_parts(&request.messages).map_err(|error| request.refused(&error))?;
    // Clients that share the prefix cache share what they computed, but not the names that they chose.
    let scope = headers.caller.salt(request.common.cache_salt.as_deref(), false);
    state.image_requests(&parts, scope.as_ref())
}
