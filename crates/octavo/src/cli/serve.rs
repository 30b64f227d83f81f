//! Flags of `octavo serve` that concern its socket and its log.

use std::path::PathBuf;

use clap::Args;

use crate::cli::model::ComposeArgs;
use crate::cli::values::{self, FingerprintMode, TextList};

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) answers: AnswerArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Who may connect, where, and for how long.
#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkArgs {
    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub(crate) host: String,

    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

    /// Unix domain socket to listen on, instead of --host and --port.
    #[arg(long, value_name = "PATH")]
    pub(crate) uds: Option<PathBuf>,

    /// API keys that clients must send.
    ///
    /// Clients send one of them as `Authorization: Bearer KEY`.
    #[arg(long, num_args = 1.., env = "VLLM_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// Path prefix that a proxy adds to every route.
    #[arg(long, default_value = "", value_name = "PATH")]
    pub(crate) root_path: String,

    /// Origins of web pages that may call the API.
    ///
    /// Names or a JSON list; `*` allows all.
    #[arg(long, num_args = 1.., value_parser = values::text_list, value_name = "ORIGIN")]
    pub(crate) allowed_origins: Vec<TextList>,

    /// Methods that web pages of other origins may use.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "METHOD")]
    pub(crate) allowed_methods: Vec<TextList>,

    /// Header fields that web pages of other origins may send.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "NAME")]
    pub(crate) allowed_headers: Vec<TextList>,

    /// Let web pages of other origins send cookies and credentials.
    #[arg(long)]
    pub(crate) allow_credentials: bool,

    /// Return the request's `X-Request-Id`, or a new one.
    #[arg(long)]
    pub(crate) enable_request_id_headers: bool,

    /// Do not serve the description of the API (/docs, /redoc, /openapi.json).
    #[arg(long)]
    pub(crate) disable_fastapi_docs: bool,

    /// Serve GET /tokenizer_info.
    #[arg(long)]
    pub(crate) enable_tokenizer_info_endpoint: bool,

    /// Maximum size of a request's head.
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) h11_max_incomplete_event_size: Option<usize>,

    /// Maximum size of a request's body [default: 100 MiB].
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) max_body_bytes: Option<usize>,

    /// Maximum number of header fields of a request.
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) h11_max_header_count: Option<usize>,

    /// Seconds that running requests get after SIGTERM, the lag included; 0 ends them at once.
    #[arg(long, default_value_t = 25.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) shutdown_timeout: f64,

    /// Seconds after SIGTERM in which new requests are still served, while load balancers notice.
    #[arg(long, default_value_t = 5.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) shutdown_lag: f64,
}

/// HTTPS.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub(crate) struct TlsArgs {
    /// Private key (PEM).
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,

    /// Certificate with its chain (PEM); turns on HTTPS.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,

    /// Certificate authorities for client certificates (PEM).
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_ca_certs: Option<PathBuf>,

    /// Client certificates: 0 ignores them, 1 checks them if sent, 2 requires them.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2), value_name = "0|1|2")]
    pub(crate) ssl_cert_reqs: u8,

    /// Reload key and certificate when their files change.
    #[arg(long)]
    pub(crate) enable_ssl_refresh: bool,
}

/// What answers carry.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling and answers")]
pub(crate) struct AnswerArgs {
    /// Report in `usage` how many prompt tokens came from the prefix cache.
    #[arg(long)]
    pub(crate) enable_prompt_tokens_details: bool,

    /// Count the requests in flight for GET /load.
    #[arg(long)]
    pub(crate) enable_server_load_tracking: bool,

    /// Include `usage` in every streamed answer.
    #[arg(long)]
    pub(crate) enable_force_include_usage: bool,

    /// Include timings in every answer.
    #[arg(long)]
    pub(crate) enable_per_request_metrics: bool,

    /// Seconds of silence after which a stream gets a comment; 0 turns this off.
    #[arg(long, default_value_t = 0.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) sse_keep_alive_interval: f64,

    /// Number of tokens in a streamed chunk.
    #[arg(long, value_parser = values::count, default_value = "1", value_name = "TOKENS")]
    pub(crate) stream_interval: usize,

    /// Contents of `system_fingerprint`.
    #[arg(long, value_enum, default_value_t = FingerprintMode::Full)]
    pub(crate) fingerprint_mode: FingerprintMode,
}

/// What is logged. The level is VLLM_LOGGING_LEVEL's, or RUST_LOG's.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Do not log statistics.
    ///
    /// By default a line is logged every 10 seconds (VLLM_LOG_STATS_INTERVAL). The metrics are not affected.
    #[arg(long)]
    pub(crate) disable_log_stats: bool,

    /// Log every request.
    #[arg(long)]
    pub(crate) enable_log_requests: bool,

    /// Log every answer; needs --enable-log-requests.
    #[arg(long)]
    pub(crate) enable_log_outputs: bool,

    /// Maximum number of prompt characters or tokens in the log [default: all].
    #[arg(long, value_parser = values::amount, value_name = "N")]
    pub(crate) max_log_len: Option<usize>,
}
