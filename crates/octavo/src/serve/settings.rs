//! Converts flags to the configurations of engine and server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use octavo_engine::{EngineConfig, SchedulingPolicy};
use octavo_kv_events::KvEventsConfig;
use octavo_media::MediaSettings;
use octavo_server::{
    ApiConfig, ClientAuth, ConnectionLimits, CorsConfig, FingerprintMode, RequestLog, ServerConfig, StoreLimits,
    TlsConfig,
};
use octavo_telemetry::{LogConfig, LogFormat, TraceConfig};
use serde_json::Value;

use crate::cli::{
    self, ChatFormatArgs, ComposeArgs, EngineArgs, Environment, NetworkArgs, ObserveArgs, Policy, ServeArgs, TextList,
};
use crate::serve::device::StepLimits;
use crate::serve::keys::KeysFile;
use crate::serve::model::LoadedModel;
use crate::serve::parsers::{Choice, ParserFlags};
use crate::serve::{images, kv_events, vectors};
use crate::template_helper;

/// Variable for the seconds that a connection is kept open between requests.
const KEEP_ALIVE: &str = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE";

/// vLLM's variable for the development routes.
const DEVELOPMENT: &str = "VLLM_SERVER_DEV_MODE";

/// vLLM's variable for stored responses.
const STORE: &str = "VLLM_ENABLE_RESPONSES_API_STORE";

/// vLLM's variable for an API key.
const API_KEY: &str = "VLLM_API_KEY";

/// Keys of `--structured-outputs-config` without an effect, since one library compiles all grammars strictly.
const STRUCTURED_NO_EFFECT: [&str; 3] = ["backend", "disable_fallback", "enable_in_reasoning"];

/// Interval at which `--enable-ssl-refresh` checks for changed files.
const CERTIFICATE_REFRESH: Duration = Duration::from_secs(10);

/// The settings of the server beside its model.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Settings {
    /// API keys; without these and the file's, every route is open.
    pub(crate) api_keys: Vec<String>,
    /// The file of API keys with names.
    pub(crate) keys_file: Option<KeysFile>,
    /// Whether requests with different keys share the prefix cache.
    pub(crate) share_prefix_cache: bool,
    pub(crate) connection: ConnectionLimits,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) shutdown_lag: Duration,
    pub(crate) log_stats: bool,

    pub(crate) uds: Option<PathBuf>,
    pub(crate) tls: Option<TlsConfig>,
    pub(crate) cors: CorsConfig,
    /// Path prefix that begins with a slash and does not end with one, or empty.
    pub(crate) root_path: String,
    pub(crate) request_id_headers: bool,
    pub(crate) sse_keep_alive: Option<Duration>,
    pub(crate) track_load: bool,
    pub(crate) no_docs: bool,
    /// Without the parsers, which depend on the model.
    pub(crate) api: ApiConfig,
    pub(crate) parsers: ParserFlags,

    pub(crate) tokenizer_info: bool,
    /// Whether the development routes are served.
    pub(crate) development: bool,
    /// Whether responses are stored.
    pub(crate) store_responses: bool,
    pub(crate) log: RequestLog,
    /// Where images come from.
    pub(crate) media: MediaSettings,
    pub(crate) traces: Option<TraceConfig>,
    pub(crate) kv_events: Option<KvEventsConfig>,
    /// Seed of the hashes of KV blocks.
    pub(crate) prefix_seed: Option<String>,
}

impl Settings {
    /// The settings of a server with a socket.
    ///
    /// # Errors
    /// Flags contradict each other, or a variable is invalid.
    pub(crate) fn of_server(args: &ServeArgs, environment: &Environment<'_>) -> Result<Self> {
        let (network, answers, log) = (&args.network, &args.answers, &args.log);
        if log.enable_log_outputs && !log.enable_log_requests {
            bail!("--enable-log-outputs needs --enable-log-requests");
        }
        let api = ApiConfig {
            prompt_tokens_details: answers.enable_prompt_tokens_details,
            request_metrics: answers.enable_per_request_metrics,
            fingerprint: match answers.fingerprint_mode {
                cli::FingerprintMode::Full => FingerprintMode::Full,
                cli::FingerprintMode::Hash => FingerprintMode::Hash,
                cli::FingerprintMode::None => FingerprintMode::None,
            },
            force_include_usage: answers.enable_force_include_usage,
            stream_interval: u32::try_from(answers.stream_interval).unwrap_or(u32::MAX),
            ..api_config(&args.compose.chat)?
        };
        let parsers = parser_flags(&args.compose.chat)?;
        Ok(Self {
            api_keys: api_keys(network, environment)?,
            keys_file: network.api_keys_file.as_deref().map(KeysFile::open).transpose()?,
            share_prefix_cache: network.share_prefix_cache,
            connection: connection(network, environment)?,
            shutdown_timeout: Duration::from_secs_f64(network.shutdown_timeout),
            shutdown_lag: Duration::from_secs_f64(network.shutdown_lag),
            log_stats: !log.disable_log_stats,
            uds: network.uds.clone(),
            tls: tls(args),
            cors: CorsConfig {
                allowed_origins: TextList::flat(&network.allowed_origins),
                allowed_methods: TextList::flat(&network.allowed_methods),
                allowed_headers: TextList::flat(&network.allowed_headers),
                allow_credentials: network.allow_credentials,
            },
            root_path: root_path(&network.root_path),
            request_id_headers: network.enable_request_id_headers,
            sse_keep_alive: seconds(answers.sse_keep_alive_interval),
            track_load: answers.enable_server_load_tracking,
            no_docs: network.disable_fastapi_docs,
            api,
            parsers,
            tokenizer_info: network.enable_tokenizer_info_endpoint,
            development: switch(environment, DEVELOPMENT)?,
            store_responses: switch(environment, STORE)?,
            log: RequestLog {
                requests: log.enable_log_requests,
                outputs: log.enable_log_outputs,
                max_len: log.max_log_len,
            },
            media: images::media_settings(&args.compose.media, environment)?,
            traces: traces(&args.compose.observe, environment)?,
            kv_events: kv_events(&args.compose.engine, environment)?,
            prefix_seed: prefix_seed(environment),
        })
    }

    /// The settings of a server for use in this process.
    ///
    /// # Errors
    /// Flags contradict each other, or a variable is invalid.
    pub(crate) fn in_process(args: &ComposeArgs, environment: &Environment<'_>) -> Result<Self> {
        let traces = traces(&args.observe, environment)?;
        let (kv_events, prefix_seed) = (kv_events(&args.engine, environment)?, prefix_seed(environment));
        let (api, parsers) = (api_config(&args.chat)?, parser_flags(&args.chat)?);
        let media = images::media_settings(&args.media, environment)?;
        Ok(Self { api, parsers, media, traces, kv_events, prefix_seed, ..Self::default() })
    }
}

fn api_keys(network: &NetworkArgs, environment: &Environment<'_>) -> Result<Vec<String>> {
    // An empty secret must not open the server to everyone. vLLM's own variable may be empty, as in vLLM.
    for flag in cli::LOCKS {
        let name = cli::variable(flag);
        let is_given = if flag == "api-key" { !network.api_key.is_empty() } else { network.api_keys_file.is_some() };
        if environment(&name).is_some_and(|value| value.trim().is_empty()) && !is_given {
            bail!("{name} is set but empty: unset it to serve without API keys");
        }
    }
    if !network.api_key.is_empty() {
        return Ok(network.api_key.clone());
    }
    Ok(environment(API_KEY).filter(|key| !key.trim().is_empty()).into_iter().collect())
}

/// A variable that is 0 or 1.
fn switch(environment: &Environment<'_>, name: &str) -> Result<bool> {
    match environment(name).as_deref().map(str::trim) {
        None | Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => bail!("{name}='{other}' is neither 0 nor 1"),
    }
}

/// The limits of connections.
fn connection(network: &NetworkArgs, environment: &Environment<'_>) -> Result<ConnectionLimits> {
    let mut connection = ConnectionLimits::default();
    if let Some(value) = environment(KEEP_ALIVE).filter(|value| !value.is_empty()) {
        match value.parse::<f64>() {
            Ok(seconds) if (1.0..=86_400.0).contains(&seconds) => {
                connection.head_timeout = Duration::from_secs_f64(seconds);
            }
            _ => bail!("{KEEP_ALIVE}='{value}' is not a number of seconds between 1 and 86400"),
        }
    }
    if let Some(bytes) = network.h11_max_incomplete_event_size {
        connection.max_head_bytes = bytes;
    }
    if let Some(bytes) = network.max_body_bytes {
        connection.max_body_bytes = bytes;
        // Several bodies of this size must fit at the same time.
        connection.max_buffered_bytes = connection.max_buffered_bytes.max(bytes.saturating_mul(4));
    }
    if let Some(bytes) = network.max_response_bytes {
        connection.max_response_bytes = bytes;
    }
    if let Some(fields) = network.h11_max_header_count {
        connection.max_headers = fields;
    }
    if let Some(connections) = network.max_connections {
        connection.max_connections = connections;
    }
    Ok(connection)
}

/// The configuration of logging, with the level `level` or that of the environment.
pub(crate) fn log_config(args: &ObserveArgs, level: Option<&str>) -> LogConfig {
    let format = match args.log_format {
        cli::LogFormat::Text => LogFormat::Text,
        cli::LogFormat::Json => LogFormat::Json,
    };
    LogConfig { level: level.map(str::to_owned), format }
}

fn traces(args: &ObserveArgs, environment: &Environment<'_>) -> Result<Option<TraceConfig>> {
    let (endpoint, detailed) = (args.otlp_traces_endpoint.as_deref(), !args.collect_detailed_traces.is_empty());
    let traces = TraceConfig::new(endpoint, detailed, environment).context("--otlp-traces-endpoint")?;
    if detailed && endpoint.is_none() && traces.is_none() {
        bail!("--collect-detailed-traces needs --otlp-traces-endpoint, the address of the collector");
    }
    Ok(traces)
}

/// The configuration of the API.
fn api_config(args: &ChatFormatArgs) -> Result<ApiConfig> {
    let mut api = ApiConfig {
        response_role: args.response_role.clone(),
        template_kwargs: args.default_chat_template_kwargs.clone().unwrap_or_default().0,
        template_helper: args.trust_request_chat_template.then(template_helper::command),
        ..ApiConfig::default()
    };
    for (key, value) in args.structured_outputs_config.iter().flat_map(|object| &object.0) {
        structured(&mut api, key, value).context("--structured-outputs-config")?;
    }
    Ok(api)
}

/// The flags of parsers, among which `--structured-outputs-config` has a place for one.
fn parser_flags(args: &ChatFormatArgs) -> Result<ParserFlags> {
    let mut flags = ParserFlags::new(args)?;
    let nested = args.structured_outputs_config.as_ref().and_then(|object| object.0.get("reasoning_parser"));
    if let Some(name) = nested.and_then(Value::as_str).filter(|name| !name.is_empty()) {
        flags.reasoning = Choice::read(name).context("--structured-outputs-config")?;
    }
    Ok(flags)
}

fn structured(api: &mut ApiConfig, key: &str, value: &Value) -> Result<()> {
    let switch = || match value {
        Value::Null => Ok(false),
        Value::Bool(on) => Ok(*on),
        other => bail!("'{key}' is {other}, but must be true or false"),
    };
    match key {
        "disable_any_whitespace" => api.disable_any_whitespace = switch()?,
        "disable_additional_properties" => api.disable_additional_properties = switch()?,
        // Read with the flags of parsers.
        "reasoning_parser" if value.is_string() => {}
        "reasoning_parser" => bail!("'{key}' is {value}, but must be a name"),
        _ if STRUCTURED_NO_EFFECT.contains(&key) => {}
        _ => bail!("unknown key '{key}'"),
    }
    Ok(())
}

fn tls(args: &ServeArgs) -> Option<TlsConfig> {
    let tls = &args.tls;
    Some(TlsConfig {
        cert_file: tls.ssl_certfile.clone()?,
        key_file: tls.ssl_keyfile.clone(),
        ca_certs: tls.ssl_ca_certs.clone(),
        client_auth: match tls.ssl_cert_reqs {
            0 => ClientAuth::None,
            1 => ClientAuth::Optional,
            _ => ClientAuth::Required,
        },
        refresh: tls.enable_ssl_refresh.then_some(CERTIFICATE_REFRESH),
    })
}

fn root_path(given: &str) -> String {
    match given.trim_matches('/') {
        "" => String::new(),
        path => format!("/{path}"),
    }
}

fn seconds(seconds: f64) -> Option<Duration> {
    (seconds > 0.0).then(|| Duration::from_secs_f64(seconds))
}

fn kv_events(args: &EngineArgs, environment: &Environment<'_>) -> Result<Option<KvEventsConfig>> {
    let config = kv_events::config(args.kv_events_config.as_ref(), environment).context("--kv-events-config")?;
    if config.is_some() && !args.enable_prefix_caching {
        bail!("--kv-events-config needs prefix caching, whose blocks the events describe");
    }
    Ok(config)
}

/// The seed of block hashes from vLLM's variable. Servers with the same seed have the same hashes.
fn prefix_seed(environment: &Environment<'_>) -> Option<String> {
    environment("PYTHONHASHSEED").filter(|seed| !seed.is_empty())
}

/// The configuration of the engine; `steps` limits a step unless a flag says otherwise. A step encodes images of at most
/// `image_tokens`.
pub(crate) fn engine_config(
    args: &EngineArgs,
    settings: &Settings,
    max_model_len: usize,
    steps: StepLimits,
    image_tokens: usize,
) -> EngineConfig {
    let defaults = EngineConfig::default();
    EngineConfig {
        stuck_after: steps.stuck_after,
        max_model_len,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: steps.tokens,
        max_num_encoder_tokens: image_tokens,
        max_step: match args.max_step_ms {
            None => steps.time,
            Some(0) => None,
            Some(time) => Some(Duration::from_millis(time as u64)),
        },
        policy: match args.scheduling_policy {
            Policy::Fcfs => SchedulingPolicy::Fcfs,
            Policy::Priority => SchedulingPolicy::Priority,
            Policy::Fair => SchedulingPolicy::Fair,
        },
        enable_prefix_caching: args.enable_prefix_caching,
        prefix_seed: settings.prefix_seed.clone(),
        enable_chunked_prefill: args.enable_chunked_prefill,
        long_prefill_token_threshold: args.long_prefill_token_threshold,
        watermark: args.watermark,
        max_queued_requests: args.max_num_queued_reqs.unwrap_or(defaults.max_queued_requests),
        max_queued_tokens: args.max_num_queued_tokens.unwrap_or(defaults.max_queued_tokens),
    }
}

/// The configuration of the server for `model`.
pub(crate) fn server_config(
    args: &ComposeArgs,
    settings: &Settings,
    model: &LoadedModel,
    max_model_len: usize,
) -> ServerConfig {
    let (names, reference) = (&args.model.served_model_name, args.model.reference());
    let vocab_size = model.program.vocab_size;
    let embedding = model.program.embedding().map(|id| &model.program.buffers[id.0]);
    ServerConfig {
        served_model_names: if names.is_empty() { vec![reference.to_owned()] } else { names.clone() },
        model_root: reference.to_owned(),
        max_model_len,
        vocab_size,
        embedding_size: embedding.map_or(0, |buffer| buffer.cols),
        eos_token_ids: model.eos_token_ids.clone(),
        sampling_defaults: model.sampling_defaults,
        seed: args.sampling.seed,
        api_keys: settings.api_keys.clone(),
        key_entries: settings.keys_file.as_ref().map(|file| file.entries.clone()).unwrap_or_default(),
        share_prefix_cache: settings.share_prefix_cache,
        min_priority: args.engine.min_priority.unwrap_or(i64::MIN),
        max_logprobs: args.sampling.max_logprobs.unwrap_or(u32::try_from(vocab_size).unwrap_or(u32::MAX)),
        connection: settings.connection,
        shutdown_timeout: settings.shutdown_timeout,
        shutdown_lag: settings.shutdown_lag,
        cors: settings.cors.clone(),
        root_path: settings.root_path.clone(),
        request_id_headers: settings.request_id_headers,
        sse_keep_alive: settings.sse_keep_alive,
        track_load: settings.track_load,
        disable_docs: settings.no_docs,
        tokenizer_info: settings.tokenizer_info,
        development: settings.development,
        response_store: settings.store_responses.then(StoreLimits::default),
        log: settings.log,
        api: settings.api.clone(),
        pooling: vectors::pooling_config(args, &model.checkpoint, &model.program),
        ..ServerConfig::default()
    }
}

#[cfg(test)]
mod tests;
