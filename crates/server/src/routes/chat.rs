//! POST /v1/chat/completions

use axum::extract::{Request, State};
use axum::response::Response;

use crate::app::AppState;
use crate::prepare;

/// Answers with one body, or with a stream of chunks.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    super::generate(state, request, prepare::chat).await
}
