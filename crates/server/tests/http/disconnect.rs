//! Clients that go away.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::{Setup, TestServer, ok};

const ABORTED: &str = r#"vllm:request_success_total{engine="0",finished_reason="abort",model_name="mock"}"#;

#[tokio::test]
async fn before_the_first_token() {
    let mut setup = Setup::endless();
    setup.engine.max_num_seqs = 1;
    let server = setup.start().await;
    let running = server.long(true).send().await.unwrap();
    for stream in [true, false] {
        let waiting = tokio::spawn(server.long(stream).send());
        server.until("it waits", |s| s.handle.status().waiting == 1).await;
        waiting.abort();
        server.until("it is gone", |s| s.handle.status().waiting == 0).await;
    }
    assert_eq!(server.handle.status().running, 1, "nobody else is touched");
    drop(running);
    server.idle().await;
    assert_eq!(server.metric(ABORTED), 3.0);
}

#[tokio::test]
async fn during_the_stream() {
    let server = Setup::endless().start().await;
    let mut response = server.chat(json!({"max_tokens": 4000, "n": 3, "stream": true})).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    server.running(3).await;
    drop(response);
    server.idle().await;
    assert_eq!(server.metric(ABORTED), 3.0);
}

#[tokio::test]
async fn while_waiting_for_the_whole_answer() {
    let server = Setup::endless().start().await;
    let request = tokio::spawn(server.long(false).send());
    server.running(1).await;
    request.abort();
    server.idle().await;
    assert_eq!(server.metric(ABORTED), 1.0);
}

#[tokio::test]
async fn after_the_end() {
    let server = Setup::default().start().await;
    let response = server.chat(json!({"stream": true})).send().await.unwrap();
    server.idle().await;
    drop(response);
    ok(server.chat(json!({}))).await;
    assert_eq!(server.metric(ABORTED), 0.0);
}

#[tokio::test]
async fn in_the_middle_of_a_request() {
    let server = Setup::default().start().await;
    let starts = [
        "POST /v1/comp",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"pro",
    ];
    for start in starts {
        let mut socket = TcpStream::connect(server.address()).await.unwrap();
        socket.write_all(start.as_bytes()).await.unwrap();
        drop(socket);
    }
    ok(server.completion(json!({}))).await;
    server.idle().await;
}

#[tokio::test]
async fn half_closed_connections_are_gone() {
    let server = Setup::endless().start().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let body = r#"{"prompt": "x", "max_tokens": 4000, "stream": true}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    server.running(1).await;
    socket.shutdown().await.unwrap();
    server.idle().await;
    let mut rest = Vec::new();
    // The server closes; whether by FIN or by RST does not matter.
    let _ = socket.read_to_end(&mut rest).await;
}

#[tokio::test]
async fn one_that_never_ends_its_head() {
    let mut setup = Setup::default();
    setup.config.connection.head_timeout = std::time::Duration::from_millis(50);
    let server = setup.start().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    socket.write_all(b"GET /health HTTP/1.1\r\nx-slow: ").await.unwrap();
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest).await;
    assert!(!rest.starts_with(b"HTTP/1.1 200"), "closed, or told 408");
}

#[tokio::test]
async fn one_whose_head_never_ends() {
    let server = Setup::default().start().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let line = format!("x-header: {}\r\n", "y".repeat(1000));
    let mut answer = Vec::new();
    let _ = socket.write_all(b"GET /health HTTP/1.1\r\n").await;
    for _ in 0..1000 {
        if socket.write_all(line.as_bytes()).await.is_err() {
            break;
        }
    }
    let _ = socket.read_to_end(&mut answer).await;
    let text = String::from_utf8_lossy(&answer);
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 431"), "{text}");
    assert_eq!(server.get("/health").await.status(), 200);
}

/// A request that takes minutes to tokenise.
fn giant(server: &TestServer) -> JoinHandle<Value> {
    tokio::spawn(ok(server.post("/tokenize", &json!({"prompt": "ab ".repeat(8 << 20)}))))
}

#[tokio::test]
async fn giant_texts_delay_neither_grammars_nor_small_texts() {
    let server = Setup::writing(r#"{"a": 1}"#).start().await;
    let giants = [giant(&server), giant(&server)];
    for _ in 0..4 {
        // A text above 64 KiB shares the lane of the giants.
        let text = ok(server.post("/tokenize", &json!({"prompt": "a ".repeat(40 << 10)}))).await;
        assert_eq!(text["count"], 80 << 10);
        let answer = ok(server.chat(json!({"response_format": {"type": "json_object"}}))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], r#"{"a": 1}"#);
        assert!(!giants.iter().any(JoinHandle::is_finished), "they have to wait for no giant");
    }
    for giant in giants {
        giant.abort();
    }
}
