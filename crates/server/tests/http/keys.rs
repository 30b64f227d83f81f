//! Keys with names: limits, usage and reloads.

use std::num::NonZeroU32;
use std::time::Duration;

use octavo_server::{Activation, KeyEntry, KeyHash, KeyLimits, StoreLimits};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok};

/// An entry whose key is `key-NAME`.
fn entry(name: &str, limits: KeyLimits) -> KeyEntry {
    KeyEntry {
        name: name.into(),
        hashes: vec![KeyHash::new(format!("key-{name}").as_bytes())],
        limits,
        min_priority: None,
    }
}

fn unlimited(name: &str) -> KeyEntry {
    entry(name, KeyLimits::default())
}

fn limit(number: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(number)
}

async fn start(mut setup: Setup, entries: Vec<KeyEntry>) -> TestServer {
    setup.config.key_entries = entries;
    setup.start().await
}

fn chat(server: &TestServer, name: &str, rest: Value) -> RequestBuilder {
    server.chat(rest).bearer_auth(format!("key-{name}"))
}

/// The series of a key.
fn usage(server: &TestServer, metric: &str, name: &str) -> f64 {
    server.metric(&format!("octavo_key_{metric}_total{{key_name=\"{name}\"}}"))
}

fn rejections(server: &TestServer, name: &str, limit: &str) -> f64 {
    server.metric(&format!("octavo_key_rejections_total{{key_name=\"{name}\",limit=\"{limit}\"}}"))
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).unwrap_or_else(|| panic!("no {name}: {response:?}")).to_str().unwrap()
}

#[tokio::test]
async fn a_key_over_its_requests_is_told_when_to_come_back() {
    let limits = KeyLimits { requests_per_minute: limit(1), ..KeyLimits::default() };
    let server = start(Setup::default(), vec![entry("a", limits), unlimited("b")]).await;
    let first = chat(&server, "a", json!({})).send().await.unwrap();
    assert_eq!((first.status().as_u16(), header(&first, "x-ratelimit-limit-requests")), (200, "1"));
    assert_eq!(header(&first, "x-ratelimit-remaining-requests"), "0");
    assert!(header(&first, "x-ratelimit-reset-requests").ends_with('s'));
    assert!(!first.headers().contains_key("x-ratelimit-limit-tokens"));

    let second = chat(&server, "a", json!({})).send().await.unwrap();
    assert_eq!((second.status().as_u16(), header(&second, "x-ratelimit-remaining-requests")), (429, "0"));
    let seconds: u64 = header(&second, "retry-after").parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    let error = &second.json::<Value>().await.unwrap()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("requests"), &json!("rate_limit_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("The API key 'a' is over its limit of 1 request per minute."), "{message}");

    // Neither other clients nor routes that compute nothing are affected.
    let other = chat(&server, "b", json!({})).send().await.unwrap();
    assert!(other.status().is_success() && !other.headers().contains_key("x-ratelimit-limit-requests"));
    let models = server.client.get(format!("{}/v1/models", server.url)).bearer_auth("key-a");
    assert_eq!(models.send().await.unwrap().status(), 200);
    let counts = [usage(&server, "requests", "a"), rejections(&server, "a", "requests_per_minute")];
    assert_eq!((counts, usage(&server, "requests", "b")), ([2.0, 1.0], 1.0));
}

#[tokio::test]
async fn anthropics_clients_get_their_form_of_the_error() {
    let limits = KeyLimits { requests_per_minute: limit(1), ..KeyLimits::default() };
    let server = start(Setup::default(), vec![entry("a", limits)]).await;
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]});
    let ask = || server.post("/v1/messages", &body).header("x-api-key", "key-a").send();
    assert_eq!(ask().await.unwrap().status(), 200);
    let refused = ask().await.unwrap();
    assert!(refused.status() == 429 && refused.headers().contains_key("retry-after"));
    let error: Value = refused.json().await.unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("rate_limit_error")));
}

#[tokio::test]
async fn tokens_of_prompts_and_answers_count_streamed_or_not() {
    for stream in [false, true] {
        let limits = KeyLimits { tokens_per_minute: limit(60), ..KeyLimits::default() };
        let server = start(Setup::default(), vec![entry("a", limits)]).await;
        let answer = chat(&server, "a", json!({"stream": stream, "n": 3})).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), header(&answer, "x-ratelimit-limit-tokens")), (200, "60"));
        assert!(answer.text().await.unwrap().contains("Hello"));
        // The prompt has 21 tokens, and each of the three answers has 4.
        assert_eq!(usage(&server, "prompt_tokens", "a"), 21.0);
        assert_eq!(usage(&server, "generation_tokens", "a"), 12.0);
        let next = chat(&server, "a", json!({"max_tokens": 1})).send().await.unwrap();
        let left: u32 = header(&next, "x-ratelimit-remaining-tokens").parse().unwrap();
        assert!(left < 60, "{left}");
    }
}

#[tokio::test]
async fn a_key_without_tokens_waits_until_its_debt_is_paid() {
    let limits = KeyLimits { tokens_per_minute: limit(10), ..KeyLimits::default() };
    let server = start(Setup::default(), vec![entry("a", limits)]).await;
    // A prompt that is larger than the allowance needs all of it.
    assert_eq!(chat(&server, "a", json!({})).send().await.unwrap().status(), 200);
    let refused = chat(&server, "a", json!({})).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), header(&refused, "x-ratelimit-remaining-tokens")), (429, "0"));
    let seconds: u64 = header(&refused, "retry-after").parse().unwrap();
    assert!((31..=96).contains(&seconds), "15 tokens too many, at 6 s each: {seconds}");
    let error = &refused.json::<Value>().await.unwrap()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("tokens"), &json!("rate_limit_exceeded")));
    assert_eq!(rejections(&server, "a", "tokens_per_minute"), 1.0);
    assert_eq!(usage(&server, "requests", "a"), 2.0);
}

#[tokio::test]
async fn a_prompt_needs_the_tokens_that_are_left() {
    let limits = KeyLimits { tokens_per_minute: limit(60), ..KeyLimits::default() };
    let server = start(Setup::default(), vec![entry("a", limits)]).await;
    let ask = |text: String| {
        let body = json!({"prompt": text, "max_tokens": 1});
        server.completion(body).bearer_auth("key-a").send()
    };
    assert_eq!(ask("x".repeat(20)).await.unwrap().status(), 200);
    let refused = ask("x".repeat(60)).await.unwrap();
    assert_eq!(refused.status(), 429);
    let error: Value = refused.json().await.unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("60 tokens per minute: ") && message.contains("and the prompt has 60"), "{message}");
    assert_eq!(usage(&server, "prompt_tokens", "a"), 20.0);
}

#[tokio::test]
async fn parallel_requests_count_until_they_end() {
    let limits = KeyLimits { parallel_requests: limit(1), ..KeyLimits::default() };
    let mut setup = Setup::endless();
    setup.config.response_store = Some(StoreLimits::default());
    let server = start(setup, vec![entry("a", limits)]).await;
    let long = || server.long(true).bearer_auth("key-a").send();
    let running = long().await.unwrap();
    let refused = chat(&server, "a", json!({"max_tokens": 1})).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), header(&refused, "retry-after")), (429, "1"));
    assert!(refused.text().await.unwrap().contains("over its limit of 1 parallel request."));
    // A client that leaves makes room.
    drop(running);
    until_admitted(&server).await;

    // A response in the background runs on without its client.
    let body = json!({"input": "hi", "background": true, "max_output_tokens": 4000});
    let queued = ok(server.post("/v1/responses", &body).bearer_auth("key-a")).await;
    server.running(1).await;
    assert_eq!(chat(&server, "a", json!({"max_tokens": 1})).send().await.unwrap().status(), 429);
    let cancel = format!("/v1/responses/{}/cancel", queued["id"].as_str().unwrap());
    ok(server.post(&cancel, &json!({})).bearer_auth("key-a")).await;
    until_admitted(&server).await;
    assert!(rejections(&server, "a", "parallel_requests") >= 2.0);
}

/// Waits until a short request of `a` is within the limits.
async fn until_admitted(server: &TestServer) {
    let wait = async {
        while chat(server, "a", json!({"max_tokens": 1})).send().await.unwrap().status() == 429 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap();
    server.idle().await;
}

#[tokio::test]
async fn every_route_that_computes_counts() {
    let server = start(Setup::default(), vec![unlimited("a")]).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let of_engine = [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/chat/completions/batch", json!({"messages": [messages, messages]})),
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9})),
        ("/invocations", json!({"prompt": "hi"})),
        ("/generate", json!({"prompt": "hi"})),
        ("/v1/embeddings", json!({"input": "hi"})),
    ];
    let other = [
        ("/tokenize", json!({"prompt": "hi"})),
        ("/detokenize", json!({"tokens": [104]})),
        ("/v1/chat/completions/render", json!({"messages": messages})),
        ("/v1/completions/render", json!({"prompt": "hi"})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
    ];
    let (mut requests, mut prompts, mut answers) = (0.0, 0.0, 0.0);
    for (path, body) in of_engine.iter().chain(&other) {
        let response = server.post(path, body).bearer_auth("key-a").send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.bytes().await.unwrap();
        requests += 1.0;
        assert_eq!(usage(&server, "requests", "a"), requests, "{path}");
        let now = (usage(&server, "prompt_tokens", "a"), usage(&server, "generation_tokens", "a"));
        let computes = of_engine.iter().any(|(known, _)| known == path);
        assert_eq!((now.0 > prompts, now.1 > answers), (computes, computes && *path != "/v1/embeddings"), "{path}");
        (prompts, answers) = now;
    }
    let series = "{engine=\"0\",model_name=\"mock\"}";
    assert_eq!(answers, server.metric(&format!("vllm:generation_tokens_total{series}")));
}

#[tokio::test]
async fn requests_for_vectors_and_scores_count() {
    let input = json!({"input": "hi"});
    let shared = [("/pooling", input.clone()), ("/invocations", input.clone())];
    let pairs = json!({"queries": "q", "query": "q", "documents": ["a", "b"]});
    let scoring = ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"].map(|path| (path, pairs.clone()));
    let embedder = [("/v1/embeddings", input.clone()), ("/v2/embed", json!({"texts": ["hi"]}))];
    let classifier = [("/classify", input)];
    let models = [
        // A text has two special tokens. One query is read once.
        (Setup::embedder(), &embedder[..], 3 + 3 + 3),
        // A pair has three.
        (Setup::classifier(&["only"], Activation::Sigmoid), &classifier[..], 5 + 5),
    ];
    for (setup, own, pair_tokens) in models {
        let server = start(setup, vec![unlimited("a")]).await;
        let (mut requests, mut tokens) = (0.0, 0.0);
        for (path, body) in own.iter().chain(&shared).chain(&scoring) {
            ok(server.post(path, body).bearer_auth("key-a")).await;
            requests += 1.0;
            tokens += f64::from(if body.get("documents").is_some() { pair_tokens } else { 4 });
            assert_eq!(usage(&server, "requests", "a"), requests, "{path}");
            assert_eq!(usage(&server, "prompt_tokens", "a"), tokens, "{path}");
            assert_eq!(server.post(path, body).send().await.unwrap().status(), 401, "{path}");
        }
        let series = "{engine=\"0\",model_name=\"mock\"}";
        assert_eq!(tokens, server.metric(&format!("vllm:prompt_tokens_total{series}")));
        assert_eq!(usage(&server, "generation_tokens", "a"), 0.0);
        server.idle().await;
    }
}

#[tokio::test]
async fn a_refused_submission_costs_no_tokens() {
    let mut setup = Setup::endless();
    setup.engine.max_num_seqs = 1;
    setup.engine.max_queued_requests = 1;
    let limits = KeyLimits { tokens_per_minute: limit(1000), ..KeyLimits::default() };
    let server = start(setup, vec![unlimited("b"), entry("a", limits)]).await;
    let running = server.long(true).bearer_auth("key-b").send().await.unwrap();
    let waiting = tokio::spawn(server.long(true).bearer_auth("key-b").send());
    server.until("the queue is full", |server| server.handle.status().waiting == 1).await;
    for _ in 0..50 {
        let busy = chat(&server, "a", json!({})).send().await.unwrap();
        let error: Value = busy.json().await.unwrap();
        assert_eq!((&error["error"]["code"], &error["error"]["type"]), (&json!(429), &json!("Too Many Requests")));
    }
    assert_eq!(usage(&server, "prompt_tokens", "a"), 0.0);
    drop(running);
    waiting.abort();
}

#[tokio::test]
async fn keys_of_flags_and_of_the_file_go_together() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["flag".into()];
    let server = start(setup, vec![unlimited("a")]).await;
    for key in ["flag", "key-a"] {
        assert_eq!(server.chat(json!({})).bearer_auth(key).send().await.unwrap().status(), 200);
    }
    for key in ["a", "key-b", &KeyHash::new(b"key-a").to_string()] {
        assert_eq!(server.chat(json!({})).bearer_auth(key).send().await.unwrap().status(), 401, "{key}");
    }
    assert_eq!(server.chat(json!({})).send().await.unwrap().status(), 401);
    assert_eq!(usage(&server, "requests", "a"), 1.0);
}

#[tokio::test]
async fn a_client_keeps_its_cache_and_its_responses_when_its_key_is_replaced() {
    let mut setup = Setup::default();
    setup.config.api.prompt_tokens_details = true;
    setup.config.response_store = Some(StoreLimits::default());
    let server = start(setup, vec![unlimited("a"), unlimited("b")]).await;
    let cached = async |key: &str| {
        let body = json!({"prompt": "x".repeat(100), "max_tokens": 1});
        let answer = ok(server.completion(body).bearer_auth(key)).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let stored = async |key: &str| {
        let request = server.client.get(format!("{}/v1/responses/resp_r", server.url)).bearer_auth(key);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!((cached("key-a").await, cached("key-b").await, cached("key-a").await), (0, 0, 96));
    ok(server.post("/v1/responses", &json!({"input": "hi"})).bearer_auth("key-a")).await;
    assert_eq!((stored("key-a").await, stored("key-b").await), (200, 404));

    // The order in the file changes, too.
    let rotated = KeyEntry { hashes: vec![KeyHash::new(b"new")], ..unlimited("a") };
    server.keys.replace(&[unlimited("b"), unlimited("c"), rotated]);
    assert_eq!((stored("key-a").await, stored("new").await, stored("key-b").await), (401, 200, 404));
    assert_eq!((cached("new").await, cached("key-b").await, cached("key-c").await), (96, 96, 0));
    assert_eq!(usage(&server, "requests", "a"), 4.0);
}

#[tokio::test]
async fn a_reload_changes_limits_and_keeps_what_was_used() {
    let limits = |requests| KeyLimits { requests_per_minute: limit(requests), ..KeyLimits::default() };
    let server = start(Setup::default(), vec![entry("a", limits(1))]).await;
    let status = async || chat(&server, "a", json!({"max_tokens": 1})).send().await.unwrap().status().as_u16();
    assert_eq!((status().await, status().await), (200, 429));
    server.keys.replace(&[entry("a", limits(1)), unlimited("b")]);
    assert_eq!(status().await, 429, "a reload is no refill");
    server.keys.replace(&[unlimited("a")]);
    assert_eq!(status().await, 200);
}

#[tokio::test]
async fn a_key_bounds_the_priority_of_its_requests() {
    let mut setup = Setup::default();
    setup.config.min_priority = -3;
    let bounded = KeyEntry { min_priority: Some(2), ..unlimited("a") };
    let looser = KeyEntry { min_priority: Some(-9), ..unlimited("c") };
    let server = start(setup, vec![bounded, unlimited("b"), looser]).await;
    for (name, asked, given) in [("a", -7, 2), ("a", 5, 5), ("b", -7, -3), ("c", -7, -3)] {
        let body = json!({"prompt": "hi", "priority": asked});
        let rendered = ok(server.post("/v1/completions/render", &body).bearer_auth(format!("key-{name}"))).await;
        assert_eq!(rendered[0]["priority"], given, "{name}: {rendered}");
    }
}
