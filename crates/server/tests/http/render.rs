//! POST /v1/chat/completions/render and POST /v1/completions/render

use serde_json::{Value, json};

use crate::support::{Setup, ok, with};

#[tokio::test]
async fn a_rendered_chat_has_the_tokens_that_the_route_would_use() {
    let server = Setup::default().start().await;
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    let tokens = ok(server.post("/tokenize", &messages)).await["tokens"].take();
    let rest = json!({
        "model": "alias", "max_tokens": 7, "temperature": 0.3, "top_p": 0.9, "top_k": 4, "seed": 11, "stop": ["x"],
        "logit_bias": {"5": -2}, "bad_words": ["no"], "stream": true, "stream_options": {"include_usage": true},
        "cache_salt": "salt", "priority": 3, "response_format": {"type": "json_object"},
    });
    let body = ok(server.post("/v1/chat/completions/render", &with(messages, rest))).await;
    let expected = json!({
        "request_id": "chatcmpl-r", "token_ids": tokens, "features": null, "model": "alias", "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": false}, "cache_salt": "salt",
        "priority": 3, "kv_transfer_params": null,
        "sampling_params": {
            "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 0.3,
            "top_p": 0.9, "top_k": 4, "min_p": 0.0, "seed": 11, "stop": ["x"], "stop_token_ids": [],
            "ignore_eos": false, "max_tokens": 7, "min_tokens": 0, "logprobs": null, "prompt_logprobs": null,
            "logprob_token_ids": null, "skip_special_tokens": true, "include_stop_str_in_output": false,
            "logit_bias": {"5": -2.0}, "bad_words": ["no"], "allowed_token_ids": null,
            "structured_outputs": {"json_object": true},
        },
    });
    assert_eq!(body, expected);
    assert_eq!(
        server.metric("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"mock\"}"),
        0.0
    );
}

#[tokio::test]
async fn rendered_completions_are_one_for_each_prompt() {
    let server = Setup::default().start().await;
    let render = |body: Value| server.post("/v1/completions/render", &body);
    let one = ok(render(json!({"prompt": "abc"}))).await;
    assert_eq!(one.as_array().unwrap().len(), 1);
    assert_eq!((&one[0]["request_id"], &one[0]["token_ids"]), (&json!("cmpl-r"), &json!([97, 98, 99])));
    assert_eq!((&one[0]["sampling_params"]["max_tokens"], &one[0]["model"]), (&json!(16), &Value::Null));
    let two = ok(render(json!({"prompt": [[5, 6], [7]], "structured_outputs": {"regex": "a+"}}))).await;
    let ids: Vec<&Value> = two.as_array().unwrap().iter().map(|each| &each["request_id"]).collect();
    assert_eq!(ids, ["cmpl-r-0", "cmpl-r-1"]);
    assert_eq!((&two[0]["token_ids"], &two[1]["token_ids"]), (&json!([5, 6]), &json!([7])));
    assert_eq!(two[1]["sampling_params"]["structured_outputs"], json!({"regex": "a+"}));
}

#[tokio::test]
async fn a_wrong_request_is_refused_as_the_route_would_refuse_it() {
    let server = Setup::default().start().await;
    for (path, body, status, param) in [
        ("/v1/chat/completions", json!({}), 400, "messages"),
        ("/v1/chat/completions", json!({"messages": [], "temperature": -1}), 400, "temperature"),
        ("/v1/chat/completions", json!({"messages": [], "model": "other"}), 404, "model"),
        ("/v1/completions", json!({"prompt": "x".repeat(5000)}), 400, "input_tokens"),
        ("/v1/completions", json!({"prompt": [9_999_999]}), 400, "prompt"),
    ] {
        let own = server.post(path, &body).send().await.unwrap();
        let rendered = server.post(&format!("{path}/render"), &body).send().await.unwrap();
        assert_eq!((own.status().as_u16(), rendered.status().as_u16()), (status, status), "{body}");
        let (own, rendered): (Value, Value) = (own.json().await.unwrap(), rendered.json().await.unwrap());
        assert_eq!((&own, &own["error"]["param"]), (&rendered, &json!(param)));
    }
}
