//! POST /invocations: SageMaker's route for all kinds of requests.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::api::pooling;
use crate::api::pooling::convert;
use crate::api::pooling::convert::PreparePooling;
use crate::api::pooling::request::names_queries;
use crate::api::shared::fields::JsonFields;
use crate::api::shared::run::{receive, run};
use crate::api::{chat, completions};
use crate::app::{App, AppState};
use crate::config::PoolingKind;
use crate::error::ApiError;

/// Answers a body as the route does whose fields it has.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    let received = match receive(&state, request).await {
        Ok(received) => received,
        Err(error) => return error.into_response(),
    };
    match kind(&state, &received.body.bytes) {
        Ok(InvokedApi::Chat) => run(state, received, chat::convert::chat).await,
        Ok(InvokedApi::Completion) => run(state, received, completions::convert::completion).await,
        Ok(InvokedApi::Pooling(prepare)) => pooling::run(state, received, prepare).await,
        Err(error) => error.into_response(),
    }
}

enum InvokedApi {
    Chat,
    Completion,
    Pooling(PreparePooling),
}

fn kind(state: &App, body: &[u8]) -> Result<InvokedApi, ApiError> {
    let fields = JsonFields::parse(body)?;
    let has = |name| fields.raw(name).is_some();
    let found = match &state.config.pooling {
        None => [
            ("messages", InvokedApi::Chat),
            ("prompt", InvokedApi::Completion),
            ("input", InvokedApi::Pooling(convert::embeddings)),
        ]
        .into_iter()
        .find_map(|(field, kind)| has(field).then_some(kind)),
        Some(model) => {
            let single: PreparePooling = match model.kind {
                PoolingKind::Embedder { .. } => convert::embeddings,
                PoolingKind::Classifier { .. } => convert::classification,
            };
            let candidates: [(bool, PreparePooling); 3] = [
                (has("input") || has("messages"), single),
                (has("query") && model.compares_texts(), convert::ranking),
                (names_queries(&fields) && model.compares_texts(), convert::scores),
            ];
            candidates.into_iter().find_map(|(fits, prepare)| fits.then_some(InvokedApi::Pooling(prepare)))
        }
    };
    found.ok_or_else(|| {
        let expected = match &state.config.pooling {
            None => "messages, prompt, input",
            Some(model) if model.compares_texts() => "messages, input, query, queries, data_1, text_1",
            Some(_) => "messages, input",
        };
        let message = format!("Cannot find suitable handler for request. Expected one of: {expected}.");
        ApiError::bad_request(message)
    })
}
