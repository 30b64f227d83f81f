//! One sequence: the engine's tokens turned into text, and the text taken apart, until a stop string or the engine ends
//! it.

use octavo_engine::{FinishReason, RequestEvent, RequestStream, TokenOutput};
use octavo_text::TextStream;

use crate::choices::Output;
use crate::choices::parts::Parts;
use crate::types::response::{Finish, StopReason};

/// Drives a [`RequestStream`] through a [`TextStream`] and [`Parts`]. Dropping it aborts the sequence.
pub(crate) struct Generation {
    index: u32,
    source: Source,
    /// What the engine has given and is not yet put out.
    event: RequestEvent,
    /// Its tokens that are out.
    taken: usize,
    text: TextStream,
    parts: Parts,
    pace: Pace,
}

/// How a sequence's tokens become outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A stop token is part of the text.
    pub(crate) include_stop: bool,
    /// Tokens of an output; the first and the last come as they are.
    pub(crate) interval: u32,
}

enum Source {
    Engine(RequestStream),
    /// Nothing to generate: ends at once.
    Nothing,
    Ended,
}

impl Generation {
    /// `stream` is none if there is nothing to generate.
    pub(crate) fn new(
        index: u32,
        stream: Option<RequestStream>,
        (text, parts): (TextStream, Parts),
        pace: Pace,
    ) -> Self {
        let source = stream.map_or(Source::Nothing, Source::Engine);
        Self { index, source, event: RequestEvent::default(), taken: 0, text, parts, pace }
    }

    /// The next output: one token, unless the pace says more. `None` after the last, or the reason why the sequence
    /// died.
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

    /// Waits until there is something to put out.
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
            Some(error @ FinishReason::Error(_)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Moves the next token into `output`, with what comes with it, and the end if that was the last one.
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

    /// Adds a token's text; a stop string that it completes is returned.
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
