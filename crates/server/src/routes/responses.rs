//! POST /v1/responses, and the routes of stored responses, of which there are none.

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};

use crate::app::AppState;
use crate::error::ApiError;
use crate::prepare;

/// Answers with one body, or with a stream of events.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    super::generate(state, request, prepare::responses).await
}

/// Answers that the id is unknown, since no responses are stored.
pub(crate) async fn stored(Path(id): Path<String>) -> Response {
    ApiError::response_not_found(&id).into_response()
}
