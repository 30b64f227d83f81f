//! One kept-alive HTTP/1.1 connection.

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::target::{Encryption, Socket, Target};

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection cannot be opened.
    #[error("connecting failed: {0}")]
    Connect(#[from] std::io::Error),
    /// The server does not speak TLS, or its certificate is not accepted.
    #[error("the TLS handshake failed: {0}")]
    Tls(#[source] std::io::Error),
    /// The connection broke, or the response is not HTTP.
    #[error("the connection failed: {0}")]
    Http(#[from] hyper::Error),
    /// The path cannot be part of a URL.
    #[error("the request is not valid: {0}")]
    Request(#[from] http::Error),
}

/// A connection that is opened on demand and kept as long as the server keeps it.
#[derive(Debug)]
pub struct Connection {
    target: Target,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Connection {
    /// Creates a connection that is not open yet.
    pub fn new(target: Target) -> Self {
        Self { target, sender: None }
    }

    /// The destination of the connection.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Opens a connection if there is no usable one.
    pub async fn connect(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, ClientError> {
        let usable = match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        };
        if !usable {
            self.sender = None;
        }
        match self.sender {
            Some(ref mut sender) => Ok(sender),
            None => {
                let opened = open(&self.target).await?;
                Ok(self.sender.insert(opened))
            }
        }
    }

    /// Sends a request and returns the head of the response.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, ClientError> {
        Ok(self.connect().await?.send_request(request).await?)
    }

    /// Drops the connection, because its last response was not read to the end or it must not be reused.
    pub fn close(&mut self) {
        self.sender = None;
    }
}

async fn open(target: &Target) -> Result<SendRequest<Full<Bytes>>, ClientError> {
    match &target.socket {
        Socket::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            encrypt(stream, target.encryption.as_ref()).await
        }
        Socket::Unix(path) => encrypt(UnixStream::connect(path).await?, target.encryption.as_ref()).await,
    }
}

async fn encrypt<S>(stream: S, encryption: Option<&Encryption>) -> Result<SendRequest<Full<Bytes>>, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    match encryption {
        None => speak(stream).await,
        Some(Encryption { connector, name }) => {
            speak(connector.connect(name.clone(), stream).await.map_err(ClientError::Tls)?).await
        }
    }
}

/// Starts HTTP over a stream, until either side closes it.
async fn speak<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended");
        }
    });
    Ok(sender)
}
