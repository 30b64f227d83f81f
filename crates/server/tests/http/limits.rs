//! What a request may cost in time, and what a connection may cost in memory.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::{Setup, TestServer, joined, ok, parse_events};
use crate::wire::exchange;

const ABORTED: &str = r#"vllm:request_success_total{engine="0",finished_reason="abort",model_name="mock"}"#;

#[tokio::test]
async fn the_load_is_what_runs() {
    for track in [true, false] {
        let mut setup = Setup::endless();
        setup.config.track_load = track;
        let server = setup.start().await;
        let load = async || server.get("/load").await.json::<Value>().await.unwrap()["server_load"].as_u64().unwrap();
        assert_eq!(load().await, 0);
        let mut stream = server.long(true).send().await.unwrap();
        stream.chunk().await.unwrap();
        let whole = tokio::spawn(server.long(false).send());
        server.running(2).await;
        assert_eq!(load().await, if track { 2 } else { 0 });
        whole.abort();
        drop(stream);
        server.idle().await;
        let gone = async { while load().await > 0 {} };
        tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
        server.chat(json!({"n": 0})).send().await.unwrap();
        server.get("/v1/models").await;
        assert_eq!(load().await, 0, "what has ended, or generates nothing");
    }
}

#[tokio::test]
async fn silent_streams_carry_comments() {
    let (mut setup, gate) = Setup::saying(&["Hello", " world", "<|im_end|>"]).gated();
    setup.config.sse_keep_alive = Some(Duration::from_millis(20));
    let server = setup.start().await;
    gate.step();
    let mut response = server.chat(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while text.matches(": keep-alive\n\n").count() < 3 {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    assert!(text.starts_with("data: "), "only after the first event: {text}");
    drop(gate);
    text.push_str(&response.text().await.unwrap());
    assert_eq!(joined(&parse_events(&text.replace(": keep-alive\n\n", "")), 0), "Hello world");
    let whole = ok(server.chat(json!({}))).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "Hello world");
}

#[tokio::test]
async fn queued_and_prefilling_streams_carry_comments() {
    let (mut setup, gate) = Setup::saying(&["Hello", " world", "<|im_end|>"]).gated();
    setup.config.sse_keep_alive = Some(Duration::from_millis(20));
    setup.engine.max_num_seqs = 1;
    let server = setup.start().await;
    // The gate holds the prefill of the first request, and the second one waits for its place.
    let messages = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": true});
    let mut streams = vec![];
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let mut response = server.post(path, &messages).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        let mut text = String::new();
        while text.matches(": keep-alive\n\n").count() < 3 {
            text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
        }
        assert_eq!(text.replace(": keep-alive\n\n", ""), "", "no token is sent yet");
        streams.push(response);
    }
    assert_eq!(server.handle.status().waiting, 1);
    drop(gate);
    let mut texts = vec![];
    for response in streams {
        texts.push(response.text().await.unwrap().replace(": keep-alive\n\n", ""));
    }
    assert_eq!(joined(&parse_events(&texts[0]), 0), "Hello world");
    assert!(texts[1].starts_with("event: message_start\n"), "{}", texts[1]);
    assert!(texts[1].contains(" world") && texts[1].contains("event: message_stop\n"), "{}", texts[1]);
}

#[tokio::test]
async fn a_stream_that_fails_after_a_comment_ends_with_an_error_event() {
    let (mut setup, gate) = Setup::endless().gated();
    setup.config.sse_keep_alive = Some(Duration::from_millis(20));
    setup.config.shutdown_timeout = Duration::ZERO;
    let server = setup.start().await;
    let mut streams = vec![];
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}], "stream": true})),
        ("/v1/responses", json!({"input": "hi", "stream": true})),
    ] {
        let mut response = server.post(path, &body).send().await.unwrap();
        assert_eq!(response.chunk().await.unwrap().unwrap(), ": keep-alive\n\n");
        streams.push(response);
    }
    server.shutdown.signal();
    drop(gate);
    let mut texts = vec![];
    for response in streams {
        texts.push(response.text().await.unwrap().replace(": keep-alive\n\n", ""));
    }
    let last = parse_events(&texts[0]).pop().unwrap();
    assert_eq!(last["error"]["code"], 503, "{last}");
    assert!(texts[1].starts_with("event: response.created\n"), "{}", texts[1]);
    assert!(texts[1].contains("event: response.failed\n"), "{}", texts[1]);
}

#[tokio::test]
async fn without_the_interval_a_stream_begins_with_its_first_token() {
    let (setup, gate) = Setup::saying(&["Hello", "<|im_end|>"]).gated();
    let server = setup.start().await;
    let mut waiting = tokio::spawn(server.chat(json!({"stream": true})).send());
    let early = tokio::time::timeout(Duration::from_millis(100), &mut waiting).await;
    assert!(early.is_err(), "no token is drawn yet");
    drop(gate);
    let text = waiting.await.unwrap().unwrap().text().await.unwrap();
    assert_eq!(joined(&parse_events(&text), 0), "Hello");
}

#[tokio::test]
async fn gateways_may_ask_for_the_load_in_a_header() {
    let (mut setup, gate) = Setup::saying(&["Hello", " world", "<|im_end|>"]).gated();
    setup.config.sse_keep_alive = Some(Duration::from_millis(20));
    setup.engine.max_num_seqs = 1;
    let server = setup.start().await;
    gate.step();
    let ask = |format: &str| server.chat(json!({"stream": true})).header("Endpoint-Load-Metrics-Format", format);
    let report = |response: &reqwest::Response| {
        response.headers().get("endpoint-load-metrics").map(|value| value.to_str().unwrap().to_owned())
    };
    let running = ask("text").send().await.unwrap();
    assert!(report(&running).unwrap().starts_with("TEXT named_metrics.kv_cache_usage_perc=0."), "{running:?}");
    server.running(1).await;
    let waiting = ask("JSON").send().await.unwrap();
    let text = report(&waiting).unwrap();
    let body: serde_json::Value = serde_json::from_str(text.strip_prefix("JSON ").unwrap()).unwrap();
    assert_eq!(body["named_metrics"]["num_requests_waiting"], 1.0);
    assert!(body["named_metrics"]["kv_cache_usage_perc"].as_f64().unwrap() > 0.0);
    drop(gate);
    drop((running, waiting));
    server.idle().await;
    let idle = ask("TEXT").send().await.unwrap();
    assert!(report(&idle).unwrap().contains("named_metrics.num_requests_waiting=0.0"));
    assert_eq!(report(&ask("BIN").send().await.unwrap()), None);
    assert_eq!(report(&server.chat(json!({})).send().await.unwrap()), None);
    assert_eq!(report(&ask("TEXT").json(&json!({"messages": 5})).send().await.unwrap()), None, "no report of errors");
}

/// Streams more than any buffer holds, to a client that reads nothing.
async fn stalled_reader(server: &TestServer) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut socket = socket.connect(server.address().parse().unwrap()).await.unwrap();
    let body = r#"{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 8}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket
}

fn talkative(stall: Duration) -> Setup {
    let mut setup = Setup::endless();
    setup.mock.step_latency = Duration::from_millis(5);
    setup.config.connection.write_stall_timeout = stall;
    setup
}

#[tokio::test]
async fn a_reader_that_stops_is_dropped_and_its_request_aborted() {
    let server = talkative(Duration::from_millis(300)).start().await;
    let mut stalled = stalled_reader(&server).await;
    server.running(8).await;
    // Others are served meanwhile, and a slow one is not taken for stalled.
    let slow = tokio::spawn(server.chat(json!({"stream": true, "max_tokens": 200, "ignore_eos": true})).send());
    let mut slow = slow.await.unwrap().unwrap();
    while slow.chunk().await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ok(server.chat(json!({"max_tokens": 5}))).await;
    server.idle().await;
    assert_eq!(server.metric(ABORTED), 8.0, "long before its 4000 tokens");
    // The rest is what the kernel still had, and then the connection is gone.
    let mut rest = Vec::new();
    let _ = stalled.read_to_end(&mut rest).await;
    assert!(!rest.ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn heads_are_bounded_in_bytes_and_in_fields() {
    let many = |count: usize| -> Vec<(String, String)> { (0..count).map(|n| (format!("x-{n}"), "y".into())).collect() };
    let ask = async |server: &TestServer, fields: Vec<(String, String)>| {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (&**name, &**value)).collect();
        let socket = TcpStream::connect(server.address()).await.unwrap();
        // Without an answer: the server hung up on a head that was still being sent, which may reset the connection.
        exchange(socket, "GET /live", &fields, "").await.map_or(431, |answer| answer.status)
    };
    let server = Setup::default().start().await;
    assert_eq!(ask(&server, many(250)).await, 200);
    assert_eq!(ask(&server, many(300)).await, 431);
    assert_eq!(ask(&server, vec![("x-long".into(), "y".repeat(10_000))]).await, 200);
    assert_eq!(ask(&server, vec![("x-long".into(), "y".repeat(200_000))]).await, 431);
    let mut setup = Setup::default();
    setup.config.connection.max_headers = usize::MAX;
    setup.config.connection.max_head_bytes = 1 << 20;
    let server = setup.start().await;
    assert_eq!(ask(&server, many(9_000)).await, 200);
    assert_eq!(ask(&server, many(11_000)).await, 431);
    let mut setup = Setup::default();
    setup.config.connection.max_headers = 10;
    let server = setup.start().await;
    assert_eq!(ask(&server, many(9)).await, 431, "the client's own two make eleven");
    assert_eq!(ask(&server, many(8)).await, 200);
}

#[tokio::test]
async fn connections_beyond_the_limit_get_only_probes() {
    let mut setup = Setup::default();
    setup.config.connection.max_connections = 2;
    let server = setup.start().await;
    // Each has sent a part of a head, and the answers below show that both were accepted before.
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut socket = TcpStream::connect(server.address()).await.unwrap();
        socket.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n").await.unwrap();
        held.push(socket);
    }
    let refused = server.raw("GET /v1/models", &[]).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")), "{refused:?}");
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(refused.body.contains("too many open connections"), "{}", refused.body);
    for path in ["/live", "/health", "/metrics"] {
        assert_eq!(server.raw(&format!("GET {path}"), &[]).await.status, 200, "{path}");
    }
    // The connections within the limit go on, and make room at their end.
    let mut first = held.remove(0);
    first.write_all(b"connection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    first.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let served = async { while server.raw("GET /v1/models", &[]).await.status != 200 {} };
    tokio::time::timeout(Duration::from_secs(60), served).await.unwrap();
}

#[tokio::test]
async fn any_number_of_connections_beyond_the_limit_leaves_the_served_ones_alone() {
    let mut setup = Setup::default();
    setup.config.connection.max_connections = 1;
    let server = setup.start().await;
    let mut held = TcpStream::connect(server.address()).await.unwrap();
    held.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n").await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(server.address()).await.unwrap());
    }
    let ended = async {
        let mut byte = [0];
        for socket in &mut silent {
            // Closed at once or after the short time limit, which may reset the connection.
            while socket.read(&mut byte).await.is_ok_and(|read| read > 0) {}
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ended).await.unwrap();
    held.write_all(b"connection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    held.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Begins the upload of `announced` bytes, of which it sends `sent`.
async fn upload(server: &TestServer, announced: usize, sent: usize) -> TcpStream {
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {announced}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(&vec![b' '; sent]).await.unwrap();
    socket
}

/// The response on a connection that the server then closes or keeps.
async fn answered(mut socket: TcpStream) -> String {
    let mut answer = vec![0; 4096];
    let mut len = 0;
    while !answer[..len].ends_with(b"}") {
        match socket.read(&mut answer[len..]).await.unwrap() {
            0 => break,
            more => len += more,
        }
    }
    String::from_utf8_lossy(&answer[..len]).into_owned()
}

#[tokio::test]
async fn stalled_uploads_give_way_to_a_body_of_80_kb() {
    let mut setup = Setup::default();
    setup.config.connection.max_buffered_bytes = 6 << 20;
    setup.config.connection.body_timeout = Duration::from_secs(3600);
    setup.config.connection.body_stall_timeout = Duration::from_secs(3600);
    let server = setup.start().await;
    // With its free 64 KiB, each fills a sixth of the budget.
    let stalled = async || upload(&server, 80 << 20, (1 << 20) + (64 << 10)).await;
    let mut uploads = Vec::new();
    for _ in 0..6 {
        uploads.push(stalled().await);
    }
    let body = json!({"prompt": "x", "max_tokens": 1, "user": "u".repeat(80_000)});
    let gave_way = async {
        loop {
            let status = server.post("/v1/completions", &body).send().await.unwrap().status();
            for upload in &mut uploads {
                let mut answer = vec![0; 4096];
                let Ok(len) = upload.try_read(&mut answer) else { continue };
                let answer = String::from_utf8_lossy(&answer[..len]).into_owned();
                if status == 200 && answer.starts_with("HTTP/1.1 408 ") {
                    return answer;
                }
                // The small body was faster than the end of this upload.
                *upload = stalled().await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let answer = tokio::time::timeout(Duration::from_secs(120), gave_way).await.expect("they stay for an hour");
    assert!(answer.contains("other requests needed its memory"), "{answer}");
}

#[tokio::test]
async fn a_large_upload_keeps_a_minimum_rate() {
    let mut setup = Setup::default();
    setup.config.connection.body_timeout = Duration::from_secs(3600);
    setup.config.connection.body_stall_timeout = Duration::from_millis(100);
    let server = setup.start().await;
    let small = upload(&server, 100, 10).await;
    let answer = answered(upload(&server, 1 << 20, 100 << 10).await).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("less than 1024 bytes per second"), "{answer}");
    // A body without shared memory may take its time.
    let mut small = small;
    small.write_all(&[b' '; 90]).await.unwrap();
    assert!(answered(small).await.starts_with("HTTP/1.1 400 "), "it is whole, but not JSON");
}
