//! The formats of outputs: each generation route has its implementation of [`ResponseFormat`].

use axum::response::{IntoResponse, Response};
use octavo_engine::TokenOutput;
use octavo_text::OutputDelta;

use crate::api::shared::common::StreamOptions;
use crate::api::shared::response::{Finish, Usage};
use crate::api::shared::sse::{Events, Extras};
use crate::choices::{Choices, Output, append};
use crate::error::ApiError;

/// A complete choice.
#[derive(Debug, Default)]
pub(crate) struct FullResponse {
    /// The parts in order; adjacent parts differ in kind.
    pub(crate) parts: Vec<OutputDelta>,
    pub(crate) tokens: Vec<TokenOutput>,
    /// Number of leading tokens that are reasoning.
    pub(crate) reasoning_tokens: usize,
    pub(crate) prompt_logprobs: Vec<octavo_engine::Logprobs>,
    pub(crate) finish: Option<Finish>,
}

impl FullResponse {
    fn add(&mut self, output: Output) {
        output.parts.into_iter().for_each(|part| append(&mut self.parts, part));
        self.tokens.extend(output.tokens);
        self.reasoning_tokens += output.reasoning_tokens;
        if !output.prompt_logprobs.is_empty() {
            self.prompt_logprobs = output.prompt_logprobs;
        }
        self.finish = output.finish;
    }
}

/// Counts the tokens of a response.
#[derive(Debug)]
pub(crate) struct Tally {
    /// For each choice.
    choices: Vec<Usage>,
    /// Choices of a prompt.
    n: usize,
}

impl Tally {
    /// Nothing generated yet.
    pub(crate) fn new<W: ResponseFormat>(format: &W, n: u32) -> Self {
        let usage = |index| Usage { prompt_tokens: format.prompt_tokens(index), ..Usage::default() };
        Self { choices: (0..format.choices() as u32).map(usage).collect(), n: n.max(1) as usize }
    }

    /// Counts an output.
    pub(crate) fn add(&mut self, output: &Output) {
        let usage = &mut self.choices[output.index as usize];
        usage.completion_tokens += output.tokens.len();
        usage.reasoning_tokens += output.reasoning_tokens;
        usage.cached_tokens += output.cached_tokens.unwrap_or(0) as usize;
        usage.times = output.times.or(usage.times);
    }

    /// The usage of one choice.
    pub(crate) fn choice(&self, index: usize) -> Usage {
        self.choices[index]
    }

    /// The usage of the whole response, in which a prompt counts once for all its choices.
    pub(crate) fn total(&self) -> Usage {
        let mut total = Usage::default();
        for choices in self.choices.chunks(self.n) {
            total.prompt_tokens += choices[0].prompt_tokens;
            total.cached_tokens += choices[0].cached_tokens;
            total.completion_tokens += choices.iter().map(|usage| usage.completion_tokens).sum::<usize>();
            total.reasoning_tokens += choices.iter().map(|usage| usage.reasoning_tokens).sum::<usize>();
        }
        if let [single] = &self.choices[..] {
            total.times = single.times;
        }
        total
    }
}

/// The bodies of one route.
pub(crate) trait ResponseFormat: Send + Sized + 'static {
    /// Media type of a stream.
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    /// Whether a stream may contain comments.
    const COMMENTS: bool = true;

    /// Number of choices.
    fn choices(&self) -> usize;

    /// Tokens of the prompt that a choice continues.
    fn prompt_tokens(&self, index: u32) -> usize;

    /// Adds the event that begins a choice, if the route has one.
    fn open(&mut self, events: &mut Events, index: u32, extras: Extras);

    /// Adds the events of an output.
    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras);

    /// Adds the event with the usage, if the client requested it.
    fn usage(&mut self, events: &mut Events, usage: Usage);

    /// Adds the end of a successful stream.
    fn close(&mut self, events: &mut Events, _: Usage) {
        events.done();
    }

    /// Adds the end of a failed stream.
    fn fail(&mut self, events: &mut Events, error: &ApiError) {
        events.push(&error.body());
        events.done();
    }

    /// The body of a response that is not streamed.
    fn whole(self, choices: Vec<FullResponse>, usage: Usage) -> Response;

    /// The response to a request that failed before its first output.
    fn refuse(error: &ApiError) -> Response {
        error.clone().into_response()
    }
}

/// Answers a request whose sequences run.
pub(crate) async fn respond<W: ResponseFormat>(
    choices: Choices,
    format: W,
    stream: Option<StreamOptions>,
) -> Result<Response, ApiError> {
    if let Some(options) = stream {
        return crate::api::shared::sse::respond(choices, format, options).await;
    }
    let (responses, usage) = collect(choices, &format).await?;
    Ok(format.whole(responses, usage).into_response())
}

/// Waits for the ends of all sequences of a request.
pub(crate) async fn collect<W: ResponseFormat>(
    mut choices: Choices,
    format: &W,
) -> Result<(Vec<FullResponse>, Usage), ApiError> {
    let mut tally = Tally::new(format, choices.n());
    let mut responses: Vec<FullResponse> = (0..format.choices()).map(|_| FullResponse::default()).collect();
    while let Some(output) = choices.next().await.transpose()? {
        tally.add(&output);
        responses[output.index as usize].add(output);
    }
    Ok((responses, tally.total()))
}

/// The content of parts.
pub(crate) fn text_of(parts: Vec<OutputDelta>) -> String {
    let mut texts = parts.into_iter().filter_map(|part| match part {
        OutputDelta::Content(text) => Some(text),
        _ => None,
    });
    let mut text = texts.next().unwrap_or_default();
    texts.for_each(|more| text.push_str(&more));
    text
}

/// The ids of tokens.
pub(crate) fn token_ids(tokens: &[TokenOutput]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}
