//! The development routes: pause, sleep and the reset of the prefix cache.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok, text};

fn developing(mut setup: Setup) -> Setup {
    setup.config.development = true;
    setup
}

async fn command(server: &TestServer, path: &str) -> Value {
    ok(server.client.post(format!("{}{path}", server.url))).await
}

async fn state(server: &TestServer) -> (Value, Value) {
    let ask = async |path: &str| ok(server.client.get(format!("{}{path}", server.url))).await;
    (ask("/is_paused").await["is_paused"].take(), ask("/is_sleeping").await["is_sleeping"].take())
}

/// The status and the message of a chat request.
async fn chat(server: &TestServer) -> (StatusCode, String) {
    let response = server.chat(json!({"max_tokens": 1})).send().await.unwrap();
    (response.status(), response.text().await.unwrap())
}

#[tokio::test]
async fn the_routes_exist_only_in_development_mode() {
    let server = Setup::default().start().await;
    for path in ["/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/is_paused", "/is_sleeping"] {
        for method in [reqwest::Method::POST, reqwest::Method::GET] {
            let response = server.client.request(method, format!("{}{path}", server.url)).send().await.unwrap();
            assert_eq!(
                (response.status(), response.text().await.unwrap()),
                (StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#.into()),
                "{path}"
            );
        }
    }
    let mut setup = developing(Setup::default());
    setup.config.api_keys = vec!["secret".into()];
    let server = setup.start().await;
    let open = server.client.post(format!("{}/pause", server.url)).send().await.unwrap();
    assert_eq!(open.status(), 401, "they need the key");
}

#[tokio::test]
async fn a_pause_aborts_what_runs_and_refuses_what_comes() {
    let server = developing(Setup::endless()).start().await;
    let running = server.long(true).send().await.unwrap();
    assert_eq!(command(&server, "/pause").await, json!({"status": "paused"}));
    assert_eq!(state(&server).await, (json!(true), json!(false)));
    let status = server.handle.status();
    assert_eq!((status.running, status.waiting, status.blocks_used), (0, 0, 0));
    assert!(running.text().await.unwrap().contains(r#""finish_reason":"abort""#));
    let (status, message) = chat(&server).await;
    assert_eq!(status, 503);
    assert!(message.contains("The engine is paused"), "{message}");
    assert_eq!(server.get("/health").await.status(), 200);
    assert_eq!(command(&server, "/resume").await, json!({"status": "resumed"}));
    assert_eq!(state(&server).await, (json!(false), json!(false)));
    assert_eq!(chat(&server).await.0, 200);
}

#[tokio::test]
async fn a_pause_may_wait_for_what_runs() {
    for query in ["mode=wait", "wait_for_inflight_requests=true"] {
        let (setup, gate) = Setup::default().gated();
        let server = developing(setup).start().await;
        gate.step();
        let running = server.chat(json!({"stream": true})).send().await.unwrap();
        let pausing = server.client.post(format!("{}/pause?{query}", server.url)).send();
        let mut pausing = tokio::spawn(pausing);
        while chat(&server).await.0 != 503 {
            tokio::task::yield_now().await;
        }
        assert!(!pausing.is_finished(), "a request runs");
        drop(gate);
        assert!(running.text().await.unwrap().contains(r#""finish_reason":"stop""#));
        assert_eq!((&mut pausing).await.unwrap().unwrap().status(), 200);
        assert_eq!(state(&server).await.0, json!(true));
    }
}

#[tokio::test]
async fn kept_requests_continue_when_the_engine_is_resumed() {
    let server = developing(Setup::endless()).start().await;
    let mut running = server.chat(json!({"stream": true, "max_tokens": 30})).send().await.unwrap();
    let mut sent = running.chunk().await.unwrap().unwrap().to_vec();
    assert_eq!(command(&server, "/pause?mode=keep&clear_cache=true").await, json!({"status": "paused"}));
    let before = server.metric("vllm:generation_tokens_total{engine=\"0\",model_name=\"mock\"}");
    let waiting = tokio::spawn(server.chat(json!({"max_tokens": 1})).send());
    server.until("the new request waits", |server| server.handle.status().waiting == 1).await;
    assert_eq!(server.metric("vllm:generation_tokens_total{engine=\"0\",model_name=\"mock\"}"), before);
    assert!(!server.handle.status().stuck() && !waiting.is_finished());
    command(&server, "/resume").await;
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    while let Some(chunk) = running.chunk().await.unwrap() {
        sent.extend_from_slice(&chunk);
    }
    assert!(String::from_utf8(sent).unwrap().contains(r#""finish_reason":"length""#));
}

#[tokio::test]
async fn only_a_sleep_that_releases_no_memory_is_possible() {
    let server = developing(Setup::default()).start().await;
    for (query, status, part) in [
        ("", 501, "cannot release the memory"),
        ("?level=2", 501, "Sleep level 2 is not supported"),
        ("?level=3", 400, "Input should be 0, 1 or 2"),
        ("?level=0&mode=later", 400, "Input should be 'abort', 'wait' or 'keep'"),
    ] {
        let response = server.client.post(format!("{}/sleep{query}", server.url)).send().await.unwrap();
        assert_eq!(response.status(), status, "{query}");
        assert!(response.text().await.unwrap().contains(part), "{query}");
        assert_eq!(state(&server).await, (json!(false), json!(false)), "it is still awake");
    }
    let awake = "vllm:engine_sleep_state{engine=\"0\",model_name=\"mock\",sleep_state=\"awake\"}";
    assert_eq!(server.metric(awake), 1.0);
    assert_eq!(command(&server, "/sleep?level=0").await, json!({"status": "sleeping", "level": 0}));
    assert_eq!(server.metric(awake), 0.0);
    assert_eq!(state(&server).await, (json!(true), json!(true)));
    assert_eq!(chat(&server).await.0, 503);
    let partly = command(&server, "/wake_up?tags=weights&tags=kv_cache").await;
    assert_eq!(partly, json!({"status": "awake", "tags": ["weights", "kv_cache"]}));
    assert_eq!(state(&server).await.1, json!(true), "its scheduling still sleeps");
    assert_eq!(command(&server, "/wake_up").await, json!({"status": "awake", "tags": null}));
    assert_eq!(server.metric(awake), 1.0);
    assert_eq!(state(&server).await, (json!(false), json!(false)));
    assert_eq!(chat(&server).await.0, 200);
    let unknown = server.client.post(format!("{}/wake_up?tags=lights", server.url)).send().await.unwrap();
    assert_eq!(unknown.status(), 400);
}

#[tokio::test]
async fn the_prefix_cache_is_reset_on_request() {
    let mut setup = developing(Setup::default());
    setup.config.api.prompt_tokens_details = true;
    let server = setup.start().await;
    let prompt = "x".repeat(100);
    let cached = async || {
        let body = ok(server.completion(json!({"prompt": prompt, "max_tokens": 2}))).await;
        server.idle().await;
        body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!((cached().await, cached().await), (0, 96));
    assert_eq!(command(&server, "/reset_prefix_cache").await, json!({"success": true}));
    assert_eq!((cached().await, cached().await), (0, 96));
    let external = command(&server, "/reset_prefix_cache?reset_external=1").await;
    assert_eq!(external, json!({"success": false}), "there is no external cache");
    let wrong = server.client.post(format!("{}/reset_prefix_cache?reset_external=maybe", server.url));
    assert_eq!(wrong.send().await.unwrap().status(), 400);
}

#[tokio::test]
async fn a_running_request_keeps_the_cache_unless_it_may_be_recomputed() {
    let server = developing(Setup::endless()).start().await;
    let running = server.chat(json!({"stream": true, "max_tokens": 30})).send().await.unwrap();
    assert_eq!(command(&server, "/reset_prefix_cache").await, json!({"success": false}));
    let preempting = command(&server, "/reset_prefix_cache?reset_running_requests=true").await;
    assert_eq!(preempting, json!({"success": true}));
    let rest = running.text().await.unwrap();
    assert!(rest.contains(r#""finish_reason":"length""#), "{rest}");
}

#[tokio::test]
async fn the_description_lists_the_routes_that_are_served() {
    for development in [false, true] {
        let mut setup = Setup::default();
        setup.config.development = development;
        let server = setup.start().await;
        let document = text(server.client.get(format!("{}/openapi.json", server.url))).await;
        assert_eq!(document.contains("\"/wake_up\""), development);
    }
}
