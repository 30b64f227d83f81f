//! The server: state, routes, start and shutdown.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::StatusCode;
use octavo_engine::EngineHandle;
use octavo_sockets::Listener;
use octavo_telemetry::{EngineMetrics, HttpMetrics, Telemetry};
use octavo_text::{Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec};
use tokio::time::{Instant, sleep_until};

use crate::adapters::Adapters;
use crate::api::development::Pause;
use crate::api::responses::stored::ResponseStore;
use crate::body::BodyBudget;
use crate::config::{FingerprintMode, PoolingConfig, ServerConfig, TextModel};
use crate::drain::Shutdown;
use crate::error::ApiError;
use crate::keys::ApiKeys;
use crate::layers;
use crate::listener::Connections;
use crate::load::Load;
use crate::route_table::served;
use crate::seeds::Seeds;
use crate::workers::{Workers, take_turns};

/// Time in which streams that the shutdown ends can send their last events.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The state that handlers share; clones are cheap.
pub(crate) type AppState = Arc<App>;

/// See [`AppState`].
pub(crate) struct App {
    pub(crate) engine: EngineHandle,
    pub(crate) engine_metrics: EngineMetrics,
    pub(crate) http_metrics: HttpMetrics,
    pub(crate) telemetry: Telemetry,
    pub(crate) text: TextModel,
    pub(crate) config: ServerConfig,
    /// The model name in responses.
    pub(crate) model: Arc<str>,
    /// The `system_fingerprint` of responses; `None` if it is disabled.
    pub(crate) fingerprint: Option<Arc<str>>,
    /// Bytes of the longest token, if it bounds the length of a text; see [`octavo_text::Tokenizer::longest_token`].
    longest_token: Option<usize>,
    /// How the model pools; the last token of a model that generates text.
    pub(crate) pooling: PoolingConfig,
    /// Unix time of the start.
    pub(crate) started: u64,
    pub(crate) drain: Shutdown,
    pub(crate) workers: Workers,
    pub(crate) bodies: BodyBudget,
    pub(crate) seeds: Seeds,
    pub(crate) keys: ApiKeys,
    pub(crate) load: Load,
    pub(crate) pause: Pause,
    /// The adapters; `None` if the server runs without.
    pub(crate) adapters: Option<Adapters>,
    /// The stored responses; `None` if none are stored.
    pub(crate) responses: Option<Arc<ResponseStore>>,
    /// Created for the first grammar: creation takes a moment, and most servers never see a grammar.
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

impl App {
    /// Whether the length of a text bounds the number of its tokens.
    pub(crate) fn bounds_texts(&self) -> bool {
        self.longest_token.is_some()
    }

    /// Whether a text of so many bytes has more tokens than a prompt may have, whatever it is.
    pub(crate) fn is_too_long(&self, bytes: usize) -> bool {
        self.longest_token.is_some_and(|longest| bytes.div_ceil(longest) > self.config.max_model_len)
    }

    /// Compiles a grammar, in turns with other requests.
    pub(crate) fn compile(&self, mut spec: GrammarSpec) -> Result<Grammar, ApiError> {
        let config = &self.config;
        if let GrammarSpec::JsonSchema { disable_any_whitespace, disable_additional_properties, .. } = &mut spec {
            *disable_any_whitespace |= config.api.disable_any_whitespace;
            *disable_additional_properties |= config.api.disable_additional_properties;
        }
        let make = || {
            let limits = GrammarLimits::default();
            GrammarCompiler::new(&self.text.tokenizer, config.vocab_size, &config.eos_token_ids, limits)
        };
        let compiler = self.grammars.get_or_init(make).as_ref().map_err(|error| {
            tracing::error!(%error, "the tokenizer cannot be restricted by grammars");
            ApiError::internal()
        })?;
        compiler.compile_in_turns(&spec, take_turns)
    }
}

/// The reason why the server stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The listening socket is unusable.
    #[error("no connection can be accepted any more: {0}")]
    Accept(#[from] std::io::Error),
}

/// The HTTP server of one engine.
pub struct Server {
    state: AppState,
}

impl Server {
    /// Creates a server for a running engine. Without a served name, the model is served under `model_root`.
    pub fn new(
        engine: EngineHandle,
        text: TextModel,
        telemetry: Telemetry,
        mut config: ServerConfig,
        adapters: Option<Adapters>,
    ) -> Self {
        if config.served_model_names.is_empty() {
            config.served_model_names.push(config.model_root.clone());
        }
        config.adapter_routes &= adapters.is_some();
        let counted = served(&config).filter(|route| route.counted);
        let labels: Vec<_> = counted.map(|route| (route.method, route.path)).collect();
        let state = Arc::new(App {
            engine,
            engine_metrics: telemetry.engine(),
            http_metrics: telemetry.http(&labels),
            fingerprint: fingerprint(&config).map(Arc::from),
            seeds: Seeds::new(config.seed),
            grammars: OnceLock::new(),
            keys: ApiKeys::new(telemetry.clone(), &config.api_keys, &config.key_entries),
            load: Load::default(),
            pause: Pause::default(),
            adapters,
            responses: config.response_store.map(|limits| Arc::new(ResponseStore::new(limits))),
            bodies: BodyBudget::new(&config.connection),
            longest_token: text.tokenizer.longest_token(),
            pooling: config.pooling.clone().unwrap_or_else(PoolingConfig::of_generative),
            started: unix_time(),
            drain: Shutdown::new(),
            workers: Workers::new(),
            telemetry,
            text,
            model: config.served_model_names[0].as_str().into(),
            config,
        });
        Self { state }
    }

    /// The API keys, whose named entries can be replaced while the server runs.
    pub fn keys(&self) -> ApiKeys {
        self.state.keys.clone()
    }

    /// The routes, for callers that run their own HTTP server.
    pub fn router(&self) -> Router {
        let mut router = Router::new();
        for route in served(&self.state.config) {
            router = router.route(route.path, route.handler());
        }
        let router = router
            .fallback(not_found)
            .method_not_allowed_fallback(method_not_allowed)
            .with_state(Arc::clone(&self.state));
        layers::around(router, &self.state)
    }

    /// Serves until `shutdown` is signalled: readiness turns false at once, new requests are served for `shutdown_lag`
    /// (unless it was interrupted), running ones have `shutdown_timeout` in all, and what is left then ends with an
    /// error. A second signal returns at once.
    ///
    /// # Errors
    /// The listening socket is unusable.
    pub async fn serve(self, listener: impl Into<Listener>, shutdown: Shutdown) -> Result<(), ServerError> {
        let router = self.router();
        let mut connections = Connections::new(self.state.config.connection);
        tokio::select! {
            () = self.state.drain.follow(&shutdown) => Ok(()),
            result = self.run(listener.into(), &router, &mut connections) => result,
        }
    }

    async fn run(&self, listener: Listener, router: &Router, connections: &mut Connections) -> Result<(), ServerError> {
        let (drain, config) = (&self.state.drain, &self.state.config);
        tokio::select! {
            error = connections.accept(&listener, router) => return Err(error.into()),
            () = drain.draining() => {}
        }
        let begun = Instant::now();
        let (lag, deadline) = (begun + config.shutdown_lag, begun + config.shutdown_timeout);
        tracing::debug!(connections = connections.len(), timeout = ?config.shutdown_timeout, "draining");
        tokio::select! {
            error = connections.accept(&listener, router) => return Err(error.into()),
            () = sleep_until(lag.min(deadline)) => {}
            () = drain.closing() => {}
        }
        drop(listener);
        connections.close();
        if !connections.closed(deadline).await {
            tracing::warn!(
                connections = connections.len(),
                "the shutdown timeout is over: ending the requests that still run"
            );
            drain.end();
            self.state.engine.abort_all();
            connections.closed(Instant::now() + LAST_WORDS).await;
        }
        Ok(())
    }
}

/// The answer for a path without a route, as Starlette gives it.
pub(crate) async fn not_found() -> Response {
    (StatusCode::NOT_FOUND, Json(serde_json::json!({"detail": "Not Found"}))).into_response()
}

async fn method_not_allowed() -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, Json(serde_json::json!({"detail": "Method Not Allowed"}))).into_response()
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A fingerprint that changes with the part of the configuration that changes seeded answers: its FNV-1a hash.
fn fingerprint(config: &ServerConfig) -> Option<String> {
    let identity = format!("{}\0{}\0{}", config.version, config.model_root, config.max_model_len);
    let hash = identity.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    match config.api.fingerprint {
        FingerprintMode::Full => Some(format!("octavo-{}-{hash:08x}", config.version)),
        FingerprintMode::Hash => Some(format!("octavo-{hash:08x}")),
        FingerprintMode::None => None,
    }
}
