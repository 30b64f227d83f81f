//! Chat requests.

use std::sync::Arc;

use octavo_media::ProcessedImage;
use serde_json::Value;

use crate::api::chat::request::ChatRequest;
use crate::api::chat::stream::ChatFormat;
use crate::api::shared::conversation::{Conversation, ConversationSettings, conversation};
use crate::api::shared::convert::{Prepared, envelope, spelling, stream_options};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::size::ResponseSize;
use crate::api::shared::staged::{Staged, images_of};
use crate::app::AppState;
use crate::choices::{Calls, Submission};
use crate::error::ApiError;

/// Prepares a chat request.
pub(crate) fn chat(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Prepared<ChatFormat>>, ApiError> {
    let request = ChatRequest::parse(body)?;
    let shared = ConversationSettings::new(state, &request)?;
    let (images, headers) = (images_of(state, &request, headers)?, headers.clone());
    Staged::new(state, images, move |state, images| Ok(prepare(state, &request, &headers, shared, &images)?.0))
}

/// Prepares a batch: one request for each conversation. They share an id, to which the engine's requests add the index.
pub(crate) fn batch(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Vec<Prepared<ChatFormat>>>, ApiError> {
    let (mut request, conversations) = ChatRequest::parse_batch(body)?;
    let limit = state.config.max_sequences;
    if conversations.len() > limit {
        let message = format!("A batch has at most {limit} conversations, got {}.", conversations.len());
        return Err(ApiError::bad_request(message).with_param("messages"));
    }
    let shared = ConversationSettings::new(state, &request)?;
    let (mut counted, mut all) = (Vec::with_capacity(conversations.len()), vec![]);
    for messages in conversations {
        request.messages = messages;
        let images = images_of(state, &request, headers)?;
        counted.push(BatchedMessages { messages: std::mem::take(&mut request.messages), images: images.len() });
        all.extend(images);
    }
    let headers = headers.with_id(&headers.id(request.common.request_id.as_ref()));
    Staged::new(state, all, move |state, images| conversations_of(state, request, &headers, shared, counted, &images))
}

/// A conversation of a batch.
struct BatchedMessages {
    messages: Vec<Value>,
    /// Number of its images.
    images: usize,
}

/// Prepares the conversations of a batch, each of which has the next so many of the images.
fn conversations_of(
    state: &AppState,
    mut request: ChatRequest,
    headers: &RequestHeaders,
    shared: ConversationSettings,
    conversations: Vec<BatchedMessages>,
    mut images: &[Arc<ProcessedImage>],
) -> Result<Vec<Prepared<ChatFormat>>, ApiError> {
    let (mut batch, mut size) = (Vec::with_capacity(conversations.len()), ResponseSize::new(1));
    for (index, conversation) in conversations.into_iter().enumerate() {
        request.messages = conversation.messages;
        let (own, others) = images.split_at(conversation.images.min(images.len()));
        images = others;
        let (mut prepared, bytes) = prepare(state, &request, headers, shared.clone(), own)?;
        size = size.bytes("messages", bytes);
        prepared.submission.request_id = format!("{}_{index}", prepared.submission.request_id);
        // The first request has the grammar of all.
        prepared.grammar = prepared.grammar.filter(|_| index == 0);
        batch.push(prepared);
    }
    size.check(state)?;
    Ok(batch)
}

/// Prepares one conversation. The estimated size of its response, in bytes, is returned too.
fn prepare(
    state: &AppState,
    request: &ChatRequest,
    headers: &RequestHeaders,
    shared: ConversationSettings,
    images: &[Arc<ProcessedImage>],
) -> Result<(Prepared<ChatFormat>, usize), ApiError> {
    let Conversation { id, submission, grammar, prompt, text } = conversation(state, request, headers, shared, images)?;
    let (common, api) = (&request.common, &state.config.api);
    let last = request.messages.last();
    let role = match last.and_then(|message| message.get("role")?.as_str()) {
        Some(role) if !request.add_generation_prompt => role,
        _ => &api.response_role,
    };
    let echo = last.filter(|message| request.echo && message.get("role").and_then(Value::as_str) == Some(role));
    let bytes = check_size(state, request, &submission, echo)?;
    let parsing = &submission.parsing;
    let format = ChatFormat {
        envelope: envelope(state, &submission.model, format!("chatcmpl-{id}"), parsing.reasoning.is_some()),
        n: submission.sampling.n,
        prompt,
        role: role.to_owned(),
        echo: echo.and_then(|message| message.get("content")?.as_str()).map(str::to_owned),
        logprobs: submission.sampling.chat_logprobs(),
        prompt_logprobs: common.prompt_logprobs.is_some(),
        spelling: spelling(state, common),
        return_token_ids: common.return_token_ids,
        prompt_text: request.return_prompt_text.then_some(text),
        parses: parsing.reasoning.is_some() || !matches!(parsing.calls, Calls::None),
    };
    Ok((Prepared { submission, format, stream: stream_options(state, common), grammar }, bytes))
}

/// Refuses a request whose response would be too large, and returns the estimated size, in bytes. Tokens count as generated as far as the request limits them.
fn check_size(
    state: &AppState,
    request: &ChatRequest,
    submission: &Submission,
    echo: Option<&Value>,
) -> Result<usize, ApiError> {
    let sampling = &submission.sampling;
    let prompt = submission.prompts[0].tokens.len();
    let generated = request.limit.1.map_or(0, |tokens| usize::try_from(tokens).unwrap_or(0));
    let mut size = ResponseSize::new(sampling.n);
    if let Some(text) = echo.and_then(|message| message.get("content")?.as_str()) {
        size = size.texts("echo", [text]);
    }
    if let Some(top) = sampling.chat_logprobs() {
        size = size.chat_logprobs("top_logprobs", generated, top);
    }
    if let Some(top) = sampling.prompt_logprobs() {
        size = size.prompt_logprobs(prompt, top);
    }
    if request.common.return_token_ids {
        size = size.token_ids("return_token_ids", prompt + generated);
    }
    size.check(state)
}
