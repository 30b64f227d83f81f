//! Bodies of POST /v1/completions.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_text::Tokenizer;

use crate::choices::Output;
use crate::logprobs;
use crate::sse::{Events, Extras};
use crate::types::response::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, Finish, Null, Usage,
};
use crate::wire::{Envelope, Whole, Wire};

/// The completion route's [`Wire`].
pub(crate) struct CompletionWire {
    pub(crate) envelope: Envelope,
    pub(crate) n: u32,
    /// For each prompt its number of tokens.
    pub(crate) prompt_tokens: Vec<usize>,
    /// For each prompt its text, if it shall be repeated.
    pub(crate) echo: Option<Vec<String>>,
    /// Alternatives, if log-probabilities were asked for.
    pub(crate) logprobs: Option<u32>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// For each choice the characters sent.
    pub(crate) sent: Vec<usize>,
}

impl CompletionWire {
    fn event<'a>(&'a self, choices: &'a [CompletionChunkChoice<'a>], extras: Extras) -> CompletionChunk<'a> {
        let Envelope { id, created, model, fingerprint } = &self.envelope;
        CompletionChunk {
            id,
            object: "text_completion",
            created: *created,
            model,
            choices,
            system_fingerprint: extras.fingerprint.then_some(&**fingerprint),
            usage: extras.usage,
        }
    }

    fn prompt_of(&self, index: u32) -> usize {
        (index / self.n) as usize
    }

    /// A choice's text, after its prompt if that is to be repeated.
    fn with_echo(&self, index: u32, text: String) -> String {
        match &self.echo {
            Some(prompts) => format!("{}{text}", prompts[self.prompt_of(index)]),
            None => text,
        }
    }
}

impl Wire for CompletionWire {
    fn choices(&self) -> usize {
        self.prompt_tokens.len() * self.n as usize
    }

    fn prompt_tokens(&self, index: u32) -> usize {
        self.prompt_tokens[self.prompt_of(index)]
    }

    fn total_prompt_tokens(&self) -> usize {
        self.prompt_tokens.iter().sum()
    }

    fn open(&mut self, _: &mut Events, _: u32, _: Extras) {}

    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras) {
        let Output { index, text, tokens, finish } = output;
        let sent = self.sent[index as usize];
        let text = if sent == 0 { self.with_echo(index, text) } else { text };
        self.sent[index as usize] += text.chars().count();
        let choice = CompletionChunkChoice {
            index,
            text: &text,
            logprobs: self.logprobs.map(|top| logprobs::completion(&tokens, top, sent, &self.tokenizer)),
            finish_reason: finish.as_ref().map(Finish::reason),
            stop_reason: finish.as_ref().and_then(Finish::stop_reason),
            prompt_token_ids: Null,
            token_ids: Null,
        };
        events.push(&self.event(&[choice], extras));
    }

    fn usage(&self, events: &mut Events, usage: Usage) {
        events.push(&self.event(&[], Extras { usage: Some(usage), fingerprint: true }));
    }

    fn whole(self, choices: Vec<Whole>, usage: Usage) -> Response {
        let choice = |(index, whole): (usize, Whole)| CompletionChoice {
            index: index as u32,
            text: self.with_echo(index as u32, whole.text),
            logprobs: self.logprobs.map(|top| logprobs::completion(&whole.tokens, top, 0, &self.tokenizer)),
            finish_reason: whole.finish.as_ref().map_or("abort", Finish::reason),
            stop_reason: whole.finish.as_ref().and_then(Finish::stop_reason).cloned(),
            token_ids: Null,
            prompt_logprobs: Null,
            prompt_token_ids: Null,
        };
        let Envelope { id, created, model, fingerprint } = &self.envelope;
        Json(Completion {
            id,
            object: "text_completion",
            created: *created,
            model,
            choices: choices.into_iter().enumerate().map(choice).collect(),
            service_tier: Null,
            system_fingerprint: fingerprint,
            usage: usage.into(),
            kv_transfer_params: Null,
            ec_transfer_params: Null,
            metrics: Null,
        })
        .into_response()
    }
}
