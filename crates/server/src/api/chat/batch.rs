//! POST /v1/chat/completions/batch

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;

use crate::api::chat::convert;
use crate::api::chat::stream::Conversations;
use crate::api::shared::run::{Received, receive, staged, submit};
use crate::api::shared::stream::collect;
use crate::app::AppState;
use crate::choices::{Choices, Submission};
use crate::error::ApiError;

/// Answers several conversations with one body, which has a choice for each of them.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    run(&state, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn run(state: &AppState, request: Request) -> Result<Response, ApiError> {
    let Received { body, headers } = receive(state, request).await?;
    let mut prepared = staged(state, body, move |state, body| convert::batch(state, body, &headers)).await?;
    // All conversations have the same grammar.
    let grammar = prepared.first_mut().and_then(|first| first.grammar.take());
    let meter = prepared.first().map(|first| first.submission.origin.meter.clone()).unwrap_or_default();
    let tokens = prepared.iter().map(|each| each.submission.prompt_tokens()).sum();
    let (submissions, formats): (Vec<_>, Vec<_>) =
        prepared.into_iter().map(|each| (each.submission, each.format)).unzip();
    let running = submit(state, grammar, move |state, grammar| {
        // If the engine rejects one of them, dropping the others aborts them.
        let submit = |each: Submission| Choices::submit(state, each.restricted_by(grammar.clone()));
        meter.submit(tokens, || submissions.into_iter().map(submit).collect::<Result<Vec<_>, _>>())
    });
    let running = running.await?;
    let answers = running.into_iter().zip(&formats).map(|(choices, format)| collect(choices, format));
    let answers = try_join_all(answers).await?;
    Ok(Conversations(formats).whole(answers))
}
