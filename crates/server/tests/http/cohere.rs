//! POST /v2/embed

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use octavo_server::{Matryoshka, PoolingKind};
use serde_json::{Value, json};

use crate::pooling::{normalised, numbers, prompt, raw, refused};
use crate::support::{Setup, TestServer, ok};

async fn embed(server: &TestServer, body: Value) -> Value {
    ok(server.post("/v2/embed", &body)).await
}

fn vector(text: &str) -> Vec<f32> {
    normalised(&raw(&prompt(text), 8))
}

#[tokio::test]
async fn vectors_come_in_the_requested_encodings() {
    let server = Setup::embedder().start().await;
    let body = embed(&server, json!({"model": "mock", "texts": ["a", "b"]})).await;
    let keys: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "embeddings", "texts", "meta", "response_type"]);
    assert_eq!((&body["id"], &body["texts"]), (&json!("embd-r"), &json!(["a", "b"])));
    assert_eq!(body["response_type"], "embeddings_by_type");
    assert_eq!(
        body["meta"],
        json!({"api_version": {"version": "2"}, "billed_units": {"input_tokens": 6, "image_tokens": 0}})
    );
    assert_eq!(body["embeddings"].as_object().unwrap().len(), 1);
    for (index, text) in ["a", "b"].iter().enumerate() {
        assert_eq!(numbers(&body["embeddings"]["float"][index]), vector(text));
    }
    let types = ["binary", "ubinary", "base64"];
    let body = embed(&server, json!({"texts": ["a"], "embedding_types": types})).await;
    let bits = vector("a").iter().fold(0_u8, |byte, &x| byte << 1 | u8::from(x >= 0.0));
    let bytes: Vec<u8> = vector("a").iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(
        body["embeddings"],
        json!({"binary": [[i32::from(bits) - 128]], "ubinary": [[bits]], "base64": [BASE64_STANDARD.encode(bytes)]})
    );
    server.idle().await;
}

#[tokio::test]
async fn a_type_of_input_is_a_prompt_of_the_model() {
    let server = Setup::embedder().start().await;
    let ask = |name: &str| json!({"texts": ["text"], "input_type": name});
    assert_eq!(
        refused(&server, "/v2/embed", ask("query"), 400).await,
        "Unsupported input_type 'query'. This model does not define any input_type prompt prefixes."
    );
    let mut setup = Setup::embedder();
    setup.pools().prompts = [("query", "Query: "), ("document", "")].map(|(a, b)| (a.into(), b.into())).into();
    let server = setup.start().await;
    for (name, text) in [("query", "Query: text"), ("document", "text")] {
        assert_eq!(numbers(&embed(&server, ask(name)).await["embeddings"]["float"][0]), vector(text));
    }
    assert_eq!(
        refused(&server, "/v2/embed", ask("other"), 400).await,
        "Unsupported input_type 'other'. Supported values: document, query"
    );
    let contents = json!({"inputs": [{"content": [{"type": "text", "text": "hi"}]}], "input_type": "query"});
    let body = embed(&server, contents).await;
    // A message of the system and one of the user.
    assert_eq!(body["meta"]["billed_units"]["input_tokens"], (9 + 7 + 1) + (7 + 2 + 1) + 1 - 1);
    assert!(body.get("texts").is_none());
}

#[tokio::test]
async fn texts_are_truncated_unless_the_client_refuses() {
    let server = Setup::embedder().start().await;
    for (rest, text) in [
        (json!({"max_tokens": 5}), "abc"),
        (json!({"max_tokens": 5, "truncate": "END"}), "abc"),
        (json!({"max_tokens": 5, "truncate": "START"}), "def"),
        (json!({"max_tokens": 8, "truncate": "NONE"}), "abcdef"),
    ] {
        let body = crate::support::with(json!({"texts": ["abcdef"]}), rest);
        assert_eq!(numbers(&embed(&server, body.clone()).await["embeddings"]["float"][0]), vector(text), "{body}");
    }
    let long = embed(&server, json!({"texts": ["x".repeat(9000)]})).await;
    assert_eq!(long["meta"]["billed_units"]["input_tokens"], 4096);
    assert_eq!(
        refused(&server, "/v2/embed", json!({"texts": ["abcdef"], "max_tokens": 7, "truncate": "NONE"}), 400).await,
        "Input of 8 tokens exceeds max_tokens=7 with truncate=NONE. Set truncate to END or START to allow truncation."
    );
    let untruncated = json!({"texts": ["x".repeat(9000)], "truncate": "NONE"});
    assert!(refused(&server, "/v2/embed", untruncated, 400).await.contains("maximum context length is 4096"));
}

#[tokio::test]
async fn dimensions_are_those_of_the_model() {
    let mut setup = Setup::embedder();
    setup.pools().kind = PoolingKind::Embedder { normalise: true, matryoshka: Matryoshka::Dimensions(vec![4, 8]) };
    let server = setup.start().await;
    let body = embed(&server, json!({"texts": ["a"], "output_dimension": 4})).await;
    assert_eq!(numbers(&body["embeddings"]["float"][0]), normalised(&raw(&prompt("a"), 8)[..4]));
    let ask = |rest: Value| crate::support::with(json!({"texts": ["a"]}), rest);
    for (body, message) in [
        (ask(json!({"output_dimension": 5})), "Model 'mock' only supports Matryoshka dimensions [4, 8], got 5."),
        (
            ask(json!({"output_dimension": 4, "embedding_types": ["binary"]})),
            "Embedding dimension must be a multiple of 8 for binary embedding types, but got 4.",
        ),
        (json!({}), "Exactly one of texts, images, or inputs must be provided, and it must be non-empty"),
        (json!({"images": ["data:"]}), "At most 0 image(s) may be provided in one prompt."),
    ] {
        assert_eq!(refused(&server, "/v2/embed", body, 400).await, message);
    }
}
