//! The configuration of the server.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use octavo_text::{ChatTemplate, ReasoningSyntax, Tokenizer, ToolSyntax};
use serde_json::{Map, Value};

use crate::images::ImageModel;
use crate::keys::KeyEntry;

mod pooling;

pub use pooling::{Activation, Matryoshka, PairFormat, PoolingConfig, PoolingKind};

/// The model's own sampling defaults (`generation_config.json`), for parameters that a request does not set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Instead of 1.
    pub temperature: Option<f32>,
    /// Instead of 1.
    pub top_p: Option<f32>,
    /// Instead of 0, which keeps all tokens.
    pub top_k: Option<u32>,
    /// Instead of 0.
    pub min_p: Option<f32>,
    /// Instead of 1.
    pub repetition_penalty: Option<f32>,
    /// Maximum number of generated tokens for chat requests that set no limit.
    pub max_new_tokens: Option<u32>,
}

impl SamplingDefaults {
    /// The defaults that are set, under their names in a `generation_config.json`.
    pub fn to_map(&self) -> Map<String, Value> {
        // The shortest decimal number, not the nearest one in f64: 0.2, not 0.20000000298023224.
        let number = |x: f32| x.to_string().parse::<f64>().map(Value::from).ok();
        let pairs = [
            ("temperature", self.temperature.and_then(number)),
            ("top_p", self.top_p.and_then(number)),
            ("top_k", self.top_k.map(Value::from)),
            ("min_p", self.min_p.and_then(number)),
            ("repetition_penalty", self.repetition_penalty.and_then(number)),
            ("max_new_tokens", self.max_new_tokens.map(Value::from)),
        ];
        pairs.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

impl fmt::Display for SamplingDefaults {
    /// `temperature 0.2, top_p 0.9`; empty if nothing is set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<_> = self.to_map().iter().map(|(name, value)| format!("{name} {value}")).collect();
        f.write_str(&pairs.join(", "))
    }
}

/// What a connection may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Time limit for a request's head, counted from the end of the previous response; it is also the keep-alive time.
    pub head_timeout: Duration,
    /// Maximum size of a request's head. Bytes that arrive together are read together, so up to twice as many may pass.
    pub max_head_bytes: usize,
    /// Time limit for a request's body.
    pub body_timeout: Duration,
    /// A body of more than 64 KiB that brings less than a kilobyte per second for this time is refused.
    pub body_stall_timeout: Duration,
    /// Maximum size of a request's body, in bytes.
    pub max_body_bytes: usize,
    /// Maximum size of all bodies that are being received or parsed, beyond the first 64 KiB of each. If it is reached,
    /// the slowest of the uploads that are behind give way: those whose present rate is too low for what they hold to
    /// arrive within `body_timeout`.
    pub max_buffered_bytes: usize,
    /// Maximum size of a response, in bytes, as estimated from the request: repeated prompts, log-probabilities and
    /// token ids.
    pub max_response_bytes: usize,
    /// A client that reads no byte for this time is disconnected, and its request is aborted.
    pub write_stall_timeout: Duration,
    /// Maximum number of headers of a request, up to 10 000.
    pub max_headers: usize,
    /// Maximum number of open connections. Requests on further ones are refused, except for probes.
    pub max_connections: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            head_timeout: Duration::from_secs(75),
            max_head_bytes: 64 << 10,
            body_timeout: Duration::from_secs(60),
            body_stall_timeout: Duration::from_secs(10),
            // A common limit of gateways in front of such servers.
            max_body_bytes: 100 << 20,
            max_buffered_bytes: 512 << 20,
            max_response_bytes: 64 << 20,
            // Long enough for a terminal that is paused by mistake, short enough to remove dead readers before they
            // accumulate. The kernel reports room only when a third of the send buffer is free, so the timeout also
            // implies a minimum rate of about a kilobyte per second.
            write_stall_timeout: Duration::from_secs(120),
            max_headers: 256,
            // Many times the requests that one engine runs, and at most some gigabytes of heads and socket buffers.
            max_connections: 16_384,
        }
    }
}

/// Permissions of pages of other origins (cross-origin resource sharing). Entries are literal, except that `"*"` allows
/// all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorsConfig {
    /// Origins whose pages may read responses; an empty list allows none.
    pub allowed_origins: Vec<String>,
    /// Methods that they may use.
    pub allowed_methods: Vec<String>,
    /// Headers that they may send, in addition to those that need no permission.
    pub allowed_headers: Vec<String>,
    /// Whether they may send cookies and client certificates.
    pub allow_credentials: bool,
}

impl Default for CorsConfig {
    /// vLLM's defaults: no origin, every method and every header.
    fn default() -> Self {
        let any = || vec!["*".to_owned()];
        Self { allowed_origins: vec![], allowed_methods: any(), allowed_headers: any(), allow_credentials: false }
    }
}

/// How the server presents its model, and its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// Model names that requests may use, at least one. Responses carry the first.
    pub served_model_names: Vec<String>,
    /// The origin of the model: `root` of its card.
    pub model_root: String,
    /// Context length, in tokens.
    pub max_model_len: usize,
    /// Number of token ids of the model.
    pub vocab_size: usize,
    /// Number of elements of the model's embeddings; 0 if it has none.
    pub embedding_size: usize,
    /// How the model pools; `None` for a model that generates text, whose POST /v1/embeddings returns the last hidden
    /// state.
    pub pooling: Option<PoolingConfig>,
    /// Token ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The model's sampling defaults.
    pub sampling_defaults: SamplingDefaults,
    /// Initial value for the seeds of requests without a seed; `None` draws it at random.
    pub seed: Option<u64>,
    /// API keys of the inference routes; without these and named keys, the routes are open.
    pub api_keys: Vec<String>,
    /// API keys with names and limits, which [`ApiKeys::replace`](crate::ApiKeys::replace) replaces.
    pub key_entries: Vec<KeyEntry>,
    /// Whether requests with different API keys share the prefix cache. Otherwise more than one key keeps it apart.
    pub share_prefix_cache: bool,
    /// The smallest priority, which is the most urgent, that a request may have; a smaller one is raised to it.
    pub min_priority: i64,
    /// Maximum number of alternatives in log-probabilities.
    pub max_logprobs: u32,
    /// Maximum number of sequences of a request: `n` × prompts.
    pub max_sequences: usize,
    /// Limits of connections.
    pub connection: ConnectionLimits,
    /// Time from the signal until the last request is ended; zero ends all requests at once.
    pub shutdown_timeout: Duration,
    /// Time from the signal until new requests are refused; part of the timeout.
    pub shutdown_lag: Duration,
    /// The answer of GET /version.
    pub version: String,
    /// Access for pages of other origins.
    pub cors: CorsConfig,
    /// A path prefix that a proxy may add; requests are accepted with and without it. Empty for none.
    pub root_path: String,
    /// Whether responses carry an `X-Request-Id`.
    pub request_id_headers: bool,
    /// Time of silence after which a stream is sent a comment.
    pub sse_keep_alive: Option<Duration>,
    /// Whether GET /load counts the running requests; otherwise it reports 0.
    pub track_load: bool,
    /// Whether GET /docs, /redoc and /openapi.json are disabled.
    pub disable_docs: bool,
    /// Whether GET /tokenizer_info is enabled, which returns the chat template.
    pub tokenizer_info: bool,
    /// Whether the development routes are enabled: pause, sleep and the reset of the prefix cache.
    pub development: bool,
    /// The limits of stored responses; `None` if none are stored.
    pub response_store: Option<StoreLimits>,
    /// Whether there are routes that load and unload adapters, if the server has any.
    pub adapter_routes: bool,
    /// The answer of GET /kv_event_sources: one entry for each engine that publishes.
    pub kv_event_sources: Vec<KvEventSource>,
    /// The logging of requests.
    pub log: RequestLog,
    /// The parsing of requests and the content of answers.
    pub api: ApiConfig,
}

impl Default for ServerConfig {
    /// A placeholder; the first seven fields describe the model and must be set.
    fn default() -> Self {
        Self {
            served_model_names: vec!["model".into()],
            model_root: "model".into(),
            max_model_len: 2048,
            vocab_size: usize::MAX,
            embedding_size: usize::MAX,
            pooling: None,
            eos_token_ids: vec![],
            sampling_defaults: SamplingDefaults::default(),
            seed: None,
            api_keys: vec![],
            key_entries: vec![],
            share_prefix_cache: false,
            min_priority: i64::MIN,
            max_logprobs: 20,
            max_sequences: 1024,
            connection: ConnectionLimits::default(),
            shutdown_timeout: Duration::from_secs(25),
            shutdown_lag: Duration::from_secs(5),
            version: env!("CARGO_PKG_VERSION").into(),
            cors: CorsConfig::default(),
            root_path: String::new(),
            request_id_headers: false,
            sse_keep_alive: None,
            track_load: false,
            disable_docs: false,
            tokenizer_info: false,
            development: false,
            response_store: None,
            adapter_routes: false,
            kv_event_sources: vec![],
            log: RequestLog::default(),
            api: ApiConfig::default(),
        }
    }
}

impl ServerConfig {
    /// Time of silence after which a stream is sent a comment; zero disables comments like `None`.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.sse_keep_alive.filter(|interval| !interval.is_zero())
    }
}

/// Limits of the stored responses. The oldest are forgotten first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Maximum number of responses.
    pub responses: usize,
    /// Maximum size of all responses with their conversations and events, in bytes.
    pub bytes: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { responses: 1024, bytes: 64 << 20 }
    }
}

/// The address where an engine publishes the content of its prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSource {
    /// Index of the engine, from 0.
    pub rank: u32,
    /// The ZeroMQ endpoint as configured.
    pub endpoint: String,
    /// The endpoint for missed batches.
    pub replay_endpoint: Option<String>,
    /// The topic of every message.
    pub topic: String,
    /// Tokens per block.
    pub block_size: usize,
}

/// The content of `system_fingerprint`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FingerprintMode {
    /// The version and a hash of the configuration.
    #[default]
    Full,
    /// The hash alone.
    Hash,
    /// Nothing.
    None,
}

/// The logging of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestLog {
    /// Log a line when the sequences of a request are submitted, with their prompts at the level `debug`.
    pub requests: bool,
    /// Log a line with the text of each choice at its end.
    pub outputs: bool,
    /// Maximum number of characters of a text and tokens of a prompt in the log; `None` for no limit.
    pub max_len: Option<usize>,
}

/// A command that reads a request of [`octavo_text::untrusted_request`] from its standard input and writes the answer of
/// [`octavo_text::answer_untrusted`] to its standard output. It limits its own memory and time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateHelper {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
}

/// The parsing of requests and the content of answers.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiConfig {
    /// The role of answers in a chat.
    pub response_role: String,
    /// Default variables of chat templates.
    pub template_kwargs: Map<String, Value>,
    /// The command that renders chat templates of requests; without it, they are refused.
    pub template_helper: Option<TemplateHelper>,
    /// The syntax of the model's tool calls; without it, requests with `tool_choice` "auto" are refused.
    pub tools: Option<ToolSyntax>,
    /// The syntax of the model's reasoning; without it, reasoning is content.
    pub reasoning: Option<ReasoningSyntax>,
    /// Whether `usage` reports the prompt tokens found in the prefix cache.
    pub prompt_tokens_details: bool,
    /// Whether responses of a single sequence report the timings of its stages.
    pub request_metrics: bool,
    /// The content of `system_fingerprint`.
    pub fingerprint: FingerprintMode,
    /// Whether all streams report `usage`, requested or not.
    pub force_include_usage: bool,
    /// Tokens per streamed chunk.
    pub stream_interval: u32,
    /// Whether JSON that follows a schema has no optional whitespace.
    pub disable_any_whitespace: bool,
    /// Whether objects that follow a schema have only the properties that it names.
    pub disable_additional_properties: bool,
}

impl Default for ApiConfig {
    /// vLLM's behaviour without flags.
    fn default() -> Self {
        Self {
            response_role: "assistant".into(),
            template_kwargs: Map::new(),
            template_helper: None,
            tools: None,
            reasoning: None,
            prompt_tokens_details: false,
            request_metrics: false,
            fingerprint: FingerprintMode::Full,
            force_include_usage: false,
            stream_interval: 1,
            disable_any_whitespace: false,
            disable_additional_properties: false,
        }
    }
}

/// What turns requests into the prompts of a model.
#[derive(Clone)]
pub struct TextModel {
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; without one, chat requests are refused.
    pub template: Option<Arc<ChatTemplate>>,
    /// How the model takes images; without it, images are refused.
    pub images: Option<ImageModel>,
}
