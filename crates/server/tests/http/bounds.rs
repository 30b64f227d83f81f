//! What a request may ask for: lists of tokens, the size of its response, and one host.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Setup, TestServer, VOCAB, id, ok, with};

/// The status, field and message of a refused request.
async fn refusal(request: reqwest::RequestBuilder) -> (u16, String, String) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let body: Value = response.json().await.unwrap();
    let text = |key: &str| body["error"][key].as_str().unwrap_or_default().to_owned();
    (status, text("param"), text("message"))
}

#[tokio::test]
async fn lists_of_tokens_have_limits_and_stay_in_the_vocabulary() {
    let server = Setup::default().start().await;
    let biases: serde_json::Map<String, Value> = (0..40_000).map(|id| (id.to_string(), json!(1))).collect();
    let cases = [
        (json!({"stop_token_ids": [VOCAB]}), "stop_token_ids", "out of the vocabulary"),
        (json!({"stop_token_ids": vec![1; 5000]}), "stop_token_ids", "at most 4096 elements, got 5000."),
        (json!({"allowed_token_ids": [VOCAB]}), "allowed_token_ids", "out of the vocabulary"),
        (json!({"logprobs": 1, "logprob_token_ids": vec![1; 129]}), "logprob_token_ids", "at most 128 elements"),
        (json!({"logit_bias": biases}), "logit_bias", "at most 32768 tokens, got 40000."),
        (json!({"bad_words": vec!["a"; 129]}), "bad_words", "at most 128 elements, got 129."),
        (json!({"bad_words": ["a".repeat(2000)]}), "bad_words", "a word of 2000 bytes; at most 1024"),
        (json!({"stop": vec!["a"; 5]}), "stop", "at most 4 elements, got 5."),
        (json!({"stop": ["a".repeat(20_000)]}), "stop", "at most 16384 bytes, got 20000."),
    ];
    for (rest, field, part) in cases {
        let (status, param, message) = refusal(server.completion(rest)).await;
        assert_eq!((status, param.as_str()), (400, field), "{message}");
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test]
async fn every_sequence_ends_at_a_token_of_the_list() {
    let server = Setup::default().start().await;
    let ids: Vec<u32> = (0..256).rev().chain([id(" world"), id(" world")]).collect();
    let body = ok(server.completion(json!({"stop_token_ids": ids, "n": 3}))).await;
    for choice in body["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!("Hello"), &json!(id(" world"))));
    }
}

fn limited() -> Setup {
    let mut setup = Setup::default();
    setup.config.connection.max_response_bytes = 1 << 20;
    setup
}

#[tokio::test]
async fn a_response_is_refused_if_it_would_be_too_large() {
    let server = limited().start().await;
    let prompt = "x".repeat(4000);
    let conversation = json!([{"role": "user", "content": prompt}]);
    let cases = [
        ("/v1/completions", json!({"echo": true, "n": 512, "max_tokens": 1}), "echo"),
        ("/v1/completions", json!({"echo": true, "logprobs": 20, "n": 8, "max_tokens": 1}), "logprobs"),
        ("/v1/completions", json!({"prompt_logprobs": 20, "n": 8, "max_tokens": 1}), "prompt_logprobs"),
        ("/v1/completions", json!({"return_token_ids": true, "n": 64, "max_tokens": 1}), "return_token_ids"),
        ("/v1/completions", json!({"prompt": "x", "logprobs": 20, "n": 8, "max_tokens": 4000}), "logprobs"),
        ("/v1/completions", json!({"echo": true, "n": 512, "max_tokens": 1, "stream": true}), "echo"),
        ("/v1/chat/completions", json!({"prompt_logprobs": 20, "n": 8, "max_tokens": 1}), "prompt_logprobs"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 20, "n": 4, "max_tokens": 4000}),
            "top_logprobs",
        ),
        ("/generate", json!({"stream": true, "max_tokens": 90, "n": 4}), "prompt"),
    ];
    for (path, rest, field) in cases {
        let base = if path.contains("chat") { json!({"messages": conversation}) } else { json!({"prompt": prompt}) };
        let (status, param, message) = refusal(server.post(path, &with(base, rest.clone()))).await;
        assert_eq!((status, param.as_str()), (400, field), "{rest}: {message}");
        assert!(message.contains(&format!("for {field} with n=")) && message.contains("at most 1048576"), "{message}");
    }
}

/// The response has at most the bytes of the limit if it is not refused.
#[tokio::test]
async fn a_response_is_not_larger_than_estimated() {
    let server = limited().start().await;
    let prompt = "\u{1}x\"".repeat(300);
    let mut answered = 0;
    for n in [1, 4, 16, 64, 256] {
        for rest in [
            json!({"echo": true}),
            json!({"echo": true, "logprobs": 1}),
            json!({"echo": true, "logprobs": 20, "prompt_logprobs": 20}),
            json!({"prompt_logprobs": 20, "return_token_ids": true}),
            json!({"return_token_ids": true, "logprobs": 5, "max_tokens": 100, "ignore_eos": true}),
        ] {
            let base = json!({"prompt": prompt, "n": n, "max_tokens": 1});
            let response = server.completion(with(base, rest.clone())).send().await.unwrap();
            let (status, length) = (response.status().as_u16(), response.bytes().await.unwrap().len());
            answered += u32::from(status == 200);
            // The envelope and the fields of a choice count for nothing.
            assert!(status == 400 || length <= (1 << 20) + 512 * (n + 1), "n={n} {rest}: {length} bytes");
        }
    }
    assert!((10..25).contains(&answered), "{answered}");
}

/// The status line of the answer to a request with this head.
async fn status_line(server: &TestServer, head: &str) -> String {
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    socket.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_request_has_one_host() {
    let server = Setup::default().start().await;
    for (head, status) in [
        ("GET /health HTTP/1.1\r\nhost: x\r\n", "200 OK"),
        ("GET /health HTTP/1.1\r\nhost:\r\n", "200 OK"),
        ("GET /health HTTP/1.0\r\n", "200 OK"),
        ("GET /health HTTP/1.1\r\n", "400 Bad Request"),
        ("GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n", "400 Bad Request"),
        ("GET /health HTTP/1.1\r\nhost: a/b\r\n", "400 Bad Request"),
        ("GET /nowhere HTTP/1.1\r\n", "400 Bad Request"),
    ] {
        let line = status_line(&server, head).await;
        assert!(line.ends_with(status), "{head}: {line}");
    }
}
