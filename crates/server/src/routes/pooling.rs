//! The routes of vectors and scores: POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::app::AppState;
use crate::body::ReceivedBody;
use crate::error::ApiError;
use crate::prepare::{self, Headers, PreparePooling};
use crate::routes::{blocking, receive};
use crate::vectors;

/// Returns the vectors of texts.
pub(crate) async fn embeddings(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::embeddings).await
}

/// Returns the vectors of texts, in the form of Cohere's API.
pub(crate) async fn cohere_embeddings(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::cohere_embeddings).await
}

/// Returns the vectors or the scores of texts or of their tokens.
pub(crate) async fn pooling(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::pooling).await
}

/// Returns the labels of texts.
pub(crate) async fn classify(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::classification).await
}

/// Returns the scores of pairs of texts.
pub(crate) async fn score(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::scores).await
}

/// Returns documents in the order of their scores.
pub(crate) async fn rerank(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, prepare::ranking).await
}

async fn handle(state: AppState, request: Request, prepare: PreparePooling) -> Response {
    match receive(&state, request).await {
        Ok(received) => answer(state, received, prepare).await,
        Err(error) => error.into_response(),
    }
}

/// Answers a request whose body is received.
pub(crate) async fn answer(state: AppState, received: (ReceivedBody, Headers), prepare: PreparePooling) -> Response {
    let answered: Result<Response, ApiError> = async {
        let (body, headers) = received;
        let prepared = blocking(&state, body, move |state, body| prepare(state, body, &headers)).await?;
        vectors::answer(&state, prepared).await
    }
    .await;
    answered.unwrap_or_else(IntoResponse::into_response)
}
