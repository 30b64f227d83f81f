//! Requests written by hand, for what a well-behaved client would never send.

use std::io;

use octavo_engine::{Engine, EngineHandle};
use octavo_server::{Server, ServerError, Shutdown};
use octavo_sockets::Listener;
use octavo_telemetry::Telemetry;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::{Setup, TestServer};

/// What a server says on one connection.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// The status line and the header fields.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The value of a header field, its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let fields = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        let mut values = fields.filter(|(field, _)| *field == name).map(|(_, value)| value);
        let value = values.next();
        assert_eq!(values.next(), None, "{name} comes once: {}", self.head);
        value
    }
}

/// Sends a request of a first line, such as `GET /health`, and header fields; reads to the end of the connection.
pub async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    mut socket: S,
    line: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> io::Result<Answer> {
    let mut text = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        text.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    text.push_str(body);
    socket.write_all(text.as_bytes()).await?;
    socket.flush().await?;
    let mut answer = Vec::new();
    let read = socket.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        read?;
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("no answer but {answer:?}")));
    };
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Ok(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

impl TestServer {
    /// The same on a TCP connection of its own.
    pub async fn raw(&self, line: &str, fields: &[(&str, &str)]) -> Answer {
        exchange(TcpStream::connect(self.address()).await.unwrap(), line, fields, "").await.unwrap()
    }
}

/// Serves on any listener.
pub fn serve_on(setup: Setup, listener: Listener) -> Served {
    let (server, engine, telemetry) = setup.compose();
    let shutdown = Shutdown::new();
    let task = tokio::spawn(Server::serve(server, listener, shutdown.clone()));
    Served { shutdown, task, telemetry, handle: engine.handle(), _engine: engine }
}

/// A running server; gone when dropped.
pub struct Served {
    pub shutdown: Shutdown,
    pub task: JoinHandle<Result<(), ServerError>>,
    pub telemetry: Telemetry,
    pub handle: EngineHandle,
    _engine: Engine,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}
