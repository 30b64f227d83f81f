//! The path prefix of a proxy. Some proxies remove it before they forward a request, others do not.

use std::sync::Arc;

use axum::extract::{Request, State};
use http::Uri;
use http::uri::PathAndQuery;

/// The prefix, `/like/this`.
#[derive(Clone, Debug)]
pub(crate) struct RootPath(Arc<str>);

impl RootPath {
    /// Parses the prefix; `None` if it is empty.
    pub(crate) fn new(path: &str) -> Option<Self> {
        let path = path.trim().trim_matches('/');
        (!path.is_empty()).then(|| Self(format!("/{path}").into()))
    }

    /// `uri` without the prefix; `None` if it does not begin with it.
    fn strip(&self, uri: &Uri) -> Option<Uri> {
        let rest = uri.path_and_query()?.as_str().strip_prefix(&*self.0)?;
        let rest = match rest.as_bytes().first() {
            Some(b'/') => rest.to_owned(),
            None | Some(b'?') => format!("/{rest}"),
            // `/prefixes/v1` is not under `/prefix`.
            Some(_) => return None,
        };
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::from_maybe_shared(rest).ok()?);
        Uri::from_parts(parts).ok()
    }
}

/// Removes the prefix from a request, once. It runs before all code that reads the path.
pub(crate) async fn strip(State(root): State<RootPath>, mut request: Request) -> Request {
    if let Some(uri) = root.strip(request.uri()) {
        *request.uri_mut() = uri;
    }
    request
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stripped(root: &str, uri: &str) -> Option<String> {
        RootPath::new(root)?.strip(&uri.parse().unwrap()).map(|uri| uri.to_string())
    }

    #[test]
    fn only_whole_segments_are_taken_off() {
        for root in ["/a/b", "a/b", "/a/b/", " /a/b "] {
            assert_eq!(stripped(root, "/a/b/v1/models").as_deref(), Some("/v1/models"));
            assert_eq!(stripped(root, "/a/b").as_deref(), Some("/"));
            assert_eq!(stripped(root, "/a/b?x=/a/b").as_deref(), Some("/?x=/a/b"));
            assert_eq!(stripped(root, "/a/b/a/b/c").as_deref(), Some("/a/b/c"));
            assert_eq!(stripped(root, "/a/b//v1").as_deref(), Some("//v1"));
            assert_eq!(stripped(root, "http://host:1/a/b/c?d").as_deref(), Some("http://host:1/c?d"));
            for elsewhere in ["/", "/a", "/a/bc", "/v1/models", "/A/b/c", "/%61/b/c", "//a/b/c", "*"] {
                assert_eq!(stripped(root, elsewhere), None, "{elsewhere}");
            }
        }
        for nothing in ["", "/", "//", " "] {
            assert!(RootPath::new(nothing).is_none());
        }
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_end_of_what_came(uri in "(/[ab%2F.?#/]{0,12}){0,3}") {
            let Ok(uri) = uri.parse::<Uri>() else { return Ok(()) };
            if let Some(rest) = RootPath::new("/a").unwrap().strip(&uri) {
                prop_assert!(uri.path().starts_with("/a"));
                prop_assert!(rest.path().starts_with('/'));
                prop_assert!(rest.path() == "/" || uri.path().ends_with(rest.path()));
                prop_assert_eq!(rest.query(), uri.query());
            }
        }
    }
}
