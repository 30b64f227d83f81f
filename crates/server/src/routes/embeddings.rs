//! POST /v1/embeddings

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures::stream::{FuturesOrdered, StreamExt};
use octavo_engine::{FinishReason, Pooling, RequestStream, SamplingParams, StageTimes, Task};
use serde_json::{Value, json};

use crate::app::AppState;
use crate::body::ReceivedBody;
use crate::error::ApiError;
use crate::prepare::{self, Headers, PreparedEmbeddings};
use crate::request_log;
use crate::routes::{blocking, receive};
use crate::trace::TracedSequences;
use crate::types::embeddings::Encoding;

/// Returns the last hidden states of texts, scaled to length 1.
pub(crate) async fn handle(State(state): State<AppState>, request: Request) -> Response {
    match receive(&state, request).await {
        Ok(received) => answer(state, received).await,
        Err(error) => error.into_response(),
    }
}

/// Answers a request whose body is received.
pub(crate) async fn answer(state: AppState, received: (ReceivedBody, Headers)) -> Response {
    match try_answer(&state, received).await {
        Ok(body) => Json(body).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn try_answer(state: &AppState, (body, headers): (ReceivedBody, Headers)) -> Result<Value, ApiError> {
    let prepared = blocking(state, body, move |state, body| prepare::embeddings(state, body, &headers)).await?;
    let tokens: usize = prepared.prompts.iter().map(|prompt| prompt.len()).sum();
    let mut traced = TracedSequences::new(&prepared.trace, |request| {
        request.model = state.model.to_string();
        request.prompt_tokens = tokens;
    });
    let mut running = prepared.meter.submit(tokens, || {
        let mut running = FuturesOrdered::new();
        for (index, prompt) in prepared.prompts.iter().enumerate() {
            let submitted = Instant::now();
            running.push_back(vector(start(state, &prepared, index, Arc::clone(prompt))?));
            if let Some(traced) = &mut traced {
                traced.submitted(submitted);
            }
        }
        Ok(running)
    })?;
    let (mut data, mut index) = (Vec::with_capacity(prepared.prompts.len()), 0);
    while let Some(ended) = running.next().await {
        if let Some(traced) = &mut traced {
            told(traced, index, &ended);
        }
        let embedding = encode(&shaped(ended?.0, prepared.dimensions), prepared.encoding);
        data.push(json!({"index": index, "object": "embedding", "embedding": embedding}));
        index += 1;
    }
    Ok(json!({
        "id": format!("embd-{}", prepared.request_id),
        "object": "list",
        "created": crate::app::unix_time(),
        "model": state.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": null},
    }))
}

fn start(
    state: &AppState,
    prepared: &PreparedEmbeddings,
    index: usize,
    prompt: Arc<[u32]>,
) -> Result<RequestStream, ApiError> {
    let request = octavo_engine::Request {
        id: format!("{}-{index}", prepared.request_id),
        prompt,
        params: Arc::new(SamplingParams::default()),
        priority: prepared.priority,
        client: prepared.client,
        arrival: prepared.arrival,
        cache_salt: prepared.cache_salt.clone(),
        constraint: None,
        images: Arc::default(),
        second_text: None,
        parent_n: Some(1),
        task: Task::Embed(Pooling::Prompt),
    };
    if index == 0 {
        let prompts = prepared.prompts.iter().map(|prompt| &**prompt);
        request_log::received(state, (&prepared.request_id, 1), &request, prompts);
    }
    crate::choices::submit(state, request)
}

/// A vector and its timings.
type Embedded = (Vec<f32>, Option<StageTimes>);

/// Records the end of a sequence in the trace.
fn told(traced: &mut TracedSequences, index: usize, ended: &Result<Embedded, ApiError>) {
    match ended {
        Ok((_, times)) => {
            traced.timed(index, *times);
            traced.finished(index, "stop");
        }
        Err(error) => traced.failed(error),
    }
}

async fn vector(mut stream: RequestStream) -> Result<Embedded, ApiError> {
    while let Some(event) = stream.next().await {
        match (event.embedding, event.finish) {
            (Some(vector), _) => return Ok((vector, event.times)),
            (None, None) => {}
            (None, Some(FinishReason::Abort)) => return Err(ApiError::shutting_down()),
            (None, Some(reason)) => {
                tracing::error!(?reason, "the engine ended an embedding");
                break;
            }
        }
    }
    Err(ApiError::internal())
}

/// The first `dimensions` of a vector, scaled to length 1.
fn shaped(mut vector: Vec<f32>, dimensions: Option<usize>) -> Vec<f32> {
    vector.truncate(dimensions.unwrap_or(usize::MAX));
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

fn encode(vector: &[f32], encoding: Encoding) -> Value {
    match encoding {
        Encoding::Float => vector.into(),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            BASE64_STANDARD.encode(bytes).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_before_they_are_normalised() {
        assert_eq!(shaped(vec![3.0, 4.0, 100.0], Some(2)), [0.6, 0.8]);
        assert_eq!(shaped(vec![0.0, 0.0], None), [0.0, 0.0]);
    }
}
