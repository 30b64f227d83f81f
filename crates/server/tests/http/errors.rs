//! What is refused, and how.

use reqwest::Response;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, VOCAB, ok, with};

/// Checks the error body and returns its message.
async fn refused(response: Response, status: u16, kind: &str, param: Option<&str>) -> String {
    let actual = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(actual, status, "{text}");
    let body: Value = serde_json::from_str(&text).unwrap();
    let error = &body["error"];
    assert_eq!(error.as_object().unwrap().len(), 4, "{text}");
    assert_eq!((&error["type"], &error["code"]), (&json!(kind), &json!(status)), "{text}");
    assert_eq!(error["param"].as_str(), param, "{text}");
    error["message"].as_str().unwrap().to_owned()
}

async fn raw(server: &TestServer, path: &str, content_type: Option<&str>, body: &[u8]) -> Response {
    let request = server.client.post(format!("{}{path}", server.url)).body(body.to_vec());
    match content_type {
        Some(value) => request.header("content-type", value),
        None => request,
    }
    .send()
    .await
    .unwrap()
}

#[tokio::test]
async fn bodies_that_are_no_json_object() {
    let server = Setup::default().start().await;
    let bad: [&[u8]; 12] = [
        b"",
        b"{",
        b"hello",
        b"[]",
        b"3",
        b"null",
        b"{\"messages\": [}",
        b"{\"messages\": [], \"temperature\": NaN}",
        b"{\"messages\": [], \"temperature\": Infinity}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}",
        b"{} {}",
        b"{\"a\": 01}",
    ];
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for body in bad {
            let response = raw(&server, path, Some("application/json"), body).await;
            let message = refused(response, 400, "Bad Request", None).await;
            assert!(message.starts_with("1 validation error:\n  {'type': "), "{message}");
        }
        for content_type in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
            let response = raw(&server, path, content_type, b"{}").await;
            let message = refused(response, 400, "Bad Request", None).await;
            assert!(message.contains("Unsupported Media Type: Only 'application/json' is allowed"), "{message}");
        }
    }
    ok(server.chat(json!({}))).await;
}

#[tokio::test]
async fn images_video_and_sound_are_refused_by_every_route() {
    let server = Setup::default().start().await;
    let user = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]);
    let url = json!({"url": "https://host/x", "detail": "low"});
    let image = json!({"type": "image_url", "image_url": url});
    let input = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "https://host/x"}]}]);
    let messages = |part: Value| json!({"messages": user(part), "max_tokens": 1});
    for (path, body, modality) in [
        ("/v1/chat/completions", messages(image.clone()), "image"),
        ("/v1/chat/completions", messages(json!({"type": "image_url", "uuid": "logo"})), "image"),
        ("/v1/chat/completions", messages(json!({"type": "video_url", "video_url": url})), "video"),
        ("/v1/chat/completions", messages(json!({"type": "audio_url", "audio_url": url})), "audio"),
        ("/v1/chat/completions", messages(json!({"type": "input_audio", "input_audio": {}})), "audio"),
        ("/v1/responses", json!({"input": input}), "image"),
        ("/tokenize", messages(image), "image"),
    ] {
        let response = server.post(path, &body).send().await.unwrap();
        let message = refused(response, 400, "BadRequestError", Some(modality)).await;
        assert_eq!(message, format!("At most 0 {modality}(s) may be provided in one prompt."), "{path}");
    }
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let block = messages(json!({"type": "image", "source": source}));
    let response = server.post("/v1/messages", &block).send().await.unwrap();
    assert_eq!(response.status(), 400);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["message"], "At most 0 image(s) may be provided in one prompt.");
}

/// The messages of these routes are made from other parts of their bodies.
#[tokio::test]
async fn parts_of_other_routes_are_named_as_they_were_sent() {
    let server = Setup::default().start().await;
    let (hi, file) = (json!({"role": "user", "content": "hi"}), json!([{"type": "input_file", "file_id": "f"}]));
    for (input, param) in [
        (json!([hi, {"role": "user", "content": file}]), "input.1.content.0"),
        (json!([hi, {"type": "function_call_output", "call_id": "c", "output": file}]), "input.1.output.0"),
    ] {
        let body = json!({"instructions": "be brief", "input": input});
        refused(server.post("/v1/responses", &body).send().await.unwrap(), 400, "Bad Request", Some(param)).await;
    }
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]});
    let results = json!([{"type": "text", "text": "a"}, result]);
    for (rest, location) in [
        (json!({"system": 7}), "'system')"),
        (json!({"system": [{"type": "document"}]}), "'system', 0)"),
        (
            json!({"system": "s", "messages": [hi, {"role": "user", "content": results}]}),
            "'messages', 1, 'content', 1, 'content', 0)",
        ),
    ] {
        let body = with(json!({"max_tokens": 8, "messages": [hi]}), rest);
        let response = server.post("/v1/messages", &body).send().await.unwrap();
        let text = response.text().await.unwrap();
        assert!(text.contains(&format!("'loc': ('body', {location}")), "{location}: {text}");
    }
}

#[tokio::test]
async fn fields_of_the_wrong_shape_are_named() {
    let server = Setup::default().start().await;
    let cases = [
        (json!({"messages": null}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [7]}), "messages.0"),
        (json!({"messages": [{"content": "x"}]}), "messages.0.role"),
        (json!({"messages": [{"role": "user", "content": 7}]}), "messages.0.content"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages.0.content.0.image_url"),
        (json!({"model": 7}), "model"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"max_tokens": "many"}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"n": []}), "n"),
        (json!({"stream": "perhaps"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"include_usage": 1.5}}), "stream_options.include_usage"),
        (json!({"stop": vec!["x"; 10_000]}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": [null]}), "stop"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logit_bias": []}), "logit_bias"),
        (json!({"cache_salt": "a/b"}), "cache_salt"),
        (json!({"tools": []}), "tools"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"structured_outputs": {"regex": "a", "grammar": "b"}}), "structured_outputs"),
        (json!({"prompt_logprobs": "all"}), "prompt_logprobs"),
        (json!({"use_beam_search": true}), "use_beam_search"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"stream_interval": 0}), "stream_interval"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"session_id": 5}), "session_id"),
    ];
    for (rest, param) in cases {
        let response = server.chat(rest).send().await.unwrap();
        let message = refused(response, 400, "Bad Request", Some(param)).await;
        assert!(message.contains("validation error"), "{message}");
        assert!(message.len() < 1000, "{message}");
    }
    let surrogate = br#"{"messages": [{"role": "user", "content": "\ud800"}]}"#;
    let response = raw(&server, "/v1/chat/completions", Some("application/json"), surrogate).await;
    refused(response, 400, "Bad Request", Some("messages")).await;
    let surrogate = br#"{"prompt": "\udc00 alone"}"#;
    let response = raw(&server, "/v1/completions", Some("application/json"), surrogate).await;
    refused(response, 400, "Bad Request", Some("prompt")).await;
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(50_000), "]".repeat(50_000));
    let response = raw(&server, "/v1/chat/completions", Some("application/json"), deep.as_bytes()).await;
    refused(response, 400, "Bad Request", Some("messages")).await;
}

#[tokio::test]
async fn values_out_of_range_are_told_with_their_value() {
    let server = Setup::default().start().await;
    let cases = [
        (json!({"temperature": -1}), "temperature", "temperature must be non-negative, got -1."),
        (json!({"temperature": 3}), "temperature", "temperature must be in [0, 2], got 3."),
        (json!({"top_p": 0}), "top_p", "top_p must be in (0, 1], got 0."),
        (json!({"top_p": 1.5}), "top_p", "top_p must be in (0, 1], got 1.5."),
        (json!({"top_k": -2}), "top_k", "top_k must be 0 (disable), or at least 1, got -2."),
        (json!({"min_p": 2}), "min_p", "min_p must be in [0, 1], got 2."),
        (json!({"presence_penalty": 3}), "presence_penalty", "presence_penalty must be in [-2, 2], got 3."),
        (json!({"frequency_penalty": -2.5}), "frequency_penalty", "frequency_penalty must be in [-2, 2], got -2.5."),
        (
            json!({"repetition_penalty": 0}),
            "repetition_penalty",
            "repetition_penalty must be greater than zero, got 0.",
        ),
        (json!({"repetition_penalty": 1e-300}), "repetition_penalty", "must be greater than zero"),
        (json!({"n": 0}), "n", "n must be at least 1, got 0."),
        (json!({"n": 100_000}), "n", "n must be at most 1024, got 100000."),
        (json!({"n": 2, "temperature": 0}), "n", "n must be 1 when using greedy sampling, got 2."),
        (json!({"max_tokens": 0}), "max_tokens", "max_tokens must be at least 1, got 0."),
        (json!({"max_completion_tokens": -4}), "max_completion_tokens", "must be at least 1, got -4."),
        (
            json!({"max_completion_tokens": 1_000_000_000_000_i64}),
            "max_completion_tokens",
            "max_completion_tokens=1000000000000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        ),
        (json!({"max_tokens": 5000}), "max_tokens", "max_tokens=5000 cannot be greater than max_model_len=4096."),
        (json!({"min_tokens": -1}), "min_tokens", "min_tokens must be greater than or equal to 0, got -1."),
        (json!({"min_tokens": 9, "max_tokens": 8}), "min_tokens", "less than or equal to max_tokens=8, got 9."),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "greater than max allowed: 20"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs", "greater than max allowed: 20"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids", "stop_token_ids must contain token ids, got -1."),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "Invalid key in 'logit_bias': 'x'"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias", "out of the vocabulary"),
        (json!({"logit_bias": {"1": "a"}}), "logit_bias", "must be a number"),
    ];
    for (rest, param, part) in cases {
        let response = server.chat(rest.clone()).send().await.unwrap();
        let message = refused(response, 400, "BadRequestError", Some(param)).await;
        assert!(message.contains(part), "{rest}: {message}");
    }
    let response = server.chat(json!({})).header("x-vllm-priority", "high").send().await.unwrap();
    refused(response, 400, "BadRequestError", Some("priority")).await;
    ok(server.chat(json!({"temperature": 1e-9, "top_k": 999_999_999_999_i64}))).await;
}

#[tokio::test]
async fn prompts_that_cannot_run() {
    let mut setup = Setup::default();
    (setup.config.max_model_len, setup.engine.max_model_len) = (64, 64);
    let server = setup.start().await;
    let prompt = |prompt: Value| server.completion(json!({"prompt": prompt, "max_tokens": 1})).send();
    let many = |n: usize| vec![5; n];

    let message = refused(prompt(json!(many(65))).await.unwrap(), 400, "BadRequestError", Some("input_tokens")).await;
    assert_eq!(
        message,
        "This model's maximum context length is 64 tokens. However, your prompt contains 65 input tokens, which exceeds \
         this limit even without any output tokens. Please reduce the length of the input prompt."
    );
    let huge = "x".repeat(1 << 20);
    let message = refused(prompt(json!(huge)).await.unwrap(), 400, "BadRequestError", Some("input_tokens")).await;
    assert!(message.contains("your prompt contains at least 65 input tokens"), "{message}");
    let message = refused(prompt(json!(many(64))).await.unwrap(), 400, "BadRequestError", Some("input_tokens")).await;
    assert!(
        message.starts_with("The decoder prompt (length 64) plus the number of requested output tokens"),
        "{message}"
    );
    assert_eq!(prompt(json!(many(63))).await.unwrap().status(), 200);

    for bad in [json!([VOCAB]), json!([-1]), json!([[1], [1_i64 << 40]])] {
        let message = refused(prompt(bad).await.unwrap(), 400, "BadRequestError", Some("prompt")).await;
        assert!(message.contains("is out of vocabulary"), "{message}");
    }
    for nothing in [json!(null), json!(""), json!([])] {
        let message = refused(prompt(nothing).await.unwrap(), 400, "Bad Request", Some("prompt")).await;
        assert!(message.contains("Either prompt or prompt_embeds must be provided and non-empty."), "{message}");
    }
    for nothing in [json!([[]]), json!(["a", ""])] {
        refused(prompt(nothing).await.unwrap(), 400, "BadRequestError", Some("prompt")).await;
    }
    let response = server.completion(json!({"prompt": vec!["a"; 1024], "n": 2})).send().await.unwrap();
    let message = refused(response, 400, "BadRequestError", Some("n")).await;
    assert!(message.contains("make 2048 sequences; at most 1024"), "{message}");
    let response = server.chat(json!({"messages": [{"role": "wizard", "content": "x"}]})).send().await.unwrap();
    let message = refused(response, 400, "BadRequestError", Some("messages")).await;
    assert!(message.contains("no wizards"), "{message}");
    server.idle().await;
}

#[tokio::test]
async fn a_model_that_is_not_served() {
    let server = Setup::default().start().await;
    for request in [server.chat(json!({"model": "gpt-4"})), server.completion(json!({"model": "gpt-4"}))] {
        let message = refused(request.send().await.unwrap(), 404, "NotFoundError", Some("model")).await;
        assert_eq!(message, "The model `gpt-4` does not exist. Valid aliases: mock, alias.");
    }
}

#[tokio::test]
async fn a_body_over_the_limit() {
    let mut setup = Setup::default();
    setup.config.connection.max_body_bytes = 1 << 20;
    let server = setup.start().await;
    let body = format!("{{\"prompt\": \"{}\"}}", "x".repeat(3 << 20));
    for _ in 0..8 {
        let response = raw(&server, "/v1/completions", Some("application/json"), body.as_bytes()).await;
        let message = refused(response, 413, "Request Entity Too Large", None).await;
        assert_eq!(message, "The request body is larger than the limit of 1048576 bytes.");
    }
    let chunks = futures::stream::iter((0..64).map(|_| Ok::<_, std::io::Error>(vec![b' '; 65536])));
    let request =
        server.client.post(format!("{}/v1/completions", server.url)).header("content-type", "application/json");
    let response = request.body(reqwest::Body::wrap_stream(chunks)).send().await.unwrap();
    refused(response, 413, "Request Entity Too Large", None).await;
    ok(server.completion(json!({}))).await;
}

#[tokio::test]
async fn a_body_that_never_comes() {
    let mut setup = Setup::default();
    setup.config.connection.body_timeout = std::time::Duration::from_millis(50);
    let server = setup.start().await;
    let request =
        server.client.post(format!("{}/v1/completions", server.url)).header("content-type", "application/json");
    let body = reqwest::Body::wrap_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    refused(request.body(body).send().await.unwrap(), 408, "Request Timeout", None).await;
}
