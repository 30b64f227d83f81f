//! GET /, GET /assets/..., GET /docs, GET /redoc, GET /openapi.json: pages for people, and their files.
//!
//! No page loads anything from another host, so all of them work without a network.

mod openapi;
mod page;

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use http::HeaderMap;

use crate::app::{AppState, not_found};
use page::Page;

static CHAT: LazyLock<Page> = LazyLock::new(|| Page::application(include_str!("chat/index.html")));

/// The files of the chat page, by their paths below `/assets/`.
static ASSETS: LazyLock<HashMap<&'static str, Page>> = LazyLock::new(|| {
    let style = |text| Page::file(text, "text/css; charset=utf-8");
    let script = |text| Page::file(text, "text/javascript; charset=utf-8");
    HashMap::from([
        ("answer.css", style(include_str!("chat/answer.css"))),
        ("api.js", script(include_str!("chat/api.js"))),
        ("clipboard.js", script(include_str!("chat/clipboard.js"))),
        ("elements.js", script(include_str!("chat/elements.js"))),
        ("highlight.js", script(include_str!("chat/highlight.js"))),
        ("image-file.js", script(include_str!("chat/image-file.js"))),
        ("image-store.js", script(include_str!("chat/image-store.js"))),
        ("main.js", script(include_str!("chat/main.js"))),
        ("markdown.js", script(include_str!("chat/markdown.js"))),
        ("problem.js", script(include_str!("chat/problem.js"))),
        ("settings.js", script(include_str!("chat/settings.js"))),
        ("sidebar.js", script(include_str!("chat/sidebar.js"))),
        ("store.js", script(include_str!("chat/store.js"))),
        ("style.css", style(include_str!("chat/style.css"))),
        ("tray.js", script(include_str!("chat/tray.js"))),
        ("turn.js", script(include_str!("chat/turn.js"))),
        ("vendor/highlight.min.js", script(include_str!("chat/vendor/highlight.min.js"))),
        ("vendor/licences.txt", Page::file(LICENCES, "text/plain; charset=utf-8")),
        ("vendor/marked.esm.js", script(include_str!("chat/vendor/marked.esm.js"))),
    ])
});

/// The licences of the vendored libraries. They must accompany every copy.
const LICENCES: &str = concat!(
    "highlight.js\n\n",
    include_str!("chat/vendor/highlight.LICENSE.txt"),
    "\n\nmarked\n\n",
    include_str!("chat/vendor/marked.LICENSE.txt"),
);

static DOCS: LazyLock<Page> = LazyLock::new(|| Page::html(include_str!("docs.html")));

/// A chat with the model, in the browser.
pub(crate) async fn chat(headers: HeaderMap) -> Response {
    CHAT.respond(&headers)
}

/// A style sheet or a script of the chat.
pub(crate) async fn asset(file: Result<Path<String>, PathRejection>, headers: HeaderMap) -> Response {
    match file.ok().and_then(|Path(file)| ASSETS.get(file.as_str())) {
        Some(asset) => asset.respond(&headers),
        None => not_found().await,
    }
}

/// The description of the API, to read.
pub(crate) async fn docs(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if state.config.disable_docs { not_found().await } else { DOCS.respond(&headers) }
}

/// The description of the API, for tools.
pub(crate) async fn openapi(State(state): State<AppState>, headers: HeaderMap) -> Response {
    if state.config.disable_docs { not_found().await } else { openapi::page(&state.config).respond(&headers) }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// The files that a text names: everything in quotes that ends like one.
    fn named(text: &str) -> Vec<&str> {
        text.split('"').filter(|part| part.ends_with(".js") || part.ends_with(".css")).collect()
    }

    #[test]
    fn every_asset_is_reached_and_every_import_is_an_asset() {
        let page = std::str::from_utf8(CHAT.body()).unwrap();
        let mut reached: Vec<_> = named(page).iter().map(|path| path.strip_prefix("assets/").unwrap()).collect();
        let mut next = 0;
        while let Some(&path) = reached.get(next) {
            let asset = ASSETS.get(path).unwrap_or_else(|| panic!("{path} is not served"));
            if !path.starts_with("vendor/") {
                for import in named(std::str::from_utf8(asset.body()).unwrap()) {
                    let import = import.strip_prefix("./").unwrap();
                    if !reached.contains(&import) {
                        reached.push(import);
                    }
                }
            }
            next += 1;
        }
        reached.push("vendor/licences.txt");
        let mut served: Vec<_> = ASSETS.keys().copied().collect();
        reached.sort_unstable();
        reached.dedup();
        served.sort_unstable();
        assert_eq!(reached, served);
    }

    #[test]
    fn vendored_files_are_those_that_the_readme_names() {
        let readme = include_str!("chat/vendor/README.md");
        for file in ["highlight.min.js", "marked.esm.js"] {
            let digest = Sha256::digest(ASSETS[&*format!("vendor/{file}")].body());
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            let row = readme.lines().find(|line| line.starts_with(&format!("| `{file}`"))).expect(file);
            assert!(row.contains(&format!("`{digest}`")), "{file} is {digest}");
        }
        assert!(LICENCES.contains("BSD 3-Clause") && LICENCES.contains("MarkedJS"));
    }
}
