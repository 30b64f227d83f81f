//! POST /v1/chat/completions, as a stream.

use serde_json::{Value, json};

use crate::support::{Setup, events, id, joined, ok, parse_events, step_by_step};

/// One chunk as it must be on the wire.
fn chunk(choices: &str, rest: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-r\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"mock\",\
         \"choices\":[{choices}]{rest}}}\n\n"
    )
}

fn role(index: u32) -> String {
    let delta = r#"{"role":"assistant","content":""}"#;
    format!("{{\"index\":{index},\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}")
}

fn content(text: &str, finish: &str) -> String {
    format!("{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,{finish},\"token_ids\":null}}")
}

const GOES_ON: &str = r#""finish_reason":null"#;
const STOPS: &str = r#""finish_reason":"stop","stop_reason":null"#;
const FINGERPRINT: &str = "\"octavo-0.0.0-e5e80301\"";

#[tokio::test]
async fn a_stream_is_what_vllm_sends_to_the_byte() {
    let (setup, gate) = Setup::default().gated();
    let server = setup.start().await;
    let last = chunk(&content("", STOPS), &format!(",\"system_fingerprint\":{FINGERPRINT}"));
    let expected = [
        chunk(&role(0), r#","prompt_token_ids":null"#) + &chunk(&content("Hello", GOES_ON), ""),
        chunk(&content(" world", GOES_ON), ""),
        chunk(&content("!", GOES_ON), ""),
        last + "data: [DONE]\n\n",
    ];
    step_by_step(server.chat(json!({"stream": true})), &gate, &expected).await;
}

#[tokio::test]
async fn every_engine_output_is_a_chunk_even_without_text() {
    let (setup, gate) = Setup::default().gated();
    let server = setup.start().await;
    let expected = [
        chunk(&role(0), r#","prompt_token_ids":null"#) + &chunk(&content("", GOES_ON), ""),
        chunk(&content("Hello", GOES_ON), ""),
        chunk(
            &content("", r#""finish_reason":"stop","stop_reason":" world!""#),
            &format!(",\"system_fingerprint\":{FINGERPRINT}"),
        ) + "data: [DONE]\n\n",
    ];
    let rest = json!({"stream": true, "stop": ["Hello, you", " world!"]});
    step_by_step(server.chat(rest), &gate, &expected).await;
}

#[tokio::test]
async fn usage_comes_last_and_on_every_chunk_if_asked_for() {
    let (setup, gate) = Setup::default().gated();
    let server = setup.start().await;
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let usage =
        |n: u32| format!(",\"usage\":{{\"prompt_tokens\":21,\"total_tokens\":{},\"completion_tokens\":{n}}}", 21 + n);
    let opening = chunk(&role(0), &format!("{},\"prompt_token_ids\":null", usage(0)));
    let last = chunk(&content(" world", r#""finish_reason":"length","stop_reason":null"#), &usage(2));
    let total = chunk("", &format!(",\"system_fingerprint\":{FINGERPRINT}{}", usage(2)));
    let expected = [opening + &chunk(&content("Hello", GOES_ON), &usage(1)), last + &total + "data: [DONE]\n\n"];
    let rest = json!({"stream": true, "stream_options": options, "max_tokens": 2});
    step_by_step(server.chat(rest), &gate, &expected).await;
    drop(gate);
    let plain = events(server.chat(json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    let with_usage: Vec<bool> = plain.iter().map(|event| event.get("usage").is_some()).collect();
    assert_eq!(with_usage.iter().rposition(|&has| !has), Some(plain.len() - 2), "only the last");
}

#[tokio::test]
async fn the_last_chunk_has_the_rest_of_the_text_and_the_reason() {
    let server = Setup::saying(&["Hello", " world", "STOP", " one", "<|im_end|>"]).start().await;
    let cases = [
        (json!({"stop": "STOP"}), "Hello world", json!("stop"), json!("STOP")),
        (json!({"stop": "STOPPED"}), "Hello worldSTOP one", json!("stop"), json!(null)),
        (json!({"stop": "d"}), "Hello worl", json!("stop"), json!("d")),
        (json!({"stop_token_ids": [id("STOP")]}), "Hello world", json!("stop"), json!(id("STOP"))),
        (json!({"max_tokens": 1, "stop": "Hellooo"}), "Hello", json!("length"), json!(null)),
    ];
    for (rest, content, finish, stop) in cases {
        let events = events(server.chat(crate::support::with(rest.clone(), json!({"stream": true})))).await;
        assert_eq!(joined(&events, 0), content, "{rest}");
        let last = &events.last().unwrap()["choices"][0];
        assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&finish, &stop), "{rest}");
        let (_, before) = events.split_last().unwrap();
        assert!(before.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
        assert!(before.iter().all(|event| event["choices"][0].get("stop_reason").is_none()));
    }
    server.idle().await;
}

#[tokio::test]
async fn choices_interleave_by_index() {
    let server = Setup::varied().start().await;
    let rest = json!({"n": 3, "seed": 5, "max_tokens": 20, "stream_options": {"include_usage": true}, "stream": true});
    let events = events(server.chat(rest)).await;
    let whole = ok(server.chat(json!({"n": 3, "seed": 5, "max_tokens": 20}))).await;
    let roles: Vec<&Value> = events[..3].iter().map(|event| &event["choices"][0]).collect();
    for (index, choice) in roles.into_iter().enumerate() {
        assert_eq!((&choice["index"], &choice["delta"]["role"]), (&json!(index), &json!("assistant")));
    }
    for index in 0..3 {
        assert_eq!(joined(&events, index), whole["choices"][index as usize]["message"]["content"]);
        let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
        assert_eq!(own.filter(|event| event["choices"][0]["finish_reason"] == "length").count(), 1);
    }
    let usage = events.last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"], json!({"prompt_tokens": 21, "total_tokens": 81, "completion_tokens": 60}));
}

#[tokio::test]
async fn chunks_carry_their_tokens_log_probabilities() {
    let server = Setup::default().start().await;
    let rest = json!({"stream": true, "logprobs": true, "top_logprobs": 1, "stop": "world"});
    let events = events(server.chat(rest)).await;
    assert!(events[0]["choices"][0]["logprobs"].is_null());
    let contents = events[1..].iter().flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().unwrap());
    let tokens: Vec<&str> = contents.map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["Hello", " world"]);
    assert_eq!(joined(&events, 0), "Hello ");
}

#[tokio::test]
async fn a_reader_that_pauses_still_gets_an_event_for_each_token() {
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    let mut setup = Setup::saying(&[" one"]);
    setup.engine.max_model_len = 200;
    setup.config.max_model_len = 200;
    let (server, engine, _) = setup.compose();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 100});
    let request = http::Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(axum::body::Body::from(body.to_string()))
        .unwrap();
    let response = server.router().oneshot(request).await.unwrap();
    // Nobody asks for the body: the engine goes on all the same and keeps what it draws.
    while engine.handle().status().running > 0 {
        tokio::task::yield_now().await;
    }
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let events = parse_events(std::str::from_utf8(&bytes).unwrap());
    assert_eq!(events.len(), 101, "the role and every token");
    assert_eq!(joined(&events, 0), " one".repeat(100));
}
