//! Bodies of responses. Those of whole responses have all keys, including nulls; chunks have only the keys that vLLM sets.

use std::sync::Arc;
use std::time::Duration;

use octavo_engine::{FinishReason, StageTimes};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::api::shared::sse::Extras;

/// A key that is always null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Null;

impl Serialize for Null {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_none()
    }
}

/// The fields that every body of a response repeats.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    /// With the route's prefix.
    pub(crate) id: String,
    /// Unix time.
    pub(crate) created: u64,
    pub(crate) model: Arc<str>,
    /// `None` if the fingerprint is disabled.
    pub(crate) fingerprint: Option<Arc<str>>,
    pub(crate) details: UsageDetails,
}

/// The whole response to a chat or completion request.
#[derive(Serialize)]
pub(crate) struct WholeBody<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    service_tier: Null,
    system_fingerprint: Option<&'a str>,
    usage: UsageBody,
    /// This and the next two in chats only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<Option<PromptLogprobs>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Option<&'a [u32]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_text: Option<Option<&'a str>>,
    kv_transfer_params: Null,
    ec_transfer_params: Null,
    metrics: Option<RequestMetrics>,
}

/// One event of a chat or completion stream.
#[derive(Serialize)]
pub(crate) struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    /// One choice, or none in the usage chunk.
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageBody>,
    /// With the usage, in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<RequestMetrics>,
    /// In the first chunk of a choice of a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Option<&'a [u32]>>,
}

impl Envelope {
    /// The body of a whole response.
    pub(crate) fn whole<C>(&self, object: &'static str, choices: Vec<C>, usage: Usage) -> WholeBody<'_, C> {
        WholeBody {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            service_tier: Null,
            system_fingerprint: self.fingerprint.as_deref(),
            usage: self.details.whole(usage),
            prompt_logprobs: None,
            prompt_token_ids: None,
            prompt_text: None,
            kv_transfer_params: Null,
            ec_transfer_params: Null,
            metrics: self.details.metrics(usage),
        }
    }

    /// An event of a stream.
    pub(crate) fn chunk<'a, C>(&'a self, object: &'static str, choices: &'a [C], extras: Extras) -> Chunk<'a, C> {
        Chunk {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            system_fingerprint: self.fingerprint.as_deref().filter(|_| extras.fingerprint),
            usage: extras.usage.map(|usage| self.details.chunk(usage)),
            metrics: extras.usage.filter(|_| choices.is_empty()).and_then(|usage| self.details.metrics(usage)),
            prompt_token_ids: None,
        }
    }
}

/// The reason why a choice ended, for `finish_reason` and `stop_reason`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// End of sequence, a stop token or a stop string.
    Stop(Option<StopReason>),
    /// As `Stop`, after tool calls that the model chose to make.
    ToolCalls(Option<StopReason>),
    Length,
    Abort,
    /// The output repeats itself.
    Repetition,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop { token } => Self::Stop(token.map(StopReason::Token)),
            FinishReason::Length => Self::Length,
            FinishReason::Repetition => Self::Repetition,
            FinishReason::Abort | FinishReason::Unsatisfiable | FinishReason::Error(_) => Self::Abort,
        }
    }
}

impl Finish {
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::ToolCalls(_) => "tool_calls",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Repetition => "repetition",
        }
    }

    pub(crate) fn stop_reason(&self) -> Option<&StopReason> {
        match self {
            Self::Stop(reason) | Self::ToolCalls(reason) => reason.as_ref(),
            Self::Length | Self::Abort | Self::Repetition => None,
        }
    }
}

/// The stop string or token that ended a choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    String(String),
    Token(u32),
}

/// Token counts and timings of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cached_tokens: usize,
    /// Reasoning tokens among the completion tokens.
    pub(crate) reasoning_tokens: usize,
    /// Timings up to the latest token, for a single sequence only.
    pub(crate) times: Option<StageTimes>,
}

impl Usage {
    pub(crate) fn total_tokens(&self) -> usize {
        self.prompt_tokens + self.completion_tokens
    }
}

/// The usage details that a response reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageDetails {
    pub(crate) prompt: bool,
    pub(crate) completion: bool,
    /// Whether timings are reported.
    pub(crate) metrics: bool,
}

impl UsageDetails {
    /// The usage of a chunk, without details that are not reported.
    fn chunk(self, usage: Usage) -> UsageBody {
        let whole = self.whole(usage);
        UsageBody {
            prompt_tokens_details: whole.prompt_tokens_details.filter(Option::is_some),
            completion_tokens_details: whole.completion_tokens_details.filter(Option::is_some),
            ..whole
        }
    }

    /// The usage of a whole response, with nulls for details that are not reported.
    pub(crate) fn whole(self, usage: Usage) -> UsageBody {
        let prompt = PromptTokensDetails { cached_tokens: usage.cached_tokens };
        let completion = CompletionTokensDetails { reasoning_tokens: usage.reasoning_tokens };
        UsageBody {
            prompt_tokens: usage.prompt_tokens,
            total_tokens: usage.total_tokens(),
            completion_tokens: usage.completion_tokens,
            prompt_tokens_details: Some(self.prompt.then_some(prompt)),
            completion_tokens_details: Some(self.completion.then_some(completion)),
        }
    }

    /// The timings of the response, if they are reported and known.
    pub(crate) fn metrics(self, usage: Usage) -> Option<RequestMetrics> {
        usage.times.filter(|_| self.metrics).map(|times| RequestMetrics::new(times, usage.completion_tokens))
    }
}

/// The timings of a response, in the format of vLLM's `--enable-per-request-metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct RequestMetrics {
    /// From the first step, so without the time in the queue.
    time_to_first_token_ms: f64,
    /// From the first token to the last.
    generation_time_ms: f64,
    queue_time_ms: f64,
    /// `None` for a single token.
    mean_itl_ms: Option<f64>,
    /// Rate from the first step to the last token; `None` if the time was too short to measure.
    tokens_per_second: Option<f64>,
}

impl RequestMetrics {
    fn new(times: StageTimes, tokens: usize) -> Self {
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let seconds = (times.prefill + times.decode).as_secs_f64();
        Self {
            time_to_first_token_ms: ms(times.prefill),
            generation_time_ms: ms(times.decode),
            queue_time_ms: ms(times.queue),
            mean_itl_ms: (tokens > 1).then(|| ms(times.decode) / (tokens - 1) as f64),
            tokens_per_second: (seconds > 0.0).then(|| tokens as f64 / seconds),
        }
    }
}

/// Token counts in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct UsageBody {
    prompt_tokens: usize,
    total_tokens: usize,
    completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<Option<PromptTokensDetails>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<Option<CompletionTokensDetails>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PromptTokensDetails {
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CompletionTokensDetails {
    reasoning_tokens: usize,
}

/// Log-probabilities of a prompt, one entry per token, null for the first.
pub(crate) type PromptLogprobs = Vec<Option<PromptLogprob>>;

/// By token id, with the prompt's own token first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PromptLogprob(pub(crate) Vec<(u32, RankedLogprob)>);

impl Serialize for PromptLogprob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, entry)| (id.to_string(), entry)))
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RankedLogprob {
    pub(crate) logprob: f32,
    pub(crate) rank: u32,
    pub(crate) decoded_token: String,
}

/// Log-probabilities of a chat choice or chunk, one entry per token.
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

/// Log-probabilities of a completion choice or chunk: parallel lists with one entry per token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CompletionLogprobs {
    /// Start of each token, in characters of the choice's text.
    pub(crate) text_offset: Vec<usize>,
    /// Null for the first token of an echoed prompt.
    pub(crate) token_logprobs: Vec<Option<f32>>,
    pub(crate) tokens: Vec<String>,
    pub(crate) top_logprobs: Vec<Option<TokenMap>>,
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
