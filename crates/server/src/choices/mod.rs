//! The sequences of one request, from submission to their ends.

mod choice_parser;
mod generation;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{SelectAll, Stream, StreamExt, unfold};
use octavo_engine::{EngineState, FinishReason, Logprobs, PromptImage, Request, StageTimes, SubmitError, TokenOutput};
use octavo_telemetry::{Rejection, TracedRequest};
use octavo_text::{Grammar, OutputDelta, TextStream};

use crate::api::shared::model::ResolvedModel;
use crate::api::shared::response::Finish;
use crate::api::shared::restrictions::Restrictions;
use crate::api::shared::sampling::Sampling;
use crate::app::AppState;
use crate::caller::Origin;
use crate::error::ApiError;
use crate::keys::Meter;
use crate::request_log;
use crate::request_log::OutputLog;
use crate::trace::TracedSequences;
use crate::workers::take_turns;

use choice_parser::ChoiceParser;
use generation::{Generation, Pace};

pub(crate) use choice_parser::{Calls, Parsing, append};

/// A prompt that fits the context.
pub(crate) struct PreparedPrompt {
    pub(crate) tokens: Arc<[u32]>,
    pub(crate) images: Arc<[PromptImage]>,
    /// Maximum number of generated tokens; 0 only if the client wants the prompt alone.
    pub(crate) max_tokens: u32,
}

/// The settings that all sequences of a request share.
pub(crate) struct Submission {
    pub(crate) request_id: String,
    pub(crate) model: ResolvedModel,
    pub(crate) prompts: Vec<PreparedPrompt>,
    pub(crate) sampling: Sampling,
    pub(crate) restrictions: Restrictions,
    pub(crate) parsing: Parsing,
    pub(crate) origin: Origin,
    /// Tokens per output.
    pub(crate) interval: u32,
}

impl Submission {
    /// The attributes of its span.
    fn describe(&self, request: &mut TracedRequest) {
        let (temperature, top_p) = self.sampling.temperature_and_top_p();
        request.model = self.model.name().to_string();
        request.n = Some(self.sampling.n);
        request.temperature = Some(temperature);
        request.top_p = Some(top_p);
        request.max_tokens = self.prompts.iter().map(|prompt| prompt.max_tokens).max();
        request.prompt_tokens = self.prompt_tokens();
    }

    /// This submission with the grammar of its output.
    pub(crate) fn restricted_by(mut self, grammar: Option<Grammar>) -> Self {
        self.restrictions.grammar = grammar;
        self
    }

    /// The tokens of all prompts, each of which counts once for all its sequences.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }
}

/// The part of a choice that one engine output adds.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Prompt index × n + child.
    pub(crate) index: u32,
    /// The parsed new text; empty while a character, a possible stop string or a marker is incomplete.
    pub(crate) parts: Vec<OutputDelta>,
    /// The tokens of this output.
    pub(crate) tokens: Vec<TokenOutput>,
    /// Number of these tokens that are reasoning.
    pub(crate) reasoning_tokens: usize,
    /// Prompt tokens found in the prefix cache, in the first output of a choice.
    pub(crate) cached_tokens: Option<u32>,
    /// Log-probabilities of the prompt from its second token on, in the first output of a choice, if requested.
    pub(crate) prompt_logprobs: Vec<Logprobs>,
    /// Timings up to the latest of the tokens.
    pub(crate) times: Option<StageTimes>,
    /// Set in a choice's last output.
    pub(crate) finish: Option<Finish>,
}

type OutputStream = Pin<Box<dyn Stream<Item = Result<Output, ApiError>> + Send>>;

/// The running sequences of a request. Dropping it aborts them.
pub(crate) struct Choices {
    running: SelectAll<OutputStream>,
    state: AppState,
    /// Sequences per prompt, and the most tokens that a sequence of each prompt generated; tracked for more than one
    /// sequence per prompt.
    n: u32,
    generated: Vec<u32>,
    meter: Meter,
    log: Option<OutputLog>,
    traced: Option<TracedSequences>,
}

impl Choices {
    /// Submits `n` sequences for each prompt, in turns with other requests. If the engine rejects one of them, none runs.
    pub(crate) fn submit(state: &AppState, submission: Submission) -> Result<Self, ApiError> {
        if state.drain.is_ending() {
            return Err(ApiError::shutting_down());
        }
        let n = submission.sampling.n;
        let sequences = submission.prompts.len() * n as usize;
        let mut traced = TracedSequences::new(&submission.origin.trace, |request| submission.describe(request));
        let mut running = SelectAll::new();
        for index in 0..sequences {
            take_turns()?;
            let submitted = Instant::now();
            let generation = start(state, &submission, index)?;
            if let Some(traced) = &mut traced {
                traced.submitted(submitted);
            }
            running.push(Box::pin(unfold(generation, next)) as OutputStream);
        }
        let generated = if n > 1 { vec![0; sequences] } else { vec![] };
        let log = OutputLog::new(state.config.log, &submission.request_id, sequences);
        Ok(Self { running, state: state.clone(), n, generated, meter: submission.origin.meter, log, traced })
    }

    /// Sequences of each prompt.
    pub(crate) fn n(&self) -> u32 {
        self.n
    }

    /// Time of silence after which a stream is sent a comment.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.state.config.keep_alive()
    }

    /// The next output of any choice; `None` when all have ended.
    pub(crate) async fn next(&mut self) -> Option<Result<Output, ApiError>> {
        let output = match self.running.next().await? {
            Ok(output) => output,
            Err(error) => return Some(Err(self.failed(error))),
        };
        if output.finish == Some(Finish::Abort) && self.state.drain.is_ending() {
            return Some(Err(self.failed(ApiError::shutting_down())));
        }
        self.meter.generated(output.tokens.len());
        if let Some(traced) = &mut self.traced {
            traced.output(&output);
        }
        if let Some(log) = &mut self.log {
            log.add(&output);
        }
        if let Some(generated) = self.generated.get_mut(output.index as usize) {
            *generated = generated.saturating_add(u32::try_from(output.tokens.len()).unwrap_or(u32::MAX));
        }
        Some(Ok(output))
    }

    /// Records an error in the trace.
    fn failed(&mut self, error: ApiError) -> ApiError {
        if let Some(traced) = &mut self.traced {
            traced.failed(&error);
        }
        error
    }
}

impl Drop for Choices {
    fn drop(&mut self) {
        for children in self.generated.chunks(self.n as usize) {
            let most = children.iter().copied().max().unwrap_or(0);
            self.state.engine_metrics.parent_finished(u64::from(most));
        }
    }
}

fn start(state: &AppState, submission: &Submission, index: usize) -> Result<Generation, ApiError> {
    let Submission { prompts, sampling, .. } = submission;
    let prompt = &prompts[index / sampling.n as usize];
    let text = TextStream::new(Arc::clone(&state.text.tokenizer), &prompt.tokens, sampling.text.clone());
    let parts = ChoiceParser::new(&submission.parsing);
    let pace = Pace { include_stop: sampling.includes_stop(), interval: submission.interval };
    let stream = if prompt.max_tokens == 0 && !sampling.scores_prompt() {
        None
    } else {
        let request = build_request(state, submission, index);
        if index == 0 {
            let prompts = prompts.iter().map(|prompt| &*prompt.tokens);
            request_log::received(state, &submission.request_id, sampling.n, &request, prompts);
        }
        Some(submit(state, request)?)
    };
    Ok(Generation::new(index as u32, stream, text, parts, pace))
}

/// The request of one sequence to the engine.
fn build_request(state: &AppState, submission: &Submission, index: usize) -> Request {
    let Submission { prompts, sampling, origin, .. } = submission;
    let (prompt, child) = (&prompts[index / sampling.n as usize], index as u32 % sampling.n);
    let single = prompts.len() == 1 && sampling.n == 1;
    Request {
        id: if single { submission.request_id.clone() } else { format!("{}-{index}", submission.request_id) },
        prompt: Arc::clone(&prompt.tokens),
        params: Arc::new(sampling.for_sequence(child, prompt.max_tokens, &state.seeds)),
        priority: origin.priority,
        client: origin.client,
        arrival: origin.arrival,
        cache_salt: origin.cache_salt.clone(),
        constraint: submission.restrictions.constraint(),
        images: Arc::clone(&prompt.images),
        adapter: submission.model.adapter.clone(),
        second_text: None,
        parent_n: (child == 0).then_some(sampling.n),
        task: octavo_engine::Task::Generate,
    }
}

/// Submits a request to the engine.
pub(crate) fn submit(state: &AppState, request: Request) -> Result<octavo_engine::RequestStream, ApiError> {
    state.engine.submit(request).map_err(|error| {
        match error {
            SubmitError::TooManyRequests { .. } => state.http_metrics.rejected(Rejection::Requests),
            SubmitError::TooManyTokens { .. } => state.http_metrics.rejected(Rejection::Tokens),
            _ => {}
        }
        ApiError::from_submit(&error, state.engine.status().state == EngineState::Failed)
    })
}

async fn next(mut generation: Generation) -> Option<(Result<Output, ApiError>, Generation)> {
    let output = generation.next().await?.map_err(|reason| ended_early(&reason));
    Some((output, generation))
}

/// The error of a request that the engine ended without a result.
pub(crate) fn ended_early(reason: &FinishReason) -> ApiError {
    match reason {
        FinishReason::Unsatisfiable => ApiError::unsatisfiable(),
        FinishReason::Abort => ApiError::shutting_down(),
        reason => {
            tracing::error!(?reason, "the engine ended a request");
            ApiError::internal()
        }
    }
}
