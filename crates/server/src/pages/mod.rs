//! GET /, GET /docs, GET /redoc, GET /openapi.json: pages for people, and what they are made from.
//!
//! Each is one file that loads nothing from elsewhere, so that it works where no other host is reached.

mod openapi;
mod page;

use std::sync::LazyLock;

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;

use crate::app::{AppState, not_found};
use page::Page;

static CHAT: LazyLock<Page> = LazyLock::new(|| Page::html(include_str!("chat.html")));

static DOCS: LazyLock<Page> = LazyLock::new(|| Page::html(include_str!("docs.html")));

/// A chat with the model, in the browser.
pub(crate) async fn chat(headers: HeaderMap) -> Response {
    CHAT.respond(&headers)
}

/// The description of the API, to read.
pub(crate) async fn docs(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if state.config.disable_docs { not_found().await } else { DOCS.respond(&headers) }
}

/// The description of the API, for tools.
pub(crate) async fn openapi(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if state.config.disable_docs { not_found().await } else { openapi::page(&state.config).respond(&headers) }
}
