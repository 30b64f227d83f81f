//! One module a route.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod health;
pub(crate) mod metrics;
pub(crate) mod models;

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};

use crate::app::AppState;
use crate::choices::Choices;
use crate::error::ApiError;
use crate::prepare::{Headers, Prepared};
use crate::wire::{self, Wire};

/// How a generation route reads its body.
type Prepare<W> = fn(&AppState, &[u8], &Headers) -> Result<Prepared<W>, ApiError>;

/// Answers a generation request. Dropping the future, or the body of its response, aborts the sequences.
async fn generate<W: Wire>(state: AppState, request: Request, prepare: Prepare<W>) -> Response {
    match try_generate(state, request, prepare).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn try_generate<W: Wire>(state: AppState, request: Request, prepare: Prepare<W>) -> Result<Response, ApiError> {
    let head = request.headers().clone();
    let body = state.bodies.receive(request, &state.config.connection).await?;
    let headers = Headers::read(&head)?;
    let prepared = {
        let state = Arc::clone(&state);
        let size = body.bytes.len();
        state.clone().workers.run(size, move || prepare(&state, &body.bytes, &headers)).await?
    };
    let choices = Choices::submit(&state, prepared.submission)?;
    wire::respond(choices, prepared.wire, prepared.stream).await
}
