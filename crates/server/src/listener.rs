//! Connections: the accept loop, the limits of a connection, and the shutdown of both.

use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::ConnectionLimits;
use crate::host;
use crate::sockets::{Accepted, Listener};

/// The maximum number of headers that the HTTP library supports.
const MOST_HEADERS: usize = 10_000;

/// Pause of the listener when the system has no file descriptor or memory for another connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(50);

/// The open connections; the kernel holds those that wait to be accepted. Dropping the value closes all of them.
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    limits: ConnectionLimits,
    /// Whether connections close after the current request.
    closing: watch::Sender<bool>,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self { tasks: JoinSet::new(), limits, closing: watch::Sender::new(false) }
    }

    /// Accepts connections until the listener fails, and returns the error.
    pub(crate) async fn accept(&mut self, listener: &Listener, router: &Router) -> io::Error {
        let router = router.clone().layer(from_fn(host::check));
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => self.open(accepted, router.clone()),
                    Err(error) => match Failure::of(&error) {
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

    fn open(&mut self, accepted: Accepted, router: Router) {
        let (limits, closing) = (self.limits, self.closing.subscribe());
        self.tasks.spawn(serve(accepted, router, limits, closing));
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
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => Self::Exhausted,
            Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) => Self::Listener,
            _ => Self::Connection,
        }
    }
}

async fn serve(accepted: Accepted, router: Router, limits: ConnectionLimits, mut closing: watch::Receiver<bool>) {
    let peer = accepted.peer();
    let opened = tokio::select! {
        // In this order, so that an accepted connection without a handshake is served although the shutdown has begun.
        biased;
        opened = accepted.open(&limits) => opened,
        () = told(&mut closing) => return,
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
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.max_head_bytes.max(8 << 10))
        .max_headers(limits.max_headers.min(MOST_HEADERS))
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => Some(result),
        () = told(&mut closing) => None,
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

/// Waits until connections must close, or forever.
async fn told(closing: &mut watch::Receiver<bool>) {
    if closing.wait_for(|closing| *closing).await.is_err() {
        std::future::pending().await
    }
}
