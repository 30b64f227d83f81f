//! The table of all routes. Keys, limits, load, metrics and the description of the API follow from it.

use axum::extract::{MatchedPath, Request};
use axum::routing::{MethodRouter, delete, get, post};
use http::Method;

use crate::api::chat::batch;
use crate::api::{
    adapters, chat, completions, development, generate, health, invocations, kv_event_sources, load, messages, metrics,
    models, pooling, render, responses, server_info, tokenize,
};
use crate::app::AppState;
use crate::config::{PoolingKind, ServerConfig};
use crate::pages;

/// A route. All rows of one path agree in everything but the method and the handler.
#[derive(Debug)]
pub(crate) struct Route {
    /// Also the method label of its metrics.
    pub(crate) method: &'static str,
    /// The pattern, which is also the handler label of its metrics.
    pub(crate) path: &'static str,
    handler: fn() -> MethodRouter<AppState>,
    /// The servers that have it.
    servers: Servers,
    /// What a request costs.
    pub(crate) work: Work,
    /// The form of its errors.
    pub(crate) errors: ErrorStyle,
    /// Whether it needs no key. vLLM protects only /v1, /v2, /inference and /cohere, and leaves /invocations, /pooling and
    /// /tokenize open.
    pub(crate) open: bool,
    /// Whether it has HTTP metrics. Probes and scrapes have none, since they would outnumber the requests.
    pub(crate) counted: bool,
    /// Whether it is served on connections beyond the limit. Otherwise many connections would make an orchestrator restart
    /// the server.
    probe: bool,
}

/// The servers that have a route. As in vLLM, a route that the model cannot answer does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Servers {
    All,
    /// Those of models that generate text.
    Generators,
    /// Those of models that return vectors of texts: embedders and models that generate text.
    Vectors,
    Embedders,
    Classifiers,
    /// Those of models that do not generate text.
    Pooling,
    /// Those of models that compare texts.
    Comparing,
    Development,
    /// Those whose operator allows adapters to change.
    Updatable,
}

/// What a request costs. Requests that cost anything count against the limits of their key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Nothing,
    /// Template and tokenizer.
    Text,
    /// The engine. Such requests are counted as load and traced.
    Engine,
}

/// The form of error bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorStyle {
    OpenAi,
    Anthropic,
}

impl Servers {
    fn include(self, config: &ServerConfig) -> bool {
        let model = config.pooling.as_ref();
        match self {
            Self::All => true,
            Self::Generators => model.is_none(),
            Self::Vectors => model.is_none_or(|model| matches!(model.kind, PoolingKind::Embedder { .. })),
            Self::Embedders => model.is_some_and(|model| matches!(model.kind, PoolingKind::Embedder { .. })),
            Self::Classifiers => model.is_some_and(|model| matches!(model.kind, PoolingKind::Classifier { .. })),
            Self::Pooling => model.is_some(),
            Self::Comparing => model.is_some_and(|model| model.compares_texts()),
            Self::Development => config.development,
            Self::Updatable => config.adapter_routes,
        }
    }
}

impl Route {
    /// A protected route of all servers that costs nothing.
    const fn new(method: &'static str, path: &'static str, handler: fn() -> MethodRouter<AppState>) -> Self {
        Self {
            method,
            path,
            handler,
            servers: Servers::All,
            work: Work::Nothing,
            errors: ErrorStyle::OpenAi,
            open: false,
            counted: true,
            probe: false,
        }
    }

    const fn get(path: &'static str, handler: fn() -> MethodRouter<AppState>) -> Self {
        Self::new("GET", path, handler)
    }

    const fn post(path: &'static str, handler: fn() -> MethodRouter<AppState>) -> Self {
        Self::new("POST", path, handler)
    }

    const fn delete(path: &'static str, handler: fn() -> MethodRouter<AppState>) -> Self {
        Self::new("DELETE", path, handler)
    }

    const fn only(self, servers: Servers) -> Self {
        Self { servers, ..self }
    }

    const fn costs(self, work: Work) -> Self {
        Self { work, ..self }
    }

    const fn anthropic(self) -> Self {
        Self { errors: ErrorStyle::Anthropic, ..self }
    }

    const fn open(self) -> Self {
        Self { open: true, ..self }
    }

    const fn uncounted(self) -> Self {
        Self { counted: false, ..self }
    }

    const fn probe(self) -> Self {
        Self { probe: true, open: true, counted: false, ..self }
    }

    /// The handler of its method.
    pub(crate) fn handler(&self) -> MethodRouter<AppState> {
        (self.handler)()
    }

    /// The route of a request; `None` if no path matched, or the path has no such method.
    pub(crate) fn matched(request: &Request) -> Option<&'static Self> {
        let path = request.extensions().get::<MatchedPath>()?.as_str();
        let method = if *request.method() == Method::HEAD { Method::GET.as_str() } else { request.method().as_str() };
        ROUTES.iter().find(|route| route.path == path && route.method == method)
    }

    /// Whether a request uses the engine.
    pub(crate) fn generates(request: &Request) -> bool {
        Self::matched(request).is_some_and(|route| route.work == Work::Engine)
    }
}

/// All routes of all servers.
pub(crate) static ROUTES: &[Route] = &[
    Route::post("/tokenize", || post(tokenize::tokenize)).costs(Work::Text),
    Route::get("/tokenizer_info", || get(tokenize::info)),
    Route::post("/detokenize", || post(tokenize::detokenize)).costs(Work::Text),
    Route::post("/invocations", || post(invocations::handle)).costs(Work::Engine),
    Route::get("/server_info", || get(server_info::handle)).uncounted(),
    Route::get("/v1/models", || get(models::handle)),
    Route::get("/v1/models/{*model}", || get(models::one)),
    Route::post("/v1/load_lora_adapter", || post(adapters::load)).only(Servers::Updatable),
    Route::post("/v1/unload_lora_adapter", || post(adapters::unload)).only(Servers::Updatable),
    Route::get("/health", || get(health::ready)).probe(),
    Route::get("/ping", || get(health::ready)).probe(),
    Route::post("/ping", || post(health::ready)).probe(),
    Route::get("/live", || get(health::live)).probe(),
    Route::get("/version", || get(health::version)).open().uncounted(),
    Route::get("/load", || get(load::handle)).open().uncounted(),
    Route::get("/kv_event_sources", || get(kv_event_sources::handle)).open(),
    Route::get("/metrics", || get(metrics::handle)).probe(),
    Route::get("/metrics/", || get(metrics::handle)).open().uncounted(),
    Route::get("/docs", || get(pages::docs)).open(),
    Route::get("/redoc", || get(pages::docs)).open(),
    Route::get("/openapi.json", || get(pages::openapi)).open(),
    Route::post("/v1/chat/completions", || post(chat::handle)).only(Servers::Generators).costs(Work::Engine),
    Route::post("/v1/chat/completions/batch", || post(batch::handle)).only(Servers::Generators).costs(Work::Engine),
    Route::post("/v1/chat/completions/render", || post(render::chat)).only(Servers::Generators).costs(Work::Text),
    Route::post("/v1/completions", || post(completions::handle)).only(Servers::Generators).costs(Work::Engine),
    Route::post("/v1/completions/render", || post(render::completions)).only(Servers::Generators).costs(Work::Text),
    Route::post("/v1/responses", || post(responses::handle)).only(Servers::Generators).costs(Work::Engine),
    Route::get("/v1/responses/{response_id}", || get(responses::stored)).only(Servers::Generators),
    Route::delete("/v1/responses/{response_id}", || delete(responses::delete)).only(Servers::Generators),
    Route::post("/v1/responses/{response_id}/cancel", || post(responses::cancel)).only(Servers::Generators),
    Route::post("/v1/messages", || post(messages::handle)).only(Servers::Generators).costs(Work::Engine).anthropic(),
    Route::post("/v1/messages/count_tokens", || post(messages::count_tokens))
        .only(Servers::Generators)
        .costs(Work::Text)
        .anthropic(),
    Route::post("/generate", || post(generate::handle)).only(Servers::Generators).costs(Work::Engine),
    Route::get("/", || get(pages::chat)).only(Servers::Generators).open(),
    Route::get("/assets/{*file}", || get(pages::asset)).only(Servers::Generators).open(),
    Route::post("/pooling", || post(pooling::pooling)).only(Servers::Pooling).costs(Work::Engine),
    Route::post("/v1/embeddings", || post(pooling::embeddings)).only(Servers::Vectors).costs(Work::Engine),
    Route::post("/v2/embed", || post(pooling::cohere_embeddings)).only(Servers::Embedders).costs(Work::Engine),
    Route::post("/classify", || post(pooling::classify)).only(Servers::Classifiers).costs(Work::Engine),
    Route::post("/score", || post(pooling::score)).only(Servers::Comparing).costs(Work::Engine),
    Route::post("/v1/score", || post(pooling::score)).only(Servers::Comparing).costs(Work::Engine),
    Route::post("/rerank", || post(pooling::rerank)).only(Servers::Comparing).costs(Work::Engine),
    Route::post("/v1/rerank", || post(pooling::rerank)).only(Servers::Comparing).costs(Work::Engine),
    Route::post("/v2/rerank", || post(pooling::rerank)).only(Servers::Comparing).costs(Work::Engine),
    Route::post("/pause", || post(development::pause)).only(Servers::Development),
    Route::post("/resume", || post(development::resume)).only(Servers::Development),
    Route::get("/is_paused", || get(development::is_paused)).only(Servers::Development),
    Route::post("/sleep", || post(development::sleep)).only(Servers::Development),
    Route::post("/wake_up", || post(development::wake_up)).only(Servers::Development),
    Route::get("/is_sleeping", || get(development::is_sleeping)).only(Servers::Development),
    Route::post("/reset_prefix_cache", || post(development::reset_prefix_cache)).only(Servers::Development),
];

/// The routes of a server.
pub(crate) fn served(config: &ServerConfig) -> impl Iterator<Item = &'static Route> {
    ROUTES.iter().filter(|route| route.servers.include(config))
}

/// Whether requests of a path are counted in the HTTP metrics, whatever their method.
pub(crate) fn is_counted(path: &str) -> bool {
    ROUTES.iter().find(|route| route.path == path).is_none_or(|route| route.counted)
}

/// Whether a path is served on connections beyond the limit.
pub(crate) fn is_probe(path: &str) -> bool {
    ROUTES.iter().any(|route| route.probe && route.path == path)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rows_of_one_path_agree() {
        let mut seen = HashSet::new();
        for route in ROUTES {
            assert!(seen.insert((route.method, route.path)), "{route:?} is there twice");
            let first = ROUTES.iter().find(|first| first.path == route.path).unwrap();
            let properties =
                |route: &Route| (route.servers, route.work, route.errors, route.open, route.counted, route.probe);
            assert_eq!(properties(route), properties(first), "{route:?}");
        }
    }

    #[test]
    fn only_post_requests_cost_anything_and_all_of_them_are_protected() {
        for route in ROUTES.iter().filter(|route| route.work != Work::Nothing) {
            assert_eq!((route.method, route.open), ("POST", false), "{route:?}");
        }
    }

    #[test]
    fn what_is_open_and_what_is_probed_is_listed_here_once_more() {
        let paths = |has: fn(&Route) -> bool| -> HashSet<_> {
            ROUTES.iter().filter(|route| has(route)).map(|route| route.path).collect()
        };
        let probes = HashSet::from(["/health", "/live", "/metrics", "/ping"]);
        assert_eq!(paths(|route| route.probe), probes);
        let described = ["/", "/assets/{*file}", "/docs", "/kv_event_sources", "/load", "/metrics/", "/openapi.json"];
        let open = probes.iter().copied().chain(described).chain(["/redoc", "/version"]).collect();
        assert_eq!(paths(|route| route.open), open);
        let uncounted = probes.iter().copied().chain(["/metrics/", "/load", "/version", "/server_info"]).collect();
        assert_eq!(paths(|route| !route.counted), uncounted);
    }
}
