//! Converts flags to the configurations of engine and server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use octavo_engine::{EngineConfig, Speculation};
use octavo_kv_events::KvEventsConfig;
use octavo_media::MediaSettings;
use octavo_server::{ApiConfig, ConnectionLimits, CorsConfig, RequestLog, ServerConfig, StoreLimits};
use octavo_sockets::{ClientAuth, TlsConfig};
use octavo_telemetry::{LogConfig, TraceConfig};
use serde_json::Value;

use crate::cli::{
    self, ChatFormatArgs, ComposeArgs, EngineArgs, Environment, NetworkArgs, ObserveArgs, ServeArgs, TextList,
};
use crate::serve::device::StepLimits;
use crate::serve::keys::KeysFile;
use crate::serve::model::LoadedModel;
use crate::serve::parsers::{Choice, ParserFlags};
use crate::serve::{images, kv_events, speculation, vectors};
use crate::template_helper;

/// Variable for the seconds that a connection is kept open between requests.
const KEEP_ALIVE: &str = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE";

/// vLLM's variable for the development routes.
const DEVELOPMENT: &str = "VLLM_SERVER_DEV_MODE";

/// vLLM's variable for stored responses.
const STORE: &str = "VLLM_ENABLE_RESPONSES_API_STORE";

/// vLLM's variables for adapters that change while the server runs.
const UPDATES: &str = "VLLM_ALLOW_RUNTIME_LORA_UPDATING";
const ADAPTERS: &str = "VLLM_LORA_RESOLVER_CACHE_DIR";

/// vLLM's variable for an API key.
const API_KEY: &str = "VLLM_API_KEY";

/// Keys of `--structured-outputs-config` without an effect, since one library compiles all grammars strictly.
const STRUCTURED_NO_EFFECT: [&str; 3] = ["backend", "disable_fallback", "enable_in_reasoning"];

/// Interval at which `--enable-ssl-refresh` checks for changed files.
const CERTIFICATE_REFRESH: Duration = Duration::from_secs(10);

/// The settings that do not depend on the model.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Settings {
    /// The configuration of the server without what [`server_config`] adds.
    pub(crate) server: ServerConfig,
    /// The file of API keys with names.
    pub(crate) keys_file: Option<KeysFile>,
    pub(crate) log_stats: bool,
    pub(crate) uds: Option<PathBuf>,
    pub(crate) tls: Option<TlsConfig>,
    pub(crate) parsers: ParserFlags,
    /// Where images come from.
    pub(crate) media: MediaSettings,
    pub(crate) traces: Option<TraceConfig>,
    pub(crate) kv_events: Option<KvEventsConfig>,
    /// Seed of the hashes of KV blocks.
    pub(crate) prefix_seed: Option<String>,
    /// Folder in which adapters of unknown names are searched for.
    pub(crate) adapter_folder: Option<PathBuf>,
    pub(crate) speculation: Option<Speculation>,
}

impl Settings {
    /// The settings of a server with a socket.
    ///
    /// # Errors
    /// Flags contradict each other, or a variable is invalid.
    pub(crate) fn of_server(args: &ServeArgs, environment: &Environment<'_>) -> Result<Self> {
        if args.log.enable_log_outputs && !args.log.enable_log_requests {
            bail!("--enable-log-outputs needs --enable-log-requests");
        }
        let settings = Self::in_process(&args.compose, environment)?;
        let keys_file = args.network.api_keys_file.as_deref().map(KeysFile::open).transpose()?;
        let server = with_socket(settings.server, args, environment)?;
        let adapter_folder = environment(ADAPTERS).filter(|_| server.adapter_routes).map(PathBuf::from);
        let server = ServerConfig {
            key_entries: keys_file.as_ref().map(|file| file.entries.clone()).unwrap_or_default(),
            ..server
        };
        Ok(Self {
            server,
            keys_file,
            log_stats: !args.log.disable_log_stats,
            uds: args.network.uds.clone(),
            adapter_folder,
            tls: tls(args),
            ..settings
        })
    }

    /// The settings of a server for use in this process.
    ///
    /// # Errors
    /// Flags contradict each other, or a variable is invalid.
    pub(crate) fn in_process(args: &ComposeArgs, environment: &Environment<'_>) -> Result<Self> {
        let (names, reference) = (&args.model.served_model_name, args.model.reference());
        let server = ServerConfig {
            served_model_names: if names.is_empty() { vec![reference.to_owned()] } else { names.clone() },
            model_root: reference.to_owned(),
            seed: args.sampling.seed,
            min_priority: args.engine.min_priority.unwrap_or(i64::MIN),
            api: api_config(&args.chat)?,
            ..ServerConfig::default()
        };
        Ok(Self {
            server,
            parsers: parser_flags(&args.chat)?,
            media: images::media_settings(&args.media, environment)?,
            traces: traces(&args.observe, environment)?,
            kv_events: kv_events(&args.engine, environment)?,
            prefix_seed: prefix_seed(environment),
            speculation: speculation::config(args.engine.speculative_config.as_ref())
                .context("--speculative-config")?,
            ..Self::default()
        })
    }
}

/// Adds to a configuration what the flags of a server with a socket say.
fn with_socket(server: ServerConfig, args: &ServeArgs, environment: &Environment<'_>) -> Result<ServerConfig> {
    let (network, answers, log) = (&args.network, &args.answers, &args.log);
    Ok(ServerConfig {
        api_keys: api_keys(network, environment)?,
        share_prefix_cache: network.share_prefix_cache,
        connection: connection(network, environment)?,
        shutdown_timeout: Duration::from_secs_f64(network.shutdown_timeout),
        shutdown_lag: Duration::from_secs_f64(network.shutdown_lag),
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
        disable_docs: network.disable_fastapi_docs,
        tokenizer_info: network.enable_tokenizer_info_endpoint,
        development: switch(environment, DEVELOPMENT)?,
        adapter_routes: updates(environment)?,
        response_store: switch(environment, STORE)?.then(StoreLimits::default),
        log: RequestLog {
            requests: log.enable_log_requests,
            outputs: log.enable_log_outputs,
            max_len: log.max_log_len,
        },
        api: ApiConfig {
            prompt_tokens_details: answers.enable_prompt_tokens_details,
            request_metrics: answers.enable_per_request_metrics,
            fingerprint: answers.fingerprint_mode,
            force_include_usage: answers.enable_force_include_usage,
            stream_interval: u32::try_from(answers.stream_interval).unwrap_or(u32::MAX),
            ..server.api
        },
        ..server
    })
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

/// Whether requests may load and unload adapters.
fn updates(environment: &Environment<'_>) -> Result<bool> {
    match environment(UPDATES).as_deref().map(|value| value.trim().to_ascii_lowercase()).as_deref() {
        None | Some("" | "0" | "false") => Ok(false),
        Some("1" | "true") => Ok(true),
        Some(other) => bail!("{UPDATES}='{other}' is neither 0 nor 1"),
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
    LogConfig { level: level.map(str::to_owned), format: args.log_format }
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
        policy: args.scheduling_policy,
        enable_prefix_caching: args.enable_prefix_caching,
        prefix_seed: settings.prefix_seed.clone(),
        enable_chunked_prefill: args.enable_chunked_prefill,
        long_prefill_token_threshold: args.long_prefill_token_threshold,
        watermark: args.watermark,
        speculation: settings.speculation,
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
) -> Result<ServerConfig> {
    let vocab_size = model.program.vocab_size;
    let embedding = model.program.embedding().map(|id| &model.program.buffers[id.0]);
    let mut config = ServerConfig {
        max_model_len,
        vocab_size,
        embedding_size: embedding.map_or(0, |buffer| buffer.cols),
        eos_token_ids: model.eos_token_ids.clone(),
        sampling_defaults: model.sampling_defaults,
        max_logprobs: args.sampling.max_logprobs.unwrap_or(u32::try_from(vocab_size).unwrap_or(u32::MAX)),
        pooling: vectors::pooling_config(args, &model.checkpoint, &model.program),
        ..settings.server.clone()
    };
    (config.api.tools, config.api.reasoning) = settings.parsers.choose(&model.text)?;
    Ok(config)
}

#[cfg(test)]
mod tests;
