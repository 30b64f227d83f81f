//! POST /v1/messages

use octavo_text::{ReasoningSyntax, ToolSyntax};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok, text, with};

fn ask(server: &TestServer, rest: Value) -> RequestBuilder {
    let hi = json!([{"role": "user", "content": "hi"}]);
    server.post("/v1/messages", &with(json!({"max_tokens": 200, "messages": hi}), rest))
}

async fn events(request: RequestBuilder) -> Vec<Value> {
    let parse = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let body: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(body["type"], name.strip_prefix("event: ").unwrap());
        body
    };
    text(request).await.split_terminator("\n\n").map(parse).collect()
}

#[tokio::test]
async fn a_text_is_one_block() {
    let server = Setup::default().start().await;
    let usage =
        json!({"input_tokens": 21, "output_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0});
    let expected = json!({"id": "msg_r", "type": "message", "role": "assistant", "model": "mock",
        "content": [{"type": "text", "text": "Hello world!"}], "stop_reason": "end_turn", "stop_sequence": null, "usage": usage});
    assert_eq!(ok(ask(&server, json!({}))).await, expected);
    let cut = ok(ask(&server, json!({"max_tokens": 1}))).await;
    assert_eq!(cut["stop_reason"], "max_tokens");
    let stopped = ok(ask(&server, json!({"stop_sequences": ["wor"]}))).await;
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("wor")));
    assert_eq!(stopped["content"][0]["text"], "Hello ");
}

#[tokio::test]
async fn blocks_stream_in_order() {
    let said = "<think>Hm.</think>Look:<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
    let mut setup = Setup::writing(said);
    (setup.config.api.tools, setup.config.api.reasoning) = (Some(ToolSyntax::Hermes), Some(ReasoningSyntax::Qwen3));
    let server = setup.start().await;
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let body = ok(ask(&server, json!({"tools": tools}))).await;
    let blocks = body["content"].as_array().unwrap();
    assert_eq!(blocks[0], json!({"type": "thinking", "thinking": "Hm.", "signature": ""}));
    assert_eq!(blocks[1], json!({"type": "text", "text": "Look:"}));
    assert_eq!(
        (&blocks[2]["type"], &blocks[2]["name"], &blocks[2]["input"]),
        (&json!("tool_use"), &json!("f"), &json!({"a": 1}))
    );
    assert_eq!(body["stop_reason"], "tool_use");

    let events = events(ask(&server, json!({"tools": tools, "stream": true}))).await;
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let mut edges = kinds.clone();
    edges.retain(|kind| *kind != "content_block_delta");
    let block = ["content_block_start", "content_block_stop"];
    assert_eq!(edges, [&["message_start"][..], &block, &block, &block, &["message_delta", "message_stop"]].concat());
    let joined = |key: &str| -> String { events.iter().filter_map(|event| event["delta"][key].as_str()).collect() };
    assert_eq!((joined("thinking"), joined("text")), ("Hm.".into(), "Look:".into()));
    assert_eq!(joined("partial_json"), "{\"a\": 1}");
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert_eq!(end["usage"]["output_tokens"], body["usage"]["output_tokens"]);
}

#[tokio::test]
async fn prompts_are_counted() {
    let server = Setup::default().start().await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(ok(server.post("/v1/messages/count_tokens", &body)).await, json!({"input_tokens": 21}));
}

#[tokio::test]
async fn errors_have_anthropics_shape() {
    let server = Setup::default().start().await;
    for (request, status, kind) in [
        (ask(&server, json!({"max_tokens": null})), 400, "invalid_request_error"),
        (ask(&server, json!({"model": "nope"})), 404, "not_found_error"),
        (server.post("/v1/messages/count_tokens", &json!({})), 400, "invalid_request_error"),
        (server.post("/v1/messages", &json!([])), 400, "invalid_request_error"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status);
        let body: Value = response.json().await.unwrap();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
        assert!(body["error"]["message"].is_string());
    }
}
