//! Embedding requests.

use std::sync::Arc;
use std::time::Instant;

use octavo_engine::ClientId;
use octavo_text::{Modality, image_parts};

use crate::app::AppState;
use crate::error::ApiError;
use crate::keys::Meter;
use crate::prepare::{Headers, check_model, prompt_of, prompt_tokens, truncate};
use crate::trace::RequestTrace;
use crate::types::embeddings::{EmbeddingRequest, Encoding, Input};

/// Texts that are ready to be embedded.
pub(crate) struct PreparedEmbeddings {
    pub(crate) request_id: String,
    pub(crate) prompts: Vec<Arc<[u32]>>,
    pub(crate) encoding: Encoding,
    pub(crate) dimensions: Option<usize>,
    pub(crate) priority: i64,
    pub(crate) client: ClientId,
    pub(crate) meter: Meter,
    pub(crate) cache_salt: Option<Arc<str>>,
    pub(crate) arrival: Instant,
    pub(crate) trace: RequestTrace,
}

/// Prepares an embeddings request.
pub(crate) fn embeddings(state: &AppState, body: &[u8], headers: &Headers) -> Result<PreparedEmbeddings, ApiError> {
    let request = EmbeddingRequest::parse(body)?;
    check_model(state, request.model.as_deref())?;
    let most = state.config.embedding_size;
    let dimensions = request.dimensions.map(|dimensions| usize::try_from(dimensions).unwrap_or(usize::MAX));
    if let Some(dimensions) = dimensions.filter(|&dimensions| dimensions > most) {
        let message = format!("dimensions must be at most {most}, got {dimensions}.");
        return Err(ApiError::invalid_value("dimensions", dimensions, message));
    }
    let prompts = match &request.input {
        Input::Conversation(chat) if !image_parts(&chat.messages)?.is_empty() => {
            return Err(ApiError::too_many(Modality::Image, 0));
        }
        Input::Conversation(chat) => vec![fit(state, &request, prompt_of(state, chat, &[])?.1.tokens)?],
        Input::Prompts(prompts) => prompts
            .iter()
            .map(|prompt| {
                let tokens = prompt_tokens(state, prompt, request.add_special_tokens, request.truncation)?;
                fit(state, &request, tokens)
            })
            .collect::<Result<_, _>>()?,
    };
    Ok(PreparedEmbeddings {
        request_id: headers.id(request.request_id.as_ref()),
        prompts,
        encoding: request.encoding,
        dimensions,
        priority: headers.priority(state, request.priority),
        client: headers.caller.id(),
        meter: headers.caller.meter().clone(),
        cache_salt: headers.salt(state, request.cache_salt.as_deref()),
        arrival: headers.arrival,
        trace: headers.trace.clone(),
    })
}

fn fit(state: &AppState, request: &EmbeddingRequest, mut tokens: Vec<u32>) -> Result<Arc<[u32]>, ApiError> {
    let max_model_len = state.config.max_model_len;
    if let Some(truncation) = request.truncation {
        truncate(&mut tokens, truncation, 0, max_model_len)?;
    }
    if tokens.is_empty() {
        return Err(ApiError::bad_request("The input cannot be empty.").with_param("input"));
    }
    if tokens.len() > max_model_len {
        return Err(ApiError::prompt_too_long(tokens.len(), false, max_model_len));
    }
    Ok(tokens.into())
}
