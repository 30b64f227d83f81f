//! Tests of start, health, drain and end.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use octavo_tests::Server;

use crate::{OCTAVO, server};

fn long_stream() -> Value {
    json!({"model": "default", "prompt": "Count:", "max_tokens": 2000, "ignore_eos": true, "stream": true})
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_there_when_the_server_is_ready() {
    let Some(server) = server(&["--max-model-len", "256", "--api-key", "secret"]) else { return };
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
async fn a_short_stream_survives_sigterm() {
    let Some(mut server) = server(&["--max-model-len", "512", "--shutdown-lag", "1", "--shutdown-timeout", "120"])
    else {
        return;
    };
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
async fn a_long_stream_ends_with_an_error_event_at_the_timeout() {
    let flags = ["--max-model-len", "4096", "--shutdown-lag", "0", "--shutdown-timeout", "1"];
    let Some(mut server) = server(&flags) else { return };
    let response = server.client().post(server.url("/v1/completions")).json(&long_stream()).send().await.unwrap();
    server.signal("TERM");
    let body = response.text().await.unwrap();
    assert!(body.contains(r#""error""#) && body.ends_with("data: [DONE]\n\n"), "{body}");
    assert_eq!(server.ended(Duration::from_secs(20)).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_it_now() {
    let Some(mut server) = server(&["--max-model-len", "4096"]) else { return };
    let _response = server.client().post(server.url("/v1/completions")).json(&long_stream()).send().await.unwrap();
    server.signal("TERM");
    while server.get("/health").await.0 == 200 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    server.signal("TERM");
    server.ended(Duration::from_secs(10)).await;
}

#[test]
fn the_doctor_uses_the_instruction_set_that_is_forced() {
    let doctor = std::process::Command::new(OCTAVO).arg("doctor").env("OCTAVO_CPU_ISA", "portable").output();
    let said = String::from_utf8(doctor.unwrap().stdout).unwrap();
    assert!(said.contains("instruction sets") && said.contains(" portable kernels"), "{said}");
}
