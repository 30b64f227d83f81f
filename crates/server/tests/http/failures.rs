//! What clients see when the engine is busy or broken.

use octavo_engine::mock::{FailurePoint, MockFailure};
use serde_json::{Value, json};

use crate::support::{Setup, ok};

fn failing(step: u64, fatal: bool) -> Setup {
    let mut setup = Setup::default();
    setup.mock.failures = vec![MockFailure { step, at: FailurePoint::Wait, fatal }];
    setup
}

const BODY: &str = concat!(
    r#"{"error":{"message":"The server had an error while processing your request.","#,
    r#""type":"InternalServerError","param":null,"code":500}}"#
);

#[tokio::test]
async fn a_step_that_fails_before_the_first_token_is_500() {
    for stream in [false, true] {
        let server = failing(1, false).start().await;
        let response = server.chat(json!({"stream": stream})).send().await.unwrap();
        assert_eq!(response.status(), 500);
        assert_eq!(response.text().await.unwrap(), BODY);
        ok(server.chat(json!({}))).await;
        assert_eq!(server.get("/health").await.status(), 200, "one failed step is no failed engine");
        server.idle().await;
    }
}

#[tokio::test]
async fn a_step_that_fails_later_ends_the_stream_with_an_error() {
    let (setup, gate) = failing(3, false).gated();
    let server = setup.start().await;
    gate.step();
    let response = server.chat(json!({"stream": true})).send().await.unwrap();
    assert_eq!(response.status(), 200, "the first token is out");
    drop(gate);
    let text = response.text().await.unwrap();
    assert!(text.ends_with(&format!("data: {BODY}\n\ndata: [DONE]\n\n")), "{text}");
    assert!(text.contains("Hello"));
    server.idle().await;
}

#[tokio::test]
async fn a_dead_engine_is_500_and_asks_to_be_restarted() {
    let server = failing(1, true).start().await;
    assert_eq!(server.chat(json!({})).send().await.unwrap().status(), 500);
    server.until("the engine is dead", |s| s.handle.status().state == octavo_engine::EngineState::Failed).await;
    let response = server.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(response.text().await.unwrap(), BODY);
    assert_eq!(server.get("/health").await.status(), 503);
    assert_eq!(server.get("/ping").await.status(), 503);
    assert_eq!(server.get("/live").await.status(), 503);
    assert_eq!(server.get("/metrics").await.status(), 200);
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_time_to_come_back() {
    let mut setup = Setup::endless();
    setup.engine.max_num_seqs = 1;
    setup.engine.max_queued_requests = 1;
    let server = setup.start().await;
    let running = server.long(true).send().await.unwrap();
    let waiting = tokio::spawn(server.long(true).send());
    server.until("one waits", |s| s.handle.status().waiting == 1).await;
    let refused = server.chat(json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    let body: Value = refused.json().await.unwrap();
    assert_eq!(body["error"]["code"], 429);
    assert!(body["error"]["message"].as_str().unwrap().starts_with("The engine is currently busy"), "{body}");
    let several = server.chat(json!({"n": 3})).send().await.unwrap();
    assert_eq!(several.status(), 429);
    let series = r#"vllm:admission_rejections_total{model_name="mock",reason="max_num_queued_reqs"}"#;
    assert_eq!(server.metric(series), 2.0);
    drop(running);
    waiting.abort();
    server.idle().await;
}
