//! POST /generate: the route of vLLM's first server, which some clients still use.

pub(crate) mod convert;
pub(crate) mod stream;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::api::shared::run;
use crate::app::AppState;

/// Answers with prompt and completion in one text, or with JSON lines that each have all text so far.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    run::generate(state, request, convert::legacy).await
}
