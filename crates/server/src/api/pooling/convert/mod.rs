//! Requests for vectors and scores.

mod classification;
mod cohere;
mod embeddings;
mod prompts;
mod scoring;
mod task;

use std::sync::Arc;

use octavo_engine::Pooling;

use crate::api::pooling::answer::{Answer, Finish, Head};
use crate::api::pooling::request::PoolingFields;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::model::ResolvedModel;
use crate::api::shared::size::ResponseSize;
use crate::app::{App, AppState, unix_time};
use crate::caller::Origin;
use crate::config::PoolingKind;
use crate::error::ApiError;

pub(crate) use classification::classification;
pub(crate) use cohere::cohere_embeddings;
pub(crate) use embeddings::embeddings;
pub(crate) use prompts::PoolingPrompt;
pub(crate) use scoring::{ranking, scores};
pub(crate) use task::pooling;

/// The function that prepares a request from its body.
pub(crate) type PreparePooling = fn(&AppState, &[u8], &RequestHeaders) -> Result<PreparedPooling, ApiError>;

/// Estimated bytes of a result in an answer, beside its numbers.
const ITEM_BYTES: usize = 64;

/// A request that is ready to run.
pub(crate) struct PreparedPooling {
    pub(crate) request_id: String,
    pub(crate) model: ResolvedModel,
    pub(crate) prompts: Vec<PoolingPrompt>,
    pub(crate) pooling: Pooling,
    pub(crate) origin: Origin,
    pub(crate) answer: Box<dyn Answer>,
    /// Estimated size of the answer, in bytes.
    pub(crate) bytes: usize,
}

impl PreparedPooling {
    /// The tokens of all prompts.
    pub(crate) fn tokens(&self) -> usize {
        tokens_of(&self.prompts)
    }
}

fn tokens_of(prompts: &[PoolingPrompt]) -> usize {
    prompts.iter().map(|prompt| prompt.tokens.len()).sum()
}

/// The prompts of a request and the form of its answer.
struct Work {
    model: ResolvedModel,
    prompts: Vec<PoolingPrompt>,
    pooling: Pooling,
    answer: Box<dyn Answer>,
    bytes: usize,
}

/// A request with the fields and headers that all requests have; `id` is the one of its headers.
fn prepared(
    state: &AppState,
    common: &PoolingFields,
    headers: &RequestHeaders,
    id: String,
    work: Work,
) -> PreparedPooling {
    let Work { model, prompts, pooling, answer, bytes } = work;
    PreparedPooling {
        request_id: id,
        model,
        prompts,
        pooling,
        origin: headers.origin(state, common.priority, common.cache_salt.as_deref()),
        answer,
        bytes,
    }
}

/// The first fields of a list; `id` has the prefix of its route.
fn head(model: &ResolvedModel, id: String, prompt_tokens: usize) -> Head {
    Head { id, created: unix_time(), model: Arc::clone(model.name()), prompt_tokens }
}

/// Refuses results that would make too large an answer. Returns the estimated bytes.
fn check_size(state: &AppState, results: usize, elements: usize, bytes_per_element: usize) -> Result<usize, ApiError> {
    let bytes = elements.saturating_mul(bytes_per_element).saturating_add(results * ITEM_BYTES);
    ResponseSize::without_choices().bytes("input", bytes).check(state)
}

impl App {
    /// Whether vectors are normalised: as the request says, or else as the model does it.
    fn vector_finish(&self, use_activation: Option<bool>) -> Result<Finish, ApiError> {
        let PoolingKind::Embedder { normalise, .. } = &self.pooling.kind else {
            return Err(ApiError::not_implemented("The model does not support Embeddings API"));
        };
        Ok(if use_activation.unwrap_or(*normalise) { Finish::Normalise } else { Finish::Raw })
    }

    /// The function of scores, and their number.
    fn score_finish(&self, use_activation: Option<bool>) -> Result<(Finish, usize), ApiError> {
        let PoolingKind::Classifier { labels, activation } = &self.pooling.kind else {
            return Err(ApiError::not_implemented("The model does not support Classification API"));
        };
        Ok((if use_activation.unwrap_or(true) { (*activation).into() } else { Finish::Raw }, labels.len()))
    }
}
