//! The HTTP/1.1 client of the exporter.

use std::path::Path;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::config::TraceConfig;

/// Maximum size of a collector's answer, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// A blocking client, which runs on the exporter's own thread.
#[derive(Debug)]
pub(super) struct BlockingClient(Agent);

impl BlockingClient {
    /// # Errors
    /// The file of authorities cannot be used.
    pub(super) fn new(config: &TraceConfig) -> Result<Self, String> {
        // A refusal is an answer; the exporter decides whether to retry.
        let mut builder = Agent::config_builder().timeout_global(Some(config.timeout)).http_status_as_error(false);
        if let Some(file) = &config.authorities {
            builder = builder.tls_config(TlsConfig::builder().root_certs(authorities(file)?).build());
        }
        Ok(Self(builder.build().into()))
    }
}

fn authorities(file: &Path) -> Result<RootCerts, String> {
    let pem = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut certificates = vec![];
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => certificates.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(format!("{}: {error}", file.display())),
        }
    }
    if certificates.is_empty() {
        return Err(format!("{} holds no certificate", file.display()));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

#[async_trait]
impl HttpClient for BlockingClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let (head, mut body) = self.0.run(Request::from_parts(head, &body[..]))?.into_parts();
        let bytes = body.with_config().limit(MAX_ANSWER).read_to_vec()?;
        Ok(Response::from_parts(head, bytes.into()))
    }
}
