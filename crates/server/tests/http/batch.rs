//! POST /v1/chat/completions/batch

use octavo_text::ReasoningSyntax;
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok, with};

fn conversation(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn batch(server: &TestServer, rest: Value) -> RequestBuilder {
    let messages = json!({"messages": [conversation("a"), conversation("bb"), conversation("ccc")]});
    server.post("/v1/chat/completions/batch", &with(messages, rest))
}

#[tokio::test]
async fn each_conversation_has_a_choice_equal_to_its_own_answer() {
    let server = Setup::varied().start().await;
    let rest = json!({"max_tokens": 6, "seed": 5, "logprobs": true, "top_logprobs": 1, "return_token_ids": true});
    let body = ok(batch(&server, rest.clone())).await;
    assert_eq!((&body["id"], &body["object"]), (&json!("chatcmpl-r"), &json!("chat.completion")));
    let (mut prompt_tokens, mut completion_tokens) = (0, 0);
    for (index, text) in ["a", "bb", "ccc"].into_iter().enumerate() {
        let single = ok(server.chat(with(rest.clone(), json!({"messages": conversation(text)})))).await;
        let expected = with(single["choices"][0].clone(), json!({"index": index}));
        assert_eq!(body["choices"][index], expected);
        prompt_tokens += single["usage"]["prompt_tokens"].as_u64().unwrap();
        completion_tokens += single["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!(body["choices"].as_array().unwrap().len(), 3);
    assert_eq!(body["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(body["usage"]["completion_tokens"], completion_tokens);
    assert_eq!(body["usage"]["total_tokens"], prompt_tokens + completion_tokens);
    assert_eq!((&body["prompt_token_ids"], &body["prompt_logprobs"]), (&Value::Null, &Value::Null));
    server.idle().await;
}

#[tokio::test]
async fn constraints_and_reasoning_apply_to_every_conversation() {
    let server = Setup::varied().start().await;
    let body = ok(batch(&server, json!({"structured_outputs": {"choice": ["yes", "no"]}}))).await;
    for choice in body["choices"].as_array().unwrap() {
        assert!(["yes", "no"].contains(&choice["message"]["content"].as_str().unwrap()), "{choice}");
    }
    let mut setup = Setup::writing("<think>hm</think>ok");
    setup.config.api.reasoning = Some(ReasoningSyntax::Qwen3);
    let server = setup.start().await;
    let body = ok(batch(&server, json!({}))).await;
    for choice in body["choices"].as_array().unwrap() {
        assert_eq!((&choice["message"]["reasoning"], &choice["message"]["content"]), (&json!("hm"), &json!("ok")));
    }
}

#[tokio::test]
async fn batches_that_cannot_be_answered_are_refused_by_the_field() {
    let mut setup = Setup::default();
    setup.config.max_sequences = 4;
    let server = setup.start().await;
    let cases = [
        (json!({"messages": null}), "messages", "Field required"),
        (json!({"messages": []}), "messages", "List should have at least 1 item"),
        (json!({"messages": [conversation("a"), []]}), "messages.1", "List should have at least 1 item"),
        (json!({"messages": conversation("a")}), "messages.0", "Input should be a valid list"),
        (json!({"messages": [[{"role": 5}]]}), "messages.0.0.role", "Input should be a valid string"),
        (json!({"messages": vec![conversation("a"); 5]}), "messages", "at most 4 conversations, got 5"),
        (json!({"n": 2}), "n", "Batch chat completions do not support `n > 1`. Please set `n` to 1."),
        (json!({"stream": true}), "stream", "do not support streaming"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools", "do not support tool use"),
        (json!({"use_beam_search": true}), "use_beam_search", "use_beam_search"),
        (json!({"model": "other"}), "model", "does not exist"),
    ];
    for (rest, param, part) in cases {
        let response = batch(&server, rest.clone()).send().await.unwrap();
        assert_eq!(response.status(), if param == "model" { 404 } else { 400 }, "{rest}");
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["error"]["param"], param, "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(part), "{body}");
    }
}

#[tokio::test]
async fn a_batch_that_does_not_fit_the_queue_leaves_nothing_behind() {
    let mut setup = Setup::endless();
    setup.engine.max_num_seqs = 1;
    setup.engine.max_queued_requests = 2;
    let server = setup.start().await;
    let running = server.long(true).send().await.unwrap();
    server.running(1).await;
    let response = batch(&server, json!({})).send().await.unwrap();
    assert_eq!(response.status(), 429);
    drop(running);
    server.idle().await;
}
