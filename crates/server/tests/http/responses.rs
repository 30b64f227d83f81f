//! POST /v1/responses

use octavo_text::{ReasoningSyntax, ToolSyntax};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok, text, with};

fn ask(server: &TestServer, rest: Value) -> RequestBuilder {
    server.post("/v1/responses", &with(json!({"input": "hi"}), rest))
}

/// Names and bodies of a stream's events.
async fn events(request: RequestBuilder) -> Vec<Value> {
    let text = text(request).await;
    assert!(!text.contains("[DONE]"));
    let events: Vec<Value> = text
        .split_terminator("\n\n")
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let body: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(body["type"], name.strip_prefix("event: ").unwrap());
            body
        })
        .collect();
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    events
}

#[tokio::test]
async fn a_text_is_one_message() {
    let server = Setup::default().start().await;
    let body = ok(ask(&server, json!({"metadata": {"k": "v"}, "temperature": 0.7}))).await;
    assert_eq!(
        (&body["id"], &body["object"], &body["status"]),
        (&json!("resp_r"), &json!("response"), &json!("completed"))
    );
    let item = &body["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "Hello world!", "annotations": [], "logprobs": []}])
    );
    let usage = json!({"input_tokens": 21, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 4,
                       "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 25});
    assert_eq!(body["usage"], usage);
    assert_eq!((&body["metadata"], &body["temperature"]), (&json!({"k": "v"}), &json!(0.7)));
    let cut = ok(ask(&server, json!({"max_output_tokens": 1}))).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
}

#[tokio::test]
async fn a_stream_has_the_events_that_clients_wait_for() {
    let server = Setup::default().start().await;
    let events = events(ask(&server, json!({"stream": true}))).await;
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(names, expected);
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, "Hello world!");
    let done = &events[9]["item"];
    assert_eq!(events[10]["response"]["output"], json!([done]));
    assert_eq!(done["id"], events[2]["item"]["id"]);
    assert_eq!(events[10]["response"]["usage"]["total_tokens"], 25);
}

#[tokio::test]
async fn reasoning_text_and_calls_are_items_in_order() {
    let said = "<think>Hm.</think>Look:<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
    let mut setup = Setup::writing(said);
    (setup.config.api.tools, setup.config.api.reasoning) = (Some(ToolSyntax::Hermes), Some(ReasoningSyntax::Qwen3));
    let server = setup.start().await;
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let body = ok(ask(&server, json!({"tools": tools}))).await;
    let kinds: Vec<&str> =
        body["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    let call = &body["output"][2];
    assert_eq!((&call["name"], &call["arguments"]), (&json!("f"), &json!("{\"a\": 1}")));
    let events = events(ask(&server, json!({"tools": tools, "stream": true}))).await;
    let arguments: String = events
        .iter()
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, "{\"a\": 1}");
    let last = &events.last().unwrap()["response"];
    let without_ids = |items: &Value| -> Vec<Value> {
        let strip = |item: &Value| with(item.clone(), json!({"id": null, "call_id": null}));
        items.as_array().unwrap().iter().map(strip).collect()
    };
    assert_eq!(without_ids(&last["output"]), without_ids(&body["output"]));
}

#[tokio::test]
async fn nothing_is_stored() {
    let server = Setup::default().start().await;
    for request in [
        server.client.get(format!("{}/v1/responses/resp_1", server.url)),
        server.client.post(format!("{}/v1/responses/resp_1/cancel", server.url)),
        ask(&server, json!({"previous_response_id": "resp_1"})),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 404);
        assert!(response.text().await.unwrap().contains("Response with id 'resp_1' not found."));
    }
    assert_eq!(ask(&server, json!({"background": true})).send().await.unwrap().status(), 400);
}
