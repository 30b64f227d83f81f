//! Requests and the events that answer them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::{Logprobs, TokenOutput};
use crate::{Adapter, Constraint, PromptImage, TokenSet};

/// Sampling parameters. The code that parses the request checks the ranges. Each field has the meaning of OpenAI's API
/// and vLLM's extensions.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Temperature; 0 means greedy.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Cumulative probability of the tokens to keep; 1 keeps all.
    pub top_p: f32,
    /// Minimum probability relative to the most likely token; 0 keeps all.
    pub min_p: f32,
    /// Penalty subtracted once from every token already generated.
    pub presence_penalty: f32,
    /// Penalty subtracted for each time a token was generated.
    pub frequency_penalty: f32,
    /// Repetition penalty; 1 turns it off.
    pub repetition_penalty: f32,
    /// Random seed. The front end gives a random seed to a request without one.
    pub seed: u64,
    /// Number of most likely tokens to report beside the sampled one.
    pub logprobs: Option<u32>,
    /// Tokens to report beside the sampled one instead of the most likely ones, if not empty; needs `logprobs`.
    /// Duplicates count once. An id beyond the vocabulary has the log-probability −∞.
    pub logprob_token_ids: Vec<u32>,
    /// Number of most likely tokens to report for each prompt token but the first, with the prompt's log-probabilities.
    /// The prefix cache is then not looked up, because every row of the prompt is needed.
    pub prompt_logprobs: Option<u32>,
    /// Values added to the logits, as `(id, value)`. The sequences of a request share them.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Maximum number of generated tokens, at least 1. With `prompt_logprobs` it may be 0: the prompt is then scored
    /// and nothing is generated.
    pub max_tokens: u32,
    /// Minimum number of generated tokens. End-of-sequence and stop ids are masked until then.
    pub min_tokens: u32,
    /// Ids that end the request without a stop reason, unless `ignore_eos` is set.
    pub eos_token_ids: Vec<u32>,
    /// Ids that end the request and are reported as its stop reason.
    pub stop_token_ids: TokenSet,
    /// Continues after an end-of-sequence id.
    pub ignore_eos: bool,
    /// Rule that ends a request which repeats itself.
    pub repetition_detection: Option<RepetitionDetection>,
}

/// Rule for repetition: an output repeats itself if it ends with a pattern of `min_pattern_size` to `max_pattern_size`
/// tokens that occurs `min_count` times in a row. The rule applies once `min_tokens` tokens exist.
///
/// Detection costs `max_pattern_size` comparisons per token and 4 bytes for each; the caller bounds it. A
/// `max_pattern_size` of 0 or a `min_count` below 2 turns it off. A `min_pattern_size` of 0 means 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepetitionDetection {
    /// Length of the longest pattern, in tokens.
    pub max_pattern_size: u32,
    /// Length of the shortest pattern, in tokens.
    pub min_pattern_size: u32,
    /// Number of consecutive occurrences.
    pub min_count: u32,
}

impl Default for SamplingParams {
    /// Returns greedy sampling of 16 tokens.
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
            logit_bias: Arc::default(),
            max_tokens: 16,
            min_tokens: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: TokenSet::default(),
            ignore_eos: false,
            repetition_detection: None,
        }
    }
}

/// Operation on a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Task {
    /// Generates tokens after the prompt.
    #[default]
    Generate,
    /// Returns vectors of the prompt. No token is sampled, and [`Request::params`] has no effect.
    Embed(Pooling),
}

/// Rows of a prompt that a request gets vectors of. The vectors are not normalised, because a caller that truncates them
/// to fewer dimensions must do that first. Classifiers return their raw scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// One vector of the whole prompt, reduced as the model does it: the hidden state of the first or the last token, or
    /// the mean of all.
    #[default]
    Prompt,
    /// A vector of each token. The prefix cache is then not looked up, because every row of the prompt is needed.
    Tokens,
}

/// Client to which a request belongs. All sequences of a client share its turn under the fair policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u128);

/// A sequence to complete.
pub struct Request {
    /// Request id for logs and traces. It need not be unique.
    pub id: String,
    /// Prompt token ids: not empty and shorter than the context, or as long as the context where no token is generated.
    pub prompt: Arc<[u32]>,
    /// Position of the first token of the second text, if the prompt is a pair of texts that the model distinguishes by
    /// token types, as BERT does.
    pub second_text: Option<u32>,
    /// Images of the prompt in the order of their tokens, which do not overlap. Mostly empty. The sequences of a request
    /// share them.
    pub images: Arc<[PromptImage]>,
    /// Operation on the prompt.
    pub task: Task,
    /// Sampling parameters.
    pub params: Arc<SamplingParams>,
    /// Priority. Lower values run earlier under the priority policy.
    pub priority: i64,
    /// Client that sent the request, for the fair policy.
    pub client: ClientId,
    /// Time when the front end received the request: the zero of TTFT and end-to-end latency.
    pub arrival: Instant,
    /// Salt that separates prefix-cache entries.
    pub cache_salt: Option<Arc<str>>,
    /// Adapter of the sequence; `None` for the base model alone.
    pub adapter: Option<Adapter>,
    /// Grammar that restricts the output, if any.
    pub constraint: Option<Box<dyn Constraint>>,
    /// `n` of the API request to which this sequence belongs, for the metrics of that request. The first child reports
    /// it.
    pub parent_n: Option<u32>,
}

impl Request {
    /// Creates a request to generate that arrives now, of no client, with the usual priority and nothing else set.
    pub fn new(id: impl Into<String>, prompt: impl Into<Arc<[u32]>>, params: impl Into<Arc<SamplingParams>>) -> Self {
        Self {
            id: id.into(),
            prompt: prompt.into(),
            second_text: None,
            images: Arc::default(),
            task: Task::Generate,
            params: params.into(),
            priority: 0,
            client: ClientId::default(),
            arrival: Instant::now(),
            cache_salt: None,
            adapter: None,
            constraint: None,
            parent_n: None,
        }
    }
}

/// Reason why a request ended. Every request ends exactly once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The request ended by an end-of-sequence or stop token or by
    /// [`RequestStream::finish`](crate::RequestStream::finish), or its embedding is done.
    Stop {
        /// Stop token id that matched; `None` for end of sequence, stop strings and embeddings.
        token: Option<u32>,
    },
    /// The request used up `max_tokens` or the context.
    Length,
    /// The output repeats itself according to the request's [`RepetitionDetection`].
    Repetition,
    /// The caller went away, or the engine is shutting down.
    Abort,
    /// The request's constraint allowed no token.
    Unsatisfiable,
    /// The request's step failed, or its constraint rejected a token.
    Error(Arc<str>),
}

impl FinishReason {
    /// Returns the name in the API and in the `finished_reason` label.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Stop { .. } => "stop",
            Self::Length => "length",
            Self::Repetition => "repetition",
            Self::Abort => "abort",
            Self::Unsatisfiable | Self::Error(_) => "error",
        }
    }
}

/// An event of a [`RequestStream`](crate::RequestStream): newly sampled tokens, and in the last event the end of the
/// request. A slow reader gets several tokens in one event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestEvent {
    /// Number of prompt tokens found in the prefix cache; set in the first event.
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of the prompt; complete in the first event if the request asked for them. Entry i is about
    /// prompt token i + 1, because the first token has no predecessor.
    pub prompt_logprobs: Vec<Logprobs>,
    /// New tokens. A stop token or end-of-sequence token is the last of them.
    pub tokens: Vec<TokenOutput>,
    /// Stage times up to the latest token; `None` before the first.
    pub times: Option<StageTimes>,
    /// Vector of the prompt, or vectors of its tokens one after the other; set in the last event of a [`Task::Embed`]
    /// that ended as [`FinishReason::Stop`].
    pub embedding: Option<Vec<f32>>,
    /// Reason why the request ended; set in the last event.
    pub finish: Option<FinishReason>,
}

/// Time that a request spent in its stages up to its latest token. Preemption counts in the stage that it interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Time from entry into the queue to the first planned step.
    pub queue: Duration,
    /// Time from the first planned step to the first token.
    pub prefill: Duration,
    /// Time from the first token to the latest token.
    pub decode: Duration,
}

/// Reason why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too many requests wait.
    #[error("the server is busy: {waiting} requests are waiting, the limit is {limit}")]
    TooManyRequests {
        /// Number of waiting requests.
        waiting: usize,
        /// Limit.
        limit: usize,
    },
    /// Too many prompt tokens wait.
    #[error("the server is busy: {waiting} prompt tokens are waiting, the limit is {limit}")]
    TooManyTokens {
        /// Number of waiting tokens.
        waiting: usize,
        /// Limit.
        limit: usize,
    },
    /// The prompt can never run because it exceeds the context or the whole KV cache.
    #[error("the prompt has {tokens} tokens, but at most {limit} fit")]
    PromptTooLong {
        /// Number of prompt tokens.
        tokens: usize,
        /// Limit.
        limit: usize,
    },
    /// The prompt is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt has images, and the model takes none.
    #[error("the model takes no images")]
    NoImages,
    /// An image can never be encoded because it exceeds the encoder's budget of a step or its whole cache.
    #[error("image {number} takes {tokens} tokens, but at most {limit} fit one image: send a smaller image")]
    ImageTooLarge {
        /// Number of the image, counted from 1.
        number: usize,
        /// Number of its tokens.
        tokens: usize,
        /// Limit.
        limit: usize,
    },
    /// The description of an image contradicts itself, the prompt or the model.
    #[error("image {number} is malformed: {reason}")]
    MalformedImage {
        /// Number of the image, counted from 1.
        number: usize,
        /// Defect.
        reason: &'static str,
    },
    /// The prompt has images that are computed in one step, and each of its tokens is to be scored.
    #[error(
        "the log-probabilities of a prompt with images are not supported with this model: it computes an image in one step"
    )]
    ScoredImages,
    /// The request has an adapter, and the executor has no room for any.
    #[error("the server runs without adapters")]
    NoAdapters,
    /// The engine is paused and refuses new requests.
    #[error("the engine is paused")]
    Paused,
    /// The engine is shutting down or has stopped.
    #[error("the engine is not running")]
    Stopped,
}
