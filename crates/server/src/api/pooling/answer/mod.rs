//! The sequences of a request for vectors or scores, from submission to the answer.

mod classification;
mod cohere;
mod finish;
mod list;
mod scoring;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use futures::stream::{FuturesOrdered, StreamExt};
use octavo_engine::{Request, RequestStream, SamplingParams, StageTimes, Task};

use crate::api::pooling::convert::PreparedPooling;
use crate::app::AppState;
use crate::choices;
use crate::error::ApiError;
use crate::request_log;
use crate::trace::TracedSequences;
use crate::workers::{LARGE_BODY, Work};

pub(crate) use classification::Classification;
pub(crate) use cohere::CohereEmbeddings;
pub(crate) use finish::Finish;
pub(crate) use list::{Head, VectorKind, Vectors};
pub(crate) use scoring::{Comparison, Ranking, Scores};

/// The form of an answer.
pub(crate) trait Answer: Send {
    /// The response with the raw results of the prompts, in their order: a vector or the scores of the prompt, or those of
    /// its tokens one after the other.
    fn respond(self: Box<Self>, results: Vec<Vec<f32>>) -> Result<Response, ApiError>;
}

/// Computes the vectors of a request and answers it. Dropping the future aborts the sequences.
pub(crate) async fn answer(state: &AppState, mut prepared: PreparedPooling) -> Result<Response, ApiError> {
    let results = compute(state, &mut prepared).await?;
    let (answer, bytes) = (prepared.answer, prepared.bytes);
    if bytes <= LARGE_BODY {
        return answer.respond(results);
    }
    state.workers.run(Work::Answer, move || answer.respond(results)).await
}

/// The results of the prompts, in their order.
async fn compute(state: &AppState, prepared: &mut PreparedPooling) -> Result<Vec<Vec<f32>>, ApiError> {
    if state.drain.is_ending() {
        return Err(ApiError::shutting_down());
    }
    let (tokens, model) = (prepared.tokens(), Arc::clone(prepared.model.name()));
    let mut traced = TracedSequences::new(&prepared.origin.trace, |request| {
        request.model = model.to_string();
        request.prompt_tokens = tokens;
    });
    let mut running = prepared.origin.meter.submit(tokens, || {
        let mut running = FuturesOrdered::new();
        for index in 0..prepared.prompts.len() {
            let submitted = Instant::now();
            running.push_back(result(start(state, prepared, index)?));
            if let Some(traced) = &mut traced {
                traced.submitted(submitted);
            }
        }
        Ok(running)
    })?;
    // The engine has its own handle on what it still needs.
    prepared.prompts = vec![];
    let mut results = Vec::with_capacity(running.len());
    while let Some(ended) = running.next().await {
        if let Some(traced) = &mut traced {
            record_end(traced, results.len(), &ended);
        }
        results.push(ended?.0);
    }
    Ok(results)
}

fn start(state: &AppState, prepared: &PreparedPooling, index: usize) -> Result<RequestStream, ApiError> {
    let request = build_request(prepared, index);
    if index == 0 {
        let prompts = prepared.prompts.iter().map(|prompt| &*prompt.tokens);
        request_log::received(state, &prepared.request_id, 1, &request, prompts);
    }
    choices::submit(state, request)
}

/// The request of one prompt to the engine.
fn build_request(prepared: &PreparedPooling, index: usize) -> Request {
    let prompt = &prepared.prompts[index];
    Request {
        id: format!("{}-{index}", prepared.request_id),
        prompt: Arc::clone(&prompt.tokens),
        second_text: prompt.second_text,
        images: Arc::default(),
        task: Task::Embed(prepared.pooling),
        params: Arc::new(SamplingParams::default()),
        priority: prepared.origin.priority,
        client: prepared.origin.client,
        arrival: prepared.origin.arrival,
        cache_salt: prepared.origin.cache_salt.clone(),
        adapter: prepared.model.adapter.clone(),
        constraint: None,
        parent_n: Some(1),
    }
}

/// A result and its timings.
type Ended = (Vec<f32>, Option<StageTimes>);

/// Records the end of a sequence in the trace.
fn record_end(traced: &mut TracedSequences, index: usize, ended: &Result<Ended, ApiError>) {
    match ended {
        Ok((_, times)) => {
            traced.timed(index, *times);
            traced.finished(index, "stop");
        }
        Err(error) => traced.failed(error),
    }
}

async fn result(mut stream: RequestStream) -> Result<Ended, ApiError> {
    while let Some(event) = stream.next().await {
        match (event.embedding, event.finish) {
            (Some(result), _) => return Ok((result, event.times)),
            (None, None) => {}
            (None, Some(reason)) => return Err(choices::ended_early(&reason)),
        }
    }
    Err(ApiError::internal())
}
