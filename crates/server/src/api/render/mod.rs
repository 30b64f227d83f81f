//! POST /v1/chat/completions/render and POST /v1/completions/render

pub(crate) mod convert;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::run::{Received, blocking, receive};
use crate::app::AppState;
use crate::error::ApiError;

/// Returns the tokens and the parameters of a chat request, which is not run.
pub(crate) async fn chat(State(state): State<AppState>, request: Request) -> Response {
    answer(&state, request, convert::rendered_chat).await
}

/// Returns the tokens and the parameters of each prompt of a completion request, which is not run.
pub(crate) async fn completions(State(state): State<AppState>, request: Request) -> Response {
    answer(&state, request, convert::rendered_completions).await
}

async fn answer(
    state: &AppState,
    request: Request,
    render: fn(&AppState, &[u8], &RequestHeaders) -> Result<Value, ApiError>,
) -> Response {
    let rendered = async {
        let Received { body, headers } = receive(state, request).await?;
        blocking(state, body, move |state, body| render(state, body, &headers)).await
    };
    match rendered.await {
        Ok(rendered) => Json(rendered).into_response(),
        Err(error) => error.into_response(),
    }
}
