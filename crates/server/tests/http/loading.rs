//! Before there is an engine.

use std::time::Duration;

use octavo_server::{ConnectionLimits, serve_while_loading};
use octavo_sockets::Listener;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

#[tokio::test]
async fn probes_are_answered_while_the_model_loads() {
    let listener = Listener::from(TcpListener::bind("127.0.0.1:0").await.unwrap());
    let url = listener.to_string();
    let (loaded, load) = oneshot::channel();
    let serving = tokio::spawn(async move {
        let loaded = serve_while_loading(&listener, ConnectionLimits::default(), load).await.unwrap().unwrap();
        (loaded, listener)
    });
    let client = Client::builder().no_proxy().build().unwrap();
    assert_eq!(client.get(format!("{url}/live")).send().await.unwrap().status(), 200);
    for path in ["/health", "/ping", "/v1/models", "/metrics"] {
        assert_eq!(client.get(format!("{url}{path}")).send().await.unwrap().status(), 503, "{path}");
    }
    let chat = client.post(format!("{url}/v1/chat/completions")).json(&json!({"messages": []})).send().await.unwrap();
    assert_eq!(chat.status(), 503);
    let body: Value = chat.json().await.unwrap();
    let error = json!({"message": "The model is still being loaded.", "type": "Service Unavailable", "param": null,
        "code": 503});
    assert_eq!(body, json!({"error": error}));

    // The body comes after the headers, from a client that reads the answer only then.
    let mut socket = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    let (head, body) = ("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n", vec![b' '; 1 << 20]);
    socket.write_all(format!("{head}content-length: {}\r\n\r\n", body.len()).as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    socket.write_all(&body).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");

    // An idle connection of the client's is closed, one that comes later waits for the next reader of the listener.
    loaded.send("model").unwrap();
    let (loaded, listener) = serving.await.unwrap();
    assert_eq!(loaded, "model");
    let later = client.get(format!("{url}/live")).send();
    let answer = serve_while_loading(&listener, ConnectionLimits::default(), later).await.unwrap();
    assert_eq!(answer.unwrap().status(), 200);
}
