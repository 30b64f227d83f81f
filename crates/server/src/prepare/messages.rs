//! Requests of the messages route.

use crate::app::AppState;
use crate::error::ApiError;
use crate::prepare::chat::{Conversation, Shared, conversation};
use crate::prepare::{Headers, Prepared, Staged, images_of};
use crate::types::messages::{MessagesRequest, Thinking};
use crate::wire::{Blocks, MessagesWire};

/// Prepares a messages request.
pub(crate) fn messages(
    state: &AppState,
    body: &[u8],
    headers: &Headers,
) -> Result<Staged<Prepared<MessagesWire>>, ApiError> {
    let MessagesRequest { mut chat, thinking } = MessagesRequest::parse(body)?;
    if let (Thinking::Budget(budget), Some(_)) = (thinking, state.config.api.reasoning) {
        chat.thinking_token_budget = Some(budget);
    }
    chat.include_reasoning = thinking != Thinking::Disabled;
    let shared = Shared::new(state, &chat)?;
    let (images, headers) = (images_of(state, &chat, headers)?, headers.clone());
    Staged::new(state, images, move |state, images| {
        let Conversation { id, submission, grammar, prompt, .. } =
            conversation(state, &chat, &headers, shared, &images)?;
        let wire = MessagesWire {
            id: format!("msg_{id}"),
            model: state.model.clone(),
            prompt_tokens: prompt.len(),
            blocks: Blocks::default(),
        };
        Ok(Prepared { submission, wire, stream: chat.common.stream, grammar })
    })
}
