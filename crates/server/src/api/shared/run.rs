//! The way of a request from its body to its answer.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use octavo_text::{Grammar, GrammarSpec};

use crate::api::shared::common::StreamOptions;
use crate::api::shared::convert::Prepared;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::staged::Staged;
use crate::api::shared::stream::{self, ResponseFormat};
use crate::app::AppState;
use crate::body::ReceivedBody;
use crate::choices::Choices;
use crate::error::ApiError;
use crate::images;
use crate::workers::Work;

/// The function that prepares a generation request from its body.
pub(crate) type Prepare<W> = fn(&AppState, &[u8], &RequestHeaders) -> Result<Staged<Prepared<W>>, ApiError>;

/// Answers a generation request. Dropping the future, or the body of its response, aborts the sequences.
pub(crate) async fn generate<W: ResponseFormat>(state: AppState, request: Request, prepare: Prepare<W>) -> Response {
    let received = match receive(&state, request).await {
        Ok(received) => received,
        Err(error) => return W::refuse(&error),
    };
    run(state, received, prepare).await
}

/// A request that has arrived.
pub(crate) struct Received {
    pub(crate) body: ReceivedBody,
    pub(crate) headers: RequestHeaders,
}

/// Receives the body of a request.
pub(crate) async fn receive(state: &AppState, request: Request) -> Result<Received, ApiError> {
    let headers = RequestHeaders::read(&request);
    let body = state.bodies.receive(request, &state.config.connection).await?;
    Ok(Received { body, headers: headers? })
}

/// Answers a generation request whose body is received.
pub(crate) async fn run<W: ResponseFormat>(state: AppState, received: Received, prepare: Prepare<W>) -> Response {
    match try_run(state, received, prepare).await {
        Ok(response) => response,
        Err(error) => W::refuse(&error),
    }
}

async fn try_run<W: ResponseFormat>(
    state: AppState,
    received: Received,
    prepare: Prepare<W>,
) -> Result<Response, ApiError> {
    let (choices, format, stream) = ready(&state, received, prepare).await?;
    stream::respond(choices, format, stream).await
}

/// Prepares a request and submits its sequences.
pub(crate) async fn ready<W: ResponseFormat>(
    state: &AppState,
    Received { body, headers }: Received,
    prepare: Prepare<W>,
) -> Result<(Choices, W, Option<StreamOptions>), ApiError> {
    let Prepared { submission, format, stream, grammar } =
        staged(state, body, move |state, body| prepare(state, body, &headers)).await?;
    let (meter, tokens) = (submission.origin.meter.clone(), submission.prompt_tokens());
    let choices = submit(state, grammar, move |state, grammar| {
        let submission = submission.restricted_by(grammar);
        meter.submit(tokens, || Choices::submit(state, submission))
    });
    Ok((choices.await?, format, stream))
}

/// Submits a request with its grammar. Compiling a grammar takes time, and so does copying it for each sequence, so a
/// request with a grammar is submitted on the blocking pool.
pub(crate) async fn submit<T: Send + 'static>(
    state: &AppState,
    grammar: Option<GrammarSpec>,
    submit: impl FnOnce(&AppState, Option<Grammar>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let Some(spec) = grammar else { return submit(state, None) };
    let worker = Arc::clone(state);
    state.workers.run(Work::Grammar, move || submit(&worker, Some(worker.compile(spec)?))).await
}

/// Runs `work` on a body, and the rest of it when the images that it needs are loaded.
pub(crate) async fn staged<T: Send + 'static>(
    state: &AppState,
    body: ReceivedBody,
    work: impl FnOnce(&AppState, &[u8]) -> Result<Staged<T>, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let kind = Work::Body(body.bytes.len());
    match blocking(state, body, work).await? {
        Staged::Ready(result) => Ok(result),
        Staged::Images(requests, then) => {
            let images = images::load(state, requests).await?;
            let worker = Arc::clone(state);
            state.workers.run(kind, move || then(&worker, images)).await
        }
    }
}

/// Runs `work` on a body, on the blocking pool.
pub(crate) async fn blocking<T: Send + 'static>(
    state: &AppState,
    body: ReceivedBody,
    work: impl FnOnce(&AppState, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let worker = Arc::clone(state);
    state.workers.run(Work::Body(body.bytes.len()), move || work(&worker, &body.bytes)).await
}
