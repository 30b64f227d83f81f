//! Many clients, and slow ones.

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Setup, joined, ok, parse_events};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_streams_at_once_are_each_what_they_are_alone() {
    let server = Setup::varied().start().await;
    let rest = |seed: usize, stream: bool| json!({"seed": seed % 10, "max_tokens": 20, "stream": stream});
    let mut alone = Vec::new();
    for seed in 0..10 {
        let body = ok(server.chat(rest(seed, false))).await;
        alone.push(body["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
    }
    let streams = join_all((0..320).map(|seed| crate::support::events(server.chat(rest(seed, true))))).await;
    for (seed, events) in streams.iter().enumerate() {
        assert_eq!(joined(events, 0), alone[seed % 10]);
    }
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_idle_connections_leave_room_for_one_more() {
    let server = Setup::default().start().await;
    let idle = join_all((0..500).map(|_| TcpStream::connect(server.address()))).await;
    assert!(idle.iter().all(Result::is_ok));
    ok(server.chat(json!({}))).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_delays_nobody_and_loses_nothing() {
    let mut setup = Setup::saying(&[" one"]);
    setup.mock.step_latency = Duration::from_micros(50);
    let server = setup.start().await;
    let mut slow = TcpStream::connect(server.address()).await.unwrap();
    let body = r#"{"prompt": "x", "max_tokens": 3000, "stream": true}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    server.running(1).await;
    ok(server.completion(json!({"max_tokens": 100}))).await;
    server.idle().await;
    let mut first = [0; 64];
    for byte in &mut first {
        *byte = slow.read_u8().await.unwrap();
    }
    assert!(first.starts_with(b"HTTP/1.1 200 OK\r\n"));
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).await.unwrap();
    let rest = String::from_utf8(rest).unwrap();
    assert_eq!(rest.matches(" one").count(), 3000);
    assert!(rest.contains("data: [DONE]"));
}

#[tokio::test]
async fn connections_are_kept_alive_and_pipelined() {
    let server = Setup::default().start().await;
    let mut socket = TcpStream::connect(server.address()).await.unwrap();
    let body = r#"{"prompt": "x"}"#;
    let request = |connection: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let three = [request("keep-alive"), request("keep-alive"), request("close")].concat();
    socket.write_all(three.as_bytes()).await.unwrap();
    let mut answers = String::new();
    socket.read_to_string(&mut answers).await.unwrap();
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 3);
    assert_eq!(answers.matches("Hello world!").count(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_prompts_do_not_starve_small_requests() {
    let server = Setup::default().start().await;
    let huge = json!({"prompt": "x ".repeat(1 << 20)});
    let flood = (0..8).map(|_| server.post("/v1/completions", &huge).send());
    let small = (0..20).map(|_| ok(server.chat(json!({"stream": false}))));
    let (refused, _) = tokio::join!(join_all(flood), join_all(small));
    assert!(refused.into_iter().all(|response| response.unwrap().status() == 400));
    let text = server.chat(json!({"stream": true})).send().await.unwrap().text().await.unwrap();
    parse_events(&text);
}
