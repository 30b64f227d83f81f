//! The bodies of answers.

use std::borrow::Cow;

use serde::Serialize;

use crate::api::shared::response::{ChatLogprobs, Null, StopReason};

#[derive(Serialize)]
pub(crate) struct ChatChoice<'a> {
    pub(crate) index: u32,
    pub(crate) message: ChatMessage<'a>,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) routed_experts: Null,
    pub(crate) weight_versions: Null,
}

#[derive(Serialize)]
pub(crate) struct ChatMessage<'a> {
    pub(crate) role: &'a str,
    /// Null if there are only tool calls.
    pub(crate) content: Option<String>,
    pub(crate) refusal: Null,
    pub(crate) annotations: Null,
    pub(crate) audio: Null,
    pub(crate) function_call: Null,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    pub(crate) reasoning: Option<String>,
}

/// A tool call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    pub(crate) r#type: &'static str,
    pub(crate) function: FunctionCall,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct FunctionCall {
    pub(crate) name: String,
    /// A JSON object, as text.
    pub(crate) arguments: String,
}

#[derive(Serialize)]
pub(crate) struct ChatChunkChoice<'a> {
    pub(crate) index: u32,
    pub(crate) delta: ChatDelta<'a>,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    /// In the last chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stop_reason: Option<Option<&'a StopReason>>,
    /// In all but the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Option<Vec<u32>>>,
}

/// The part of a message in a chunk.
#[derive(Default, Serialize)]
pub(crate) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCallDelta<'a>>,
}

/// The beginning of a tool call, or a further part of its arguments.
#[derive(Serialize)]
pub(crate) struct ToolCallDelta<'a> {
    pub(crate) index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) r#type: Option<&'static str>,
    pub(crate) function: FunctionDelta<'a>,
}

#[derive(Serialize)]
pub(crate) struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<&'a str>,
    pub(crate) arguments: &'a str,
}
