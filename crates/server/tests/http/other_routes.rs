//! Routes beside the API's own: tokens, SageMaker, the first server's.

use octavo_server::{KvEventSource, SamplingDefaults};
use serde_json::{Value, json};

use crate::support::{IM_END, Setup, id, ok, text};

#[tokio::test]
async fn texts_and_messages_become_tokens_and_back() {
    let server = Setup::default().start().await;
    let body = ok(server.post("/tokenize", &json!({"prompt": "abc", "return_token_strs": true}))).await;
    assert_eq!(body, json!({"count": 3, "max_model_len": 4096, "token_strs": ["a", "b", "c"], "tokens": [97, 98, 99]}));
    let chat = ok(server.post("/tokenize", &json!({"messages": [{"role": "user", "content": "hi"}]}))).await;
    assert_eq!((&chat["count"], &chat["token_strs"]), (&json!(21), &Value::Null));
    let long = ok(server.post("/tokenize", &json!({"prompt": "x".repeat(10_000)}))).await;
    assert_eq!(long["count"], 10_000, "what does not fit may be counted");
    let back = ok(server.post("/detokenize", &json!({"tokens": [97, id(" world"), IM_END]}))).await;
    assert_eq!(back, json!({"prompt": "a world<|im_end|>"}));
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": 7})),
        ("/tokenize", json!({"messages": [{"role": "wizard", "content": ""}]})),
        ("/detokenize", json!({})),
        ("/detokenize", json!({"tokens": [-1]})),
        ("/detokenize", json!({"tokens": [1_000_000]})),
    ] {
        assert_eq!(server.post(path, &body).send().await.unwrap().status(), 400, "{path} {body}");
    }
}

#[tokio::test]
async fn the_tokenizer_is_told_of_where_it_may_be() {
    let server = Setup::default().start().await;
    assert_eq!(server.get("/tokenizer_info").await.status(), 404);
    let mut setup = Setup::default();
    setup.config.tokenizer_info = true;
    let server = setup.start().await;
    let info: Value = server.get("/tokenizer_info").await.json().await.unwrap();
    assert_eq!(info["model_max_length"], 4096);
    assert!(info["vocab_size"].as_u64().unwrap() > 256);
    assert!(info["chat_template"].as_str().unwrap().contains("messages"));
}

#[tokio::test]
async fn one_route_takes_every_kind_of_request() {
    let server = Setup::default().start().await;
    let invoke = |body: Value| server.post("/invocations", &body);
    let chat = ok(invoke(json!({"messages": [{"role": "user", "content": "hi"}]}))).await;
    assert_eq!(chat["object"], "chat.completion");
    assert_eq!(ok(invoke(json!({"prompt": "hi"}))).await["object"], "text_completion");
    assert_eq!(ok(invoke(json!({"input": "hi"}))).await["object"], "list");
    let refused = invoke(json!({"model": "mock"})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("Cannot find suitable handler"));
}

#[tokio::test]
async fn the_first_servers_route_repeats_the_prompt() {
    let server = Setup::default().start().await;
    let generate = |rest: Value| server.post("/generate", &crate::support::with(json!({"prompt": "hi, "}), rest));
    assert_eq!(ok(generate(json!({}))).await, json!({"text": ["hi, Hello world!"]}));
    let two = ok(generate(json!({"n": 2, "temperature": 1, "max_tokens": 1}))).await;
    assert_eq!(two, json!({"text": ["hi, Hello", "hi, Hello"]}));
    let lines: Vec<Value> =
        text(generate(json!({"stream": true}))).await.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<&str> = lines.iter().map(|line| line["text"][0].as_str().unwrap()).collect();
    assert_eq!(texts[..3], ["hi, Hello", "hi, Hello world", "hi, Hello world!"]);
    assert_eq!(*texts.last().unwrap(), "hi, Hello world!");
    assert_eq!(generate(json!({"prompt": ["a", "b"]})).send().await.unwrap().status(), 400);
}

#[tokio::test]
async fn the_configuration_is_told_without_its_secrets() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["secret-key".into()];
    let defaults = SamplingDefaults { temperature: Some(0.2), top_k: Some(20), ..SamplingDefaults::default() };
    setup.config.sampling_defaults = defaults;
    let server = setup.start().await;
    let ask = |path: &str| server.client.get(format!("{}{path}", server.url)).bearer_auth("secret-key");
    let body = ok(ask("/server_info?config_format=json")).await;
    assert_eq!(body["vllm_config"]["max_model_len"], 4096);
    assert_eq!(body["vllm_config"]["limit_mm_per_prompt"], json!({"image": 0}), "a model of text");
    assert_eq!(body["vllm_config"]["sampling_defaults"], json!({"temperature": 0.2, "top_k": 20}), "only what is set");
    let text = text(ask("/server_info")).await;
    assert!(text.contains("max_model_len") && !text.contains("secret-key"), "{text}");
}

#[tokio::test]
async fn routers_learn_where_kv_events_are_published() {
    let silent = Setup::default().start().await;
    assert_eq!(ok(silent.client.get(format!("{}/kv_event_sources", silent.url))).await, json!([]));

    let mut setup = Setup::default();
    // A router has no key, as a scraper has none.
    setup.config.api_keys = vec!["secret-key".into()];
    setup.config.kv_event_sources = vec![KvEventSource {
        rank: 0,
        endpoint: "tcp://*:5557".into(),
        replay_endpoint: Some("tcp://*:5558".into()),
        topic: "kv@mock".into(),
        block_size: 16,
    }];
    let server = setup.start().await;
    let expected = json!([{
        "data_parallel_rank": 0,
        "endpoint": "tcp://127.0.0.1:5557",
        "replay_endpoint": "tcp://127.0.0.1:5558",
        "topic": "kv@mock",
        "block_size": 16,
    }]);
    assert_eq!(ok(server.client.get(format!("{}/kv_event_sources", server.url))).await, expected);
}
