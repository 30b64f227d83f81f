//! POST /v1/messages, POST /v1/messages/count_tokens: Anthropic's API.

pub(crate) mod convert;
pub(crate) mod request;
pub(crate) mod stream;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::api::messages::request::MessagesRequest;
use crate::api::messages::stream::MessagesFormat;
use crate::api::shared::conversation::prompt_of;
use crate::api::shared::run::{self, Received, receive, staged};
use crate::api::shared::staged::{Staged, images_of};
use crate::api::shared::stream::ResponseFormat;
use crate::app::AppState;

/// Answers with one body, or with a stream of events.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    run::generate(state, request, convert::messages).await
}

/// The number of tokens that a request's prompt has.
pub(crate) async fn count_tokens(State(state): State<AppState>, request: Request) -> Response {
    let count = async {
        let Received { body, headers } = receive(&state, request).await?;
        let count = move |state: &AppState, body: &[u8]| {
            let MessagesRequest { chat, .. } = MessagesRequest::parse_for_count(body)?;
            state.resolve_model(chat.common.model.as_deref())?;
            let images = images_of(state, &chat, &headers)?;
            Staged::new(state, images, move |state, images| Ok(prompt_of(state, &chat, &images)?.1.tokens.len()))
        };
        staged(&state, body, count).await
    };
    match count.await {
        Ok(count) => Json(json!({"input_tokens": count})).into_response(),
        Err(error) => MessagesFormat::refuse(&error),
    }
}
