//! A document that stays the same while the server runs, with the headers of its cache and its policy.

use std::fmt::Write;

use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use sha2::{Digest, Sha256};

/// The policy of a document that loads and runs nothing.
const NOTHING: &str = "default-src 'none'; frame-ancestors 'none'";

/// A document, ready to be sent.
#[derive(Clone, Debug)]
pub(super) struct Page {
    body: Bytes,
    content_type: HeaderValue,
    etag: HeaderValue,
    policy: HeaderValue,
}

impl Page {
    /// A page in one file. It may run its inline scripts and styles and send requests to this server, and nothing else. The
    /// policy names scripts and styles by their hashes, so injected markup cannot run.
    pub(super) fn html(text: &'static str) -> Self {
        Self::confined(text, "", "'none'")
    }

    /// A page that also loads scripts and styles from this server, and sets the base of their addresses.
    pub(super) fn application(text: &'static str) -> Self {
        Self::confined(text, " 'self'", "'self'")
    }

    /// `files` is the source of scripts and styles besides the inline ones. `base` is the source of the page's base address.
    fn confined(text: &'static str, files: &str, base: &str) -> Self {
        let policy = format!(
            "default-src 'none'; script-src{}{files}; style-src{}{files}; img-src data:; connect-src 'self'; base-uri {base}; \
             form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
            hashes(text, "script"),
            hashes(text, "style"),
        );
        Self::new(Bytes::from_static(text.as_bytes()), "text/html; charset=utf-8", &policy)
    }

    /// A file that a page loads.
    pub(super) fn file(text: &'static str, content_type: &'static str) -> Self {
        Self::new(Bytes::from_static(text.as_bytes()), content_type, NOTHING)
    }

    /// A JSON document.
    pub(super) fn json(body: Vec<u8>) -> Self {
        Self::new(body.into(), "application/json", NOTHING)
    }

    fn new(body: Bytes, content_type: &'static str, policy: &str) -> Self {
        let digest = Sha256::digest(&body);
        let etag = format!("\"{}\"", STANDARD.encode(&digest[..15]));
        Self {
            body,
            content_type: HeaderValue::from_static(content_type),
            etag: HeaderValue::from_str(&etag).expect("base64 is ASCII"),
            policy: HeaderValue::from_str(policy).expect("a policy is ASCII"),
        }
    }

    /// What is sent.
    #[cfg(test)]
    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    /// The page, or 304 if the client has it. Clients ask each time, so that a new version shows at once.
    pub(super) fn respond(&self, request: &HeaderMap) -> Response {
        let headers: [(HeaderName, HeaderValue); 5] = [
            (header::ETAG, self.etag.clone()),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (header::CONTENT_SECURITY_POLICY, self.policy.clone()),
            (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        ];
        if self.is_held(request) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        let content_type = [(header::CONTENT_TYPE, self.content_type.clone())];
        (headers, content_type, self.body.clone()).into_response()
    }

    /// Whether `If-None-Match` names this version.
    fn is_held(&self, request: &HeaderMap) -> bool {
        let values = request.get_all(header::IF_NONE_MATCH).into_iter().map(HeaderValue::as_bytes);
        let mut tags = values.flat_map(|value| value.split(|&byte| byte == b',')).map(<[u8]>::trim_ascii);
        tags.any(|tag| tag == b"*" || tag.strip_prefix(b"W/").unwrap_or(tag) == self.etag.as_bytes())
    }
}

/// The sources of a policy for every inline `tag` of a page: ` 'sha256-…'` each.
fn hashes(html: &str, tag: &str) -> String {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let contents = html.split(&open).skip(1).filter_map(|rest| rest.split_once(&close));
    contents.fold(String::new(), |mut sources, (content, _)| {
        let _ = write!(sources, " 'sha256-{}'", STANDARD.encode(Sha256::digest(content)));
        sources
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn respond(page: &Page, held: &str) -> Response {
        page.respond(&[(header::IF_NONE_MATCH, HeaderValue::from_str(held).unwrap())].into_iter().collect())
    }

    #[test]
    fn hashes_are_those_that_browsers_compute() {
        // The example of the Content Security Policy specification.
        let html = "<script>alert('Hello, world.');</script><style></style><script>\n</script>";
        let sources = hashes(html, "script");
        assert!(sources.starts_with(" 'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng=' 'sha256-"), "{sources}");
        assert_eq!(hashes(html, "style"), " 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='");
        assert_eq!(hashes("<p>script</p>", "script"), "");
    }

    #[test]
    fn a_client_that_has_the_page_is_told_so() {
        let page = Page::html("<p>");
        let etag = page.etag.to_str().unwrap();
        for held in [etag, "*", &format!("W/{etag}"), &format!("\"other\" , {etag}"), &format!("\"other\",W/{etag},")] {
            let response = respond(&page, held);
            assert_eq!((response.status(), &response.headers()[header::ETAG]), (StatusCode::NOT_MODIFIED, &page.etag));
        }
        for other in ["", "\"other\"", etag.trim_matches('"'), "W/", ",", &etag[..etag.len() - 1]] {
            assert_eq!(respond(&page, other).status(), StatusCode::OK, "{other}");
        }
        assert_ne!(Page::html("<b>").etag, page.etag);
    }
}
