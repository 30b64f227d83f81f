//! The load generator against a scripted server on a socket.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::load::{RampUp, RampUpStrategy};

/// What the scripted server answers to request number n.
type Script = fn(usize) -> String;

async fn serve(script: Script) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let (count, served) = (Arc::clone(&connections), Arc::new(AtomicUsize::new(0)));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(answer(stream, script, Arc::clone(&served)));
        }
    });
    (url, connections)
}

async fn answer(mut stream: TcpStream, script: Script, served: Arc<AtomicUsize>) {
    let mut received = Vec::new();
    loop {
        let Some(end) = end_of_request(&received) else {
            match stream.read_buf(&mut received).await {
                Ok(n) if n > 0 => continue,
                _ => return,
            }
        };
        received.drain(..end);
        let text = script(served.fetch_add(1, Ordering::Relaxed));
        if stream.write_all(text.as_bytes()).await.is_err() || text.contains("connection: close") {
            return;
        }
    }
}

/// Length of the request at the start of `bytes`, if it is whole.
fn end_of_request(bytes: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(bytes).unwrap();
    let (head, _) = text.split_once("\r\n\r\n")?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let end = head.len() + 4 + length.parse::<usize>().unwrap();
    (bytes.len() >= end).then_some(end)
}

fn events(payloads: &[&str]) -> String {
    let mut out =
        String::from("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    for payload in payloads {
        let event = format!("data: {payload}\n\n");
        // Every event in two chunks, cut in the middle.
        let (a, b) = event.split_at(event.len() / 2);
        for part in [a, b] {
            out += &format!("{:x}\r\n{part}\r\n", part.len());
        }
    }
    out + "0\r\n\r\n"
}

fn json(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

const TOKEN: &str = r#"{"choices":[{"index":0,"text":" a"}]}"#;
const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}"#;

fn config(base_url: String) -> LoadConfig {
    LoadConfig {
        base_url,
        requests: 10,
        max_concurrency: Some(2),
        input_len: 4,
        output_len: 3,
        ..LoadConfig::default()
    }
}

#[tokio::test]
async fn streams_are_counted_from_usage_over_kept_alive_connections() {
    let (url, connections) = serve(|_| events(&[TOKEN, TOKEN, TOKEN, USAGE, "[DONE]"])).await;
    let report = run(&LoadConfig { warmups: 1, ..config(url) }).await.unwrap();
    assert_eq!((report.completed, report.failed), (10, 0));
    assert_eq!((report.total_input_tokens, report.total_output_tokens), (90, 30));
    assert!(report.records.iter().all(|r| r.ttft.is_some() && r.itl.len() == 2));
    assert_eq!(connections.load(Ordering::Relaxed), 3, "two workers and the warm-up");
}

#[tokio::test]
async fn a_connection_can_be_for_one_request_only() {
    let (url, connections) = serve(|_| events(&[TOKEN, TOKEN, TOKEN, USAGE, "[DONE]"])).await;
    let report = run(&LoadConfig { warmups: 2, reconnect: true, ..config(url) }).await.unwrap();
    assert_eq!((report.completed, report.failed), (10, 0));
    assert_eq!(connections.load(Ordering::Relaxed), 12);
}

#[tokio::test]
async fn whole_answers_have_a_latency_only() {
    let (url, _) =
        serve(|_| json("200 OK", r#"{"choices":[{}],"usage":{"prompt_tokens":2,"completion_tokens":3}}"#)).await;
    let report = run(&LoadConfig { stream: false, endpoint: Endpoint::Chat, ..config(url) }).await.unwrap();
    assert_eq!((report.completed, report.total_output_tokens), (10, 30));
    assert!(report.ttft.is_none() && report.itl.is_none() && report.e2el.is_some());
}

#[tokio::test]
async fn every_kind_of_failure_is_counted_and_explained() {
    let script: Script = |n| match n {
        0 => json("429 Too Many Requests", r#"{"error":{"message":"busy"}}"#),
        1 => events(&[TOKEN, r#"{"error":{"message":"the engine died"}}"#, "[DONE]"]),
        2 => events(&[TOKEN, USAGE]),
        3 => events(&["{", "[DONE]"]),
        4 => events(&[TOKEN, "[DONE]"]),
        5 => {
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ncontent-length: 99\r\n\r\ndata"
                .into()
        }
        6 => "nonsense\r\nconnection: close\r\n\r\n".into(),
        _ => events(&[TOKEN, TOKEN, TOKEN, USAGE, "[DONE]"]),
    };
    let (url, _) = serve(script).await;
    let report = run(&LoadConfig { max_concurrency: Some(1), ..config(url) }).await.unwrap();
    assert_eq!((report.completed, report.failed), (3, 7));
    let errors: Vec<&str> = report.records.iter().filter_map(|r| r.error.as_deref()).collect();
    let expected = ["busy", "engine died", "without [DONE]", "not JSON", "no usage", "", ""];
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.contains(expected), "{error} / {expected}");
    }
}

#[tokio::test]
async fn an_unreachable_server_fails_the_requests_not_the_run() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let report = run(&config(url.clone())).await.unwrap();
    assert_eq!(report.failed, 10);
    assert!(matches!(run(&LoadConfig { warmups: 1, ..config(url) }).await, Err(LoadError::WarmUp(_))));
}

#[tokio::test]
async fn settings_out_of_range_are_refused() {
    let good = config("http://127.0.0.1:1".into());
    for bad in [
        LoadConfig { requests: 0, ..good.clone() },
        LoadConfig { max_concurrency: Some(0), ..good.clone() },
        LoadConfig { request_rate: Some(0.0), ..good.clone() },
        LoadConfig { request_rate: Some(f64::NAN), ..good.clone() },
        LoadConfig { percentiles: vec![101.0], ..good.clone() },
        LoadConfig { burstiness: 0.0, ..good.clone() },
        LoadConfig { ramp_up: Some(RampUp { strategy: RampUpStrategy::Linear, start: 0.0, end: 1.0 }), ..good.clone() },
        LoadConfig {
            endpoint: Endpoint::Chat,
            samples: [Sample { prompt: Prompt::Tokens(vec![1]), output_len: 1 }].into(),
            ..good.clone()
        },
    ] {
        assert!(matches!(run(&bad).await, Err(LoadError::Config(_))), "{bad:?}");
    }
}
