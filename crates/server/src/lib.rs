//! HTTP: OpenAI routes, server-sent events, limits and errors.
//!
//! A request passes these modules in order: `listener` (a connection of `octavo-sockets`), what `layers` lists (every
//! request), and the handler that `route_table` names, in `api`. There, `body` receives the bytes. On the blocking pool,
//! the `request` of the API checks the shape, and `convert` the meaning; template and tokenizer make the prompt. `choices`
//! are its sequences in the engine, and the `stream` of the API writes its answer.
//!
//! Requests for vectors and scores have `api::pooling::answer` in place of `choices` and `stream`.
//!
//! When a client disconnects, its handler's future or its response's body is dropped, and with it the engine's streams.
//! There is no other form of cancellation.
//!
//! **Invariant:** this crate knows no scheduler and no tensor: it submits token ids and reads token ids.

mod adapters;
mod api;
mod app;
mod auth;
mod body;
mod caller;
mod choices;
mod config;
mod cors;
mod drain;
mod error;
mod host;
mod images;
#[doc(hidden)]
pub mod internals;
mod json;
mod keep_alive;
mod keys;
mod layers;
mod listener;
mod load;
mod loading;
mod lock;
mod observe;
mod orca;
mod pages;
mod request_id;
mod request_log;
mod root_path;
mod route_table;
mod seeds;
mod trace;
mod watch;
mod workers;

pub use adapters::{AdapterLoadError, AdapterLoader, AdapterSource, Adapters};
pub use app::{Server, ServerError};
pub use config::{
    Activation, ApiConfig, ConnectionLimits, CorsConfig, FingerprintMode, KvEventSource, Matryoshka, PairFormat,
    PoolingConfig, PoolingKind, RequestLog, SamplingDefaults, ServerConfig, StoreLimits, TemplateHelper, TextModel,
};
pub use drain::Shutdown;
pub use images::{ImageModel, ViewWriter, WriteViews};
pub use keys::{ApiKeys, KeyEntry, KeyHash, KeyLimits};
pub use loading::serve_while_loading;
