//! Going away.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Setup, TestServer, joined, ok, parse_events};

const LONG: Duration = Duration::from_secs(600);

fn draining(lag: Duration, timeout: Duration, mut setup: Setup) -> Setup {
    setup.config.shutdown_lag = lag;
    setup.config.shutdown_timeout = timeout;
    setup
}

async fn ended(mut server: TestServer) -> TestServer {
    (&mut server.task).await.unwrap().unwrap();
    server
}

#[tokio::test]
async fn during_the_lag_it_is_not_ready_and_still_serves() {
    let server = draining(LONG, LONG, Setup::default()).start().await;
    server.shutdown.signal();
    server.until_unready().await;
    assert_eq!(server.get("/live").await.status(), 200);
    ok(server.chat(json!({}))).await;
    server.shutdown.signal();
    ended(server).await;
}

#[tokio::test]
async fn streams_finish() {
    let mut setup = Setup::saying(&[" one"]);
    setup.mock.step_latency = Duration::from_millis(5);
    let server = draining(Duration::ZERO, LONG, setup).start().await;
    let response = server.chat(json!({"stream": true, "max_tokens": 50})).send().await.unwrap();
    let idle = TcpStream::connect(server.address()).await.unwrap();
    server.shutdown.signal();
    let text = response.text().await.unwrap();
    assert_eq!(joined(&parse_events(&text), 0), " one".repeat(50));
    let server = ended(server).await;
    assert!(TcpStream::connect(server.address()).await.is_err(), "nobody listens any more");
    drop(idle);
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let server = draining(Duration::ZERO, LONG, Setup::default()).start().await;
    let mut idle = TcpStream::connect(server.address()).await.unwrap();
    idle.write_all(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = [0; 12];
    idle.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    server.shutdown.signal();
    ended(server).await;
    idle.read_to_end(&mut Vec::new()).await.unwrap();
}

#[tokio::test]
async fn what_is_left_when_time_is_up_ends_with_an_error() {
    // A timeout of zero ends all at once.
    for timeout in [Duration::ZERO, Duration::from_millis(30)] {
        let server = draining(Duration::ZERO, timeout, Setup::endless()).start().await;
        let stream = server.long(true).send().await.unwrap();
        let whole = tokio::spawn(server.long(false).send());
        server.running(2).await;
        server.shutdown.signal();
        let text = stream.text().await.unwrap();
        let error = concat!(
            r#"data: {"error":{"message":"The server is shutting down.","type":"Service Unavailable","#,
            r#""param":null,"code":503}}"#,
            "\n\ndata: [DONE]\n\n"
        );
        assert!(text.ends_with(error), "{text}");
        assert_eq!(whole.await.unwrap().unwrap().status(), 503);
        let server = ended(server).await;
        server.idle().await;
    }
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let server = draining(LONG, LONG, Setup::endless()).start().await;
    let mut stream = server.long(true).send().await.unwrap();
    stream.chunk().await.unwrap();
    server.shutdown.signal();
    server.shutdown.signal();
    let server = ended(server).await;
    server.idle().await;
    assert!(stream.text().await.is_err(), "cut off");
}

impl TestServer {
    async fn until_unready(&self) {
        let unready = async { while self.get("/health").await.status() != 503 {} };
        tokio::time::timeout(Duration::from_secs(60), unready).await.unwrap();
    }
}
