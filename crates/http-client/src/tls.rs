//! Encryption, and the certificates that are accepted.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

/// The certificates of servers that are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificates {
    /// Those that Mozilla's certificate authorities issued for the name of the server.
    Trusted,
    /// Those that the authorities in a PEM file issued for the name of the server.
    IssuedBy(PathBuf),
    /// All, also for other names. Nothing secret can be sent.
    Any,
}

/// A file of certificate authorities cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the certificate authorities in {} cannot be used: {reason}", path.display())]
pub struct AuthoritiesError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub reason: String,
}

impl Certificates {
    /// Those of the authorities in the file that the variable `SSL_CERT_FILE` names, or else the trusted ones.
    pub fn from_environment() -> Self {
        let file = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
        file.map_or(Self::Trusted, |file| Self::IssuedBy(file.into()))
    }

    /// What encrypts connections.
    ///
    /// # Errors
    /// The file of authorities cannot be read, or it has none.
    pub fn connector(&self) -> Result<TlsConnector, AuthoritiesError> {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider has the default versions");
        let config = match self {
            Self::Trusted => {
                config.with_root_certificates(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() })
            }
            Self::IssuedBy(path) => {
                let refused = |reason| AuthoritiesError { path: path.clone(), reason };
                config.with_root_certificates(authorities(path).map_err(refused)?)
            }
            Self::Any => {
                config.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(Arc::clone(&provider))))
            }
        };
        Ok(TlsConnector::from(Arc::new(config.with_no_client_auth())))
    }
}

/// The certificates of a PEM file.
fn authorities(path: &PathBuf) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| error.to_string())? {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() { Err("it holds no certificate".to_owned()) } else { Ok(roots) }
}

/// Accepts any certificate.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
