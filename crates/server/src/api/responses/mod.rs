//! POST /v1/responses, and the routes of stored responses.

pub(crate) mod convert;
pub(crate) mod request;
pub(crate) mod stored;
pub(crate) mod stream;

use std::pin::pin;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::StreamExt;
use http::header;
use octavo_engine::ClientId;
use serde_json::json;

use crate::api::responses::stored::{Cancelled, ResponseStore};
use crate::api::responses::stream::ResponsesFormat;
use crate::api::shared::common::StreamOptions;
use crate::api::shared::query::{Parameters, flag, parameter};
use crate::api::shared::run::{ready, receive};
use crate::api::shared::sse;
use crate::api::shared::stream::respond;
use crate::app::{App, AppState};
use crate::caller::Caller;
use crate::choices::Choices;
use crate::error::ApiError;

/// Answers with one body, or with a stream of events. A response that runs in the background is answered at once.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    let answered = async {
        let received = receive(&state, request).await?;
        let (choices, format, stream) = ready(&state, received, convert::responses).await?;
        if format.background {
            return run_in_background(&state, choices, format, stream);
        }
        respond(choices, format, stream).await
    };
    answered.await.unwrap_or_else(|error: ApiError| error.into_response())
}

/// Starts the task of a response, which goes on when the client has left.
fn run_in_background(
    state: &App,
    choices: Choices,
    mut format: ResponsesFormat,
    stream: Option<StreamOptions>,
) -> Result<Response, ApiError> {
    let (Some(store), Some((owner, id))) = (&state.responses, format.stored_as()) else {
        return Err(ApiError::internal());
    };
    let (queued, ticket) = format.queue(stream.is_some()).ok_or_else(ApiError::internal)?;
    let task = tokio::spawn({
        let ticket = ticket.clone();
        async move {
            let mut frames = pin!(sse::frames(choices, format, stream.unwrap_or_default()));
            while let Some(frame) = frames.next().await {
                ticket.push(&frame);
            }
            ticket.end();
        }
    });
    ticket.attach(&task.abort_handle());
    match stream {
        None => Ok(Json(queued).into_response()),
        Some(_) => follow(store, owner, &id, 0),
    }
}

fn follow(store: &Arc<ResponseStore>, owner: ClientId, id: &str, from: usize) -> Result<Response, ApiError> {
    let events = store.follow(owner, id, from).ok_or_else(|| {
        ApiError::invalid_request("The response was not streamed in the background.").with_param("stream")
    })?;
    Ok(sse::response::<ResponsesFormat>(Body::from_stream(events)))
}

/// Returns a stored response, or with `stream` its events after number `starting_after`.
pub(crate) async fn stored(
    State(state): State<AppState>,
    Path(id): Path<String>,
    parameters: Parameters,
    caller: Caller,
) -> Response {
    let answer = || {
        let owner = caller.owner();
        let unknown = || ApiError::response_not_found(&id);
        let store = state.responses.as_ref().ok_or_else(unknown)?;
        let body = store.body(owner, &id).ok_or_else(unknown)?;
        if !flag(&parameters, "stream", false)? {
            return Ok(stored_json(body));
        }
        let from = match parameter(&parameters, "starting_after").map(str::parse::<usize>) {
            None => 0,
            Some(Ok(number)) => number.saturating_add(1),
            Some(Err(_)) => {
                let message = "Input should be a valid integer, unable to parse string as an integer";
                return Err(ApiError::bad_request(message).with_param("starting_after"));
            }
        };
        follow(store, owner, &id, from)
    };
    answer().unwrap_or_else(|error: ApiError| error.into_response())
}

/// Aborts a response that runs in the background.
pub(crate) async fn cancel(State(state): State<AppState>, Path(id): Path<String>, caller: Caller) -> Response {
    let outcome = state.responses.as_ref().map(|store| store.cancel(caller.owner(), &id));
    match outcome {
        Some(Cancelled::Now(body)) => stored_json(body),
        Some(Cancelled::TooLate) => {
            ApiError::invalid_request("Cannot cancel a synchronous response.").with_param("response_id").into_response()
        }
        Some(Cancelled::Unknown) | None => ApiError::response_not_found(&id).into_response(),
    }
}

/// Forgets a stored response, as OpenAI's API does; vLLM has no such route.
pub(crate) async fn delete(State(state): State<AppState>, Path(id): Path<String>, caller: Caller) -> Response {
    if state.responses.as_ref().is_some_and(|store| store.delete(caller.owner(), &id)) {
        return Json(json!({"id": id, "object": "response", "deleted": true})).into_response();
    }
    ApiError::response_not_found(&id).into_response()
}

fn stored_json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
