//! Stored responses: continued, followed and cancelled.

use octavo_server::StoreLimits;
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok, with};

fn storing(mut setup: Setup) -> Setup {
    setup.config.response_store = Some(StoreLimits::default());
    setup
}

fn ask(server: &TestServer, id: &str, rest: Value) -> RequestBuilder {
    let request = server.client.post(format!("{}/v1/responses", server.url)).header("x-request-id", id);
    request.json(&with(json!({"input": "hi"}), rest))
}

fn get(server: &TestServer, path: &str) -> RequestBuilder {
    server.client.get(format!("{}/v1/responses/{path}", server.url))
}

fn cancel(server: &TestServer, id: &str) -> RequestBuilder {
    server.client.post(format!("{}/v1/responses/{id}/cancel", server.url))
}

async fn refused(request: RequestBuilder, status: u16, part: &str) {
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), status);
    let body: Value = response.json().await.unwrap();
    assert!(body["error"]["message"].as_str().unwrap().contains(part), "{body}");
}

/// Waits until a response has a status.
async fn until(server: &TestServer, id: &str, status: &str) -> Value {
    let wait = async {
        loop {
            let body = ok(get(server, id)).await;
            if body["status"] == status {
                return body;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), wait).await.unwrap()
}

#[tokio::test]
async fn a_response_is_stored_unless_the_request_declines() {
    let server = storing(Setup::default()).start().await;
    for (id, stream) in [("a", false), ("b", true)] {
        let body = ask(&server, id, json!({"stream": stream})).send().await.unwrap().text().await.unwrap();
        let stored = ok(get(&server, &format!("resp_{id}"))).await;
        let text = &stored["output"][0]["content"][0]["text"];
        assert_eq!((&stored["status"], text), (&json!("completed"), &json!("Hello world!")));
        if !stream {
            assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), stored);
        }
    }
    ok(ask(&server, "c", json!({"store": false}))).await;
    refused(get(&server, "resp_c"), 404, "Response with id 'resp_c' not found.").await;
    refused(cancel(&server, "resp_a"), 400, "Cannot cancel a synchronous response.").await;
    refused(cancel(&server, "resp_c"), 404, "Response with id 'resp_c' not found.").await;
    refused(get(&server, "resp_a?stream=true"), 400, "was not streamed in the background").await;
}

#[tokio::test]
async fn a_response_continues_the_conversation_without_its_instructions() {
    let server = storing(Setup::varied()).start().await;
    let first = ok(ask(&server, "a", json!({"instructions": "old", "max_output_tokens": 4, "seed": 1}))).await;
    let text = first["output"][0]["content"][0]["text"].as_str().unwrap();
    let next = json!({"input": "more", "instructions": "new", "max_output_tokens": 8, "seed": 2});
    let continued = ok(ask(&server, "b", with(next, json!({"previous_response_id": "resp_a"})))).await;
    let messages = json!([
        {"role": "system", "content": "new"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": text}, {"role": "user", "content": "more"},
    ]);
    let chat = ok(server.chat(json!({"messages": messages, "max_tokens": 8, "seed": 2}))).await;
    assert_eq!(continued["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(continued["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(continued["previous_response_id"], "resp_a");
    let third = ok(ask(&server, "c", json!({"previous_response_id": "resp_b", "max_output_tokens": 1}))).await;
    let of = |usage: &Value| usage.as_u64().unwrap();
    assert!(of(&third["usage"]["input_tokens"]) > of(&chat["usage"]["prompt_tokens"]), "it has all turns before");
    let unknown = ask(&server, "d", json!({"previous_response_id": "resp_x"}));
    refused(unknown, 404, "Response with id 'resp_x' not found.").await;
}

#[tokio::test]
async fn other_keys_find_nothing() {
    let mut setup = storing(Setup::default());
    setup.config.api_keys = vec!["a".into(), "b".into()];
    let server = setup.start().await;
    ok(ask(&server, "1", json!({})).bearer_auth("a")).await;
    ok(get(&server, "resp_1").bearer_auth("a")).await;
    let unknown = "Response with id 'resp_1' not found.";
    refused(get(&server, "resp_1").bearer_auth("b"), 404, unknown).await;
    refused(cancel(&server, "resp_1").bearer_auth("b"), 404, unknown).await;
    let continuing = || ask(&server, "2", json!({"previous_response_id": "resp_1"}));
    refused(continuing().bearer_auth("b"), 404, unknown).await;
    assert_eq!(get(&server, "resp_1").send().await.unwrap().status(), 401);
    ok(ask(&server, "1", json!({"metadata": {"of": "b"}})).bearer_auth("b")).await;
    let own = ok(get(&server, "resp_1").bearer_auth("a")).await;
    assert_eq!(own["metadata"], Value::Null, "an id that both chose names two responses");
    ok(continuing().bearer_auth("a")).await;
}

#[tokio::test]
async fn a_background_response_is_queued_runs_and_completes() {
    let (setup, gate) = storing(Setup::default()).gated();
    let server = setup.start().await;
    let queued = ok(ask(&server, "a", json!({"background": true}))).await;
    let named = (&queued["id"], &queued["status"], &queued["background"]);
    assert_eq!(named, (&json!("resp_a"), &json!("queued"), &json!(true)));
    assert_eq!(ok(get(&server, "resp_a")).await, queued);
    refused(ask(&server, "b", json!({"previous_response_id": "resp_a"})), 400, "has not ended").await;
    gate.step();
    let running = until(&server, "resp_a", "in_progress").await;
    assert_eq!(running["output"], json!([]));
    drop(gate);
    let done = until(&server, "resp_a", "completed").await;
    assert_eq!(done["output"][0]["content"][0]["text"], "Hello world!");
    assert_eq!(done["usage"]["output_tokens"], 4);
    refused(cancel(&server, "resp_a"), 400, "Cannot cancel a synchronous response.").await;
    ok(ask(&server, "c", json!({"previous_response_id": "resp_a"}))).await;
}

#[tokio::test]
async fn a_background_response_can_be_cancelled() {
    let server = storing(Setup::endless()).start().await;
    ok(ask(&server, "a", json!({"background": true, "max_output_tokens": 4000}))).await;
    server.running(1).await;
    let cancelled = ok(cancel(&server, "resp_a")).await;
    assert_eq!((&cancelled["id"], &cancelled["status"]), (&json!("resp_a"), &json!("cancelled")));
    server.idle().await;
    assert_eq!(ok(get(&server, "resp_a")).await, cancelled);
    refused(cancel(&server, "resp_a"), 400, "Cannot cancel a synchronous response.").await;
}

#[tokio::test]
async fn a_deleted_response_is_forgotten_and_aborted() {
    let mut setup = storing(Setup::endless());
    setup.config.api_keys = vec!["a".into(), "b".into()];
    let server = setup.start().await;
    let delete = |key: &str| server.client.delete(format!("{}/v1/responses/resp_a", server.url)).bearer_auth(key);
    ok(ask(&server, "a", json!({"background": true, "max_output_tokens": 4000})).bearer_auth("a")).await;
    server.running(1).await;
    let unknown = "Response with id 'resp_a' not found.";
    refused(delete("b"), 404, unknown).await;
    assert_eq!(ok(delete("a")).await, json!({"id": "resp_a", "object": "response", "deleted": true}));
    server.idle().await;
    refused(get(&server, "resp_a").bearer_auth("a"), 404, unknown).await;
    refused(delete("a"), 404, unknown).await;
}

#[tokio::test]
async fn a_background_stream_can_be_left_and_followed_from_any_event() {
    let (setup, gate) = storing(Setup::default()).gated();
    let server = setup.start().await;
    gate.step();
    let mut left = ask(&server, "a", json!({"background": true, "stream": true})).send().await.unwrap();
    assert_eq!(left.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert!(left.chunk().await.unwrap().unwrap().starts_with(b"event: response.created\n"));
    drop(left);
    let following = tokio::spawn(get(&server, "resp_a?stream=true").send());
    drop(gate);
    let whole = following.await.unwrap().unwrap().text().await.unwrap();
    let events: Vec<Value> = whole
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap())
        .collect();
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"], ok(get(&server, "resp_a")).await);
    let pieces: Vec<&str> = whole.split_inclusive("\n\n").collect();
    for after in [0, 3, events.len() - 2] {
        let rest = get(&server, &format!("resp_a?stream=true&starting_after={after}")).send().await.unwrap();
        assert_eq!(rest.text().await.unwrap(), pieces[after + 1..].concat());
    }
    let past = get(&server, "resp_a?stream=true&starting_after=1000000").send().await.unwrap();
    assert_eq!(past.text().await.unwrap(), "");
    refused(get(&server, "resp_a?stream=true&starting_after=x"), 400, "valid integer").await;
}

#[tokio::test]
async fn the_oldest_is_forgotten_and_aborted() {
    let mut setup = Setup::endless();
    setup.config.response_store = Some(StoreLimits { responses: 2, ..StoreLimits::default() });
    let server = setup.start().await;
    for id in ["a", "b", "c"] {
        ok(ask(&server, id, json!({"background": true, "max_output_tokens": 4000}))).await;
    }
    refused(get(&server, "resp_a"), 404, "not found").await;
    server.running(2).await;
    for id in ["resp_b", "resp_c"] {
        ok(cancel(&server, id)).await;
    }
    server.idle().await;
}

#[tokio::test]
async fn background_needs_the_store() {
    let server = Setup::default().start().await;
    refused(ask(&server, "a", json!({"background": true})), 400, "`VLLM_ENABLE_RESPONSES_API_STORE=1`").await;
    let server = storing(Setup::default()).start().await;
    let declined = json!({"background": true, "store": false});
    refused(ask(&server, "a", declined), 400, "background can only be used when `store` is true").await;
}
