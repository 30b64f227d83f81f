//! What the composition tells the server.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use octavo_text::{ChatTemplate, ReasoningSyntax, Tokenizer, ToolSyntax};
use serde_json::{Map, Value};

/// The sampling defaults of the model, used for the parameters that a request leaves out.
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
    /// A client has this long to send a request's head, counted from the end of the previous response: it is the
    /// keep-alive time too.
    pub head_timeout: Duration,
    /// Bytes of a request's head. What arrives together is read together: up to twice as many may pass.
    pub max_head_bytes: usize,
    /// A client has this long to send a request's body.
    pub body_timeout: Duration,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being received or parsed, beyond the first 64 KiB of each.
    pub max_buffered_bytes: usize,
    /// A client that takes no byte for this long is cut off, and what it asked for is aborted.
    pub write_stall_timeout: Duration,
    /// Header fields of a request, at most 10 000.
    pub max_headers: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            head_timeout: Duration::from_secs(75),
            max_head_bytes: 64 << 10,
            body_timeout: Duration::from_secs(60),
            // What the gateways in front of such servers commonly let through.
            max_body_bytes: 100 << 20,
            max_buffered_bytes: 512 << 20,
            // Longer than a terminal is paused by mistake, and short enough that a hundred dead readers are gone before
            // they matter. The kernel reports room only when a third of the send buffer is free, so this is also a
            // least speed, of about a kilobyte a second.
            write_stall_timeout: Duration::from_secs(120),
            max_headers: 256,
        }
    }
}

/// What pages of other origins may do (cross-origin resource sharing). Entries are taken literally; `"*"` stands for
/// all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorsConfig {
    /// Origins whose pages may read responses; none allows none.
    pub allowed_origins: Vec<String>,
    /// Methods that they may use.
    pub allowed_methods: Vec<String>,
    /// Header fields that they may send, beside those that need no leave.
    pub allowed_headers: Vec<String>,
    /// Whether they may send cookies and client certificates.
    pub allow_credentials: bool,
}

impl Default for CorsConfig {
    /// vLLM's: no origin; every method and header.
    fn default() -> Self {
        let any = || vec!["*".to_owned()];
        Self { allowed_origins: vec![], allowed_methods: any(), allowed_headers: any(), allow_credentials: false }
    }
}

/// Whether a client must show a certificate that the configured authorities have signed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// None is asked for.
    #[default]
    None,
    /// One may be shown; it must be valid.
    Optional,
    /// One must be shown.
    Required,
}

/// The certificate of a listener, and whose clients it takes. All files are PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate, followed by those of its issuers.
    pub cert_file: PathBuf,
    /// The private key, not encrypted; `None` if it is in `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The authorities that sign client certificates.
    pub ca_certs: Option<PathBuf>,
    /// Whether clients must show one.
    pub client_auth: ClientAuth,
    /// Look this often for changed files and use them for new connections; `None` reads them once.
    pub refresh: Option<Duration>,
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
    /// Who may read responses from pages of other origins.
    pub cors: CorsConfig,
    /// A path under which a proxy shows this server: requests are taken with and without it. Empty: none.
    pub root_path: String,
    /// Responses carry an `X-Request-Id`.
    pub request_id_headers: bool,
    /// A stream in which nothing was sent for this long carries a comment.
    pub sse_keep_alive: Option<Duration>,
    /// A request that runs longer is ended with an error.
    pub request_timeout: Option<Duration>,
    /// GET /load counts the requests that run; otherwise it says 0.
    pub track_load: bool,
    /// GET /docs, /redoc and /openapi.json are not there.
    pub disable_docs: bool,
    /// GET /tokenizer_info is there, which shows the chat template.
    pub tokenizer_info: bool,
    /// What GET /kv_event_sources tells: one for each engine that publishes.
    pub kv_event_sources: Vec<KvEventSource>,
    /// What is logged of each request.
    pub log: RequestLog,
    /// How requests are read and answered.
    pub api: ApiConfig,
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
            cors: CorsConfig::default(),
            root_path: String::new(),
            request_id_headers: false,
            sse_keep_alive: None,
            request_timeout: None,
            track_load: false,
            disable_docs: false,
            tokenizer_info: false,
            kv_event_sources: vec![],
            log: RequestLog::default(),
            api: ApiConfig::default(),
        }
    }
}

/// Where an engine publishes what its prefix cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSource {
    /// The engine, counted from 0.
    pub rank: u32,
    /// ZeroMQ's endpoint, as it was configured.
    pub endpoint: String,
    /// Where missed batches are asked for.
    pub replay_endpoint: Option<String>,
    /// What every message begins with.
    pub topic: String,
    /// Tokens of a block.
    pub block_size: usize,
}

/// What `system_fingerprint` tells of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FingerprintMode {
    /// Its version and a hash of its configuration.
    #[default]
    Full,
    /// The hash alone.
    Hash,
    /// Nothing.
    None,
}

/// What is logged of each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestLog {
    /// A line when its sequences are submitted; at the level `debug` their prompts too.
    pub requests: bool,
    /// A line with the text of each choice when it ends.
    pub outputs: bool,
    /// Characters of a text and tokens of a prompt that are logged; `None`: all.
    pub max_len: Option<usize>,
}

/// How requests are read and answered.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiConfig {
    /// Who answers in a chat.
    pub response_role: String,
    /// Variables that chat templates get, unless a request sets them.
    pub template_kwargs: Map<String, Value>,
    /// Requests may bring a chat template of their own.
    pub trust_request_chat_template: bool,
    /// How the model writes calls of functions; without it, requests that leave the choice to the model are refused.
    pub tools: Option<ToolSyntax>,
    /// How the model marks its reasoning; without it, reasoning is content.
    pub reasoning: Option<ReasoningSyntax>,
    /// The usage tells how many prompt tokens were in the prefix cache.
    pub prompt_tokens_details: bool,
    /// Responses of a single sequence tell how long its stages took.
    pub request_metrics: bool,
    /// What `system_fingerprint` tells.
    pub fingerprint: FingerprintMode,
    /// Streams tell the usage, asked or not.
    pub force_include_usage: bool,
    /// Tokens of a streamed chunk.
    pub stream_interval: u32,
    /// JSON that must fit a schema is written without optional whitespace.
    pub disable_any_whitespace: bool,
    /// Objects that must fit a schema have only the properties that it names.
    pub disable_additional_properties: bool,
}

impl Default for ApiConfig {
    /// What vLLM does without a flag.
    fn default() -> Self {
        Self {
            response_role: "assistant".into(),
            template_kwargs: Map::new(),
            trust_request_chat_template: false,
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

/// What turns text into tokens and back.
#[derive(Clone)]
pub struct TextModel {
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// How messages become a prompt; without one, chat requests are refused.
    pub template: Option<Arc<ChatTemplate>>,
}
