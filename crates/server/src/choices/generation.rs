//! One sequence: detokenizes the engine's tokens and parses the text, until a stop string or the engine ends the
//! sequence.

use octavo_engine::{FinishReason, RequestEvent, RequestStream, TokenOutput};
use octavo_text::TextStream;

use crate::api::shared::response::{Finish, StopReason};
use crate::choices::Output;
use crate::choices::choice_parser::ChoiceParser;

/// Drives a [`RequestStream`] through a [`TextStream`] and [`ChoiceParser`]. Dropping it aborts the sequence.
pub(crate) struct Generation {
    index: u32,
    source: Source,
    /// Engine output that is not part of an output yet.
    event: RequestEvent,
    /// Number of its tokens that are part of an output.
    taken: usize,
    text: TextStream,
    parts: ChoiceParser,
    pace: Pace,
}

/// The settings that group a sequence's tokens into outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Whether the text includes the stop token.
    pub(crate) include_stop: bool,
    /// Tokens per output, except for the first and the last output.
    pub(crate) interval: u32,
}

enum Source {
    Engine(RequestStream),
    /// There is nothing to generate, so the sequence ends at once.
    Nothing,
    Ended,
}

impl Generation {
    /// Creates a sequence; `stream` is `None` if there is nothing to generate.
    pub(crate) fn new(
        index: u32,
        stream: Option<RequestStream>,
        text: TextStream,
        parts: ChoiceParser,
        pace: Pace,
    ) -> Self {
        let source = stream.map_or(Source::Nothing, Source::Engine);
        Self { index, source, event: RequestEvent::default(), taken: 0, text, parts, pace }
    }

    /// The next output, which has one token unless the pace asks for more. `None` after the last output; an error if the
    /// engine ended the sequence.
    pub(crate) async fn next(&mut self) -> Option<Result<Output, FinishReason>> {
        if matches!(self.source, Source::Ended) {
            return None;
        }
        let mut output = Output { index: self.index, ..Output::default() };
        let mut wanted = 1;
        loop {
            if let Err(error) = self.refill().await {
                self.source = Source::Ended;
                return Some(Err(error));
            }
            let begins = self.event.cached_tokens.is_some() || matches!(self.source, Source::Nothing);
            self.take(&mut output);
            if output.finish.is_some() {
                // A stop string ends a sequence that the engine would continue.
                if let Source::Engine(stream) = std::mem::replace(&mut self.source, Source::Ended) {
                    stream.finish();
                }
                return Some(Ok(output));
            }
            if !begins {
                wanted = self.pace.interval as usize;
            }
            if output.tokens.len() >= wanted {
                return Some(Ok(output));
            }
        }
    }

    /// Waits for engine output.
    async fn refill(&mut self) -> Result<(), FinishReason> {
        if self.taken < self.event.tokens.len() {
            return Ok(());
        }
        self.taken = 0;
        self.event = match &mut self.source {
            Source::Engine(stream) => match stream.next().await {
                Some(event) => event,
                None => return Err(FinishReason::Error("the engine dropped a request".into())),
            },
            Source::Nothing | Source::Ended => {
                RequestEvent { finish: Some(FinishReason::Length), ..RequestEvent::default() }
            }
        };
        match &self.event.finish {
            Some(error @ (FinishReason::Unsatisfiable | FinishReason::Error(_))) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Moves the next token and its data into `output`, and after the last token the finish reason.
    fn take(&mut self, output: &mut Output) {
        output.cached_tokens = output.cached_tokens.or(self.event.cached_tokens.take());
        output.times = self.event.times;
        if !self.event.prompt_logprobs.is_empty() {
            output.prompt_logprobs = std::mem::take(&mut self.event.prompt_logprobs);
        }
        let token = self
            .event
            .tokens
            .get_mut(self.taken)
            .map(|token| TokenOutput { id: token.id, logprobs: token.logprobs.take() });
        self.taken += usize::from(token.is_some());
        let last = self.taken >= self.event.tokens.len();
        let finish = if last { self.event.finish.take() } else { None };
        if let Some(token) = token {
            let stops = matches!(finish, Some(FinishReason::Stop { .. }));
            let shown = !stops || self.pace.include_stop;
            let stop = if shown { self.push(&token, output) } else { None };
            output.tokens.push(token);
            if let Some(stop) = stop {
                self.end(output, Finish::Stop(Some(StopReason::String(stop))));
                return;
            }
        }
        if let Some(finish) = finish {
            let rest = self.text.finish();
            self.parts.push(&rest, &mut output.parts);
            self.end(output, Finish::from(finish));
        }
    }

    /// Adds a token's text and returns the stop string that it completes, if any.
    fn push(&mut self, token: &TokenOutput, output: &mut Output) -> Option<String> {
        let delta = self.text.push(token.id);
        self.parts.push(&delta.text, &mut output.parts);
        output.reasoning_tokens += usize::from(self.parts.is_reasoning());
        delta.stop
    }

    fn end(&mut self, output: &mut Output, finish: Finish) {
        self.parts.finish(&mut output.parts);
        output.finish = Some(match finish {
            Finish::Stop(reason) if self.parts.has_called() => Finish::ToolCalls(reason),
            finish => finish,
        });
    }
}
