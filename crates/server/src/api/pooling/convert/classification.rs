//! Classification requests.

use std::sync::Arc;

use octavo_engine::Pooling;

use crate::api::pooling::answer::Classification;
use crate::api::pooling::convert::prompts::Prompts;
use crate::api::pooling::convert::{PreparedPooling, Work, check_size, head, prepared, tokens_of};
use crate::api::pooling::request::{ClassifyRequest, Encoding};
use crate::api::shared::headers::RequestHeaders;
use crate::app::AppState;
use crate::error::ApiError;

/// Prepares a request of POST /classify.
pub(crate) fn classification(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<PreparedPooling, ApiError> {
    let ClassifyRequest { common, mut input } = ClassifyRequest::parse(body)?;
    let model = state.resolve_model(common.model.as_deref())?;
    let (finish, labels) = state.score_finish(common.use_activation)?;
    let prompts = Prompts::new(state, common.truncation, "input")?.input(&mut input)?;
    let elements = prompts.len().saturating_mul(labels);
    let bytes = check_size(state, prompts.len(), elements, Encoding::default().bytes_per_element())?;
    let id = headers.id(common.request_id.as_ref());
    let head = head(&model, format!("classify-{id}"), tokens_of(&prompts));
    let answer = Box::new(Classification { head, app: Arc::clone(state), finish });
    let work = Work { model, prompts, pooling: Pooling::Prompt, answer, bytes };
    Ok(prepared(state, &common, headers, id, work))
}
