//! Connections: the accept loop, the limits of a connection, and the shutdown of both.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use octavo_sockets::{Accepted, Listener, OpenOptions};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::caller::Peer;
use crate::config::ConnectionLimits;
use crate::error::ApiError;
use crate::host;
use crate::route_table::is_probe;

/// The maximum number of headers that the HTTP library supports.
const MOST_HEADERS: usize = 10_000;

/// Pause of the listener when the system has no file descriptor or memory for another connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(50);

/// Number of connections beyond the limit that are answered at the same time. Still further ones are closed at once.
const SPARE: usize = 64;

/// Time limit of a connection beyond the limit, for the request and for the answer.
const SPARE_TIMEOUT: Duration = Duration::from_secs(5);

/// The open connections; the kernel holds those that wait to be accepted. Dropping the value closes all of them.
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    limits: ConnectionLimits,
    /// A permit for each connection within the limit.
    free: Arc<Semaphore>,
    /// A permit for each connection beyond it.
    spare: Arc<Semaphore>,
    /// Whether the last connection was beyond the limit.
    full: bool,
    /// Whether connections close after the current request.
    closing: watch::Sender<bool>,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self {
            tasks: JoinSet::new(),
            limits,
            free: Arc::new(Semaphore::new(limits.max_connections.min(Semaphore::MAX_PERMITS))),
            spare: Arc::new(Semaphore::new(SPARE)),
            full: false,
            closing: watch::Sender::new(false),
        }
    }

    /// Accepts connections until the listener fails, and returns the error.
    pub(crate) async fn accept(&mut self, listener: &Listener, router: &Router) -> io::Error {
        let probes = router.clone().layer(from_fn(refuse_all_but_probes)).layer(from_fn(host::check));
        let router = router.clone().layer(from_fn(host::check));
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => self.open(accepted, &router, &probes),
                    Err(error) => match Failure::from_error(&error) {
                        Failure::Connection => {}
                        Failure::Exhausted => {
                            let open = self.tasks.len();
                            tracing::warn!(%error, open, "cannot accept connections: raise the limit of open files");
                            sleep(EXHAUSTED_PAUSE).await;
                        }
                        Failure::Listener => return error,
                    }
                },
                Some(_) = self.tasks.join_next() => {}
            }
        }
    }

    /// Serves a connection with `router`, or with `probes` beyond the limit.
    fn open(&mut self, accepted: Accepted, router: &Router, probes: &Router) {
        let (mut limits, closing) = (self.limits, self.closing.subscribe());
        let (permit, router) = match Arc::clone(&self.free).try_acquire_owned() {
            Ok(permit) => (permit, router),
            Err(_) => {
                if !self.full {
                    tracing::warn!(limit = limits.max_connections, "refusing connections: see --max-connections");
                }
                limits.head_timeout = limits.head_timeout.min(SPARE_TIMEOUT);
                limits.write_stall_timeout = limits.write_stall_timeout.min(SPARE_TIMEOUT);
                let Ok(permit) = Arc::clone(&self.spare).try_acquire_owned() else { return };
                (permit, probes)
            }
        };
        self.full = Arc::ptr_eq(permit.semaphore(), &self.spare);
        let serving = serve(accepted, router.clone(), limits, !self.full, closing);
        self.tasks.spawn(async move {
            serving.await;
            drop(permit);
        });
    }

    /// Asks every connection to close after the current request.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Waits until all connections are closed; `false` if the deadline passes first.
    pub(crate) async fn closed(&mut self, deadline: Instant) -> bool {
        timeout_at(deadline, async { while self.tasks.join_next().await.is_some() {} }).await.is_ok()
    }

    /// Number of open connections.
    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }
}

/// The cause of a failed accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The connection, which is lost.
    Connection,
    /// A limit of the process or the system, which may recover.
    Exhausted,
    /// The listener.
    Listener,
}

impl Failure {
    fn from_error(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => Self::Exhausted,
            Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) => Self::Listener,
            _ => Self::Connection,
        }
    }
}

/// Answers a request on a connection beyond the limit.
async fn refuse_all_but_probes(request: Request, next: Next) -> Response {
    if is_probe(request.uri().path()) {
        return next.run(request).await;
    }
    ApiError::too_many_connections().into_response()
}

/// Serves one connection: one request, or several with `keep_alive`.
async fn serve(
    accepted: Accepted,
    router: Router,
    limits: ConnectionLimits,
    keep_alive: bool,
    mut closing: watch::Receiver<bool>,
) {
    let peer = Peer(accepted.peer());
    let options = OpenOptions {
        handshake_timeout: limits.head_timeout,
        write_stall_timeout: limits.write_stall_timeout,
        plain_http_answer,
    };
    let opened = tokio::select! {
        // In this order, so that an accepted connection without a handshake is served although the shutdown has begun.
        biased;
        opened = accepted.open(options) => opened,
        () = closing_begins(&mut closing) => return,
    };
    let socket = match opened {
        Ok(socket) => socket,
        Err(error) => {
            tracing::debug!(%error, "a handshake failed");
            return;
        }
    };
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(peer);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(keep_alive)
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.max_head_bytes.max(8 << 10))
        .max_headers(limits.max_headers.min(MOST_HEADERS))
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => Some(result),
        () = closing_begins(&mut closing) => None,
    };
    let result = match result {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// The response to a client that does not use TLS where it is expected.
fn plain_http_answer() -> String {
    let error = ApiError::plain_http();
    let body = serde_json::to_string(&error.body()).unwrap_or_default();
    let (status, length) = (error.status(), body.len());
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// Waits until connections must close, or forever.
async fn closing_begins(closing: &mut watch::Receiver<bool>) {
    if closing.wait_for(|closing| *closing).await.is_err() {
        std::future::pending().await
    }
}
