//! Flags of `octavo serve` that concern its socket and its log.

use std::path::PathBuf;

use clap::Args;
use octavo_server::FingerprintMode;

use crate::cli::model::ComposeArgs;
use crate::cli::values::{self, TextList};

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

/// Addresses, access and limits of connections.
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

    /// API keys that clients must send [env: VLLM_API_KEY].
    ///
    /// Clients send one of them as `Authorization: Bearer KEY`.
    #[arg(long, num_args = 1.., value_parser = values::api_key, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// YAML or JSON file of API keys with names and limits, which is read again when it changes.
    ///
    /// It is a list of entries with a `name`, a key as `sha256` (its SHA-256 hash) or `key` (in plain text), or a list of
    /// either while a key is replaced, and optionally `requests-per-minute`, `tokens-per-minute` (of prompts and answers),
    /// `parallel-requests` and `min-priority`. A request over a limit is answered with 429. `octavo key NAME` creates an
    /// entry. Metrics and logs show the name.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,

    /// Let requests with different API keys share the prefix cache.
    ///
    /// By default, several keys keep it apart, because the time of an answer tells whether its prompt was in the cache.
    #[arg(long)]
    pub(crate) share_prefix_cache: bool,

    /// Path prefix that a proxy adds to every route.
    #[arg(long, default_value = "", value_name = "PATH")]
    pub(crate) root_path: String,

    /// Origins of web pages that may call the API: names or a JSON list; `*` allows all.
    #[arg(long, num_args = 1.., value_parser = values::text_list, value_name = "ORIGIN")]
    pub(crate) allowed_origins: Vec<TextList>,

    /// HTTP methods that such pages may use.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "METHOD")]
    pub(crate) allowed_methods: Vec<TextList>,

    /// HTTP headers that such pages may send.
    #[arg(long, num_args = 1.., value_parser = values::text_list, default_value = "*", value_name = "NAME")]
    pub(crate) allowed_headers: Vec<TextList>,

    /// Let such pages send cookies and credentials.
    #[arg(long)]
    pub(crate) allow_credentials: bool,

    /// Return the X-Request-Id of the request, or a new one, in each response.
    #[arg(long)]
    pub(crate) enable_request_id_headers: bool,

    /// Disable /docs, /redoc and /openapi.json.
    #[arg(long)]
    pub(crate) disable_fastapi_docs: bool,

    /// Serve GET /tokenizer_info.
    #[arg(long)]
    pub(crate) enable_tokenizer_info_endpoint: bool,

    /// Maximum size of a request's head, in bytes.
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) h11_max_incomplete_event_size: Option<usize>,

    /// Maximum size of a request's body, in bytes [default: 100 MiB].
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) max_body_bytes: Option<usize>,

    /// Maximum size of a response, in bytes, as estimated from its prompts, log-probabilities and token ids before they
    /// are computed [default: 64 MiB].
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) max_response_bytes: Option<usize>,

    /// Maximum number of headers of a request.
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) h11_max_header_count: Option<usize>,

    /// Maximum number of open connections. Requests on further ones are answered with 503, except for probes and metrics
    /// [default: 16384].
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) max_connections: Option<usize>,

    /// Seconds that running requests get to finish after the first SIGTERM or SIGINT, the lag included; 0 ends them at
    /// once. A second signal, more than a second after the first, ends the server at once.
    #[arg(long, default_value_t = 25.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) shutdown_timeout: f64,

    /// Seconds after SIGTERM during which new requests are still served, until load balancers have noticed. SIGINT
    /// (Ctrl-C) skips the lag: an idle server then ends at once.
    #[arg(long, default_value_t = 5.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) shutdown_lag: f64,
}

/// HTTPS.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub(crate) struct TlsArgs {
    /// Private key file, in PEM format.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,

    /// Certificate chain file, in PEM format. Without --ssl-keyfile it contains the private key, too.
    #[arg(long, value_name = "FILE")]
    pub(crate) ssl_certfile: Option<PathBuf>,

    /// Certificates of the authorities that sign client certificates, in PEM format.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_ca_certs: Option<PathBuf>,

    /// Client certificates: 0 ignores them, 1 verifies those that are sent, 2 requires one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2), value_name = "0|1|2")]
    pub(crate) ssl_cert_reqs: u8,

    /// Reload key and certificate when their files change.
    #[arg(long)]
    pub(crate) enable_ssl_refresh: bool,
}

/// The content of answers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling and answers")]
pub(crate) struct AnswerArgs {
    /// Report in `usage` the number of prompt tokens found in the prefix cache.
    #[arg(long)]
    pub(crate) enable_prompt_tokens_details: bool,

    /// Count the requests in flight for GET /load.
    #[arg(long)]
    pub(crate) enable_server_load_tracking: bool,

    /// Include `usage` in every streamed answer.
    #[arg(long)]
    pub(crate) enable_force_include_usage: bool,

    /// Report the timings of a request in its answer.
    #[arg(long)]
    pub(crate) enable_per_request_metrics: bool,

    /// Seconds of silence after which a stream is sent a keep-alive comment; 0 sends none.
    #[arg(long, default_value_t = 0.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) sse_keep_alive_interval: f64,

    /// Number of tokens in each streamed chunk.
    #[arg(long, value_parser = values::count, default_value = "1", value_name = "TOKENS")]
    pub(crate) stream_interval: usize,

    /// Content of `system_fingerprint`: version and configuration hash, the hash alone, or nothing.
    #[arg(long, value_parser = values::fingerprint_mode(), default_value = "full")]
    pub(crate) fingerprint_mode: FingerprintMode,
}

/// The log. Its level is set by VLLM_LOGGING_LEVEL or RUST_LOG.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Do not log the statistics line every VLLM_LOG_STATS_INTERVAL seconds (10 by default). Metrics are not affected.
    #[arg(long)]
    pub(crate) disable_log_stats: bool,

    /// Log every request: a line with its parameters, and at the level debug its prompts.
    #[arg(long)]
    pub(crate) enable_log_requests: bool,

    /// Log every answer; needs --enable-log-requests.
    #[arg(long)]
    pub(crate) enable_log_outputs: bool,

    /// Maximum number of characters or tokens of a prompt that are logged [default: all].
    #[arg(long, value_parser = values::amount, value_name = "N")]
    pub(crate) max_log_len: Option<usize>,
}
