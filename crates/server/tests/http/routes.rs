//! Everything that generates nothing.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Setup, ok};

#[tokio::test]
async fn models_are_listed_as_vllm_lists_them() {
    let server = Setup::default().start().await;
    let mut list: Value = server.get("/v1/models").await.json().await.unwrap();
    for card in list["data"].as_array_mut().unwrap() {
        assert!(card["created"].take().as_u64().unwrap() > 1_600_000_000);
        let permission = &mut card["permission"][0];
        assert!(permission["created"].take().is_u64());
        assert!(permission["id"].take().as_str().unwrap().starts_with("modelperm-"));
    }
    let card = |id: &str| {
        json!({"id": id, "object": "model", "created": null, "owned_by": "vllm", "root": "root/of/mock", "parent": null,
            "max_model_len": 4096, "permission": [{"id": null, "object": "model_permission", "created": null,
                "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
                "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false, "organization": "*",
                "group": null, "is_blocking": false}]})
    };
    assert_eq!(list, json!({"object": "list", "data": [card("mock"), card("alias")]}));
}

#[tokio::test]
async fn a_model_is_found_by_a_name_with_a_slash() {
    let mut setup = Setup::default();
    setup.config.served_model_names.push("org/model".into());
    let server = setup.start().await;
    for path in ["mock", "org/model", "org%2Fmodel"] {
        let card: Value = server.get(&format!("/v1/models/{path}")).await.json().await.unwrap();
        assert_eq!(card["id"], path.replace("%2F", "/"));
    }
    for path in ["org", "org/model/", "org/other"] {
        assert_eq!(server.get(&format!("/v1/models/{path}")).await.status(), 404, "{path}");
    }
}

#[tokio::test]
async fn probes_answer() {
    let server = Setup::default().start().await;
    for path in ["/health", "/ping", "/live"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.text().await.unwrap(), "", "{path}");
    }
    assert_eq!(server.client.post(format!("{}/ping", server.url)).send().await.unwrap().status(), 200);
    let version: Value = server.get("/version").await.json().await.unwrap();
    assert_eq!(version, json!({"version": "0.0.0"}));
    for path in ["/metrics", "/metrics/"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 200);
        assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        assert!(response.text().await.unwrap().contains("vllm:num_requests_running{"));
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_are_answered_as_starlette_does() {
    let server = Setup::default().start().await;
    for path in ["/v1/nothing", "/v1/chat/completions/", "/v1//models", "/%76%31/models"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        assert_eq!(response.json::<Value>().await.unwrap(), json!({"detail": "Not Found"}));
    }
    for (method, path) in [(Method::GET, "/v1/completions"), (Method::DELETE, "/v1/models"), (Method::POST, "/health")]
    {
        let response = server.client.request(method, format!("{}{path}", server.url)).send().await.unwrap();
        assert_eq!(response.status(), 405, "{path}");
        assert!(response.headers().contains_key("allow"));
        assert_eq!(response.json::<Value>().await.unwrap(), json!({"detail": "Method Not Allowed"}));
    }
}

#[tokio::test]
async fn keys_open_the_inference_routes_and_only_they_do() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["first".into(), "second".into()];
    let server = setup.start().await;
    let ask = |path: &str, key: Option<&str>| {
        let request = server.client.get(format!("{}{path}", server.url));
        key.map_or(request.try_clone().unwrap(), |key| request.header("authorization", key)).send()
    };
    for path in ["/health", "/live", "/ping", "/version", "/metrics"] {
        assert_eq!(ask(path, None).await.unwrap().status(), 200, "{path}");
    }
    for key in [None, Some("Bearer wrong"), Some("Bearer "), Some("first"), Some("Basic first")] {
        let response = ask("/v1/models", key).await.unwrap();
        assert_eq!(response.status(), 401, "{key:?}");
        assert_eq!(response.json::<Value>().await.unwrap(), json!({"error": "Unauthorized"}));
        assert_eq!(ask("/v1/unknown", key).await.unwrap().status(), 401);
    }
    assert_eq!(server.chat(json!({})).send().await.unwrap().status(), 401);
    assert_eq!(server.completion(json!({})).send().await.unwrap().status(), 401);
    for key in ["Bearer first", "Bearer second", "bearer first"] {
        assert_eq!(ask("/v1/models", Some(key)).await.unwrap().status(), 200);
    }
    ok(server.chat(json!({})).bearer_auth("second")).await;
    let options = server.client.request(Method::OPTIONS, format!("{}/v1/models", server.url));
    assert_eq!(options.send().await.unwrap().status(), 405, "asked for no key");
}

#[tokio::test]
async fn requests_are_counted_by_route_with_bounded_labels() {
    let server = Setup::default().start().await;
    ok(server.chat(json!({}))).await;
    server.chat(json!({"stream": true})).send().await.unwrap().text().await.unwrap();
    server.chat(json!({"n": 0})).send().await.unwrap();
    for path in ["/health", "/metrics", "/a", "/b", "/v1/c?d=e"] {
        server.get(path).await;
    }
    let brew = Method::from_bytes(b"BREW").unwrap();
    server.client.request(brew, format!("{}/pot", server.url)).send().await.unwrap();
    let count = |handler: &str, method: &str, status: &str| {
        server.metric(&format!("http_requests_total{{handler=\"{handler}\",method=\"{method}\",status=\"{status}\"}}"))
    };
    server.until("all are counted", |_| count("none", "OTHER", "4xx") == 1.0).await;
    assert_eq!(count("/v1/chat/completions", "POST", "2xx"), 2.0);
    assert_eq!(count("/v1/chat/completions", "POST", "4xx"), 1.0);
    assert_eq!(count("none", "GET", "4xx"), 3.0);
    let text = server.telemetry.render();
    assert!(!text.contains("handler=\"/health\"") && !text.contains("BREW") && !text.contains("/v1/c?"));
    assert!(!text.contains("\"/v1/c\""));
}
