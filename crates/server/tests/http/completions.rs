//! POST /v1/completions.

use serde_json::{Value, json};

use crate::support::{Setup, events, id, joined, ok, step_by_step, text};

#[tokio::test]
async fn every_key_is_there() {
    let server = Setup::default().start().await;
    let body = text(server.completion(json!({}))).await;
    let expected = concat!(
        r#"{"id":"cmpl-r","object":"text_completion","created":0,"model":"mock","choices":[{"index":0,"#,
        r#""text":"Hello world!","logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null,"#,
        r#""prompt_logprobs":null,"prompt_token_ids":null}],"service_tier":null,"#,
        r#""system_fingerprint":"octavo-0.0.0-e5e80301","usage":{"prompt_tokens":2,"total_tokens":6,"#,
        r#""completion_tokens":4,"prompt_tokens_details":null,"completion_tokens_details":null},"#,
        r#""kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#,
    );
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_stream_is_what_vllm_sends_to_the_byte() {
    let (setup, gate) = Setup::default().gated();
    let server = setup.start().await;
    let chunk = |choices: &str, rest: &str| {
        format!(
            "data: {{\"id\":\"cmpl-r\",\"object\":\"text_completion\",\"created\":0,\"model\":\"mock\",\
             \"choices\":[{choices}]{rest}}}\n\n"
        )
    };
    let choice = |text: &str, finish: &str| {
        format!(
            "{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{finish},\"stop_reason\":null,\
             \"prompt_token_ids\":null,\"token_ids\":null}}"
        )
    };
    let usage = concat!(
        r#","system_fingerprint":"octavo-0.0.0-e5e80301","#,
        r#""usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2}"#
    );
    let last = chunk(&choice(" world", "\"length\""), "") + &chunk("", usage);
    let expected = [chunk(&choice("Hello", "null"), ""), last + "data: [DONE]\n\n"];
    let rest = json!({"stream": true, "max_tokens": 2, "stream_options": {"include_usage": true}});
    step_by_step(server.completion(rest), &gate, &expected).await;
}

#[tokio::test]
async fn prompts_come_in_four_forms() {
    let server = Setup::varied().start().await;
    let run = |prompt: Value| {
        let request = server.completion(json!({"prompt": prompt, "temperature": 0, "max_tokens": 4}));
        async move {
            let body = ok(request).await;
            let choices = body["choices"].as_array().unwrap();
            let texts: Vec<_> = choices.iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect();
            (texts, body["usage"]["prompt_tokens"].as_u64().unwrap())
        }
    };
    let (ab, c) = (run(json!("ab")).await, run(json!("c")).await);
    assert_eq!(run(json!([97, 98])).await, ab, "the ids of the same text");
    let both = (vec![ab.0[0].clone(), c.0[0].clone()], 3);
    assert_eq!(run(json!(["ab", "c"])).await, both);
    assert_eq!(run(json!([[97, 98], [99]])).await, both);
}

#[tokio::test]
async fn choices_are_numbered_by_prompt_then_child() {
    let server = Setup::varied().start().await;
    let rest = json!({"prompt": ["a", "bb"], "n": 2, "seed": 3, "max_tokens": 5});
    let whole = ok(server.completion(rest.clone())).await;
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
    assert_eq!(whole["usage"]["completion_tokens"], 20);
    let second = ok(server.completion(json!({"prompt": "bb", "seed": 4, "max_tokens": 5}))).await;
    assert_eq!(choices[3]["text"], second["choices"][0]["text"]);
    let options = json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = events(server.completion(crate::support::with(rest, options))).await;
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(joined(&events, index as u64), choice["text"]);
        let last = events.iter().rfind(|e| e["choices"][0]["index"] == index).unwrap();
        assert_eq!(last["usage"]["prompt_tokens"], index / 2 + 1, "of its own prompt");
        assert_eq!(last["usage"]["completion_tokens"], 5);
    }
}

#[tokio::test]
async fn sixteen_tokens_unless_told_otherwise() {
    let server = Setup::saying(&[" one"]).start().await;
    for rest in [json!({}), json!({"max_tokens": null})] {
        assert_eq!(ok(server.completion(rest)).await["usage"]["completion_tokens"], 16);
    }
}

#[tokio::test]
async fn echo_repeats_the_prompt() {
    let server = Setup::default().start().await;
    let echo = |rest: Value| server.completion(crate::support::with(json!({"echo": true}), rest));
    assert_eq!(ok(echo(json!({}))).await["choices"][0]["text"], "hiHello world!");
    assert_eq!(ok(echo(json!({"prompt": [104, 105]}))).await["choices"][0]["text"], "hiHello world!");
    let nothing = ok(echo(json!({"max_tokens": 0, "prompt": ["a", "b"]}))).await;
    assert_eq!(nothing["choices"][1]["text"], "b");
    assert_eq!(nothing["choices"][1]["finish_reason"], "length");
    assert_eq!(nothing["usage"]["completion_tokens"], 0);
    let stream = events(echo(json!({"stream": true}))).await;
    assert_eq!(joined(&stream, 0), "hiHello world!");
    assert!(stream[0]["choices"][0]["text"].as_str().unwrap().starts_with("hi"));
}

#[tokio::test]
async fn log_probabilities_are_parallel_lists() {
    let server = Setup::default().start().await;
    let body = ok(server.completion(json!({"logprobs": 2, "max_tokens": 2}))).await;
    let (half, quarter) = (-0.693_147_2, -1.386_294_4);
    let expected = json!({
        "text_offset": [0, 5], "token_logprobs": [half, half], "tokens": ["Hello", " world"],
        "top_logprobs": [{"Hello": half, " world": quarter}, {" world": half, "!": quarter}],
    });
    assert_eq!(body["choices"][0]["logprobs"], expected);
    let zero = ok(server.completion(json!({"logprobs": 0, "max_tokens": 1}))).await;
    assert_eq!(zero["choices"][0]["logprobs"]["top_logprobs"], json!([{"Hello": half}]));
    let events = events(server.completion(json!({"logprobs": 0, "stream": true}))).await;
    let offsets = events.iter().flat_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array().unwrap());
    assert_eq!(offsets.map(|o| o.as_u64().unwrap()).collect::<Vec<_>>(), [0, 5, 11, 12]);
}

#[tokio::test]
async fn stop_tokens_may_be_shown() {
    let server = Setup::default().start().await;
    let rest = json!({"stop_token_ids": [id("!")], "include_stop_str_in_output": true});
    let body = ok(server.completion(rest)).await;
    assert_eq!(body["choices"][0]["text"], "Hello world!");
    assert_eq!(body["choices"][0]["stop_reason"], id("!"));
}

#[tokio::test]
async fn the_times_of_a_single_sequence_are_told_where_they_may_be() {
    let mut setup = Setup::default();
    setup.config.api.request_metrics = true;
    setup.mock.step_latency = std::time::Duration::from_millis(5);
    let server = setup.start().await;
    let check = |metrics: &Value| {
        let number = |key: &str| metrics[key].as_f64().unwrap_or_else(|| panic!("{key} of {metrics}"));
        assert!(number("time_to_first_token_ms") >= 5.0, "{metrics}");
        // Four tokens: three gaps of a step each.
        assert!(number("generation_time_ms") >= 15.0, "{metrics}");
        assert!((number("mean_itl_ms") * 3.0 - number("generation_time_ms")).abs() < 1e-6, "{metrics}");
        assert!(number("queue_time_ms") >= 0.0);
        let seconds = (number("time_to_first_token_ms") + number("generation_time_ms")) / 1e3;
        assert!((number("tokens_per_second") * seconds - 4.0).abs() < 1e-6, "{metrics}");
    };
    check(&ok(server.completion(json!({}))).await["metrics"]);
    check(&ok(server.chat(json!({}))).await["metrics"]);
    check(&ok(server.post("/v1/responses", &json!({"input": "hi"}))).await["metrics"]);
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    for request in [server.completion(options.clone()), server.chat(options)] {
        let events = events(request).await;
        let (last, others) = events.split_last().unwrap();
        check(&last["metrics"]);
        assert!(others.iter().all(|event| event.get("metrics").is_none()));
    }
    let two = ok(server.completion(json!({"n": 2, "temperature": 1.0}))).await;
    assert_eq!(two["metrics"], Value::Null, "they would be those of one of the two");

    let plain = Setup::default().start().await;
    assert_eq!(ok(plain.completion(json!({}))).await["metrics"], Value::Null);
}

#[tokio::test]
async fn the_fingerprint_tells_as_much_as_it_may() {
    use octavo_server::FingerprintMode;

    let fingerprint = async |mode: FingerprintMode| {
        let mut setup = Setup::default();
        setup.config.api.fingerprint = mode;
        ok(setup.start().await.completion(json!({}))).await["system_fingerprint"].take()
    };
    let full = fingerprint(FingerprintMode::Full).await;
    let hash = fingerprint(FingerprintMode::Hash).await;
    let (full, hash) = (full.as_str().unwrap(), hash.as_str().unwrap());
    assert!(full.starts_with("octavo-0.0.0-"), "{full}");
    assert_eq!(full.replace("-0.0.0", ""), hash);
    assert_eq!(fingerprint(FingerprintMode::None).await, Value::Null);
}

#[tokio::test]
async fn as_many_choices_as_sequences_may_run_are_drawn_together() {
    let server = Setup::default().start().await;
    let body = json!({"prompt": ["a", "b"], "n": 256, "temperature": 1, "max_tokens": 3});
    let answer = ok(server.completion(body)).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 512);
    assert!(choices.iter().all(|choice| choice["text"] == "Hello world!"));
}
