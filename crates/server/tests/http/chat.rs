//! POST /v1/chat/completions, in one body.

use serde_json::{Value, json};

use crate::support::{IM_END, Setup, id, ok, text, with};

#[tokio::test]
async fn every_key_is_there() {
    let server = Setup::default().start().await;
    let expected = concat!(
        r#"{"id":"chatcmpl-r","object":"chat.completion","created":0,"model":"mock","#,
        r#""choices":[{"index":0,"message":{"role":"assistant","content":"Hello world!","refusal":null,"#,
        r#""annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"#,
        r#""finish_reason":"stop","stop_reason":null,"token_ids":null,"routed_experts":null,"weight_versions":null}],"#,
        r#""service_tier":null,"system_fingerprint":"octavo-0.0.0-FINGERPRINT","#,
        r#""usage":{"prompt_tokens":21,"total_tokens":25,"completion_tokens":4,"prompt_tokens_details":null,"#,
        r#""completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"#,
        r#""kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#,
    );
    let body = text(server.chat(json!({}))).await;
    let fingerprint = &serde_json::from_str::<Value>(&body).unwrap()["system_fingerprint"];
    let hash = fingerprint.as_str().unwrap().rsplit('-').next().unwrap().to_owned();
    assert!(hash.len() == 8 && hash.chars().all(|c| c.is_ascii_hexdigit()), "{fingerprint}");
    assert_eq!(body.replace(&hash, "FINGERPRINT"), expected);
}

#[tokio::test]
async fn the_request_id_comes_from_the_header_then_the_body_then_chance() {
    let server = Setup::default().start().await;
    let bare = |body: Value| server.client.post(format!("{}/v1/chat/completions", server.url)).json(&body);
    let hi = json!({"messages": [{"role": "user", "content": "hi"}]});
    let named = json!({"messages": [], "request_id": "mine"});
    assert_eq!(ok(bare(named.clone()).header("x-request-id", "theirs")).await["id"], "chatcmpl-theirs");
    assert_eq!(ok(bare(named)).await["id"], "chatcmpl-mine");
    let (one, two) = (ok(bare(hi.clone())).await, ok(bare(hi)).await);
    assert_ne!(one["id"], two["id"]);
    assert_eq!(one["id"].as_str().unwrap().len(), "chatcmpl-".len() + 32);
}

#[tokio::test]
async fn any_served_name_may_be_asked_for() {
    let server = Setup::default().start().await;
    for model in [json!("mock"), json!("alias"), json!(null)] {
        assert_eq!(ok(server.chat(json!({"model": model}))).await["model"], "mock");
    }
}

#[tokio::test]
async fn a_sequence_ends_where_it_should() {
    let server = Setup::saying(&["Hello", " world", "STOP", " one", "<|im_end|>"]).start().await;
    // rest, content, finish reason, stop reason, completion tokens
    let cases = [
        (json!({}), "Hello worldSTOP one", "stop", json!(null), 5),
        (json!({"max_tokens": 2}), "Hello world", "length", json!(null), 2),
        (json!({"max_completion_tokens": 1, "max_tokens": 3}), "Hello", "length", json!(null), 1),
        (json!({"stop": "STOP"}), "Hello world", "stop", json!("STOP"), 3),
        (json!({"stop": ["nothing", "o w"]}), "Hell", "stop", json!("o w"), 2),
        (json!({"stop": "STOP", "include_stop_str_in_output": true}), "Hello worldSTOP", "stop", json!("STOP"), 3),
        (json!({"stop": "Hello", "min_tokens": 2}), "Hello worldSTOP one", "stop", json!(null), 5),
        (json!({"stop": "worldX"}), "Hello worldSTOP one", "stop", json!(null), 5),
        (json!({"stop_token_ids": [id(" world")]}), "Hello", "stop", json!(id(" world")), 2),
        (
            json!({"stop_token_ids": [id(" world")], "include_stop_str_in_output": true}),
            "Hello world",
            "stop",
            json!(id(" world")),
            2,
        ),
        (json!({"ignore_eos": true, "max_tokens": 6}), "Hello worldSTOP oneHello", "length", json!(null), 6),
        (
            json!({"ignore_eos": true, "max_tokens": 5, "skip_special_tokens": false}),
            "Hello worldSTOP one<|im_end|>",
            "length",
            json!(null),
            5,
        ),
        (json!({"max_tokens": 3, "stop": "STOP"}), "Hello world", "stop", json!("STOP"), 3),
    ];
    for (rest, content, finish, stop, tokens) in cases {
        let body = ok(server.chat(rest.clone())).await;
        let choice = &body["choices"][0];
        assert_eq!(choice["message"]["content"], content, "{rest}");
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!(finish), &stop), "{rest}");
        assert_eq!(body["usage"]["completion_tokens"], tokens, "{rest}");
    }
    server.idle().await;
}

#[tokio::test]
async fn max_tokens_is_cut_to_the_context() {
    let mut setup = Setup::saying(&[" one"]);
    (setup.config.max_model_len, setup.engine.max_model_len) = (40, 40);
    let server = setup.start().await;
    for rest in [json!({}), json!({"max_tokens": 40})] {
        let body = ok(server.chat(rest)).await;
        assert_eq!(
            body["usage"],
            json!({"prompt_tokens": 21, "total_tokens": 40, "completion_tokens": 19,
            "prompt_tokens_details": null, "completion_tokens_details": null})
        );
        assert_eq!(body["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn the_models_defaults_fill_what_a_request_leaves_open() {
    let mut setup = Setup::varied();
    setup.config.sampling_defaults.max_new_tokens = Some(7);
    setup.config.sampling_defaults.temperature = Some(0.0);
    let server = setup.start().await;
    let body = ok(server.chat(json!({"ignore_eos": true}))).await;
    assert_eq!(body["usage"]["completion_tokens"], 7);
    let greedy = server.chat(json!({"n": 2})).send().await.unwrap();
    assert!(greedy.text().await.unwrap().contains("n must be 1 when using greedy sampling, got 2."));
    assert_eq!(ok(server.chat(json!({"n": 2, "temperature": 1}))).await["choices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_models_limit_beyond_the_context_is_cut_to_it() {
    let mut setup = Setup::saying(&[" one"]);
    (setup.config.max_model_len, setup.engine.max_model_len) = (40, 40);
    setup.config.sampling_defaults.max_new_tokens = Some(1000);
    let server = setup.start().await;
    assert_eq!(ok(server.chat(json!({}))).await["usage"]["total_tokens"], 40);
    assert_eq!(server.chat(json!({"max_tokens": 1000})).send().await.unwrap().status(), 400);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(100)}], "truncate_prompt_tokens": -1});
    let usage = |tokens: Value| server.chat(with(long.clone(), tokens));
    assert_eq!(ok(usage(json!({}))).await["usage"]["prompt_tokens"], 39, "the client reserves nothing for the output");
    assert_eq!(ok(usage(json!({"max_tokens": 7}))).await["usage"]["prompt_tokens"], 33);
}

#[tokio::test]
async fn child_i_of_n_uses_seed_plus_i() {
    let server = Setup::varied().start().await;
    let rest = |n: u32, seed: i64| json!({"n": n, "seed": seed, "max_tokens": 12});
    let many = ok(server.chat(rest(3, 40))).await;
    let choices = many["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        let single = ok(server.chat(rest(1, 40 + i as i64))).await;
        assert_eq!(choice["message"], single["choices"][0]["message"]);
    }
    assert_ne!(choices[0]["message"], choices[1]["message"]);
    let usage = &many["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(21), &json!(36)));
    let unseeded = |seed: Value| server.chat(json!({"max_tokens": 12, "seed": seed}));
    assert_ne!(ok(unseeded(json!(null))).await["choices"], ok(unseeded(json!(-1))).await["choices"]);
    assert_eq!(server.metric(r#"vllm:request_params_n_sum{engine="0",model_name="mock"}"#), 8.0);
    assert_eq!(server.metric(r#"vllm:request_max_num_generation_tokens_count{engine="0",model_name="mock"}"#), 6.0);
}

#[tokio::test]
async fn a_servers_seed_decides_for_requests_that_bring_none() {
    let mut runs = Vec::new();
    for seed in [Some(5), Some(5), Some(6)] {
        let mut setup = Setup::varied();
        setup.config.seed = seed;
        let server = setup.start().await;
        let mut contents = Vec::new();
        for _ in 0..3 {
            let answer = ok(server.chat(json!({"max_tokens": 12}))).await;
            contents.push(answer["choices"][0]["message"]["content"].clone());
        }
        assert_ne!(contents[0], contents[1]);
        runs.push(contents);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test]
async fn log_probabilities_list_the_drawn_token_first() {
    let server = Setup::default().start().await;
    let body = ok(server.chat(json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 2}))).await;
    let top = |token: &str, logprob: f64| json!({"token": token, "logprob": logprob, "bytes": token.as_bytes()});
    let entry = |token: &str, next: &str| {
        let (half, quarter) = (-0.693_147_2, -1.386_294_4);
        json!({"token": token, "logprob": half, "bytes": token.as_bytes(), "top_logprobs": [top(token, half), top(next, quarter)]})
    };
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(*logprobs, json!({"content": [entry("Hello", " world"), entry(" world", "!")]}));
    let none = ok(server.chat(json!({"logprobs": true, "max_tokens": 1}))).await;
    assert_eq!(none["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    let whole = ok(server.chat(json!({"logprobs": true}))).await;
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.last().unwrap()["token"], "<|im_end|>", "the end of sequence has one too");
    assert_eq!(tokens.len(), 4);
}

#[tokio::test]
async fn half_characters_are_held_back_and_their_bytes_told() {
    let halves = [0xc4, 0x9e, IM_END]; // "Ğ" as two byte tokens
    let mut setup = Setup::default();
    setup.mock.script = Some(halves.into());
    let server = setup.start().await;
    let body = ok(server.chat(json!({"logprobs": true}))).await;
    assert_eq!(body["choices"][0]["message"]["content"], "Ğ");
    let tokens = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u64> =
        tokens[..2].iter().flat_map(|t| t["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap()).collect();
    assert_eq!(bytes, "Ğ".bytes().map(u64::from).collect::<Vec<_>>());
    let cut = ok(server.chat(json!({"max_tokens": 1}))).await;
    assert_eq!(cut["choices"][0]["message"]["content"], "\u{fffd}");
}

#[tokio::test]
async fn messages_may_be_of_many_forms() {
    let server = Setup::default().start().await;
    let forms = [
        json!([]),
        json!([{"role": "user"}]),
        json!([{"role": "user", "content": null}]),
        json!([{"role": "critic", "content": "custom roles are the template's business"}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]),
        json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "f", "arguments": "{\"x\": 1}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "2"}]),
    ];
    for messages in forms {
        ok(server.chat(json!({"messages": messages}))).await;
    }
    let prompt = |rest: Value| {
        let request = server.chat(rest);
        async move { ok(request).await["usage"]["prompt_tokens"].as_u64().unwrap() }
    };
    let user = json!([{"role": "user", "content": "hi"}]);
    assert_eq!(prompt(json!({"messages": user, "add_generation_prompt": false})).await, 10);
}

#[tokio::test]
async fn what_means_nothing_here_is_taken() {
    let server = Setup::default().start().await;
    ok(server.chat(json!({
        "user": "me", "store": true, "metadata": {}, "service_tier": "auto", "frobnicate": [1], "tools": null,
        "response_format": {"type": "text"}, "length_penalty": 1.0, "use_beam_search": false, "priority": -3,
        "logit_bias": {"5": 100, "6": -1000.5}, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -2, "frequency_penalty": 2, "top_p": 1, "cache_salt": "salt", "parallel_tool_calls": true
    })))
    .await;
}
