//! What the composition tells the server.

use std::sync::Arc;
use std::time::Duration;

use octavo_text::{ChatTemplate, Tokenizer};

/// The model's own sampling defaults (`generation_config.json`), used for what a request leaves open.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Instead of 1.
    pub temperature: Option<f32>,
    /// Instead of 1.
    pub top_p: Option<f32>,
    /// Instead of 0, which keeps all.
    pub top_k: Option<u32>,
    /// Instead of 0.
    pub min_p: Option<f32>,
    /// Instead of 1.
    pub repetition_penalty: Option<f32>,
    /// Upper bound on generated tokens for chat requests that name none.
    pub max_new_tokens: Option<u32>,
}

/// What a connection may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// A client has this long to send a request's head, counted from the end of the previous response: it is the
    /// keep-alive time too.
    pub head_timeout: Duration,
    /// Bytes of a request's head.
    pub max_head_bytes: usize,
    /// A client has this long to send a request's body.
    pub body_timeout: Duration,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being received or parsed, beyond the first 64 KiB of each.
    pub max_buffered_bytes: usize,
    /// A client that takes no byte for this long is cut off.
    pub write_stall_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            head_timeout: Duration::from_secs(75),
            max_head_bytes: 64 << 10,
            body_timeout: Duration::from_secs(60),
            max_body_bytes: 32 << 20,
            max_buffered_bytes: 256 << 20,
            write_stall_timeout: Duration::from_secs(600),
        }
    }
}

/// How the server presents its model, and its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// Names that requests may ask for, at least one; the first is the one that responses carry.
    pub served_model_names: Vec<String>,
    /// Where the model came from: `root` of its card.
    pub model_root: String,
    /// Context length, in tokens.
    pub max_model_len: usize,
    /// Number of token ids the model knows.
    pub vocab_size: usize,
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The model's sampling defaults.
    pub sampling_defaults: SamplingDefaults,
    /// Where the seeds of requests that bring none begin; without it the start is drawn.
    pub seed: Option<u64>,
    /// Keys that open the inference routes; none leaves them open.
    pub api_keys: Vec<String>,
    /// Most alternatives that a request may ask log-probabilities for.
    pub max_logprobs: u32,
    /// Most sequences of one request: `n` × prompts.
    pub max_sequences: usize,
    /// Limits of connections.
    pub connection: ConnectionLimits,
    /// From the signal until the last request is ended; zero ends all at once.
    pub shutdown_timeout: Duration,
    /// From the signal until new requests are refused; counted in the timeout.
    pub shutdown_lag: Duration,
    /// What GET /version answers.
    pub version: String,
}

impl Default for ServerConfig {
    /// A server for a model without a name; the first six fields are the model's and must be set.
    fn default() -> Self {
        Self {
            served_model_names: vec!["model".into()],
            model_root: "model".into(),
            max_model_len: 2048,
            vocab_size: usize::MAX,
            eos_token_ids: vec![],
            sampling_defaults: SamplingDefaults::default(),
            seed: None,
            api_keys: vec![],
            max_logprobs: 20,
            max_sequences: 1024,
            connection: ConnectionLimits::default(),
            shutdown_timeout: Duration::from_secs(25),
            shutdown_lag: Duration::from_secs(5),
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }
}

/// What turns text into tokens and back.
#[derive(Clone)]
pub struct TextModel {
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// How messages become a prompt; without one, chat requests are refused.
    pub template: Option<Arc<ChatTemplate>>,
}
