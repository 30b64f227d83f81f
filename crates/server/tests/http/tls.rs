//! TLS: certificates, clients that show one, and clients that are no TLS clients at all.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_server::{ConnectionLimits, serve_while_loading};
use octavo_sockets::{ClientAuth, Listener, TlsConfig};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};

use crate::support::Setup;
use crate::wire::{Answer, Served, exchange, serve_on};

/// An authority, and the folder where the server's files are.
struct Authority {
    folder: TempDir,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let authority = Self { folder: TempDir::new().unwrap(), pem, issuer: Issuer::new(params, key) };
        authority.write("ca.pem", &authority.pem);
        authority.issue_server();
        authority
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A certificate and its key.
    fn issue(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Gives the server a new one.
    fn issue_server(&self) -> CertificateDer<'static> {
        let (certificate, key) = self.issue();
        self.write("cert.pem", &certificate);
        self.write("key.pem", &key);
        CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()
    }

    fn config(&self, client_auth: ClientAuth) -> TlsConfig {
        let path = |name: &str| self.folder.path().join(name);
        TlsConfig {
            cert_file: path("cert.pem"),
            key_file: Some(path("key.pem")),
            ca_certs: Some(path("ca.pem")),
            client_auth,
            refresh: None,
        }
    }
}

/// A client that trusts `authority`, and shows `identity`.
fn client(
    authority: &Authority,
    identity: Option<(String, String)>,
    version: &'static SupportedProtocolVersion,
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    match identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
        }
    }
}

struct Secured {
    address: String,
    server: Served,
}

async fn listen(config: &TlsConfig) -> (String, Listener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listener = Listener::from(listener).with_tls(config).unwrap();
    (listener.to_string().strip_prefix("https://").unwrap().to_owned(), listener)
}

impl Secured {
    async fn start(setup: Setup, config: &TlsConfig) -> Self {
        let (address, listener) = listen(config).await;
        Self { address, server: serve_on(setup, listener) }
    }
}

async fn connect(address: &str, client: ClientConfig) -> io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(client)).connect(ServerName::try_from("localhost").unwrap(), socket).await
}

async fn ask(address: &str, client: ClientConfig, line: &str, body: &str) -> io::Result<Answer> {
    exchange(connect(address, client).await?, line, &[], body).await
}

#[tokio::test]
async fn it_serves_over_tls() {
    let authority = Authority::new();
    let secured = Secured::start(Setup::default(), &authority.config(ClientAuth::None)).await;
    for version in [&TLS12, &TLS13] {
        let health = ask(&secured.address, client(&authority, None, version), "GET /health", "").await.unwrap();
        assert_eq!((health.status, &*health.body), (200, ""));
        let body = r#"{"prompt": "hi", "stream": true}"#;
        let stream =
            ask(&secured.address, client(&authority, None, version), "POST /v1/completions", body).await.unwrap();
        assert!(stream.status == 200 && stream.body.contains("data: [DONE]\n\n"), "{}", stream.body);
        let mut both = client(&authority, None, version);
        both.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let connection = connect(&secured.address, both).await.unwrap();
        assert_eq!(connection.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    }
    let strangers = client(&Authority::new(), None, &TLS13);
    assert!(connect(&secured.address, strangers).await.is_err(), "signed by somebody else");
}

#[tokio::test]
async fn clients_show_certificates_as_asked() {
    let authority = Authority::new();
    let stranger = Authority::new();
    for (client_auth, without) in
        [(ClientAuth::None, true), (ClientAuth::Optional, true), (ClientAuth::Required, false)]
    {
        let secured = Secured::start(Setup::default(), &authority.config(client_auth)).await;
        for version in [&TLS12, &TLS13] {
            let get = async |identity| {
                let client = client(&authority, identity, version);
                ask(&secured.address, client, "GET /health", "").await.is_ok_and(|answer| answer.status == 200)
            };
            assert_eq!(get(None).await, without, "{client_auth:?}");
            assert!(get(Some(authority.issue())).await, "{client_auth:?}");
            assert_eq!(get(Some(stranger.issue())).await, client_auth == ClientAuth::None, "{client_auth:?}");
        }
    }
}

#[tokio::test]
async fn what_is_no_tls_is_turned_away() {
    let authority = Authority::new();
    let secured = Secured::start(Setup::default(), &authority.config(ClientAuth::None)).await;
    let noise: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let hellos: [&[u8]; 7] = [
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03",
        b"\x16\x03\x01\x40\x00\x01\xff\xff\xff",
        b"\x80\x2e\x01\x00\x02",
        b"\0",
        &noise,
    ];
    for hello in hellos {
        let mut socket = TcpStream::connect(&secured.address).await.unwrap();
        let _ = socket.write_all(hello).await;
        let _ = socket.shutdown().await;
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP/1.1 2"), "{answer:?}");
        let health = ask(&secured.address, client(&authority, None, &TLS13), "GET /health", "").await.unwrap();
        assert_eq!(health.status, 200);
    }
}

/// A client, or a proxy, that was told http:// by mistake reads why, though it leaves its side open and sends a body.
#[tokio::test]
async fn plain_http_is_answered_in_plain_http() {
    let authority = Authority::new();
    let secured = Secured::start(Setup::default(), &authority.config(ClientAuth::None)).await;
    let body = "x".repeat(1 << 20);
    for line in ["GET /health", "POST /v1/completions", "OPTIONS /"] {
        let begun = Instant::now();
        let socket = TcpStream::connect(&secured.address).await.unwrap();
        let answer = exchange(socket, line, &[], if line.starts_with("POST") { &body } else { "" }).await.unwrap();
        assert_eq!(answer.status, 400, "{line}");
        let error: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("https://"), "{error}");
        assert_eq!(error["error"]["code"], 400);
        assert!(begun.elapsed() < Duration::from_secs(8), "it waited for nothing");
    }
}

#[tokio::test]
async fn handshakes_that_do_not_end_hold_up_nobody_and_are_given_up() {
    let authority = Authority::new();
    let mut setup = Setup::default();
    setup.config.connection.head_timeout = Duration::from_secs(3);
    let secured = Secured::start(setup, &authority.config(ClientAuth::None)).await;
    let begun = Instant::now();
    let mut held = Vec::new();
    for n in 0..200 {
        let mut socket = TcpStream::connect(&secured.address).await.unwrap();
        socket.write_all(&b"\x16\x03\x01\x02\x00\x01\x00"[..n % 8]).await.unwrap();
        held.push(socket);
    }
    let health = ask(&secured.address, client(&authority, None, &TLS13), "GET /health", "").await.unwrap();
    assert_eq!(health.status, 200);
    for mut socket in held {
        let _ = socket.read_to_end(&mut Vec::new()).await;
    }
    assert!(begun.elapsed() >= Duration::from_millis(2900), "the server hung up, and not at once");
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_handshakes() {
    let authority = Authority::new();
    let mut setup = Setup::default();
    setup.config.shutdown_timeout = Duration::from_secs(3600);
    let mut secured = Secured::start(setup, &authority.config(ClientAuth::None)).await;
    let mut held = TcpStream::connect(&secured.address).await.unwrap();
    let health = ask(&secured.address, client(&authority, None, &TLS13), "GET /health", "").await.unwrap();
    assert_eq!(health.status, 200);
    secured.server.shutdown.signal();
    (&mut secured.server.task).await.unwrap().unwrap();
    let _ = held.read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn new_files_are_used_and_bad_ones_are_not() {
    let authority = Authority::new();
    let config = TlsConfig { refresh: Some(Duration::from_millis(10)), ..authority.config(ClientAuth::None) };
    let secured = Secured::start(Setup::default(), &config).await;
    let shown = async || {
        let connection = connect(&secured.address, client(&authority, None, &TLS13)).await.unwrap();
        connection.get_ref().1.peer_certificates().unwrap()[0].clone()
    };
    let mut old_connection = connect(&secured.address, client(&authority, None, &TLS13)).await.unwrap();
    let first = shown().await;
    let second = authority.issue_server();
    assert_ne!(first, second);
    let replaced = async { while shown().await != second {} };
    tokio::time::timeout(Duration::from_secs(60), replaced).await.unwrap();

    authority.write("cert.pem", "nonsense");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(shown().await, second, "the one in use stays");
    fs::remove_file(&config.cert_file).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(shown().await, second);
    let third = authority.issue_server();
    let replaced = async { while shown().await != third {} };
    tokio::time::timeout(Duration::from_secs(60), replaced).await.unwrap();

    old_connection.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut status = [0; 12];
    old_connection.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200", "connections outlive their certificate");
}

#[tokio::test]
async fn probes_over_tls_are_answered_while_the_model_loads() {
    let authority = Authority::new();
    let (address, listener) = listen(&authority.config(ClientAuth::None)).await;
    let load = async {
        let live = ask(&address, client(&authority, None, &TLS13), "GET /live", "").await.unwrap();
        let health = ask(&address, client(&authority, None, &TLS13), "GET /health", "").await.unwrap();
        (live.status, health.status)
    };
    assert_eq!(serve_while_loading(&listener, ConnectionLimits::default(), load).await.unwrap(), (200, 503));
}

#[tokio::test]
async fn a_reader_that_stops_is_dropped_here_too() {
    let authority = Authority::new();
    let mut setup = Setup::endless();
    setup.mock.step_latency = Duration::from_millis(5);
    setup.config.connection.write_stall_timeout = Duration::from_millis(300);
    let secured = Secured::start(setup, &authority.config(ClientAuth::None)).await;
    let mut stalled = connect(&secured.address, client(&authority, None, &TLS13)).await.unwrap();
    let body = r#"{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 8}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stalled.write_all(head.as_bytes()).await.unwrap();
    let wait = async |wanted| {
        let reached = async {
            while secured.server.handle.status().running != wanted {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), reached).await.unwrap();
    };
    wait(8).await;
    wait(0).await;
    assert_eq!(secured.server.handle.status().blocks_used, 0);
    let metrics = secured.server.telemetry.render();
    let aborted = r#"vllm:request_success_total{engine="0",finished_reason="abort",model_name="mock"} 8"#;
    assert!(metrics.contains(&format!("{aborted}\n")), "long before its 4000 tokens");
}
