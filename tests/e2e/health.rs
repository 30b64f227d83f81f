//! Tests of `octavo health` against servers that are ready, loading, draining or absent, and over TLS or a Unix socket; and of
//! the other commands that talk with a server over TLS.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use octavo_tests::Server;

use crate::OCTAVO;

/// A Llama with random weights and a context of 256 tokens.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

fn start(flags: &[&str]) -> Server {
    let small = ["--cpu-threads", "1", "--num-gpu-blocks-override", "64"];
    Server::start(Path::new(OCTAVO), Path::new(TINY), &[&small, flags].concat())
}

/// Returns the exit code and the one line of output.
fn health(args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = Command::new(OCTAVO).arg("health").args(args).envs(variables.iter().copied()).output().unwrap();
    let Output { status, stdout, stderr } = output;
    let (said, silent) = if status.success() { (stdout, stderr) } else { (stderr, stdout) };
    assert!(silent.is_empty(), "{}", String::from_utf8_lossy(&silent));
    let said = String::from_utf8(said).unwrap();
    assert_eq!(said.matches('\n').count(), 1, "one line: {said}");
    (status.code(), said.trim_end().to_owned())
}

#[test]
fn a_ready_server_is_healthy_until_it_drains() {
    // A probe needs no API key.
    let mut server = start(&["--api-key", "secret", "--shutdown-lag", "20"]);
    let url = server.url("");
    let port = url.rsplit(':').next().unwrap();
    let healthy = (Some(0), format!("{url}/health: 200 OK"));
    assert_eq!(health(&["--port", port], &[]), healthy);
    assert_eq!(health(&["--url", &url], &[]), healthy);
    assert_eq!(health(&[], &[("OCTAVO_PORT", port), ("OCTAVO_HOST", "0.0.0.0")]), healthy);
    let (code, said) = health(&["--url", &server.url("/v1/models")], &[]);
    assert_eq!((code, said), (Some(1), format!("octavo: {url}/v1/models: 401 Unauthorized")));

    server.signal("TERM");
    let draining = (Some(1), format!("octavo: {url}/health: 503 Service Unavailable"));
    let deadline = Instant::now() + Duration::from_secs(10);
    while health(&["--port", port], &[]) != draining {
        assert!(Instant::now() < deadline, "it is never told that the server drains");
    }
    assert_eq!(health(&["--url", &server.url("/live")], &[]).0, Some(0));
    // Within a second of the first it would be the same signal.
    std::thread::sleep(Duration::from_millis(1100));
    server.signal("TERM");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(server.ended(Duration::from_secs(10)));
    let (code, said) = health(&["--port", port], &[]);
    assert_eq!(code, Some(1));
    assert!(said.starts_with(&format!("octavo: {url}/health: connecting failed: ")), "{said}");
}

#[test]
fn a_server_that_loads_is_alive_and_not_healthy() {
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start_loading(Path::new(OCTAVO), &format!("http://{}", hub.local_addr().unwrap()));
    let (code, said) = health(&["--url", &server.url("")], &[]);
    assert_eq!((code, said), (Some(1), format!("octavo: {}: 503 Service Unavailable", server.url("/health"))));
    assert_eq!(health(&["--url", &server.url("/live")], &[]).0, Some(0));
}

#[test]
fn one_that_does_not_answer_is_given_up_and_nonsense_is_told() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let begun = Instant::now();
    let (code, said) = health(&["--port", &port, "--timeout", "0.2"], &[]);
    assert_eq!((code, said), (Some(1), format!("octavo: http://127.0.0.1:{port}/health: no answer within 0.2 s")));
    assert!(begun.elapsed() < Duration::from_secs(4));

    // The server speaks another protocol.
    let server = start(&[]);
    let (code, said) = health(&["--url", &server.url("").replace("http:", "https:")], &[]);
    assert!(code == Some(1) && said.contains("the TLS handshake failed"), "{said}");
}

#[test]
fn it_asks_over_tls_and_over_unix_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (certificate, key, socket) = (path("tls.crt"), path("tls.key"), path("octavo.sock"));
    // The certificate is for another name, because a probe connects to the loopback address.
    let signed = rcgen::generate_simple_self_signed(vec!["llm.example.org".to_owned()]).unwrap();
    std::fs::write(&certificate, signed.cert.pem()).unwrap();
    std::fs::write(&key, signed.signing_key.serialize_pem()).unwrap();

    let tls = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
    let server = start(&tls);
    let url = server.url("");
    assert!(url.starts_with("https://"), "{url}");
    let healthy = (Some(0), format!("{url}/health: 200 OK"));
    assert_eq!(health(&["--url", &url], &[]), healthy);
    let port = url.rsplit(':').next().unwrap();
    assert_eq!(health(&["--port", port, "--ssl-certfile", &certificate], &[]), healthy);
    assert_eq!(health(&[], &[("OCTAVO_PORT", port), ("OCTAVO_SSL_CERTFILE", &certificate)]), healthy);
    assert_eq!(health(&["--port", port], &[]).0, Some(1), "it speaks TLS only");

    let missing = health(&["--uds", &socket], &[]);
    assert!(missing.0 == Some(1) && missing.1.contains("connecting failed"), "{}", missing.1);
    let _plain = start(&["--uds", &socket]);
    assert_eq!(health(&["--uds", &socket], &[]), (Some(0), format!("http+unix:{socket}:/health: 200 OK")));
    let encrypted = path("encrypted.sock");
    let _encrypted = start(&[&tls[..], &["--uds", &encrypted]].concat());
    let answer = health(&[], &[("OCTAVO_UDS", &encrypted), ("OCTAVO_SSL_CERTFILE", &certificate)]);
    assert_eq!(answer, (Some(0), format!("https+unix:{encrypted}:/health: 200 OK")));
}

#[test]
fn the_other_commands_verify_the_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("tls.crt"), path("tls.key"));
    let signed = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(&certificate, signed.cert.pem()).unwrap();
    std::fs::write(&key, signed.signing_key.serialize_pem()).unwrap();
    let server = start(&["--ssl-certfile", &certificate, "--ssl-keyfile", &key]);
    let (url, api) = (server.url(""), server.url("/v1"));
    assert!(url.starts_with("https://"), "{url}");

    let commands: [&[&str]; 3] = [
        &["chat", "--quick", "hi", "--max-tokens", "4", "--url", &api],
        &["ps", "--url", &url],
        &["bench", "serve", "--num-prompts", "2", "--input-len", "4", "--output-len", "4", "--base-url", &url],
    ];
    for arguments in commands {
        let run = |more: &[&str], authorities: &str| {
            let mut command = Command::new(OCTAVO);
            command.args(arguments).args(more).env("SSL_CERT_FILE", authorities).output().unwrap()
        };
        let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
        for accepted in [run(&[], &certificate), run(&["--insecure"], "")] {
            assert!(accepted.status.success(), "{arguments:?}: {}", said(&accepted));
            assert!(!accepted.stdout.is_empty(), "{arguments:?}");
        }
        let refused = run(if arguments[0] == "bench" { &["--ready-check-timeout-sec", "1"] } else { &[] }, "");
        assert!(!refused.status.success(), "{arguments:?}");
        assert!(said(&refused).contains("the TLS handshake failed: invalid peer certificate"), "{}", said(&refused));
    }
}
