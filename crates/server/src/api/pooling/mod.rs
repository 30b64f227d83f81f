//! The routes of vectors and scores: POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank

pub(crate) mod answer;
pub(crate) mod convert;
pub(crate) mod request;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::api::pooling::convert::PreparePooling;
use crate::api::shared::run::{Received, blocking, receive};
use crate::app::AppState;
use crate::error::ApiError;

/// Returns the vectors of texts.
pub(crate) async fn embeddings(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::embeddings).await
}

/// Returns the vectors of texts, in the form of Cohere's API.
pub(crate) async fn cohere_embeddings(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::cohere_embeddings).await
}

/// Returns the vectors or the scores of texts or of their tokens.
pub(crate) async fn pooling(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::pooling).await
}

/// Returns the labels of texts.
pub(crate) async fn classify(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::classification).await
}

/// Returns the scores of pairs of texts.
pub(crate) async fn score(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::scores).await
}

/// Returns documents in the order of their scores.
pub(crate) async fn rerank(State(state): State<AppState>, request: Request) -> Response {
    handle(state, request, convert::ranking).await
}

async fn handle(state: AppState, request: Request, prepare: PreparePooling) -> Response {
    match receive(&state, request).await {
        Ok(received) => run(state, received, prepare).await,
        Err(error) => error.into_response(),
    }
}

/// Answers a request whose body is received.
pub(crate) async fn run(state: AppState, received: Received, prepare: PreparePooling) -> Response {
    let answered: Result<Response, ApiError> = async {
        let Received { body, headers } = received;
        let prepared = blocking(&state, body, move |state, body| prepare(state, body, &headers)).await?;
        answer::answer(&state, prepared).await
    }
    .await;
    answered.unwrap_or_else(IntoResponse::into_response)
}
