//! POST /v1/chat/completions

pub(crate) mod batch;
pub(crate) mod convert;
pub(crate) mod request;
pub(crate) mod response;
pub(crate) mod stream;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::api::shared::run;
use crate::app::AppState;

/// Answers with one body, or with a stream of chunks.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    run::generate(state, request, convert::chat).await
}
