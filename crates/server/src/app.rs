//! The server: state, routes, start and shutdown.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use http::StatusCode;
use octavo_engine::EngineHandle;
use octavo_telemetry::{EngineMetrics, HttpMetrics, Telemetry};
use octavo_text::{Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec};
use tokio::time::{Instant, sleep_until};

use crate::body::BodyBudget;
use crate::config::{FingerprintMode, PoolingConfig, PoolingKind, ServerConfig, TextModel};
use crate::drain::Shutdown;
use crate::error::ApiError;
use crate::keys::ApiKeys;
use crate::layers;
use crate::listener::Connections;
use crate::load::Load;
use crate::pages;
use crate::routes::development::Pause;
use crate::routes::{
    batch, chat, completions, development, generate, health, invocations, kv_event_sources, load, messages, metrics,
    models, pooling, render, responses, server_info, tokenize,
};
use crate::seeds::Seeds;
use crate::sockets::Listener;
use crate::stored::ResponseStore;
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

/// Method, path and handler of a route.
type Route = (&'static str, &'static str, MethodRouter<AppState>);

/// The routes that only a server in development mode has.
pub(crate) fn development_routes() -> Vec<Route> {
    vec![
        ("POST", "/pause", post(development::pause)),
        ("POST", "/resume", post(development::resume)),
        ("GET", "/is_paused", get(development::is_paused)),
        ("POST", "/sleep", post(development::sleep)),
        ("POST", "/wake_up", post(development::wake_up)),
        ("GET", "/is_sleeping", get(development::is_sleeping)),
        ("POST", "/reset_prefix_cache", post(development::reset_prefix_cache)),
    ]
}

/// The routes of models that generate text.
fn generation_routes() -> Vec<Route> {
    vec![
        ("POST", "/v1/chat/completions", post(chat::handle)),
        ("POST", "/v1/chat/completions/batch", post(batch::handle)),
        ("POST", "/v1/chat/completions/render", post(render::chat)),
        ("POST", "/v1/completions", post(completions::handle)),
        ("POST", "/v1/completions/render", post(render::completions)),
        ("POST", "/v1/responses", post(responses::handle)),
        ("GET", "/v1/responses/{response_id}", get(responses::stored)),
        ("DELETE", "/v1/responses/{response_id}", delete(responses::delete)),
        ("POST", "/v1/responses/{response_id}/cancel", post(responses::cancel)),
        ("POST", "/v1/messages", post(messages::handle)),
        ("POST", "/v1/messages/count_tokens", post(messages::count_tokens)),
        ("POST", "/generate", post(generate::handle)),
        ("GET", "/", get(pages::chat)),
        ("GET", "/assets/{*file}", get(pages::asset)),
    ]
}

/// The route of vectors that models which generate text have too.
fn embedding_routes() -> Vec<Route> {
    vec![("POST", "/v1/embeddings", post(pooling::embeddings))]
}

/// The routes of embedders alone.
fn embedder_routes() -> Vec<Route> {
    vec![("POST", "/v2/embed", post(pooling::cohere_embeddings))]
}

/// The routes of classifiers alone.
fn classifier_routes() -> Vec<Route> {
    vec![("POST", "/classify", post(pooling::classify))]
}

/// The route of all pooling models.
fn pooling_routes() -> Vec<Route> {
    vec![("POST", "/pooling", post(pooling::pooling))]
}

/// The routes of models that compare texts.
fn scoring_routes() -> Vec<Route> {
    vec![
        ("POST", "/score", post(pooling::score)),
        ("POST", "/v1/score", post(pooling::score)),
        ("POST", "/rerank", post(pooling::rerank)),
        ("POST", "/v1/rerank", post(pooling::rerank)),
        ("POST", "/v2/rerank", post(pooling::rerank)),
    ]
}

/// The routes of all servers.
fn common_routes() -> Vec<Route> {
    vec![
        ("POST", "/tokenize", post(tokenize::tokenize)),
        ("GET", "/tokenizer_info", get(tokenize::info)),
        ("POST", "/detokenize", post(tokenize::detokenize)),
        ("POST", "/invocations", post(invocations::handle)),
        ("GET", "/server_info", get(server_info::handle)),
        ("GET", "/v1/models", get(models::handle)),
        ("GET", "/v1/models/{*model}", get(models::one)),
        ("GET", "/health", get(health::ready)),
        ("GET", "/ping", get(health::ready)),
        ("POST", "/ping", post(health::ready)),
        ("GET", "/live", get(health::live)),
        ("GET", "/version", get(health::version)),
        ("GET", "/load", get(load::handle)),
        ("GET", "/kv_event_sources", get(kv_event_sources::handle)),
        ("GET", "/metrics", get(metrics::handle)),
        ("GET", "/metrics/", get(metrics::handle)),
        ("GET", "/docs", get(pages::docs)),
        ("GET", "/redoc", get(pages::docs)),
        ("GET", "/openapi.json", get(pages::openapi)),
    ]
}

/// All routes of models of any kind, without those of development.
#[cfg(test)]
pub(crate) fn routes() -> Vec<Route> {
    let of_models =
        [generation_routes, embedding_routes, embedder_routes, classifier_routes, pooling_routes, scoring_routes];
    of_models.into_iter().chain([common_routes as fn() -> Vec<Route>]).flat_map(|routes| routes()).collect()
}

/// The routes of a server, which are also the labels of its HTTP metrics. As in vLLM, a route that the model cannot answer
/// does not exist.
pub(crate) fn served(config: &ServerConfig) -> Vec<Route> {
    let mut served = common_routes();
    match &config.pooling {
        None => served.extend(generation_routes().into_iter().chain(embedding_routes())),
        Some(model) => {
            served.extend(pooling_routes());
            served.extend(match &model.kind {
                PoolingKind::Embedder { .. } => [embedding_routes(), embedder_routes()].concat(),
                PoolingKind::Classifier { .. } => classifier_routes(),
            });
            if model.compares_texts() {
                served.extend(scoring_routes());
            }
        }
    }
    if config.development {
        served.extend(development_routes());
    }
    served
}

impl Server {
    /// Creates a server for a running engine. Without a served name, the model is served under `model_root`.
    pub fn new(engine: EngineHandle, text: TextModel, telemetry: Telemetry, mut config: ServerConfig) -> Self {
        if config.served_model_names.is_empty() {
            config.served_model_names.push(config.model_root.clone());
        }
        let labels: Vec<_> = served(&config).iter().map(|(method, path, _)| (*method, *path)).collect();
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
        for (_, path, handler) in served(&self.state.config) {
            router = router.route(path, handler);
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
