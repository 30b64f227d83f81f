//! What a caller asks for and what comes back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Constraint;
use crate::plan::{Logprobs, TokenOutput};

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
    /// If not empty, the tokens to report beside the drawn one in place of the most likely ones; needs `logprobs`.
    /// Repetitions count once; an id beyond the vocabulary has the log-probability −∞.
    pub logprob_token_ids: Vec<u32>,
    /// Reports the prompt's log-probabilities: of each prompt token but the first, with this many most likely ones. The
    /// prefix cache is then not looked up, as every row of the prompt is needed.
    pub prompt_logprobs: Option<u32>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Upper bound on generated tokens, at least 1; 0 is possible where `prompt_logprobs` is set and means that the
    /// prompt is scored and nothing is generated.
    pub max_tokens: u32,
    /// End-of-sequence and stop ids are masked until this many tokens exist.
    pub min_tokens: u32,
    /// End the request without a stop reason, unless `ignore_eos`.
    pub eos_token_ids: Vec<u32>,
    /// End the request and are its stop reason.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at an end-of-sequence id.
    pub ignore_eos: bool,
    /// End a request that repeats itself.
    pub repetition_detection: Option<RepetitionDetection>,
}

/// When an output counts as repeating itself: it ends with a pattern of at least `min_pattern_size` and at most
/// `max_pattern_size` tokens, `min_count` times in a row. Not looked at before `min_tokens` tokens exist.
///
/// Costs `max_pattern_size` comparisons a token and 4 bytes each; the caller bounds it. A `max_pattern_size` of 0 or a
/// `min_count` below 2 turns it off; a `min_pattern_size` of 0 means 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepetitionDetection {
    /// Tokens of the longest pattern.
    pub max_pattern_size: u32,
    /// Tokens of the shortest pattern.
    pub min_pattern_size: u32,
    /// How often the pattern must come.
    pub min_count: u32,
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
            logprob_token_ids: Vec::new(),
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            max_tokens: 16,
            min_tokens: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            repetition_detection: None,
        }
    }
}

/// What is made of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// Tokens are drawn after it.
    #[default]
    Generate,
    /// Its hidden state is returned and no token is drawn: of [`Request::params`] nothing matters.
    Embed(Pooling),
}

/// How a prompt's hidden states become one vector. It is not normalised: a caller that cuts it to fewer dimensions must do
/// that first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// That of the last token, after the final norm.
    #[default]
    Last,
}

/// One sequence to complete.
pub struct Request {
    /// For logs and traces; need not be unique.
    pub id: String,
    /// Prompt token ids, not empty, shorter than the context; as long as it where no token is generated.
    pub prompt: Arc<[u32]>,
    /// What to make of it.
    pub task: Task,
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
    /// End of sequence, a stop token, or [`RequestStream::finish`](crate::RequestStream::finish); an embedding is done.
    Stop {
        /// The stop token id that matched; `None` for end of sequence, stop strings and embeddings.
        token: Option<u32>,
    },
    /// `max_tokens` or the context is used up.
    Length,
    /// The output repeats itself, by the request's [`RepetitionDetection`].
    Repetition,
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
            Self::Repetition => "repetition",
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
    /// Set in the first event, complete, if the request asked for it: entry i is about prompt token i + 1, as the first
    /// one follows nothing.
    pub prompt_logprobs: Vec<Logprobs>,
    /// New tokens. A stop token or end-of-sequence token is the last of them.
    pub tokens: Vec<TokenOutput>,
    /// How long it took to the latest of them; `None` before the first.
    pub times: Option<StageTimes>,
    /// `[H]`, set in the last event of a [`Task::Embed`] that ended as [`FinishReason::Stop`].
    pub embedding: Option<Vec<f32>>,
    /// Set in the last event.
    pub finish: Option<FinishReason>,
}

/// How long a request was in its stages, up to its latest token. Preemption is part of the stage that it interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Taken into the queue → first planned in a step.
    pub queue: Duration,
    /// First planned → first token.
    pub prefill: Duration,
    /// First token → latest token.
    pub decode: Duration,
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
