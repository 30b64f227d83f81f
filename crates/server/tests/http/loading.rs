//! Before there is an engine.

use octavo_server::{ConnectionLimits, serve_while_loading};
use octavo_sockets::Listener;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::net::TcpListener;
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

    // An idle connection of the client's is closed, one that comes later waits for the next reader of the listener.
    loaded.send("model").unwrap();
    let (loaded, listener) = serving.await.unwrap();
    assert_eq!(loaded, "model");
    let later = client.get(format!("{url}/live")).send();
    let answer = serve_while_loading(&listener, ConnectionLimits::default(), later).await.unwrap();
    assert_eq!(answer.unwrap().status(), 200);
}
