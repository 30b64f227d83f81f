//! Outputs that must look like something.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use crate::support::{Setup, TestServer, events, id, joined, ok, with};

/// A model that would write anything, and is kept from it.
async fn server() -> TestServer {
    Setup::writing("Once upon a time there was 1 \"model\", {that: would} [not] obey; true or false?").start().await
}

async fn content(server: &TestServer, rest: Value) -> String {
    let body = ok(server.chat(with(json!({"max_tokens": 300}), rest))).await;
    assert_eq!(body["choices"][0]["finish_reason"], "stop", "{body}");
    body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn every_kind_of_restriction_holds() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
                        "required": ["a", "b"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
    for rest in [
        json!({"response_format": format}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"structured_outputs": {"json": schema.to_string()}}),
    ] {
        let value: Value = serde_json::from_str(&content(&server, rest).await).unwrap();
        assert!(value["a"].is_boolean() && [1, 2].contains(&value["b"].as_i64().unwrap()), "{value}");
        assert_eq!(value.as_object().unwrap().len(), 2);
    }
    let regex = content(&server, json!({"structured_outputs": {"regex": "[ab]{3}[0-9]"}})).await;
    assert!(regex.len() == 4 && regex[..3].chars().all(|c| "ab".contains(c)), "{regex}");
    let choice = content(&server, json!({"structured_outputs": {"choice": ["left", "right"]}})).await;
    assert!(["left", "right"].contains(&choice.as_str()), "{choice}");
    let grammar = "root ::= \"yes\" | \"no\" digit\ndigit ::= [0-9]";
    let grammar = content(&server, json!({"structured_outputs": {"grammar": grammar}})).await;
    assert!(grammar == "yes" || grammar.starts_with("no"), "{grammar}");
    server.idle().await;
}

#[tokio::test]
async fn completions_streams_and_siblings_are_restricted_too() {
    let server = server().await;
    let choice = json!({"structured_outputs": {"choice": ["left", "right"]}});
    let completion =
        ok(server.completion(with(choice.clone(), json!({"max_tokens": 20, "n": 3, "temperature": 1})))).await;
    for choice in completion["choices"].as_array().unwrap() {
        assert!(["left", "right"].contains(&choice["text"].as_str().unwrap()), "{choice}");
    }
    let streamed = events(server.chat(with(choice, json!({"stream": true})))).await;
    assert!(["left", "right"].contains(&joined(&streamed, 0).as_str()));
}

#[tokio::test]
async fn a_bad_restriction_fails_its_own_request_only() {
    let server = server().await;
    for outputs in [
        json!({"regex": "("}),
        json!({"grammar": "this is no grammar ("}),
        json!({"json": {"type": "no such type"}}),
        json!({"json": {"$ref": "https://example.com/schema.json"}}),
        json!({"structural_tag": {"what": 1}}),
    ] {
        let refused = server.chat(json!({"structured_outputs": outputs})).send().await.unwrap();
        let (status, text) = (refused.status(), refused.text().await.unwrap());
        assert_eq!(status, 400, "{outputs}: {text}");
    }
    assert_eq!(ok(server.chat(json!({"max_tokens": 4}))).await["choices"][0]["message"]["content"], "Once");
}

#[tokio::test]
async fn contradictory_restrictions_are_a_clients_error() {
    let server = server().await;
    let rest = json!({"structured_outputs": {"choice": ["left", "right"]}, "allowed_token_ids": [id(" one")]});
    let refused = server.chat(rest.clone()).send().await.unwrap();
    let (status, text) = (refused.status(), refused.text().await.unwrap());
    assert!(status == 400 && text.contains("allowed_token_ids"), "{status}: {text}");
    let streamed = server.chat(with(rest, json!({"stream": true}))).send().await.unwrap().text().await.unwrap();
    assert!(streamed.contains("\"code\":400") && streamed.contains("allowed_token_ids"), "{streamed}");
    server.idle().await;
}

/// Whether the queue is seen to grow while the sequences of a request with a grammar are submitted.
async fn is_served_meanwhile() -> bool {
    let (setup, gate) = Setup::default().gated();
    let server = setup.start().await;
    let choice: Vec<String> = (0..500).map(|number| format!("choice {number}")).collect();
    let many = server.chat(json!({"structured_outputs": {"choice": choice}, "n": 512, "temperature": 1}));
    let mut grew = false;
    let watch = async {
        loop {
            match server.handle.status().waiting {
                256.. => return,
                length => grew |= length > 8,
            }
            tokio::task::yield_now().await;
        }
    };
    let response = tokio::select! {
        response = timeout(Duration::from_secs(60), many.send()) => Some(response),
        () = watch => None,
    };
    assert!(response.is_none(), "no step has ended: {response:?}");
    drop(gate);
    server.idle().await;
    grew
}

/// The runtime of a test has one thread. If that thread submits the sequences, it never sees a part of them. Another
/// thread may be fast enough to be missed, so there are several attempts.
#[tokio::test]
async fn others_are_served_while_many_sequences_get_their_grammars() {
    for _ in 0..20 {
        if is_served_meanwhile().await {
            return;
        }
    }
    panic!("the sequences were submitted all at once");
}

#[tokio::test]
async fn hostile_restrictions_cost_nobody_else_anything() {
    let server = server().await;
    let deep = format!("{}x{}", "(".repeat(5000), ")".repeat(5000));
    let hostile = [
        json!({"regex": "(a{1,1000}){1,1000}"}),
        json!({"regex": deep}),
        json!({"choice": (0..20_000).map(|i| format!("choice {i}")).collect::<Vec<_>>()}),
        json!({"json": {"$ref": "#"}}),
    ];
    let requests = hostile.iter().cycle().take(16).map(|outputs| {
        let rest = json!({"structured_outputs": outputs, "max_tokens": 5});
        let request = server.chat(rest);
        async move { request.send().await.unwrap().status().as_u16() }
    });
    let beside = async {
        for _ in 0..5 {
            ok(server.chat(json!({"max_tokens": 4}))).await;
        }
    };
    let (statuses, ()) = tokio::join!(futures::future::join_all(requests), beside);
    assert!(statuses.iter().all(|status| [200, 400].contains(status)), "{statuses:?}");
    server.idle().await;
}
