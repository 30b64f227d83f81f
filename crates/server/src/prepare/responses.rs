//! Requests of the responses route.

use crate::app::AppState;
use crate::error::ApiError;
use crate::prepare::chat::{Conversation, conversation};
use crate::prepare::{Headers, Prepared, envelope, spelling};
use crate::types::response::UsageDetails;
use crate::types::responses::ResponsesRequest;
use crate::wire::{Items, ResponsesWire};

/// Prepares a responses request.
pub(crate) fn responses(state: &AppState, body: &[u8], headers: &Headers) -> Result<Prepared<ResponsesWire>, ApiError> {
    let ResponsesRequest { chat, mut settings, previous_response_id } = ResponsesRequest::parse(body)?;
    if let Some(id) = previous_response_id {
        return Err(ApiError::response_not_found(&id));
    }
    let Conversation { id, submission, grammar, prompt, .. } = conversation(state, &chat, headers)?;
    let (temperature, top_p) = submission.sampling.temperature_and_top_p();
    for (key, value) in [("temperature", temperature), ("top_p", top_p)] {
        settings.insert(key.into(), value.into());
    }
    settings.insert("top_logprobs".into(), chat.logprobs.unwrap_or(0).into());
    let wire = ResponsesWire {
        envelope: envelope(state, format!("resp_{id}")),
        prompt_tokens: prompt.len(),
        settings,
        logprobs: submission.sampling.chat_logprobs(),
        spelling: spelling(state, &chat.common),
        details: UsageDetails { metrics: state.config.api.request_metrics, ..UsageDetails::default() },
        items: Items::default(),
    };
    Ok(Prepared { submission, wire, stream: chat.common.stream, grammar })
}
