//! POST /v1/embeddings

use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok};

async fn embed(server: &TestServer, body: Value) -> Value {
    ok(server.post("/v1/embeddings", &body)).await
}

fn vector(body: &Value, index: usize) -> Vec<f64> {
    body["data"][index]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[tokio::test]
async fn texts_become_vectors_of_length_one_in_order() {
    let server = Setup::default().start().await;
    let both = embed(&server, json!({"input": ["first", "second"]})).await;
    assert_eq!((&both["id"], &both["object"], &both["model"]), (&json!("embd-r"), &json!("list"), &json!("mock")));
    assert_eq!(both["usage"]["prompt_tokens"], 11);
    for (index, text) in ["first", "second"].iter().enumerate() {
        assert_eq!(both["data"][index]["index"], index);
        let length: f64 = vector(&both, index).iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
        assert_eq!(vector(&embed(&server, json!({"input": text})).await, 0), vector(&both, index));
    }
    assert_ne!(vector(&both, 0), vector(&both, 1));
    let tokens = embed(&server, json!({"input": [[102, 105, 114, 115, 116]]})).await;
    assert_eq!(vector(&tokens, 0), vector(&both, 0));
    assert_eq!(server.metric("vllm:generation_tokens_total{engine=\"0\",model_name=\"mock\"}"), 0.0);
    server.idle().await;
}

#[tokio::test]
async fn vectors_may_be_short_and_packed() {
    let server = Setup::default().start().await;
    let plain = vector(&embed(&server, json!({"input": "x", "dimensions": 2})).await, 0);
    assert_eq!(plain.len(), 2);
    let packed = embed(&server, json!({"input": "x", "dimensions": 2, "encoding_format": "base64"})).await;
    // Eight bytes in Base64.
    assert_eq!(packed["data"][0]["embedding"].as_str().unwrap().len(), 12);
    let refused = server.post("/v1/embeddings", &json!({"input": "x", "dimensions": 9})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("Model 'mock' only supports dimensions in range [1, 8], got 9."));
    assert_eq!(
        server.metric("vllm:prompt_tokens_total{engine=\"0\",model_name=\"mock\"}"),
        2.0,
        "nothing was computed"
    );
}

#[tokio::test]
async fn messages_are_embedded_as_their_prompt() {
    let server = Setup::default().start().await;
    let body = embed(&server, json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    assert_eq!(body["usage"]["prompt_tokens"], 21);
    let long = server.post("/v1/embeddings", &json!({"input": "x".repeat(5000)})).send().await.unwrap();
    assert_eq!(long.status(), 400);
    let cut = embed(&server, json!({"input": "x".repeat(5000), "truncate_prompt_tokens": -1})).await;
    assert_eq!(cut["usage"]["prompt_tokens"], 4096);
}
