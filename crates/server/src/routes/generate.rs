//! POST /generate: the route of vLLM's first server, which some clients still use.

use axum::extract::{Request, State};
use axum::response::Response;

use crate::app::AppState;
use crate::prepare;

/// Answers with prompt and completion in one text, or with JSON lines that each have all text so far.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    super::generate(state, request, prepare::legacy).await
}
