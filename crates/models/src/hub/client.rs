//! Requests to the hub. hf-hub knows its API: the URLs, the token and the description of a repository. The transfers are
//! done here, for the reasons in `download.rs`.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use ureq::http::{HeaderMap, Method, Response, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::WithoutBody;
use ureq::{Agent, Body, RequestBuilder};

use crate::progress::Progress;
use crate::resolve::{HubOptions, Retry};

use super::HubError;
use super::cache::is_commit;

/// Maximum number of redirects followed: the hub redirects for renamed repositories and to its CDN.
const REDIRECTS: usize = 6;
/// Maximum size of a repository listing and of an error text.
const LISTING_LIMIT: u64 = 32 << 20;
const ERROR_LIMIT: u64 = 16 << 10;
/// A first request that takes longer is announced.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Client of one hub.
pub(super) struct Client<'a> {
    api: Api,
    /// Makes the requests that hf-hub does not offer. It keeps connections, and has no settings of its own.
    agent: Agent,
    tls: TlsConfig,
    options: &'a HubOptions,
    progress: &'a dyn Progress,
    /// The hub has answered at least once.
    answered: AtomicBool,
}

/// The hub's metadata of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FileMetadata {
    /// Identifier of the content: for large files, its SHA-256 in hex.
    pub(super) etag: String,
    pub(super) size: Option<u64>,
}

impl FileMetadata {
    /// Returns the checksum of the content if the hub provides one. Git's own etags of small files have 40 digits.
    pub(super) fn sha256(&self) -> Option<&str> {
        (self.etag.len() == 64 && self.etag.bytes().all(|b| b.is_ascii_hexdigit())).then_some(&*self.etag)
    }
}

/// Subject of a request, for its errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct About<'a> {
    pub(super) repo: &'a str,
    pub(super) revision: &'a str,
    pub(super) file: Option<&'a str>,
}

/// Redirects that a request follows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    /// Redirects within the hub, whose response has headers that the CDN's lacks.
    SameOrigin,
    All,
}

impl<'a> Client<'a> {
    pub(super) fn new(options: &'a HubOptions, progress: &'a dyn Progress) -> Result<Client<'a>, HubError> {
        let mut tls = TlsConfig::builder();
        if let Some(path) = &options.ca_file {
            tls = tls.root_certs(certificates(path)?);
        }
        let api = ApiBuilder::from_cache(Cache::new(options.cache_dir.clone()))
            .with_endpoint(options.endpoint.clone())
            .with_token(options.token.clone())
            .with_user_agent("octavo", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| HubError::Unreachable {
                url: options.endpoint.clone(),
                silent: false,
                reason: error.to_string(),
            })?;
        let agent = Agent::config_builder().user_agent(concat!("octavo/", env!("CARGO_PKG_VERSION"))).build().into();
        Ok(Client { api, agent, tls: tls.build(), options, progress, answered: AtomicBool::new(false) })
    }

    /// Returns the commit to which a revision points, and its files.
    pub(super) fn repo_info(&self, repo: &str, revision: &str) -> Result<RepoInfo, HubError> {
        let about = About { repo, revision, file: None };
        let repo = Repo::with_revision(repo.to_owned(), RepoType::Model, escaped(revision, false));
        let url = format!("{}/api/{}", self.options.endpoint, repo.api_url());
        let request = self.api.repo(repo).info_request();
        let reply = self.checked(self.follow(request, &url, Follow::All)?, about, &url)?;
        let body = read_limited(reply.into_body(), LISTING_LIMIT, &url)?;
        let bad = |reason: String| HubError::BadReply { url: url.clone(), reason };
        let info: RepoInfo = serde_json::from_slice(&body).map_err(|error| bad(error.to_string()))?;
        if is_commit(&info.sha) { Ok(info) } else { Err(bad(format!("{:?} is no commit", info.sha))) }
    }

    /// Returns the URL of a file of a commit.
    pub(super) fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        let repo = Repo::with_revision(repo.to_owned(), RepoType::Model, commit.to_owned());
        self.api.repo(repo).url(&escaped(file, true))
    }

    /// Returns the hub's metadata of a file.
    pub(super) fn metadata(&self, url: &str, about: About<'_>) -> Result<FileMetadata, HubError> {
        let reply = self.follow(self.with_token(self.agent.head(url), url), url, Follow::SameOrigin)?;
        // A redirect to the CDN is a valid answer, because its headers describe the file.
        let reply = if reply.status().is_redirection() { reply } else { self.checked(reply, about, url)? };
        let headers = reply.headers();
        let bad = |reason: &str| HubError::BadReply { url: url.to_owned(), reason: reason.to_owned() };
        let etag =
            text(headers, "x-linked-etag").or_else(|| text(headers, "etag")).ok_or_else(|| bad("it has no ETag"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        // The ETag becomes a file name.
        if etag.is_empty() || etag.len() > 128 || !etag.bytes().all(plain) {
            return Err(bad(&format!("the ETag {etag:?} cannot name a file")));
        }
        let linked = text(headers, "x-linked-size");
        let size = match linked {
            Some(size) => Some(size),
            // The content length of a redirect is that of its own text.
            None if reply.status().is_redirection() => None,
            None => text(headers, "content-length"),
        };
        let size = size.map(|size| size.parse().map_err(|_| bad("the file's size is no number"))).transpose()?;
        Ok(FileMetadata { etag, size })
    }

    /// Requests the content of a file from byte `from` on. The status is 200 (the whole file, whatever range was
    /// requested), 206 or 416.
    pub(super) fn content(&self, url: &str, from: u64, about: About<'_>) -> Result<Response<Body>, HubError> {
        let mut request = self.with_token(self.agent.get(url), url);
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        let reply = self.follow(request, url, Follow::All)?;
        if reply.status() == 416 { Ok(reply) } else { self.checked(reply, about, url) }
    }

    /// Retries transient errors with increasing pauses. A hub that has never answered gets one attempt: it is more likely out
    /// of reach than busy, and the user should learn it at once.
    pub(super) fn retried<T>(&self, mut once: impl FnMut() -> Result<T, HubError>) -> Result<T, HubError> {
        let mut failures = 0;
        loop {
            match once() {
                Err(error) if error.may_pass() => {
                    failures += 1;
                    self.pause(failures, error)?;
                }
                other => return other,
            }
        }
    }

    /// Waits before the attempt after `failures` failed ones, or returns `error` if there are no attempts left.
    pub(super) fn pause(&self, failures: u32, error: HubError) -> Result<(), HubError> {
        let retry = &self.options.retry;
        let out_of_reach = matches!(error, HubError::Unreachable { silent: true, .. });
        if failures >= retry.attempts || (out_of_reach && !self.answered.load(Ordering::Relaxed)) {
            return Err(error);
        }
        let asked = match &error {
            HubError::Busy { retry_after: Some(seconds), .. } => Duration::from_secs(*seconds).min(retry.longest_delay),
            _ => Duration::ZERO,
        };
        tracing::debug!("attempt {failures} failed: {error}");
        std::thread::sleep(retry.delay(failures).max(asked));
        Ok(())
    }

    /// Adds the token to a request to the hub itself; other servers must not see it.
    fn with_token(&self, request: RequestBuilder<WithoutBody>, url: &str) -> RequestBuilder<WithoutBody> {
        match &self.options.token {
            Some(token) if origin(url) == origin(&self.options.endpoint) => {
                request.header(header::AUTHORIZATION, format!("Bearer {token}"))
            }
            _ => request,
        }
    }

    /// Applies the settings of every request. Redirects are followed by [`Client::follow`], to read the hub's own headers.
    fn with_settings(&self, request: RequestBuilder<WithoutBody>) -> RequestBuilder<WithoutBody> {
        let Retry { connect_timeout, read_timeout, .. } = self.options.retry;
        request
            .config()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(connect_timeout))
            .timeout_recv_response(Some(read_timeout))
            .timeout_per_read(Some(read_timeout))
            .tls_config(self.tls.clone())
            .build()
            .header(header::ACCEPT_ENCODING, "identity")
    }

    /// Makes a request and follows its redirects with the same method and range.
    fn follow(
        &self,
        first: RequestBuilder<WithoutBody>,
        url: &str,
        follow: Follow,
    ) -> Result<Response<Body>, HubError> {
        let home = origin(&self.options.endpoint);
        let head = first.method_ref() == Some(&Method::HEAD);
        let range = first.headers_ref().and_then(|headers| headers.get(header::RANGE)).cloned();
        let (mut request, mut url) = (first, url.to_owned());
        for _ in 0..=REDIRECTS {
            let unreachable = |error: ureq::Error| HubError::Unreachable {
                url: url.clone(),
                silent: is_silence(&error),
                reason: error.to_string(),
            };
            let reply = self.announced(&url, || self.with_settings(request).call()).map_err(unreachable)?;
            self.answered.store(true, Ordering::Relaxed);
            let location = text(reply.headers(), "location").filter(|_| reply.status().is_redirection());
            let Some(location) = location else {
                return Ok(reply);
            };
            let next = joined(&url, location);
            if follow == Follow::SameOrigin && (origin(&next) != home || reply.headers().contains_key("x-linked-etag"))
            {
                return Ok(reply);
            }
            if url.starts_with("https:") && !next.starts_with("https:") {
                return Err(HubError::BadReply { url, reason: format!("it redirects to {next}, without encryption") });
            }
            request = self.with_token(if head { self.agent.head(&next) } else { self.agent.get(&next) }, &next);
            if let Some(range) = &range {
                request = request.header(header::RANGE, range.clone());
            }
            url = next;
        }
        Err(HubError::BadReply { url, reason: "it redirects too often".to_owned() })
    }

    /// Runs a request. Reports that it still waits if this is the first one and takes long.
    fn announced<T: Send>(&self, url: &str, request: impl FnOnce() -> T) -> T {
        if self.answered.load(Ordering::Relaxed) {
            return request();
        }
        std::thread::scope(|scope| {
            let (done, waiting) = mpsc::channel::<()>();
            scope.spawn(move || {
                if waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    let hub = origin(url);
                    let hint =
                        "check the network, the proxy and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use only the cache";
                    self.progress.message(&format!("still waiting for {hub}: {hint}"));
                }
            });
            let reply = request();
            drop(done);
            reply
        })
    }

    /// Turns a status that is no success into the error it means.
    fn checked(&self, reply: Response<Body>, about: About<'_>, url: &str) -> Result<Response<Body>, HubError> {
        let status = reply.status().as_u16();
        if matches!(status, 200 | 206) {
            return Ok(reply);
        }
        let (repo, revision) = (about.repo.to_owned(), about.revision.to_owned());
        let code = text(reply.headers(), "x-error-code").unwrap_or_default().to_owned();
        let retry_after = text(reply.headers(), "retry-after").and_then(|seconds| seconds.parse().ok());
        let detail = self.detail(reply);
        Err(match (status, code.as_str(), about.file) {
            (401 | 403, ..) => {
                let page = format!("{}/{repo}", self.options.endpoint);
                HubError::AccessDenied { repo, status, page, has_token: self.options.token.is_some(), detail }
            }
            (404, "RevisionNotFound", _) => HubError::NoSuchRevision { repo, revision },
            (404, "RepoNotFound", _) | (404, _, None) => {
                HubError::NoSuchRepository { repo, endpoint: self.options.endpoint.clone() }
            }
            (404, _, Some(file)) => HubError::NoSuchFile { repo, file: file.to_owned(), revision },
            (408 | 429 | 500.., ..) => HubError::Busy { url: url.to_owned(), status, detail, retry_after },
            _ => HubError::BadReply { url: url.to_owned(), reason: format!("HTTP {status} {detail}") },
        })
    }

    /// Returns the hub's message about an error.
    fn detail(&self, reply: Response<Body>) -> String {
        #[derive(Deserialize)]
        struct ErrorBody {
            error: String,
        }
        let words = match text(reply.headers(), "x-error-message") {
            Some(message) => message.to_owned(),
            None => {
                let body = read_limited(reply.into_body(), ERROR_LIMIT, "").unwrap_or_default();
                serde_json::from_slice::<ErrorBody>(&body).map(|body| body.error).unwrap_or_default()
            }
        };
        words.chars().filter(|c| !c.is_control()).take(300).collect()
    }
}

/// Whether a request failed without a sign of life: no connection was made, or no answer came in time.
fn is_silence(error: &ureq::Error) -> bool {
    use std::io::ErrorKind::{AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};
    match error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::Timeout(_) => true,
        ureq::Error::Io(error) => {
            matches!(
                error.kind(),
                AddrNotAvailable | ConnectionRefused | HostUnreachable | NetworkUnreachable | TimedOut
            )
        }
        _ => false,
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn read_limited(body: Body, limit: u64, url: &str) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    let reader = body.into_with_config().limit(u64::MAX).reader();
    reader.take(limit + 1).read_to_end(&mut bytes).map_err(|error| HubError::Unreachable {
        url: url.to_owned(),
        silent: false,
        reason: error.to_string(),
    })?;
    if bytes.len() as u64 > limit {
        return Err(HubError::BadReply { url: url.to_owned(), reason: format!("it is longer than {limit} bytes") });
    }
    Ok(bytes)
}

/// Reads the certificate authorities of a PEM file.
fn certificates(path: &Path) -> Result<RootCerts, HubError> {
    let bad = |reason: String| HubError::Certificates { path: path.to_owned(), reason };
    let pem = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| bad(error.to_string()))? {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        return Err(bad("there is none in it".to_owned()));
    }
    Ok(RootCerts::Specific(Arc::new(found)))
}

/// Percent-encodes text for a path, including `/` unless `keep_slashes` is set.
fn escaped(text: &str, keep_slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
        if plain || (byte == b'/' && keep_slashes) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Returns scheme, host and port.
fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

/// Resolves a `Location` header against the base URL.
fn joined(base: &str, location: &str) -> String {
    if location.contains("://") {
        return location.to_owned();
    }
    if let Some(rest) = location.strip_prefix("//") {
        let scheme = base.split("://").next().unwrap_or("https");
        return format!("{scheme}://{rest}");
    }
    if location.starts_with('/') {
        return format!("{}{location}", origin(base));
    }
    let path = base.split(['?', '#']).next().unwrap_or(base);
    let folder = path.rfind('/').filter(|at| *at >= origin(base).len()).map_or(path, |at| &path[..at]);
    format!("{folder}/{location}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_joined_as_browsers_do() {
        let base = "http://hub:1/prefix/org/name/resolve/main/x?y=/z";
        assert_eq!(joined(base, "https://cdn/a?b"), "https://cdn/a?b");
        assert_eq!(joined(base, "//cdn/a"), "http://cdn/a");
        assert_eq!(joined(base, "/api/x"), "http://hub:1/api/x");
        assert_eq!(joined(base, "y"), "http://hub:1/prefix/org/name/resolve/main/y");
        assert_eq!(joined("http://hub", "y"), "http://hub/y");
    }

    #[test]
    fn origins_differ_by_scheme_host_and_port() {
        assert_eq!(origin("https://hub/a/b"), "https://hub");
        assert_eq!(origin("https://hub"), "https://hub");
        assert_ne!(origin("https://hub.evil/a"), origin("https://hub/a"));
        assert_ne!(origin("http://hub:80/"), origin("http://hub:81/"));
        assert_ne!(origin("https://hub@evil/"), origin("https://hub/"));
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escaped("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(escaped("a b/ü#?.gguf", true), "a%20b/%C3%BC%23%3F.gguf");
    }

    #[test]
    fn only_64_hex_digits_are_a_checksum() {
        let etag = |etag: String| FileMetadata { etag, size: None };
        assert!(etag("a".repeat(64)).sha256().is_some());
        assert!(etag("a".repeat(40)).sha256().is_none());
        assert!(etag("z".repeat(64)).sha256().is_none());
    }
}
