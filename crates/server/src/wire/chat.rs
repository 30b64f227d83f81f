//! Bodies of POST /v1/chat/completions.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use octavo_text::Tokenizer;

use crate::choices::Output;
use crate::logprobs;
use crate::sse::{Events, Extras};
use crate::types::response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, Finish, Null, Usage,
};
use crate::wire::{Envelope, Whole, Wire};

/// The chat route's [`Wire`].
pub(crate) struct ChatWire {
    pub(crate) envelope: Envelope,
    pub(crate) n: u32,
    pub(crate) prompt_tokens: usize,
    /// Alternatives, if log-probabilities were asked for.
    pub(crate) logprobs: Option<u32>,
    pub(crate) tokenizer: Arc<Tokenizer>,
}

impl ChatWire {
    fn event<'a>(&'a self, choices: &'a [ChatChunkChoice<'a>], extras: Extras) -> ChatChunk<'a> {
        let Envelope { id, created, model, fingerprint } = &self.envelope;
        ChatChunk {
            id,
            object: "chat.completion.chunk",
            created: *created,
            model,
            choices,
            system_fingerprint: extras.fingerprint.then_some(&**fingerprint),
            usage: extras.usage,
            prompt_token_ids: None,
        }
    }
}

impl Wire for ChatWire {
    fn choices(&self) -> usize {
        self.n as usize
    }

    fn prompt_tokens(&self, _: u32) -> usize {
        self.prompt_tokens
    }

    fn total_prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn open(&mut self, events: &mut Events, index: u32, extras: Extras) {
        let delta = ChatDelta { role: Some("assistant"), content: "" };
        let choice =
            ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
        let choices = [choice];
        events.push(&ChatChunk { prompt_token_ids: Some(Null), ..self.event(&choices, extras) });
    }

    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras) {
        let choice = ChatChunkChoice {
            index: output.index,
            delta: ChatDelta { role: None, content: &output.text },
            logprobs: self.logprobs.map(|top| logprobs::chat(&output.tokens, top, &self.tokenizer)),
            finish_reason: output.finish.as_ref().map(Finish::reason),
            stop_reason: output.finish.as_ref().map(Finish::stop_reason),
            token_ids: Some(Null),
        };
        events.push(&self.event(&[choice], extras));
    }

    fn usage(&self, events: &mut Events, usage: Usage) {
        events.push(&self.event(&[], Extras { usage: Some(usage), fingerprint: true }));
    }

    fn whole(self, choices: Vec<Whole>, usage: Usage) -> Response {
        let choice = |(index, whole): (usize, Whole)| ChatChoice {
            index: index as u32,
            message: ChatMessage::assistant(whole.text),
            logprobs: self.logprobs.map(|top| logprobs::chat(&whole.tokens, top, &self.tokenizer)),
            finish_reason: whole.finish.as_ref().map_or("abort", Finish::reason),
            stop_reason: whole.finish.as_ref().and_then(Finish::stop_reason).cloned(),
            token_ids: Null,
            routed_experts: Null,
            weight_versions: Null,
        };
        let Envelope { id, created, model, fingerprint } = &self.envelope;
        Json(ChatCompletion {
            id,
            object: "chat.completion",
            created: *created,
            model,
            choices: choices.into_iter().enumerate().map(choice).collect(),
            service_tier: Null,
            system_fingerprint: fingerprint,
            usage: usage.into(),
            prompt_logprobs: Null,
            prompt_token_ids: Null,
            prompt_text: Null,
            kv_transfer_params: Null,
            ec_transfer_params: Null,
            metrics: Null,
        })
        .into_response()
    }
}
