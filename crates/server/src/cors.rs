//! Cross-origin resource sharing. The answers are those of Starlette's middleware, which vLLM uses.
//!
//! The layer of `tower-http` is not used: it treats every OPTIONS request as a preflight, answers refused preflights with
//! 200, and panics on `*` with credentials.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD,
    ORIGIN, VARY,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use crate::config::CorsConfig;

/// The methods that `*` allows.
const ALL_METHODS: [&str; 7] = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"];

/// Headers that a page may always send.
const SAFE_HEADERS: [&str; 4] = ["Accept", "Accept-Language", "Content-Language", "Content-Type"];

/// Seconds for which a browser may cache the answer to a preflight.
const MAX_AGE: &str = "600";

/// The configuration in the form that requests are compared with.
#[derive(Clone)]
pub(crate) struct Cors(Arc<Rules>);

struct Rules {
    origins: Allowed,
    methods: Vec<String>,
    /// In lower case.
    headers: Allowed,
    /// Both as header values of a preflight response.
    method_list: HeaderValue,
    header_list: HeaderValue,
    credentials: bool,
}

/// All values, or a list.
enum Allowed {
    Any,
    Only(Vec<String>),
}

impl Allowed {
    fn new(entries: &[String]) -> Self {
        if entries.iter().any(|entry| entry == "*") { Self::Any } else { Self::Only(entries.to_vec()) }
    }

    fn contains(&self, entry: &[u8]) -> bool {
        match self {
            Self::Any => true,
            Self::Only(entries) => entries.iter().any(|allowed| allowed.as_bytes() == entry),
        }
    }
}

impl Cors {
    pub(crate) fn new(config: &CorsConfig) -> Self {
        let methods = match Allowed::new(&config.allowed_methods) {
            Allowed::Any => ALL_METHODS.map(str::to_owned).to_vec(),
            Allowed::Only(methods) => methods,
        };
        let mut listed: Vec<_> =
            SAFE_HEADERS.map(str::to_owned).into_iter().chain(config.allowed_headers.iter().cloned()).collect();
        let lower: Vec<_> = listed.iter().map(|name| name.to_ascii_lowercase()).collect();
        listed.sort_unstable();
        listed.dedup();
        Self(Arc::new(Rules {
            origins: Allowed::new(&config.allowed_origins),
            headers: Allowed::new(&lower),
            method_list: list(&methods),
            header_list: list(&listed),
            methods,
            credentials: config.allow_credentials,
        }))
    }
}

/// Joins names into one header value. Names that are not valid in a header are left out.
fn list(names: &[String]) -> HeaderValue {
    let sendable: Vec<_> =
        names.iter().map(String::as_str).filter(|name| HeaderValue::from_str(name).is_ok()).collect();
    HeaderValue::from_str(&sendable.join(", ")).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// Answers preflights, and adds the CORS headers to all other responses.
pub(crate) async fn share(State(cors): State<Cors>, request: Request, next: Next) -> Response {
    let Some(origin) = request.headers().get(ORIGIN).cloned() else { return next.run(request).await };
    if *request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        return cors.0.preflight(&origin, request.headers());
    }
    let mut response = next.run(request).await;
    cors.0.open(&origin, response.headers_mut());
    response
}

impl Rules {
    /// Adds the headers that let pages of `origin` read the response, if the origin is allowed.
    fn open(&self, origin: &HeaderValue, response: &mut HeaderMap) {
        if self.credentials {
            response.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
        // Browsers do not accept `*` for requests with credentials.
        if matches!(self.origins, Allowed::Any) && !self.credentials {
            response.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        } else if self.origins.contains(origin.as_bytes()) {
            response.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            response.append(VARY, HeaderValue::from_static("Origin"));
        }
    }

    fn preflight(&self, origin: &HeaderValue, request: &HeaderMap) -> Response {
        let mut headers = HeaderMap::new();
        self.open(origin, &mut headers);
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, self.method_list.clone());
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
        let wanted = request.get(ACCESS_CONTROL_REQUEST_HEADERS);
        match (&self.headers, wanted) {
            (Allowed::Any, Some(wanted)) => headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone()),
            (Allowed::Any, None) => None,
            (Allowed::Only(_), _) => headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, self.header_list.clone()),
        };
        let refused = self.refused(origin, request.get(ACCESS_CONTROL_REQUEST_METHOD), wanted);
        if refused.is_empty() {
            return (StatusCode::OK, headers, "OK").into_response();
        }
        (StatusCode::BAD_REQUEST, headers, format!("Disallowed CORS {}", refused.join(", "))).into_response()
    }

    /// The parts of a preflight that are not allowed.
    fn refused(
        &self,
        origin: &HeaderValue,
        method: Option<&HeaderValue>,
        headers: Option<&HeaderValue>,
    ) -> Vec<&'static str> {
        let mut refused = Vec::new();
        if !self.origins.contains(origin.as_bytes()) {
            refused.push("origin");
        }
        if !method.is_some_and(|method| self.methods.iter().any(|allowed| allowed.as_bytes() == method.as_bytes())) {
            refused.push("method");
        }
        let names = headers.map_or(&[][..], HeaderValue::as_bytes).split(|&byte| byte == b',');
        let mut names = names.map(|name| name.trim_ascii().to_ascii_lowercase()).filter(|name| !name.is_empty());
        if !names.all(|name| self.headers.contains(&name)) {
            refused.push("headers");
        }
        refused
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(origins: &[&str], methods: &[&str], headers: &[&str], allow_credentials: bool) -> Arc<Rules> {
        let owned = |entries: &[&str]| entries.iter().map(|&entry| entry.to_owned()).collect();
        Cors::new(&CorsConfig {
            allowed_origins: owned(origins),
            allowed_methods: owned(methods),
            allowed_headers: owned(headers),
            allow_credentials,
        })
        .0
    }

    fn preflight(rules: &Rules, origin: &str, method: &str, headers: Option<&str>) -> (u16, HeaderMap) {
        let mut request = HeaderMap::new();
        request.insert(ACCESS_CONTROL_REQUEST_METHOD, method.parse().unwrap());
        if let Some(headers) = headers {
            request.insert(ACCESS_CONTROL_REQUEST_HEADERS, headers.parse().unwrap());
        }
        let response = rules.preflight(&origin.parse().unwrap(), &request);
        (response.status().as_u16(), response.headers().clone())
    }

    #[test]
    fn an_origin_is_compared_whole() {
        let rules = rules(&["https://a.example"], &["*"], &["*"], false);
        let (status, headers) = preflight(&rules, "https://a.example", "POST", Some("Authorization, X-Any"));
        assert_eq!(status, 200);
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "https://a.example");
        assert_eq!(headers[VARY], "Origin");
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_HEADERS], "Authorization, X-Any");
        let others = [
            "null",
            "http://a.example",
            "https://a.example.evil",
            "https://b.a.example",
            "https://a.example:8443",
            "*",
        ];
        for other in others {
            let (status, headers) = preflight(&rules, other, "POST", None);
            assert_eq!(status, 400, "{other}");
            assert!(!headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN), "{other}");
        }
    }

    #[test]
    fn methods_and_headers_are_lists() {
        let rules = rules(&["*"], &["GET"], &["X-One"], false);
        assert_eq!(preflight(&rules, "o", "GET", Some("x-one, content-type,")).0, 200);
        assert_eq!(preflight(&rules, "o", "GET", Some("x-one, x-two")).0, 400);
        assert_eq!(preflight(&rules, "o", "POST", None).0, 400);
        let (_, headers) = preflight(&rules, "o", "GET", None);
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "*");
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_METHODS], "GET");
        assert_eq!(
            headers[ACCESS_CONTROL_ALLOW_HEADERS],
            "Accept, Accept-Language, Content-Language, Content-Type, X-One"
        );
    }

    #[test]
    fn credentials_never_come_with_a_star() {
        let rules = rules(&["*"], &["*"], &["*"], true);
        let (status, headers) = preflight(&rules, "https://any.example", "PUT", None);
        assert_eq!(status, 200);
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "https://any.example");
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_CREDENTIALS], "true");
    }

    proptest! {
        #[test]
        fn nothing_that_a_page_asks_for_opens_what_is_closed(
            origin in "(https://a[.]example|[ -~]{0,40})",
            method in "(GET|[!-~]{1,12})",
            wanted in "(X-One|accept|[ -~]{0,10})(, ?(x-one|[ -~]{0,10})){0,3}",
        ) {
            let rules = rules(&["https://a.example"], &["GET"], &["x-one"], false);
            let (status, headers) = preflight(&rules, &origin, &method, Some(&wanted));
            let known = ["", "accept", "accept-language", "content-language", "content-type", "x-one"];
            let mut names = wanted.split(',').map(|name| name.trim().to_ascii_lowercase());
            let ours = origin == "https://a.example";
            let fine = ours && method == "GET" && names.all(|name| known.contains(&&*name));
            prop_assert_eq!(status == 200, fine);
            prop_assert_eq!(headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN), ours);
        }
    }
}
