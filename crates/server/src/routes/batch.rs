//! POST /v1/chat/completions/batch

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures::future::try_join_all;

use crate::app::AppState;
use crate::choices::Choices;
use crate::error::ApiError;
use crate::prepare;
use crate::routes::{receive, staged};
use crate::wire::{Conversations, collect};
use crate::workers::Work;

/// Answers several conversations with one body, which has a choice for each of them.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    run(&state, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn run(state: &AppState, request: Request) -> Result<Response, ApiError> {
    let (body, headers) = receive(state, request).await?;
    let mut prepared = staged(state, body, move |state, body| prepare::batch(state, body, &headers)).await?;
    // All conversations have the same grammar.
    if let Some(spec) = prepared.first_mut().and_then(|first| first.grammar.take()) {
        let compiling = Arc::clone(state);
        let grammar = state.workers.run(Work::Grammar, move || compiling.compile(spec)).await?;
        prepared.iter_mut().for_each(|each| each.submission.restrictions.grammar = Some(grammar.clone()));
    }
    let meter = prepared.first().map(|first| first.submission.origin.meter.clone()).unwrap_or_default();
    let tokens = prepared.iter().map(|each| each.submission.prompt_tokens()).sum();
    let (submissions, wires): (Vec<_>, Vec<_>) = prepared.into_iter().map(|each| (each.submission, each.wire)).unzip();
    // If the engine rejects one of them, dropping the others aborts them.
    let submit = |submission| Choices::submit(state, submission);
    let running = meter.submit(tokens, || submissions.into_iter().map(submit).collect::<Result<Vec<_>, _>>())?;
    let answers = running.into_iter().zip(&wires).map(|(choices, wire)| collect(choices, wire));
    let answers = try_join_all(answers).await?;
    Ok(Conversations(wires).whole(answers))
}
