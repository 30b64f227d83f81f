//! Embedding requests.

use octavo_engine::Pooling;

use crate::api::pooling::answer::{VectorKind, Vectors};
use crate::api::pooling::convert::prompts::Prompts;
use crate::api::pooling::convert::{PreparedPooling, Work, check_size, head, prepared, tokens_of};
use crate::api::pooling::request::EmbeddingRequest;
use crate::api::shared::headers::RequestHeaders;
use crate::app::{App, AppState};
use crate::config::{Matryoshka, PoolingKind};
use crate::error::ApiError;

/// Prepares a request of POST /v1/embeddings.
pub(crate) fn embeddings(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<PreparedPooling, ApiError> {
    let generates = state.config.pooling.is_none();
    let EmbeddingRequest { common, mut input, encoding, dimensions } = EmbeddingRequest::parse(body, generates)?;
    let model = state.resolve_model(common.model.as_deref())?;
    let finish = state.vector_finish(common.use_activation)?;
    let dimensions = state.dimensions(dimensions, "dimensions")?;
    let prompts = Prompts::new(state, common.truncation, "input")?.input(&mut input)?;
    let elements = prompts.len().saturating_mul(dimensions.unwrap_or(state.config.embedding_size));
    let bytes = check_size(state, prompts.len(), elements, encoding.bytes_per_element())?;
    let id = headers.id(common.request_id.as_ref());
    let head = head(&model, format!("embd-{id}"), tokens_of(&prompts));
    let answer = Box::new(Vectors { head, kind: VectorKind::Embedding, encoding, finish, dimensions, tokens: None });
    let work = Work { model, prompts, pooling: Pooling::Prompt, answer, bytes };
    Ok(prepared(state, &common, headers, id, work))
}

impl App {
    /// The number of dimensions that a request asks for in `field`, if the model has vectors of so many.
    pub(crate) fn dimensions(&self, wanted: Option<i64>, field: &str) -> Result<Option<usize>, ApiError> {
        let (Some(wanted), PoolingKind::Embedder { matryoshka, .. }) = (wanted, &self.pooling.kind) else {
            return Ok(None);
        };
        let (name, size) = (&self.model, self.config.embedding_size);
        let refused = |message: String| Err(ApiError::bad_request(message).with_param(field));
        if *matryoshka == Matryoshka::Unsupported {
            return refused(format!(
                "Model '{name}' does not support Matryoshka embeddings; dimensions must be unset (received \
                 dimensions={wanted})."
            ));
        }
        let Some(dimensions) = usize::try_from(wanted).ok().filter(|wanted| (1..=size).contains(wanted)) else {
            return refused(format!("Model '{name}' only supports dimensions in range [1, {size}], got {wanted}."));
        };
        match matryoshka {
            Matryoshka::Dimensions(known) if !known.contains(&dimensions) => {
                refused(format!("Model '{name}' only supports Matryoshka dimensions {known:?}, got {dimensions}."))
            }
            _ => Ok(Some(dimensions)),
        }
    }
}
