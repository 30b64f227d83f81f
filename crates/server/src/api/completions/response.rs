//! The bodies of answers.

use std::sync::Arc;

use serde::Serialize;

use crate::api::shared::response::{
    ChunkUsage, CompletionLogprobs, Null, PromptLogprobs, RequestMetrics, StopReason, WholeUsage,
};

/// The whole response to a completion request.
#[derive(Serialize)]
pub(crate) struct Completion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) service_tier: Null,
    pub(crate) system_fingerprint: Option<&'a str>,
    pub(crate) usage: WholeUsage,
    pub(crate) kv_transfer_params: Null,
    pub(crate) ec_transfer_params: Null,
    pub(crate) metrics: Option<RequestMetrics>,
}

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

/// One event of a completion stream.
#[derive(Serialize)]
pub(crate) struct CompletionChunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: &'a [CompletionChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<ChunkUsage>,
    /// With the usage, in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<RequestMetrics>,
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
