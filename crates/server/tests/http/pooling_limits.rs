//! Requests for vectors and scores that wait, end early or are too many.

use std::time::Duration;

use octavo_text::{SpecialTokens, Tokenizer};
use serde_json::{Value, json};

use crate::pooling::refused;
use crate::support::{Setup, ok};

#[tokio::test]
async fn they_are_counted_while_they_run_and_end_with_their_client() {
    for (path, body) in [
        ("/v1/embeddings", json!({"input": ["a", "b"]})),
        ("/v2/embed", json!({"texts": ["a", "b"]})),
        ("/pooling", json!({"input": ["a", "b"], "task": "token_embed"})),
        ("/score", json!({"queries": "a", "documents": "b"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
    ] {
        let (mut setup, gate) = Setup::embedder().gated();
        setup.config.track_load = true;
        let server = setup.start().await;
        let load = async || server.get("/load").await.json::<Value>().await.unwrap()["server_load"].as_u64().unwrap();
        let running = tokio::spawn(server.post(path, &body).send());
        server.begun().await;
        assert_eq!(load().await, 1, "{path}");
        running.abort();
        let gone = async { while load().await > 0 {} };
        tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
        drop(gate);
        server.idle().await;
    }
}

#[tokio::test]
async fn a_shutdown_ends_them_with_an_error() {
    let mut setup = Setup::embedder();
    setup.mock.step_latency = Duration::from_millis(300);
    setup.config.shutdown_timeout = Duration::ZERO;
    let server = setup.start().await;
    let request = tokio::spawn(server.post("/pooling", &json!({"input": vec!["x"; 3]})).send());
    server.begun().await;
    server.shutdown.signal();
    let response = request.await.unwrap().unwrap();
    assert_eq!(response.status(), 503);
    assert!(response.text().await.unwrap().contains("The server is shutting down."));
}

#[tokio::test]
async fn if_one_sequence_is_too_many_none_runs() {
    let (mut setup, gate) = Setup::embedder().gated();
    setup.engine.max_queued_requests = 2;
    let server = setup.start().await;
    let response = server.post("/v1/embeddings", &json!({"input": vec!["x"; 8]})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"1".parse().unwrap()));
    drop(gate);
    server.idle().await;
    assert_eq!(ok(server.post("/v1/embeddings", &json!({"input": "x"}))).await["usage"]["prompt_tokens"], 3);
}

/// BERT's tokenizer drops white space and replaces a long word by one token.
#[tokio::test]
async fn a_long_text_may_have_few_tokens() {
    let kinds: Value = serde_json::from_str(include_str!("../../../text/tests/data/pairs.json")).unwrap();
    let mut setup = Setup::embedder();
    let json = kinds["word_piece"]["tokenizer"].to_string();
    setup.tokenizer = Some(Tokenizer::from_json(json.as_bytes(), SpecialTokens::default()).unwrap());
    let server = setup.start().await;
    let tokens = async |text: String| {
        ok(server.post("/v1/embeddings", &json!({"input": text}))).await["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(format!("a{}a", " ".repeat(1 << 17))).await, 4);
    assert_eq!(tokens("x".repeat(1 << 17)).await, 3);
    for (path, body) in [
        ("/v1/embeddings", json!({"input": "a ".repeat(1 << 17)})),
        ("/score", json!({"queries": "q", "documents": ["a ".repeat(1 << 17)]})),
    ] {
        let message = refused(&server, path, body, 400).await;
        assert!(message.contains("your prompt contains at least 4097 input tokens"), "{message}");
    }
}

#[tokio::test]
async fn results_keep_the_order_of_their_texts() {
    let mut setup = Setup::embedder();
    setup.engine.max_num_seqs = 3;
    let server = setup.start().await;
    let texts: Vec<String> = (0..40).map(|index| "x".repeat(1 + index * 7 % 40)).collect();
    let together = ok(server.post("/v1/embeddings", &json!({"input": texts}))).await;
    for (index, text) in texts.iter().enumerate() {
        let alone = ok(server.post("/v1/embeddings", &json!({"input": text}))).await;
        assert_eq!(together["data"][index]["embedding"], alone["data"][0]["embedding"], "{index}");
    }
    server.idle().await;
}
