//! Requests of the responses route.

use std::sync::Arc;

use octavo_engine::ClientId;
use serde_json::Value;

use crate::api::responses::request::ResponsesRequest;
use crate::api::responses::stored::Recorder;
use crate::api::responses::stream::{Items, ResponsesFormat};
use crate::api::shared::conversation::{Conversation, ConversationSettings, conversation};
use crate::api::shared::convert::{Prepared, envelope, spelling};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::places::Place;
use crate::api::shared::staged::{Staged, images_of};
use crate::app::AppState;
use crate::error::ApiError;

/// Prepares a responses request.
pub(crate) fn responses(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Prepared<ResponsesFormat>>, ApiError> {
    let ResponsesRequest { mut chat, mut settings, previous_response_id, instructed, store, background } =
        ResponsesRequest::parse(body)?;
    if background && state.responses.is_none() {
        let message = "This server does not support `store=True` and therefore does not support the background mode. To \
                       enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when \
                       launching the server.";
        return Err(ApiError::invalid_request(message).with_param("background"));
    }
    let own = usize::from(instructed);
    if let Some(id) = previous_response_id {
        let previous = continued(state, headers.caller.owner(), &id)?;
        let places = vec![Place::content("previous_response_id"); previous.len()];
        chat.messages.splice(own..own, previous);
        chat.places.splice(own..own, places);
    }
    let shared = ConversationSettings::new(state, &chat)?;
    let (images, headers) = (images_of(state, &chat, headers)?, headers.clone());
    Staged::new(state, images, move |state, images| {
        let Conversation { id, submission, grammar, prompt, .. } =
            conversation(state, &chat, &headers, shared, &images)?;
        let (temperature, top_p) = submission.sampling.temperature_and_top_p();
        for (key, value) in [("temperature", temperature), ("top_p", top_p)] {
            settings.insert(key.into(), value.into());
        }
        settings.insert("top_logprobs".into(), chat.logprobs.unwrap_or(0).into());
        let id = format!("resp_{id}");
        let store = state.responses.as_ref().filter(|_| store);
        let owner = headers.caller.owner();
        let recorder = store.map(|store| Recorder::new(Arc::clone(store), owner, &id, chat.messages.split_off(own)));
        let format = ResponsesFormat {
            envelope: envelope(state, &submission.model, id, false),
            recorder,
            background,
            prompt_tokens: prompt.len(),
            settings,
            logprobs: submission.sampling.chat_logprobs(),
            spelling: spelling(state, &chat.common),
            items: Items::default(),
        };
        Ok(Prepared { submission, format, stream: chat.common.stream, grammar })
    })
}

/// The messages of the response that a request continues, without its instructions.
fn continued(state: &AppState, owner: ClientId, id: &str) -> Result<Vec<Value>, ApiError> {
    let known = state.responses.as_ref().and_then(|store| store.conversation(owner, id));
    match known.ok_or_else(|| ApiError::response_not_found(id))? {
        (messages, true) => Ok(messages),
        (_, false) => {
            let message = "The previous response has not ended, so it cannot be continued.";
            Err(ApiError::invalid_request(message).with_param("previous_response_id"))
        }
    }
}
