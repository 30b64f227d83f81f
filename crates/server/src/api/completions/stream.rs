//! Bodies of POST /v1/completions.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_engine::{Logprobs, TokenOutput};

use crate::api::completions::response::{CompletionChoice, CompletionChunkChoice};
use crate::api::shared::logprobs::Spelling;
use crate::api::shared::response::{Chunk, CompletionLogprobs, Envelope, Finish, Usage};
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::{FullResponse, ResponseFormat, text_of, token_ids};
use crate::choices::Output;

/// The completion route's [`ResponseFormat`].
pub(crate) struct CompletionFormat {
    pub(crate) envelope: Envelope,
    pub(crate) n: u32,
    pub(crate) prompts: Vec<Arc<[u32]>>,
    /// The text of each prompt, if prompts are echoed.
    pub(crate) echo: Option<Vec<String>>,
    /// Number of alternatives, if log-probabilities are requested.
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: bool,
    pub(crate) spelling: Spelling,
    pub(crate) return_token_ids: bool,
    /// The start of the next token of each choice, in characters; `None` before the first chunk.
    pub(crate) sent: Vec<Option<usize>>,
}

impl CompletionFormat {
    fn event<'a>(
        &'a self,
        choices: &'a [CompletionChunkChoice<'a>],
        extras: Extras,
    ) -> Chunk<'a, CompletionChunkChoice<'a>> {
        self.envelope.chunk("text_completion", choices, extras)
    }

    fn prompt_of(&self, index: u32) -> usize {
        (index / self.n) as usize
    }

    /// The text of a choice, after its prompt if prompts are echoed.
    fn with_echo(&self, index: u32, text: String) -> String {
        match &self.echo {
            Some(prompts) => format!("{}{text}", prompts[self.prompt_of(index)]),
            None => text,
        }
    }

    /// Log-probabilities of tokens that start at character `offset`, and the start of the next token. At the beginning of an
    /// echo, the prompt's log-probabilities come first.
    fn logprobs(
        &self,
        index: u32,
        tokens: &[TokenOutput],
        prompt_logprobs: &[Logprobs],
        offset: Option<usize>,
    ) -> (Option<CompletionLogprobs>, usize) {
        let start = offset.unwrap_or(0);
        let Some(top) = self.logprobs else { return (None, start) };
        let (mut out, mut next) = (CompletionLogprobs::default(), start);
        if offset.is_none() && self.echo.is_some() {
            let prompt = self.prompts[self.prompt_of(index)].iter().copied();
            let logprobs = std::iter::once(None).chain(prompt_logprobs.iter().map(Some));
            next = self.spelling.completion(&mut out, prompt.zip(logprobs), top, next);
        }
        let drawn = tokens.iter().map(|token| (token.id, token.logprobs.as_ref()));
        let next = self.spelling.completion(&mut out, drawn, top, next);
        (Some(out), next)
    }
}

impl ResponseFormat for CompletionFormat {
    fn choices(&self) -> usize {
        self.prompts.len() * self.n as usize
    }

    fn prompt_tokens(&self, index: u32) -> usize {
        self.prompts[self.prompt_of(index)].len()
    }

    fn open(&mut self, _: &mut Events, _: u32, _: Extras) {}

    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras) {
        let Output { index, parts, tokens, prompt_logprobs, finish, .. } = output;
        let sent = self.sent[index as usize];
        let text = if sent.is_none() { self.with_echo(index, text_of(parts)) } else { text_of(parts) };
        let (logprobs, next) = self.logprobs(index, &tokens, &prompt_logprobs, sent);
        self.sent[index as usize] = Some(next);
        let prompt = &self.prompts[self.prompt_of(index)];
        let choice = CompletionChunkChoice {
            index,
            text: &text,
            logprobs,
            finish_reason: finish.as_ref().map(Finish::reason),
            stop_reason: finish.as_ref().and_then(Finish::stop_reason),
            prompt_token_ids: (self.return_token_ids && sent.is_none()).then_some(&**prompt),
            token_ids: self.return_token_ids.then(|| token_ids(&tokens)),
        };
        events.push(&self.event(&[choice], extras));
    }

    fn usage(&mut self, events: &mut Events, usage: Usage) {
        events.push(&self.event(&[], Extras { usage: Some(usage), fingerprint: true }));
    }

    fn whole(self, choices: Vec<FullResponse>, usage: Usage) -> Response {
        let choice = |(index, whole): (usize, FullResponse)| {
            let prompt = &self.prompts[self.prompt_of(index as u32)];
            let (logprobs, _) = self.logprobs(index as u32, &whole.tokens, &whole.prompt_logprobs, None);
            CompletionChoice {
                index: index as u32,
                text: self.with_echo(index as u32, text_of(whole.parts)),
                logprobs,
                finish_reason: whole.finish.as_ref().map_or("abort", Finish::reason),
                stop_reason: whole.finish.as_ref().and_then(Finish::stop_reason).cloned(),
                token_ids: self.return_token_ids.then(|| token_ids(&whole.tokens)),
                prompt_logprobs: self.prompt_logprobs.then(|| self.spelling.prompt(prompt, &whole.prompt_logprobs)),
                prompt_token_ids: self.return_token_ids.then(|| Arc::clone(prompt)),
            }
        };
        let choices = choices.into_iter().enumerate().map(choice).collect();
        Json(self.envelope.whole("text_completion", choices, usage)).into_response()
    }
}
