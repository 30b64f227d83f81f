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

    /// Unix domain socket to listen on, in place of --host and --port.
    #[arg(long, value_name = "PATH")]
    pub(crate) uds: Option<PathBuf>,

    /// Keys that clients must send as `Authorization: Bearer KEY`.
    #[arg(long, num_args = 1.., env = "VLLM_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// Path that a proxy in front adds to every route.
    #[arg(long, default_value = "", value_name = "PATH")]
    pub(crate) root_path: String,

    /// Origins of web pages that may call the API: names or a JSON list; `*` is all of them.
    #[arg(long, num_args = 1.., value_parser = values::text_list, value_name = "ORIGIN")]
    pub(crate) allowed_origins: Vec<TextList>,

    /// Methods that such pages may use.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "METHOD")]
    pub(crate) allowed_methods: Vec<TextList>,

    /// Header fields that such pages may send.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "NAME")]
    pub(crate) allowed_headers: Vec<TextList>,

    /// Let such pages send cookies and keys of the browser.
    #[arg(long)]
    pub(crate) allow_credentials: bool,

    /// Answer with the request's `X-Request-Id`, or a fresh one.
    #[arg(long)]
    pub(crate) enable_request_id_headers: bool,

    /// Serve no description of the API.
    #[arg(long)]
    pub(crate) disable_fastapi_docs: bool,

    /// Serve GET /tokenizer_info.
    #[arg(long)]
    pub(crate) enable_tokenizer_info_endpoint: bool,

    /// Bytes of a request's head.
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) h11_max_incomplete_event_size: Option<usize>,

    /// Bytes of a request's body; 100 MiB if not given.
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) max_body_bytes: Option<usize>,

    /// Header fields of a request.
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
    /// Private key, in PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,

    /// Certificate and its chain, in PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,

    /// Authorities that sign the certificates of clients, in PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_ca_certs: Option<PathBuf>,

    /// Certificates of clients: 0 none, 1 checked if sent, 2 required.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2), value_name = "0|1|2")]
    pub(crate) ssl_cert_reqs: u8,

    /// Read key and certificate again when their files change.
    #[arg(long)]
    pub(crate) enable_ssl_refresh: bool,
}

/// What answers carry.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling and answers")]
pub(crate) struct AnswerArgs {
    /// Tell in `usage` how many tokens of the prompt came from the cache.
    #[arg(long)]
    pub(crate) enable_prompt_tokens_details: bool,

    /// Count the requests in flight for GET /load.
    #[arg(long)]
    pub(crate) enable_server_load_tracking: bool,

    /// Send `usage` in every streamed answer.
    #[arg(long)]
    pub(crate) enable_force_include_usage: bool,

    /// Tell the times of a request in its answer.
    #[arg(long)]
    pub(crate) enable_per_request_metrics: bool,

    /// Seconds after which a silent stream is sent a comment; 0 sends none.
    #[arg(long, default_value_t = 0.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) sse_keep_alive_interval: f64,

    /// Tokens of a streamed chunk.
    #[arg(long, value_parser = values::count, default_value = "1", value_name = "TOKENS")]
    pub(crate) stream_interval: usize,

    /// What `system_fingerprint` tells.
    #[arg(long, value_enum, default_value_t = FingerprintMode::Full)]
    pub(crate) fingerprint_mode: FingerprintMode,
}

/// What is logged. The level is VLLM_LOGGING_LEVEL's, or RUST_LOG's.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Log no statistics line (every VLLM_LOG_STATS_INTERVAL seconds, 10 by default); the metrics stay.
    #[arg(long)]
    pub(crate) disable_log_stats: bool,

    /// Log every request.
    #[arg(long)]
    pub(crate) enable_log_requests: bool,

    /// Log every answer too.
    #[arg(long)]
    pub(crate) enable_log_outputs: bool,

    /// Characters or tokens of a prompt that are logged; all by default.
    #[arg(long, value_parser = values::amount, value_name = "N")]
    pub(crate) max_log_len: Option<usize>,
}
