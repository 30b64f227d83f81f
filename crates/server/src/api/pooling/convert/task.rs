//! Pooling requests.

use octavo_engine::Pooling;

use crate::api::pooling::answer::{VectorKind, Vectors};
use crate::api::pooling::convert::prompts::Prompts;
use crate::api::pooling::convert::{PreparedPooling, Work, check_size, head, prepared, tokens_of};
use crate::api::pooling::request::{PoolingRequest, PoolingTask};
use crate::api::shared::headers::RequestHeaders;
use crate::app::{App, AppState};
use crate::config::PoolingKind;
use crate::error::ApiError;

/// Prepares a request of POST /pooling.
pub(crate) fn pooling(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<PreparedPooling, ApiError> {
    let PoolingRequest { common, mut input, encoding, task } = PoolingRequest::parse(body)?;
    let model = state.resolve_model(common.model.as_deref())?;
    let task = state.task(task)?;
    let (finish, width) = match task {
        PoolingTask::Embed | PoolingTask::TokenEmbed => {
            (state.vector_finish(common.use_activation)?, state.config.embedding_size)
        }
        PoolingTask::Classify | PoolingTask::TokenClassify => state.score_finish(common.use_activation)?,
    };
    let prompts = Prompts::new(state, common.truncation, "input")?.input(&mut input)?;
    let total = tokens_of(&prompts);
    let (pooling, tokens) = match task {
        PoolingTask::Embed | PoolingTask::Classify => (Pooling::Prompt, None),
        PoolingTask::TokenEmbed | PoolingTask::TokenClassify => {
            (Pooling::Tokens, Some(prompts.iter().map(|prompt| prompt.tokens.len()).collect()))
        }
    };
    let results = if tokens.is_some() { total } else { prompts.len() };
    let bytes = check_size(state, prompts.len(), results.saturating_mul(width), encoding.bytes_per_element())?;
    let id = headers.id(common.request_id.as_ref());
    let head = head(&model, format!("pooling-{id}"), total);
    let answer = Box::new(Vectors { head, kind: VectorKind::Pooling, encoding, finish, dimensions: None, tokens });
    let work = Work { model, prompts, pooling, answer, bytes };
    Ok(prepared(state, &common, headers, id, work))
}

impl App {
    /// The task of a request: the one that it names, if the model does it, or else the model's own.
    fn task(&self, wanted: Option<PoolingTask>) -> Result<PoolingTask, ApiError> {
        let of_model = match &self.pooling.kind {
            PoolingKind::Embedder { .. } => [PoolingTask::Embed, PoolingTask::TokenEmbed],
            PoolingKind::Classifier { .. } => [PoolingTask::Classify, PoolingTask::TokenClassify],
        };
        let supported = if self.pooling.tokens { &of_model[..] } else { &of_model[..1] };
        let task = wanted.unwrap_or(of_model[0]);
        if supported.contains(&task) {
            return Ok(task);
        }
        let names: Vec<String> = supported.iter().map(|task| format!("'{}'", task.name())).collect();
        let comma = if names.len() == 1 { "," } else { "" };
        let message = format!("Unsupported task: '{}' Supported tasks: ({}{comma})", task.name(), names.join(", "));
        Err(ApiError::bad_request(message).with_param("task"))
    }
}
