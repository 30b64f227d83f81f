//! Requests of the messages route.

use std::sync::Arc;

use crate::api::messages::request::{MessagesRequest, Thinking};
use crate::api::messages::stream::{Blocks, MessagesFormat};
use crate::api::shared::conversation::{Conversation, ConversationSettings, conversation};
use crate::api::shared::convert::Prepared;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::staged::{Staged, images_of};
use crate::app::AppState;
use crate::error::ApiError;

/// Prepares a messages request.
pub(crate) fn messages(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Prepared<MessagesFormat>>, ApiError> {
    let MessagesRequest { mut chat, thinking } = MessagesRequest::parse(body)?;
    if let (Thinking::Budget(budget), Some(_)) = (thinking, state.config.api.reasoning) {
        chat.thinking_token_budget = Some(budget);
    }
    chat.include_reasoning = thinking != Thinking::Disabled;
    let shared = ConversationSettings::new(state, &chat)?;
    let (images, headers) = (images_of(state, &chat, headers)?, headers.clone());
    Staged::new(state, images, move |state, images| {
        let Conversation { id, submission, grammar, prompt, .. } =
            conversation(state, &chat, &headers, shared, &images)?;
        let format = MessagesFormat {
            id: format!("msg_{id}"),
            model: Arc::clone(submission.model.name()),
            prompt_tokens: prompt.len(),
            blocks: Blocks::default(),
        };
        Ok(Prepared { submission, format, stream: chat.common.stream, grammar })
    })
}
