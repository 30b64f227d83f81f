//! The server through its socket: a mock engine that "generates" a script, a real tokenizer, a real HTTP client.

mod chat;
mod chat_stream;
mod completions;
mod disconnect;
mod drain;
mod errors;
mod failures;
mod fuzz;
mod load;
mod routes;
mod support;
