//! Sequences of random prompts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use octavo_engine::{EngineHandle, FinishReason, Request, RequestStream, SamplingParams, SubmitError};
use tokio::task::JoinSet;

use super::OfflineError;
use crate::simulator::mix;

/// A prompt and the number of its answers.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    tokens: Arc<[u32]>,
    output_len: u32,
    n: u32,
    seed: u64,
}

impl Prompt {
    /// Prompt `index` of a run: `input_len` random token ids below `vocab_size`, which depend on the seed.
    pub(super) fn random(seed: u64, index: usize, vocab_size: u32, input_len: usize, output_len: u32, n: u32) -> Self {
        let seed = mix(seed ^ mix(index as u64));
        let mut state = seed;
        let token = || {
            state = mix(state);
            // The value is below the vocabulary's size, hence a u32.
            (state % u64::from(vocab_size.max(1))) as u32
        };
        Self { tokens: std::iter::repeat_with(token).take(input_len).collect(), output_len, n, seed }
    }

    /// Tokens of the prompt.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The sampling parameters of answer `child`.
    fn params(&self, child: u32) -> Arc<SamplingParams> {
        Arc::new(SamplingParams {
            temperature: 1.0,
            seed: self.seed.wrapping_add(u64::from(child)),
            max_tokens: self.output_len,
            ignore_eos: true,
            ..SamplingParams::default()
        })
    }
}

/// Runs all answers to all prompts, as many at a time as the engine accepts, and counts completed answers in `done`.
/// Returns the arrival time of each token in seconds since `begun`, answer by answer in the order in which they end.
///
/// # Errors
/// The engine refuses a request for a reason other than being busy, or an answer ends early.
pub(super) async fn complete(
    engine: &EngineHandle,
    prompts: &[Prompt],
    begun: Instant,
    done: &AtomicUsize,
) -> Result<Vec<f64>, OfflineError> {
    let mut running = JoinSet::new();
    let mut arrivals = Vec::new();
    let mut next = |answer: Result<Result<Vec<f64>, OfflineError>, tokio::task::JoinError>| {
        arrivals.append(&mut answer.map_err(|error| OfflineError::Ended(error.to_string()))??);
        done.fetch_add(1, Relaxed);
        Ok::<_, OfflineError>(())
    };
    for (prompt, child) in prompts.iter().flat_map(|prompt| (0..prompt.n).map(move |child| (prompt, child))) {
        let params = prompt.params(child);
        let stream = loop {
            match engine.submit(request(prompt, &params, child)) {
                Ok(stream) => break stream,
                Err(busy @ (SubmitError::TooManyRequests { .. } | SubmitError::TooManyTokens { .. })) => {
                    // A place in the queue becomes free at the latest when an earlier answer ends.
                    next(running.join_next().await.ok_or(busy)?)?;
                }
                Err(error) => return Err(error.into()),
            }
        };
        running.spawn(arrivals_of(stream, begun));
    }
    while let Some(answer) = running.join_next().await {
        next(answer)?;
    }
    Ok(arrivals)
}

fn request(prompt: &Prompt, params: &Arc<SamplingParams>, child: u32) -> Request {
    let parent_n = (child == 0).then_some(prompt.n);
    Request { parent_n, ..Request::new("bench", Arc::clone(&prompt.tokens), Arc::clone(params)) }
}

/// The arrival times of an answer's tokens.
async fn arrivals_of(mut stream: RequestStream, begun: Instant) -> Result<Vec<f64>, OfflineError> {
    let mut arrivals = Vec::new();
    while let Some(event) = stream.next().await {
        arrivals.extend(std::iter::repeat_n(begun.elapsed().as_secs_f64(), event.tokens.len()));
        match event.finish {
            None => {}
            Some(FinishReason::Length) => return Ok(arrivals),
            Some(FinishReason::Error(why)) => return Err(OfflineError::Ended(why.to_string())),
            Some(other) => return Err(OfflineError::Ended(other.name().to_owned())),
        }
    }
    Err(OfflineError::Ended("its stream had no end".to_owned()))
}
