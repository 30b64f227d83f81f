//! HTTP: OpenAI routes, server-sent events, limits and errors.
//!
//! A request passes through these modules in order: `sockets`, `tls` and `listener` (a connection), what `layers` lists
//! (every request), `body` (bytes), `prepare` (on the blocking pool: `types` checks the shape, `params` the meaning;
//! template and tokenizer make the prompt), `choices` (its sequences in the engine), and `wire` with `sse` (its answer).
//!
//! Requests for vectors and scores have `vectors` in place of `choices` and `wire`.
//!
//! When a client disconnects, its handler's future or its response's body is dropped, and with it the engine's streams.
//! There is no other form of cancellation.
//!
//! **Invariant:** this crate knows no scheduler and no tensor: it submits token ids and reads token ids.

mod app;
mod auth;
mod body;
mod caller;
mod choices;
mod config;
mod cors;
mod drain;
mod error;
mod fields;
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
mod logprobs;
mod observe;
mod orca;
mod pages;
mod params;
mod prepare;
mod reload;
mod request_id;
mod request_log;
mod restrictions;
mod root_path;
mod route_table;
mod routes;
mod seeds;
mod sockets;
mod sse;
mod stall;
mod stored;
mod tls;
mod trace;
mod types;
mod unserved;
mod vectors;
mod watch;
mod wire;
mod workers;

pub use app::{Server, ServerError};
pub use config::{
    Activation, ApiConfig, ClientAuth, ConnectionLimits, CorsConfig, FingerprintMode, KvEventSource, Matryoshka,
    PairFormat, PoolingConfig, PoolingKind, RequestLog, SamplingDefaults, ServerConfig, StoreLimits, TemplateHelper,
    TextModel, TlsConfig,
};
pub use drain::Shutdown;
pub use images::{ImageModel, ViewWriter, WriteViews};
pub use keys::{ApiKeys, KeyEntry, KeyHash, KeyLimits};
pub use loading::serve_while_loading;
pub use reload::FileWatch;
pub use sockets::{Listener, UnixSocketError};
pub use tls::TlsError;
