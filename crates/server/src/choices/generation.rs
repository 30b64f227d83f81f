//! One sequence: the engine's tokens turned into text until a stop string or the engine ends it.

use octavo_engine::{FinishReason, RequestEvent, RequestStream, TokenOutput};
use octavo_text::TextStream;

use crate::choices::Output;
use crate::types::response::{Finish, StopReason};

/// Drives a [`RequestStream`] through a [`TextStream`]. Dropping it aborts the sequence.
pub(crate) struct Generation {
    index: u32,
    source: Source,
    text: TextStream,
    /// A stop token is part of the text.
    include_stop: bool,
}

enum Source {
    Engine(RequestStream),
    /// Nothing to generate: ends at once.
    Nothing,
    Ended,
}

impl Generation {
    pub(crate) fn new(index: u32, stream: RequestStream, text: TextStream, include_stop: bool) -> Self {
        Self { index, source: Source::Engine(stream), text, include_stop }
    }

    /// A choice of no tokens.
    pub(crate) fn empty(index: u32, text: TextStream) -> Self {
        Self { index, source: Source::Nothing, text, include_stop: false }
    }

    /// The next output; `None` after the last, or the reason why the sequence died.
    pub(crate) async fn next(&mut self) -> Option<Result<Output, FinishReason>> {
        let event = match &mut self.source {
            Source::Engine(stream) => stream.next().await,
            Source::Nothing => Some(RequestEvent { finish: Some(FinishReason::Length), ..RequestEvent::default() }),
            Source::Ended => return None,
        };
        let Some(event) = event else {
            self.source = Source::Ended;
            return Some(Err(FinishReason::Error("the engine dropped a request".into())));
        };
        let output = self.take(event);
        if !matches!(&output, Ok(Output { finish: None, .. })) {
            // A stop string ends a sequence that the engine would continue.
            if let (Source::Engine(stream), Ok(_)) = (std::mem::replace(&mut self.source, Source::Ended), &output) {
                stream.finish();
            }
        }
        Some(output)
    }

    fn take(&mut self, event: RequestEvent) -> Result<Output, FinishReason> {
        let RequestEvent { mut tokens, finish, .. } = event;
        if let Some(error @ FinishReason::Error(_)) = finish {
            return Err(error);
        }
        let ends_with_stop_token = matches!(finish, Some(FinishReason::Stop { .. })) && !tokens.is_empty();
        let shown = tokens.len() - usize::from(ends_with_stop_token && !self.include_stop);
        let mut text = String::new();
        if let Some((count, stop)) = self.push(&tokens[..shown], &mut text) {
            tokens.truncate(count);
            let finish = Some(Finish::Stop(Some(StopReason::String(stop))));
            return Ok(Output { index: self.index, text, tokens, finish });
        }
        let finish = finish.map(|finish| match finish {
            FinishReason::Stop { token } => Finish::Stop(token.map(StopReason::Token)),
            FinishReason::Length => Finish::Length,
            FinishReason::Abort | FinishReason::Error(_) => Finish::Abort,
        });
        if finish.is_some() {
            text.push_str(&self.text.finish());
        }
        Ok(Output { index: self.index, text, tokens, finish })
    }

    /// Appends the tokens' text. If a stop string is found: how many tokens it took, and the string.
    fn push(&mut self, tokens: &[TokenOutput], text: &mut String) -> Option<(usize, String)> {
        for (index, token) in tokens.iter().enumerate() {
            let delta = self.text.push(token.id);
            text.push_str(&delta.text);
            if let Some(stop) = delta.stop {
                return Some((index + 1, stop));
            }
        }
        None
    }
}
