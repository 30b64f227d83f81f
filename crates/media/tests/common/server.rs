//! A server that answers as badly as a test wants.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// What the server does after it has read a request.
pub(crate) enum Reply {
    /// Sends these bytes and closes the connection.
    Bytes(Vec<u8>),
    /// Sends these bytes, and then zeros without an end.
    Endless(Vec<u8>),
    /// Sends these bytes, and then waits for the client to leave.
    Silence(Bytes),
}

/// A file with status 200.
pub(crate) fn file(bytes: &[u8]) -> Reply {
    let mut reply = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len()).into_bytes();
    reply.extend_from_slice(bytes);
    Reply::Bytes(reply)
}

/// A response that announces a file of some size and sends only its first bytes.
pub(crate) fn part(announced: u64, sent: usize) -> Bytes {
    let mut response = format!("HTTP/1.1 200 OK\r\nContent-Length: {announced}\r\n\r\n").into_bytes();
    response.resize(response.len() + sent, 1);
    response.into()
}

/// A response without a body.
pub(crate) fn status(status: u16) -> Reply {
    Reply::Bytes(format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n").into_bytes())
}

pub(crate) fn redirect(target: &str) -> Reply {
    Reply::Bytes(format!("HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n").into_bytes())
}

pub(crate) struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    left: Arc<Notify>,
    accepting: JoinHandle<()>,
}

impl Server {
    /// `answer` is given the path and the number of requests before.
    pub(crate) async fn start(answer: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0", answer).await
    }

    /// Starts a server at an address of this machine.
    pub(crate) async fn start_at(address: &str, answer: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, left, answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()), Arc::new(answer));
        let connections = Arc::new(AtomicUsize::new(0));
        let (counter, gone, accepted) = (Arc::clone(&requests), Arc::clone(&left), Arc::clone(&connections));
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, counter, gone) = (Arc::clone(&answer), Arc::clone(&counter), Arc::clone(&gone));
                accepted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    let reply = |path: &str| answer(path, counter.fetch_add(1, Ordering::Relaxed));
                    // A client that leaves is what the test wants.
                    let _ = serve(stream, reply).await;
                    gone.notify_one();
                });
            }
        });
        Self { address, connections, requests, left, accepting }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Number of connections until now.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Number of requests until now.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Waits until a connection has ended.
    pub(crate) async fn connection_ended(&self) {
        self.left.notified().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(mut stream: TcpStream, answer: impl FnOnce(&str) -> Reply) -> std::io::Result<()> {
    let mut head = vec![];
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let reply = answer(head.split(' ').nth(1).unwrap_or_default());
    match reply {
        Reply::Bytes(bytes) => stream.write_all(&bytes).await,
        Reply::Endless(bytes) => {
            stream.write_all(&bytes).await?;
            loop {
                stream.write_all(&[0; 4096]).await?;
            }
        }
        Reply::Silence(bytes) => {
            stream.write_all(&bytes).await?;
            stream.read_u8().await.map(drop)
        }
    }
}
