//! The HTTP/1.1 client. A connection serves one request and goes to an address that was checked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_LENGTH, HOST, LOCATION, USER_AGENT};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use octavo_http_client::{AuthoritiesError, Certificates};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use url::{Host, Url};

use super::address::is_public;
use super::memory::{FileLease, FileMemory};
use super::resolve::Resolver;
use super::{FetchSettings, too_large};
use crate::error::{MediaError, SettingsError};

/// Redirects that are followed.
const MAX_REDIRECTS: usize = 10;

/// Memory of a connection for the head of a response, in bytes.
const HEAD_BYTES: usize = 64 << 10;

/// A time that no fetch takes.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Another attempt would fail too.
    Final(MediaError),
    /// Another attempt may succeed.
    Passing(String),
    /// The time of the attempt is over.
    Late,
}

impl From<MediaError> for Failure {
    fn from(error: MediaError) -> Self {
        Self::Final(error)
    }
}

/// What a response leads to.
enum Outcome {
    Body(Bytes, FileLease),
    Redirect(Url),
}

/// An attempt to fetch a file.
#[derive(Debug)]
pub(super) struct Attempt<'a> {
    settings: &'a FetchSettings,
    memory: &'a FileMemory,
    /// When the host has had its time. Waiting for memory is not the host's fault and moves it.
    deadline: Instant,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(settings: &'a FetchSettings, memory: &'a FileMemory, limit: Duration) -> Self {
        let now = Instant::now();
        // A limit beyond the clock's range is none.
        let deadline = now.checked_add(limit).unwrap_or_else(|| now + FAR);
        Self { settings, memory, deadline }
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::time::timeout_at(self.deadline, work).await.unwrap_or(Err(Failure::Late))
    }
}

pub(super) struct Client {
    tls: TlsConnector,
    resolver: Arc<dyn Resolver>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    pub(super) fn new(settings: &FetchSettings, resolver: Arc<dyn Resolver>) -> Result<Self, SettingsError> {
        let certificates = settings.authorities.clone().map_or(Certificates::Trusted, Certificates::IssuedBy);
        let unusable = |AuthoritiesError { path, reason }| {
            let path = path.display().to_string();
            SettingsError::Authorities { path, reason }
        };
        Ok(Self { tls: certificates.connector().map_err(unusable)?, resolver })
    }

    /// Fetches a URL and follows redirects.
    pub(super) async fn get(&self, url: &Url, mut attempt: Attempt<'_>) -> Result<(Bytes, FileLease), Failure> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            match self.hop(&url, &mut attempt).await? {
                Outcome::Body(bytes, lease) => return Ok((bytes, lease)),
                Outcome::Redirect(_) if !attempt.settings.redirects => {
                    return Err(MediaError::Fetch("redirects are not allowed".to_owned()).into());
                }
                Outcome::Redirect(target) => url = target,
            }
        }
        Err(MediaError::Fetch(format!("more than {MAX_REDIRECTS} redirects")).into())
    }

    async fn hop(&self, url: &Url, attempt: &mut Attempt<'_>) -> Result<Outcome, Failure> {
        let stream = attempt.in_time(async {
            let addresses = permitted(url, attempt.settings, &*self.resolver).await?;
            connect(&addresses).await
        });
        let stream = stream.await?;
        if url.scheme() == "http" {
            return exchange(stream, url, attempt).await;
        }
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host).map_err(|_| invalid())?;
        let stream = attempt.in_time(async { self.tls.connect(name, stream).await.map_err(passing) }).await?;
        exchange(stream, url, attempt).await
    }
}

/// The error of a URL that cannot be used.
pub(super) fn invalid() -> MediaError {
    MediaError::Fetch("Invalid URL format".to_owned())
}

fn passing(error: impl std::fmt::Display) -> Failure {
    Failure::Passing(error.to_string())
}

/// The addresses of a URL's host, if the URL may be fetched.
async fn permitted(url: &Url, settings: &FetchSettings, resolver: &dyn Resolver) -> Result<Vec<SocketAddr>, Failure> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(MediaError::Fetch("a redirect leads to a URL that is not HTTP".to_owned()).into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(MediaError::Fetch("credentials in the URL are not supported".to_owned()).into());
    }
    let domain = url.host_str().ok_or_else(invalid)?;
    if !settings.domains.is_empty() && !settings.domains.iter().any(|allowed| allowed.eq_ignore_ascii_case(domain)) {
        return Err(MediaError::Domain { allowed: settings.domains.clone(), domain: domain.to_owned() }.into());
    }
    let port = url.port_or_known_default().ok_or_else(invalid)?;
    let addresses: Vec<SocketAddr> = match url.host().ok_or_else(invalid)? {
        Host::Ipv4(address) => vec![(address, port).into()],
        Host::Ipv6(address) => vec![(address, port).into()],
        Host::Domain(name) => {
            let addresses = resolver.resolve(name).await.unwrap_or_default();
            addresses.into_iter().map(|address| (address, port).into()).collect()
        }
    };
    if addresses.is_empty() {
        return Err(Failure::Passing(format!("the host {domain} has no address")));
    }
    // The error does not repeat the address, so that it cannot be used to explore a network.
    let allowed = |ip| is_public(ip) || settings.private_networks.iter().any(|network| network.contains(ip));
    if !addresses.iter().all(|address| allowed(address.ip())) {
        return Err(MediaError::Fetch(format!("the host {domain} has an address that is not public")).into());
    }
    Ok(addresses)
}

/// A connection to the first address that accepts one.
async fn connect(addresses: &[SocketAddr]) -> Result<TcpStream, Failure> {
    let mut last = Failure::Passing("the host has no address".to_owned());
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = passing(error.kind()),
        }
    }
    Err(last)
}

/// Sends the request and reads the response, while the connection is driven by the same future.
async fn exchange<S>(stream: S, url: &Url, attempt: &mut Attempt<'_>) -> Result<Outcome, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = http1::Builder::new();
    builder.max_buf_size(HEAD_BYTES);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(passing)?;
    let authority = &url[url::Position::BeforeHost..url::Position::AfterPort];
    let request = Request::get(&url[url::Position::BeforePath..url::Position::AfterQuery])
        .header(HOST, authority)
        .header(USER_AGENT, concat!("octavo/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, "image/*,*/*;q=0.5")
        .body(Empty::<Bytes>::new())
        .map_err(|_| invalid())?;
    let answer = async {
        let response = attempt.in_time(async { sender.send_request(request).await.map_err(passing) }).await?;
        outcome(response, url, attempt).await
    };
    tokio::pin!(answer, connection);
    tokio::select! {
        outcome = &mut answer => outcome,
        // The rest of the answer is in the buffers.
        _ = &mut connection => answer.await,
    }
}

async fn outcome(response: Response<Incoming>, url: &Url, attempt: &mut Attempt<'_>) -> Result<Outcome, Failure> {
    let status = response.status();
    if matches!(
        status,
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    ) {
        let target = response.headers().get(LOCATION).and_then(|target| target.to_str().ok());
        let target = target.and_then(|target| url.join(target).ok()).ok_or_else(invalid)?;
        return Ok(Outcome::Redirect(target));
    }
    let failure = || format!("HTTP {} error", status.as_u16());
    if status.is_server_error() {
        return Err(Failure::Passing(failure()));
    }
    if !status.is_success() {
        return Err(MediaError::Fetch(failure()).into());
    }
    let length = response.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    body(response.into_body(), length, attempt).await
}

/// Reads a body. `length` is what the host says; memory is taken for what it sends.
async fn body(mut body: Incoming, length: Option<u64>, attempt: &mut Attempt<'_>) -> Result<Outcome, Failure> {
    let max_bytes = attempt.settings.max_bytes;
    let most = length.unwrap_or(max_bytes);
    if most > max_bytes {
        return Err(too_large(max_bytes).into());
    }
    let mut download = attempt.memory.download();
    let mut bytes = Vec::new();
    loop {
        let frame = tokio::select! {
            frame = attempt.in_time(async { body.frame().await.transpose().map_err(passing) }) => frame?,
            () = download.stalled() => return Err(stalled().into()),
        };
        let Some(frame) = frame else { break };
        let Ok(data) = frame.into_data() else { continue };
        let size = bytes.len() as u64 + data.len() as u64;
        if size > max_bytes {
            return Err(too_large(max_bytes).into());
        }
        if size > download.size() {
            let start = Instant::now();
            download.grow(size, most).await;
            attempt.deadline += start.elapsed();
            bytes.reserve_exact(usize::try_from(download.size()).map_err(|_| too_large(max_bytes))? - bytes.len());
        }
        download.received(data.len() as u64);
        bytes.extend_from_slice(&data);
    }
    Ok(Outcome::Body(bytes.into(), download.whole()))
}

fn stalled() -> MediaError {
    MediaError::Fetch("the host sends too slowly while other images wait for memory".to_owned())
}
