//! HTTP: OpenAI routes, server-sent events, limits and errors.
//!
//! A request passes through these modules in order: `listener` (a socket), `observe` and `auth` (every request),
//! `body` (bytes), `prepare` (on the blocking pool: `types` checks the shape, `params` the meaning; template and
//! tokenizer make the prompt), `choices` (its sequences in the engine), and `wire` with `sse` (its answer).
//!
//! A client that goes away drops its handler's future or its response's body, and with it the engine's streams: that is
//! all there is to cancellation.
//!
//! **Invariant:** this crate knows no scheduler and no tensor: it submits token ids and reads token ids.

mod app;
mod auth;
mod body;
mod choices;
mod config;
mod drain;
mod error;
mod fields;
#[doc(hidden)]
pub mod internals;
mod listener;
mod loading;
mod logprobs;
mod observe;
mod params;
mod prepare;
mod routes;
mod seeds;
mod sse;
mod stall;
mod types;
mod unserved;
mod wire;
mod workers;

pub use app::{Server, ServerError};
pub use config::{ConnectionLimits, SamplingDefaults, ServerConfig, TextModel};
pub use drain::Shutdown;
pub use loading::serve_while_loading;
