//! The bodies of answers.

use std::sync::Arc;

use serde::Serialize;

use crate::api::shared::response::{CompletionLogprobs, PromptLogprobs, StopReason};

#[derive(Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: &'static str,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    pub(crate) prompt_token_ids: Option<Arc<[u32]>>,
}

#[derive(Serialize)]
pub(crate) struct CompletionChunkChoice<'a> {
    pub(crate) index: u32,
    pub(crate) text: &'a str,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) stop_reason: Option<&'a StopReason>,
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
    pub(crate) token_ids: Option<Vec<u32>>,
}
