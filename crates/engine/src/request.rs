//! What a caller asks for and what comes back.

use std::sync::Arc;
use std::time::Instant;

use crate::Constraint;
use crate::plan::TokenOutput;

/// How tokens are drawn. Ranges are checked by whoever parses the request; the meaning of each field is that of
/// OpenAI's API and vLLM's extensions.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 means greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from tokens already generated.
    pub presence_penalty: f32,
    /// Subtracted for each time a token was generated.
    pub frequency_penalty: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Key of the draws; a request without one gets a random one from the front end.
    pub seed: u64,
    /// Most likely tokens to report beside the drawn one.
    pub logprobs: Option<u32>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Upper bound on generated tokens, at least 1.
    pub max_tokens: u32,
    /// End-of-sequence and stop ids are masked until this many tokens exist.
    pub min_tokens: u32,
    /// End the request without a stop reason, unless `ignore_eos`.
    pub eos_token_ids: Vec<u32>,
    /// End the request and are its stop reason.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at an end-of-sequence id.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            logprobs: None,
            logit_bias: Vec::new(),
            max_tokens: 16,
            min_tokens: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// One sequence to complete.
pub struct Request {
    /// For logs and traces; need not be unique.
    pub id: String,
    /// Prompt token ids, not empty, shorter than the context.
    pub prompt: Arc<[u32]>,
    /// How to draw.
    pub params: Arc<SamplingParams>,
    /// Lower runs earlier under the priority policy.
    pub priority: i64,
    /// When the front end received it: the zero of TTFT and end-to-end latency.
    pub arrival: Instant,
    /// Separates prefix-cache entries.
    pub cache_salt: Option<Arc<str>>,
    /// Grammar, if any.
    pub constraint: Option<Box<dyn Constraint>>,
    /// `n` of the API request this sequence belongs to, for the metrics of its parent; reported by the first child.
    pub parent_n: Option<u32>,
}

/// Why a request ended. There is exactly one end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End of sequence, a stop token, or [`RequestStream::finish`](crate::RequestStream::finish).
    Stop {
        /// The stop token id that matched; `None` for end of sequence and for stop strings.
        token: Option<u32>,
    },
    /// `max_tokens` or the context is used up.
    Length,
    /// The caller went away, or the engine is shutting down.
    Abort,
    /// The step that held it failed, or its grammar rejected a token.
    Error(Arc<str>),
}

impl FinishReason {
    /// The word of the API and of the `finished_reason` label.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Stop { .. } => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error(_) => "error",
        }
    }
}

/// What a [`RequestStream`](crate::RequestStream) yields: tokens as they are drawn, the last with the end of the
/// request. A slow reader gets several tokens in one event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestEvent {
    /// Prompt tokens found in the prefix cache; set in the first event.
    pub cached_tokens: Option<u32>,
    /// New tokens. A stop token or end-of-sequence token is the last of them.
    pub tokens: Vec<TokenOutput>,
    /// Set in the last event.
    pub finish: Option<FinishReason>,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too many requests wait.
    #[error("the server is busy: {waiting} requests are waiting, the limit is {limit}")]
    TooManyRequests {
        /// Requests waiting.
        waiting: usize,
        /// Bound.
        limit: usize,
    },
    /// Too many prompt tokens wait.
    #[error("the server is busy: {waiting} prompt tokens are waiting, the limit is {limit}")]
    TooManyTokens {
        /// Tokens waiting.
        waiting: usize,
        /// Bound.
        limit: usize,
    },
    /// The prompt can never run: empty, or longer than the context or the whole KV cache.
    #[error("the prompt has {tokens} tokens, but at most {limit} fit")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Bound.
        limit: usize,
    },
    /// The prompt is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The engine is shutting down or has stopped.
    #[error("the engine is not running")]
    Stopped,
}
