//! Bodies of responses. Non-streaming ones have every key, nulls included; chunks have only those that vLLM sets.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// A key that is always null here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Null;

impl Serialize for Null {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_none()
    }
}

/// Why a choice ended, as `finish_reason` and `stop_reason`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// End of sequence, a stop token or a stop string.
    Stop(Option<StopReason>),
    Length,
    Abort,
}

impl Finish {
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }

    pub(crate) fn stop_reason(&self) -> Option<&StopReason> {
        match self {
            Self::Stop(reason) => reason.as_ref(),
            Self::Length | Self::Abort => None,
        }
    }
}

/// What stopped a choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    String(String),
    Token(u32),
}

/// Token counts of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) completion_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens + completion_tokens, completion_tokens }
    }
}

/// [`Usage`] with its details, which are not reported.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct FullUsage {
    #[serde(flatten)]
    pub(crate) usage: Usage,
    pub(crate) prompt_tokens_details: Null,
    pub(crate) completion_tokens_details: Null,
}

impl From<Usage> for FullUsage {
    fn from(usage: Usage) -> Self {
        Self { usage, prompt_tokens_details: Null, completion_tokens_details: Null }
    }
}

/// The whole answer of a chat request.
#[derive(Serialize)]
pub(crate) struct ChatCompletion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) service_tier: Null,
    pub(crate) system_fingerprint: &'a str,
    pub(crate) usage: FullUsage,
    pub(crate) prompt_logprobs: Null,
    pub(crate) prompt_token_ids: Null,
    pub(crate) prompt_text: Null,
    pub(crate) kv_transfer_params: Null,
    pub(crate) ec_transfer_params: Null,
    pub(crate) metrics: Null,
}

#[derive(Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: ChatMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) token_ids: Null,
    pub(crate) routed_experts: Null,
    pub(crate) weight_versions: Null,
}

#[derive(Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Null,
    pub(crate) annotations: Null,
    pub(crate) audio: Null,
    pub(crate) function_call: Null,
    pub(crate) reasoning: Null,
}

impl ChatMessage {
    pub(crate) fn assistant(content: String) -> Self {
        let role = "assistant";
        Self { role, content, refusal: Null, annotations: Null, audio: Null, function_call: Null, reasoning: Null }
    }
}

/// Log-probabilities of a chat choice or chunk, one entry a token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ChatLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct TopLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// One event of a chat stream.
#[derive(Serialize)]
pub(crate) struct ChatChunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    /// One, or none in the usage chunk.
    pub(crate) choices: &'a [ChatChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    /// In the first chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Null>,
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
    pub(crate) token_ids: Option<Null>,
}

#[derive(Serialize)]
pub(crate) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    pub(crate) content: &'a str,
}

/// The whole answer of a completion request.
#[derive(Serialize)]
pub(crate) struct Completion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) service_tier: Null,
    pub(crate) system_fingerprint: &'a str,
    pub(crate) usage: FullUsage,
    pub(crate) kv_transfer_params: Null,
    pub(crate) ec_transfer_params: Null,
    pub(crate) metrics: Null,
}

#[derive(Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: &'static str,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) token_ids: Null,
    pub(crate) prompt_logprobs: Null,
    pub(crate) prompt_token_ids: Null,
}

/// Log-probabilities of a completion choice or chunk: parallel lists, one entry a token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CompletionLogprobs {
    /// Where each token starts, in characters of the choice's text.
    pub(crate) text_offset: Vec<usize>,
    pub(crate) token_logprobs: Vec<f32>,
    pub(crate) tokens: Vec<String>,
    pub(crate) top_logprobs: Vec<TokenMap>,
}

/// Token text → log-probability, in order; the first of equal texts wins.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TokenMap(pub(crate) Vec<(String, f32)>);

impl Serialize for TokenMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
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
    pub(crate) usage: Option<Usage>,
}

#[derive(Serialize)]
pub(crate) struct CompletionChunkChoice<'a> {
    pub(crate) index: u32,
    pub(crate) text: &'a str,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) stop_reason: Option<&'a StopReason>,
    pub(crate) prompt_token_ids: Null,
    pub(crate) token_ids: Null,
}

/// GET /v1/models.
#[derive(Serialize)]
pub(crate) struct ModelList<'a> {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelCard<'a>>,
}

#[derive(Serialize)]
pub(crate) struct ModelCard<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    pub(crate) root: &'a str,
    pub(crate) parent: Null,
    pub(crate) max_model_len: usize,
    pub(crate) permission: [ModelPermission; 1],
}

#[derive(Serialize)]
pub(crate) struct ModelPermission {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) allow_create_engine: bool,
    pub(crate) allow_sampling: bool,
    pub(crate) allow_logprobs: bool,
    pub(crate) allow_search_indices: bool,
    pub(crate) allow_view: bool,
    pub(crate) allow_fine_tuning: bool,
    pub(crate) organization: &'static str,
    pub(crate) group: Null,
    pub(crate) is_blocking: bool,
}
