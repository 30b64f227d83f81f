//! The APIs: a module for each, from the body of a request to the body of its answer.
//!
//! `request` reads a body, `convert` makes the request of the engine from it, and `stream` writes the answer. What several
//! APIs share is in `shared`. The structure of requests is checked by `request`, the values by `shared::sampling`.

pub(crate) mod adapters;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod development;
pub(crate) mod generate;
pub(crate) mod health;
pub(crate) mod invocations;
pub(crate) mod kv_event_sources;
pub(crate) mod load;
pub(crate) mod messages;
pub(crate) mod metrics;
pub(crate) mod models;
pub(crate) mod pooling;
pub(crate) mod render;
pub(crate) mod responses;
pub(crate) mod server_info;
pub(crate) mod shared;
pub(crate) mod tokenize;

#[cfg(test)]
mod tests;
