//! One kept-alive HTTP/1.1 connection.

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::LoadError;

/// The destination of requests.
#[derive(Clone, Debug)]
pub struct Target {
    host: String,
    port: u16,
    host_header: HeaderValue,
    /// The path before `/v1`, without a trailing slash.
    prefix: String,
    authorization: Option<HeaderValue>,
}

/// The reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection cannot be opened.
    #[error("connecting failed: {0}")]
    Connect(#[from] std::io::Error),
    /// The connection broke, or the response is not HTTP.
    #[error("the connection failed: {0}")]
    Http(#[from] hyper::Error),
    /// The path cannot be part of a URL.
    #[error("the request is not valid: {0}")]
    Request(#[from] http::Error),
}

impl Target {
    /// Creates a target from `http://host[:port][/path]` and an API key.
    pub fn new(base_url: &str, api_key: Option<&str>) -> Result<Self, LoadError> {
        let error = |reason| LoadError::BaseUrl { url: base_url.to_owned(), reason };
        let uri: Uri = base_url.parse().map_err(|_| error("it does not parse"))?;
        if uri.scheme_str() != Some("http") {
            return Err(error("it must start with http:// (TLS is not supported here)"));
        }
        let authority = uri.authority().ok_or_else(|| error("it names no host"))?;
        let host_header =
            HeaderValue::from_str(authority.as_str()).map_err(|_| error("its host is not valid in a header"))?;
        let authorization = api_key
            .map(|key| HeaderValue::from_str(&format!("Bearer {key}")))
            .transpose()
            .map_err(|_| LoadError::Config("the API key has characters that a header cannot hold"))?;
        Ok(Self {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: authority.port_u16().unwrap_or(80),
            host_header,
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authorization,
        })
    }

    /// Creates a request for `path` with a JSON body, which may be empty.
    pub fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.host_header)
            .header(ACCEPT, HeaderValue::from_static("*/*"))
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        Ok(request.body(Full::new(body))?)
    }
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

    /// Creates a connection over an existing stream. If it breaks, a new connection to the target replaces it.
    ///
    /// # Errors
    /// The stream is closed.
    pub async fn over<S>(target: Target, stream: S) -> Result<Self, ClientError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Ok(Self { target, sender: Some(speak(stream).await?) })
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
                let stream = TcpStream::connect((self.target.host.as_str(), self.target.port)).await?;
                stream.set_nodelay(true)?;
                Ok(self.sender.insert(speak(stream).await?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_are_http_with_a_host() {
        let target = Target::new("http://localhost:9000/openai/", Some("key")).unwrap();
        assert_eq!((target.host.as_str(), target.port, target.prefix.as_str()), ("localhost", 9000, "/openai"));
        let request = target.request(Method::GET, "/v1/models", Bytes::new()).unwrap();
        assert_eq!(request.uri().path(), "/openai/v1/models");
        assert_eq!(request.headers()[AUTHORIZATION], "Bearer key");
        assert_eq!(Target::new("http://[::1]:80", None).unwrap().host, "::1");
        for bad in ["https://localhost", "localhost:8000", "/v1", "http://", "ftp://x"] {
            assert!(Target::new(bad, None).is_err(), "{bad}");
        }
        assert!(Target::new("http://localhost", Some("a\nb")).is_err());
    }
}
