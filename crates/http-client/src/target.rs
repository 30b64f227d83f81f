//! The destination of requests.

use std::path::PathBuf;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, Uri};
use http_body_util::Full;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::connection::ClientError;
use crate::tls::{AuthoritiesError, Certificates};

/// The destination of requests.
#[derive(Clone)]
pub struct Target {
    pub(crate) socket: Socket,
    pub(crate) encryption: Option<Encryption>,
    host_header: HeaderValue,
    /// The path before that of a request, without a trailing slash.
    prefix: String,
    authorization: Option<HeaderValue>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Socket {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// How a connection is encrypted.
#[derive(Clone)]
pub(crate) struct Encryption {
    pub(crate) connector: TlsConnector,
    /// The name in the certificate.
    pub(crate) name: ServerName<'static>,
}

/// The reason why a target cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The URL cannot be used.
    #[error("'{url}' cannot be used as a base URL: {reason}")]
    Url {
        /// The URL as given.
        url: String,
        /// The reason.
        reason: &'static str,
    },
    /// The API key cannot be part of a header.
    #[error("the API key has characters that a header cannot hold")]
    ApiKey,
    /// The file of certificate authorities cannot be used.
    #[error(transparent)]
    Authorities(#[from] AuthoritiesError),
}

impl Target {
    /// Creates a target from `http://host[:port][/path]`, or the same with `https`, and an API key. `certificates` are those
    /// that an encrypted server may have.
    ///
    /// # Errors
    /// The URL is of another form, the key is not valid in a header, or the authorities cannot be read.
    pub fn new(base_url: &str, api_key: Option<&str>, certificates: &Certificates) -> Result<Self, TargetError> {
        let error = |reason| TargetError::Url { url: base_url.to_owned(), reason };
        let uri: Uri = base_url.parse().map_err(|_| error("it does not parse"))?;
        let (encrypted, port) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => return Err(error("it must start with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| error("it names no host"))?;
        let host_header =
            HeaderValue::from_str(authority.as_str()).map_err(|_| error("its host is not valid in a header"))?;
        let authorization = api_key
            .map(|key| HeaderValue::from_str(&format!("Bearer {key}")))
            .transpose()
            .map_err(|_| TargetError::ApiKey)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let encryption = if encrypted {
            let name = ServerName::try_from(host.clone()).map_err(|_| error("its host is not the name of a server"))?;
            Some(Encryption { connector: certificates.connector()?, name })
        } else {
            None
        };
        Ok(Self {
            socket: Socket::Tcp { host, port: authority.port_u16().unwrap_or(port) },
            encryption,
            host_header,
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authorization,
        })
    }

    /// The same server at a Unix domain socket.
    pub fn at_socket(self, path: PathBuf) -> Self {
        Self { socket: Socket::Unix(path), ..self }
    }

    /// Creates a request for `path` with a JSON body, which may be empty.
    ///
    /// # Errors
    /// The path cannot be part of a URL.
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

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let encrypted = self.encryption.is_some();
        f.debug_struct("Target").field("socket", &self.socket).field("encrypted", &encrypted).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, api_key: Option<&str>) -> Result<Target, TargetError> {
        Target::new(url, api_key, &Certificates::Trusted)
    }

    #[test]
    fn base_urls_have_a_scheme_and_a_host() {
        let at = |host: &str, port| Socket::Tcp { host: host.to_owned(), port };
        let local = target("http://localhost:9000/openai/", Some("key")).unwrap();
        assert_eq!((&local.socket, local.prefix.as_str()), (&at("localhost", 9000), "/openai"));
        let request = local.request(Method::GET, "/v1/models", Bytes::new()).unwrap();
        assert_eq!(request.uri().path(), "/openai/v1/models");
        assert_eq!(request.headers()[AUTHORIZATION], "Bearer key");
        for (url, socket, encrypted) in [
            ("http://[::1]", at("::1", 80), false),
            ("https://h", at("h", 443), true),
            ("https://[::1]:8443", at("::1", 8443), true),
        ] {
            let target = target(url, None).unwrap();
            assert_eq!((&target.socket, target.encryption.is_some()), (&socket, encrypted), "{url}");
        }
        for bad in ["localhost:8000", "/v1", "http://", "ftp://x", "https://a_b..c"] {
            assert!(target(bad, None).is_err(), "{bad}");
        }
        assert!(target("http://localhost", Some("a\nb")).is_err());
    }

    #[test]
    fn a_file_without_authorities_is_refused() {
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let refused = |file| Target::new("https://h", None, &Certificates::IssuedBy(file)).unwrap_err().to_string();
        assert!(refused(file).ends_with("it holds no certificate"));
        assert!(refused("/none.pem".into()).starts_with("the certificate authorities in /none.pem cannot be used: "));
    }
}
