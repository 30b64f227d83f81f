//! The server through its socket: a mock engine that "generates" a script, a real tokenizer, a real HTTP client.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, missing_docs, reason = "helpers of one test binary")]
#![allow(clippy::approx_constant, reason = "log-probabilities as the wire spells them")]

mod access;
mod adapters;
mod batch;
mod bounds;
mod chat;
mod chat_stream;
mod classification;
mod cohere;
mod completions;
mod corpus;
mod development;
mod disconnect;
mod drain;
mod embeddings;
mod errors;
mod failures;
mod fields;
mod fuzz;
mod keys;
mod limits;
mod load;
mod loading;
mod messages;
mod other_routes;
mod pages;
mod pooling;
mod pooling_limits;
#[path = "../../../telemetry/tests/traces/receiver.rs"]
mod receiver;
mod render;
mod responses;
mod routes;
mod scoring;
mod stored;
mod structured;
mod support;
mod tls;
mod tools;
mod traces;
mod unix_socket;
mod vocabulary;
mod wire;
