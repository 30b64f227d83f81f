//! Certificates and keys: loads PEM files, and reloads them when they change.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{Error, RootCertStore, ServerConfig};

use crate::file_watch::FileWatch;

const CERT_FLAG: &str = "--ssl-certfile";
const KEY_FLAG: &str = "--ssl-keyfile";
const CA_FLAG: &str = "--ssl-ca-certs";

/// Whether clients must present a certificate signed by the configured authorities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// No certificate is requested.
    #[default]
    None,
    /// A certificate is optional, but must be valid if present.
    Optional,
    /// A valid certificate is required.
    Required,
}

/// The TLS configuration of a listener. All files are in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate, followed by those of its issuers.
    pub cert_file: PathBuf,
    /// The private key, not encrypted; `None` if it is in `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The authorities that sign client certificates.
    pub ca_certs: Option<PathBuf>,
    /// Whether clients must present a certificate.
    pub client_auth: ClientAuth,
    /// Interval for reloading changed files, which new connections then use; `None` reads the files once.
    pub refresh: Option<Duration>,
}

/// The reason why a listener cannot use TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing or invalid.
    #[error("{flag} {}: {reason}", path.display())]
    File {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Client certificates are requested, but no authority is configured.
    #[error("--ssl-cert-reqs asks for client certificates: --ssl-ca-certs must name the authorities that sign them")]
    NoAuthorities,
}

impl TlsError {
    fn file(flag: &'static str, path: &Path, reason: impl ToString) -> Self {
        Self::File { flag, path: path.to_owned(), reason: reason.to_string() }
    }
}

/// The configuration of new connections.
pub(crate) struct Tls {
    current: watch::Receiver<Arc<ServerConfig>>,
    /// The task that checks for changed files; it ends with the listener.
    _refresh: JoinSet<()>,
}

impl Tls {
    /// Reads the files. With a refresh, it must be called on an async runtime.
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, TlsError> {
        let watch = FileWatch::new(files(config));
        let (sender, current) = watch::channel(load(config)?);
        let mut tasks = JoinSet::new();
        if let Some(every) = config.refresh {
            tasks.spawn(refresh(config.clone(), every, watch, sender));
        }
        Ok(Self { current, _refresh: tasks })
    }

    /// The configuration for the next connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.current.borrow()))
    }
}

/// The files of a configuration.
fn files(config: &TlsConfig) -> Vec<PathBuf> {
    [Some(&config.cert_file), config.key_file.as_ref(), config.ca_certs.as_ref()]
        .into_iter()
        .flatten()
        .cloned()
        .collect()
}

/// Reloads the files whenever they change. Files that do not match, as between two writes, are ignored until the next
/// change.
async fn refresh(config: TlsConfig, every: Duration, mut watch: FileWatch, sender: watch::Sender<Arc<ServerConfig>>) {
    loop {
        watch.changed(every).await;
        let files = config.clone();
        let Ok(loaded) = spawn_blocking(move || load(&files)).await else { continue };
        match loaded {
            Ok(loaded) => {
                sender.send_replace(loaded);
                tracing::info!(certificate = %config.cert_file.display(), "the certificate was replaced");
            }
            Err(error) => tracing::warn!(%error, "the certificate was not replaced: the one in use stays"),
        }
    }
}

fn load(config: &TlsConfig) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let chain = certificates(CERT_FLAG, &config.cert_file)?;
    let (key_flag, key_path) = match &config.key_file {
        Some(path) => (KEY_FLAG, path),
        None => (CERT_FLAG, &config.cert_file),
    };
    let key = private_key(key_flag, key_path)?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::file(CERT_FLAG, &config.cert_file, error))?;
    let builder = match client_verifier(config, provider)? {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let mut server = builder.with_single_cert(chain, key).map_err(|error| match error {
        Error::InconsistentKeys(_) => {
            let reason = format!("the key does not belong to the certificate in {}", config.cert_file.display());
            TlsError::file(key_flag, key_path, reason)
        }
        Error::InvalidCertificate(_) => TlsError::file(CERT_FLAG, &config.cert_file, error),
        error => TlsError::file(key_flag, key_path, error),
    })?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(server))
}

fn client_verifier(
    config: &TlsConfig,
    provider: Arc<CryptoProvider>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
    if config.client_auth == ClientAuth::None {
        return Ok(None);
    }
    let path = config.ca_certs.as_ref().ok_or(TlsError::NoAuthorities)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CA_FLAG, path)? {
        roots.add(certificate).map_err(|error| TlsError::file(CA_FLAG, path, error))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = match config.client_auth {
        ClientAuth::Optional => builder.allow_unauthenticated(),
        _ => builder,
    };
    builder.build().map(Some).map_err(|error| TlsError::file(CA_FLAG, path, error))
}

fn read(flag: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|error| TlsError::file(flag, path, error))
}

/// The certificates in a file, of which there must be at least one.
fn certificates(flag: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(flag, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if found.is_empty() => Err(TlsError::file(flag, path, "the file holds no certificate in PEM form")),
        Ok(found) => Ok(found),
        Err(error) => Err(TlsError::file(flag, path, format!("the file is no valid PEM: {error}"))),
    }
}

fn private_key(flag: &'static str, path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(flag, path)?;
    let holds = |mark: &[u8]| text.windows(mark.len()).any(|window| window == mark);
    if holds(b"BEGIN ENCRYPTED PRIVATE KEY") || holds(b"Proc-Type: 4,ENCRYPTED") {
        let reason = "the private key is encrypted, and there is nobody to ask for its password: decrypt it first, \
                      with `openssl pkey -in FILE -out DECRYPTED`";
        return Err(TlsError::file(flag, path, reason));
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsError::file(flag, path, "the file holds no private key in PEM form"),
        error => TlsError::file(flag, path, format!("the file is no valid PEM: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    struct Files {
        folder: TempDir,
        config: TlsConfig,
    }

    impl Files {
        fn new() -> Self {
            let folder = TempDir::new().unwrap();
            let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
            fs::write(folder.path().join("cert.pem"), made.cert.pem()).unwrap();
            fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
            let config = TlsConfig {
                cert_file: folder.path().join("cert.pem"),
                key_file: Some(folder.path().join("key.pem")),
                ca_certs: None,
                client_auth: ClientAuth::None,
                refresh: None,
            };
            Self { folder, config }
        }

        fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
            let path = self.folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        }

        fn error(&self, change: impl FnOnce(&mut TlsConfig)) -> String {
            let mut config = self.config.clone();
            change(&mut config);
            load(&config).unwrap_err().to_string()
        }
    }

    #[test]
    fn a_certificate_and_its_key_load_together_or_apart() {
        let files = Files::new();
        assert_eq!(load(&files.config).unwrap().alpn_protocols, [b"http/1.1"]);
        let text = |path: &Path| fs::read_to_string(path).unwrap();
        let both = text(files.config.key_file.as_ref().unwrap()) + &text(&files.config.cert_file);
        let cert_file = files.write("both.pem", both);
        assert!(load(&TlsConfig { cert_file, key_file: None, ..files.config.clone() }).is_ok());
    }

    #[test]
    fn errors_name_the_flag_and_the_file() {
        let files = Files::new();
        let empty = files.write("empty.pem", "");
        let torn = files.write("torn.pem", "-----BEGIN CERTIFICATE-----\nMIIB!!!\n-----END CERTIFICATE-----\n");
        let not_der = files.write("not.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        let pkcs8 = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
        let pkcs1 = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nAAAA\n-----END RSA PRIVATE KEY-----\n";
        let (pkcs8, pkcs1) = (files.write("8.pem", pkcs8), files.write("1.pem", pkcs1));
        let weird = files.write("weird.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        let stranger = rcgen::KeyPair::generate().unwrap();
        let stranger = files.write("stranger.pem", stranger.serialize_pem());
        let missing = files.folder.path().join("missing.pem");

        let cert = |path: &PathBuf| files.error(|config| config.cert_file = path.clone());
        let key = |path: &PathBuf| files.error(|config| config.key_file = Some(path.clone()));
        let cases = [
            (cert(&missing), CERT_FLAG, &missing, "No such file"),
            (cert(&empty), CERT_FLAG, &empty, "no certificate"),
            (cert(&torn), CERT_FLAG, &torn, "no valid PEM"),
            (cert(&not_der), CERT_FLAG, &not_der, "invalid peer certificate"),
            (cert(&files.folder.path().to_owned()), CERT_FLAG, &files.folder.path().to_owned(), "directory"),
            (key(&missing), KEY_FLAG, &missing, "No such file"),
            (key(&empty), KEY_FLAG, &empty, "no private key"),
            (key(&files.config.cert_file), KEY_FLAG, &files.config.cert_file, "no private key"),
            (key(&pkcs8), KEY_FLAG, &pkcs8, "is encrypted"),
            (key(&pkcs1), KEY_FLAG, &pkcs1, "is encrypted"),
            (key(&weird), KEY_FLAG, &weird, "key"),
            (key(&stranger), KEY_FLAG, &stranger, "does not belong to the certificate"),
            (files.error(|config| config.key_file = None), CERT_FLAG, &files.config.cert_file, "no private key"),
        ];
        for (error, flag, path, reason) in cases {
            assert!(error.starts_with(&format!("{flag} {}: ", path.display())), "{error}");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn client_certificates_need_authorities() {
        let files = Files::new();
        let error = files.error(|config| config.client_auth = ClientAuth::Required);
        assert!(error.contains("--ssl-ca-certs must name"), "{error}");
        let empty = files.write("empty.pem", "");
        let error = files.error(|config| {
            config.client_auth = ClientAuth::Optional;
            config.ca_certs = Some(empty.clone());
        });
        assert!(error.starts_with(&format!("--ssl-ca-certs {}: ", empty.display())), "{error}");
        let ca_certs = Some(files.config.cert_file.clone());
        for client_auth in [ClientAuth::None, ClientAuth::Optional, ClientAuth::Required] {
            assert!(load(&TlsConfig { ca_certs: ca_certs.clone(), client_auth, ..files.config.clone() }).is_ok());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_file_loads_or_is_refused(
            mut text in proptest::collection::vec(any::<u8>(), 0..400),
            at in 0_usize..1200,
        ) {
            let files = Files::new();
            // Damage in the middle of a good file reaches further than noise does.
            let mut damaged = fs::read(&files.config.cert_file).unwrap();
            let at = at.min(damaged.len());
            drop(damaged.splice(at..(at + 3).min(damaged.len()), text.drain(..text.len().min(5))));
            let path = files.write("damaged.pem", damaged);
            let _ = load(&TlsConfig { cert_file: path.clone(), ..files.config.clone() });
            let noise = files.write("noise.pem", text);
            let config = TlsConfig { cert_file: noise.clone(), ..files.config.clone() };
            prop_assert!(load(&config).is_err());
            let config = TlsConfig { key_file: Some(noise), ..files.config.clone() };
            prop_assert!(load(&config).is_err());
            let config = TlsConfig { key_file: Some(path), ..files.config.clone() };
            prop_assert!(load(&config).is_err());
        }
    }
}
