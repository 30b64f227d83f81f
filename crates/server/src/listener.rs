//! Sockets to requests: the accept loop, the limits of a connection, and the end of both.

use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::ConnectionLimits;
use crate::sockets::{Accepted, Listener};

/// More header fields than this are more than the HTTP library can hold.
const MOST_HEADERS: usize = 10_000;

/// How long the listener rests when the system has no file descriptor or memory left for another connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(50);

/// Connections that wait to be accepted are the kernel's; those that are open are here. Dropping it closes them all.
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    limits: ConnectionLimits,
    /// True: finish the request in hand, then close.
    closing: watch::Sender<bool>,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self { tasks: JoinSet::new(), limits, closing: watch::Sender::new(false) }
    }

    /// Accepts connections for as long as it is polled; returns why the listener is unusable.
    pub(crate) async fn accept(&mut self, listener: &Listener, router: &Router) -> io::Error {
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

    /// Asks every connection to close after the request in hand.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Waits until all are closed; `false` if the deadline came first.
    pub(crate) async fn closed(&mut self, deadline: Instant) -> bool {
        timeout_at(deadline, async { while self.tasks.join_next().await.is_some() {} }).await.is_ok()
    }

    /// Open connections.
    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }
}

/// What a failed accept says something about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The one connection, which is gone.
    Connection,
    /// The process or the system, which may recover.
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
    let opened = tokio::select! {
        // In this order: who needs no handshake is served though the end has begun since it was accepted.
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
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.max_head_bytes.max(8 << 10))
        .max_headers(limits.max_headers.min(MOST_HEADERS))
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
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

/// Waits for word that connections shall close; forever if it never comes.
async fn told(closing: &mut watch::Receiver<bool>) {
    if closing.wait_for(|closing| *closing).await.is_err() {
        std::future::pending().await
    }
}
