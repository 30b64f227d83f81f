//! Who gets in: keys, other origins, proxies, request ids.

use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok};

const KEY: (&str, &str) = ("authorization", "Bearer secret");

async fn locked(root_path: &str) -> TestServer {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["secret".into()];
    setup.config.root_path = root_path.into();
    setup.start().await
}

#[tokio::test]
async fn what_is_not_listed_as_open_needs_a_key() {
    let server = locked("").await;
    let guarded = [
        "GET /v1/models",
        "HEAD /v1/models",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /tokenize",
        "POST /invocations",
        "POST /pooling",
        "GET /unknown",
        "POST /health",
        "POST /metrics",
        "DELETE /ping",
        "BREW /health",
    ];
    for line in guarded {
        let answer = server.raw(line, &[]).await;
        assert_eq!(answer.status, 401, "{line}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"), "{line}");
        assert!(line.starts_with("HEAD") || answer.body == r#"{"error":"Unauthorized"}"#, "{line}: {}", answer.body);
        assert_ne!(server.raw(line, &[KEY]).await.status, 401, "{line}");
    }
    for line in [
        "GET /health",
        "HEAD /health",
        "GET /ping",
        "POST /ping",
        "GET /live",
        "GET /version",
        "GET /load",
        "GET /metrics",
        "GET /metrics/",
    ] {
        assert_eq!(server.raw(line, &[]).await.status, 200, "{line}");
    }
    assert_eq!(server.raw("OPTIONS /v1/models", &[]).await.status, 405);
}

#[tokio::test]
async fn no_spelling_of_a_path_gets_around_the_key() {
    for root in ["", "/octavo"] {
        let server = locked(root).await;
        for path in [
            "//v1/models",
            "/./v1/models",
            "/v1/./models",
            "/v1//models",
            "/v1/../health",
            "/health/../v1/models",
            "/health/%2e%2e/v1/models",
            "/health;/../v1/models",
            "/%76%31/models",
            "/v1%2fmodels",
            "/V1/models",
            "/health/",
            "/health%00",
            "/health%20",
            "/%68ealth",
            "/HEALTH",
            "/health;x",
            "/health\\..\\v1\\models",
            "/metrics/../v1/models",
            "/metrics//",
            "/octavohealth",
            "/octavo//health",
            "/octavo/octavo/health",
            "/octavo/../v1/models",
            "/octavo%2fhealth",
            "/v1/models?path=/health",
            "/v1/models?api_key=secret",
            "/v1/models?x-api-key=secret&authorization=Bearer%20secret",
            "/v1/models#/health",
            "http://localhost/v1/models",
            "http://secret@localhost/v1/models",
            "http://localhost/health/../v1/models",
        ] {
            let answer = server.raw(&format!("GET {path}"), &[]).await;
            assert!(matches!(answer.status, 400 | 401), "{path}: {}", answer.head);
            assert!(!answer.body.contains("mock"), "{path}: {}", answer.body);
        }
        for path in ["/health?x=/v1/models", "http://localhost/health"] {
            assert_eq!(server.raw(&format!("GET {path}"), &[]).await.status, 200, "{path}");
        }
    }
}

#[tokio::test]
async fn wrong_keys_and_misplaced_ones() {
    let server = locked("").await;
    let long = "x".repeat(10_000);
    for fields in [
        &[("authorization", "Bearer secre")][..],
        &[("authorization", "secret")],
        &[("authorization", "Basic secret")],
        &[("authorization", "Bearer\tsecret")],
        &[("authorization", "Bearer secret,secret")],
        &[("authorization", "Bearer wrong"), ("authorization", "Bearer secret")],
        &[("authorization", long.as_str())],
        &[("x-api-key", "Secret")],
        &[("x-api-key", "Bearer secret")],
        &[("x-api-key", "wrong"), ("x-api-key", "secret")],
        &[("api-key", "secret")],
        &[("cookie", "authorization=Bearer secret")],
        &[("x-forwarded-uri", "/health"), ("x-original-url", "/health"), ("x-http-method-override", "OPTIONS")],
    ] {
        assert_eq!(server.raw("GET /v1/models", fields).await.status, 401, "{fields:?}");
    }
    for fields in [[KEY], [("authorization", "bearer secret")], [("x-api-key", "secret")], [("X-Api-Key", "secret")]] {
        assert_eq!(server.raw("GET /v1/models", &fields).await.status, 200, "{fields:?}");
    }
}

#[tokio::test]
async fn a_root_path_may_be_there_or_not() {
    let server = locked("/octavo/").await;
    for path in ["/v1/models", "/octavo/v1/models", "http://localhost/octavo/v1/models?x"] {
        assert_eq!(server.raw(&format!("GET {path}"), &[]).await.status, 401, "{path}");
        let answer = server.raw(&format!("GET {path}"), &[KEY]).await;
        assert!(answer.status == 200 && answer.body.contains("root/of/mock"), "{path}: {}", answer.head);
    }
    for path in ["/health", "/octavo/health", "/octavo/metrics"] {
        assert_eq!(server.raw(&format!("GET {path}"), &[]).await.status, 200, "{path}");
    }
    for path in ["/octavo/octavo/v1/models", "/octavov1/models", "/Octavo/v1/models"] {
        assert_eq!(server.raw(&format!("GET {path}"), &[KEY]).await.status, 404, "{path}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let body = ok(server.post("/octavo/v1/chat/completions", &chat).bearer_auth("secret")).await;
    assert_eq!(body["choices"][0]["message"]["content"], "Hello world!");
    let series = r#"http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}"#;
    server.until("it is counted as its route", |server| server.metric(series) == 1.0).await;
}

const ORIGIN: (&str, &str) = ("origin", "https://page.example");
const ASKS: (&str, &str) = ("access-control-request-method", "POST");

fn sharing(origins: &[&str]) -> Setup {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["secret".into()];
    setup.config.cors.allowed_origins = origins.iter().map(|&origin| origin.to_owned()).collect();
    setup
}

#[tokio::test]
async fn pages_of_other_origins_are_not_served_by_default() {
    let server = sharing(&[]).start().await;
    let answer = server.raw("OPTIONS /v1/chat/completions", &[ORIGIN, ASKS]).await;
    assert_eq!((answer.status, &*answer.body), (400, "Disallowed CORS origin"));
    let answer = server.raw("GET /health", &[ORIGIN]).await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None));
}

#[tokio::test]
async fn pages_of_allowed_origins_read_answers_and_errors() {
    for (origins, allowed) in [(&["*"], "*"), (&["https://page.example"], "https://page.example")] {
        let server = sharing(origins).start().await;
        let preflight = [ORIGIN, ASKS, ("access-control-request-headers", "authorization,content-type,x-stainless-os")];
        let answer = server.raw("OPTIONS /v1/chat/completions", &preflight).await;
        assert_eq!((answer.status, &*answer.body), (200, "OK"));
        assert_eq!(answer.header("access-control-allow-origin"), Some(allowed));
        assert_eq!(answer.header("access-control-allow-headers"), Some("authorization,content-type,x-stainless-os"));
        assert!(answer.header("access-control-allow-methods").unwrap().contains("POST"));
        assert_eq!(answer.header("access-control-allow-credentials"), None);
        for (line, key, status) in [
            ("GET /v1/models", ("x-api-key", "secret"), 200),
            ("GET /v1/models", ("x-api-key", "wrong"), 401),
            ("POST /v1/completions", ("x-api-key", "secret"), 400),
            ("GET /unknown", ("x-api-key", "secret"), 404),
            ("GET /v1/completions", ("x-api-key", "secret"), 405),
        ] {
            let answer = server.raw(line, &[ORIGIN, key]).await;
            let origin = answer.header("access-control-allow-origin");
            assert_eq!((answer.status, origin), (status, Some(allowed)), "{line}");
        }
        let elsewhere = server.raw("GET /health", &[("origin", "https://page.example.evil")]).await;
        assert_eq!(elsewhere.header("access-control-allow-origin"), (allowed == "*").then_some("*"));
        let none = server.raw("GET /health", &[]).await;
        assert_eq!(none.header("access-control-allow-origin"), None);
        let plain = server.raw("OPTIONS /v1/completions", &[ORIGIN]).await;
        assert_eq!(plain.status, 405, "no preflight");
    }
}

#[tokio::test]
async fn request_ids_come_back_when_asked_for() {
    let mut setup = Setup::default();
    setup.config.request_id_headers = true;
    setup.config.cors.allowed_origins = vec!["*".into()];
    let server = setup.start().await;
    let chat = server.chat(json!({})).send().await.unwrap();
    assert_eq!(chat.headers()["x-request-id"], "r");
    assert_eq!(chat.json::<Value>().await.unwrap()["id"], "chatcmpl-r");
    let given = [("x-request-id", "from-the-client 1")];
    let long = "x".repeat(257);
    for (line, status) in [("GET /health", 200), ("GET /unknown", 404), ("GET /v1/completions", 405)] {
        let answer = server.raw(line, &given).await;
        assert_eq!((answer.status, answer.header("x-request-id")), (status, Some(given[0].1)));
        let mut fresh = Vec::new();
        for unusable in ["", "\u{11e}", long.as_str()] {
            let answer = server.raw(line, &[("x-request-id", unusable)]).await;
            fresh.push(answer.header("x-request-id").unwrap().to_owned());
        }
        fresh.push(server.raw(line, &[]).await.header("x-request-id").unwrap().to_owned());
        assert!(fresh.iter().all(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit())), "{fresh:?}");
        fresh.sort_unstable();
        fresh.dedup();
        assert_eq!(fresh.len(), 4, "each has its own");
    }
    let preflight = server.raw("OPTIONS /v1/completions", &[ORIGIN, ASKS]).await;
    assert_eq!(preflight.header("x-request-id").map(str::len), Some(32));
    let server = Setup::default().start().await;
    assert_eq!(server.raw("GET /health", &given).await.header("x-request-id"), None);
}

/// The number of prompt tokens found in the prefix cache.
async fn cached(server: &TestServer, key: &str, salt: Option<&str>) -> u64 {
    let body = json!({"prompt": "x".repeat(100), "max_tokens": 1, "cache_salt": salt});
    let answer = ok(server.completion(body).header("authorization", format!("Bearer {key}"))).await;
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn several_keys_keep_the_prefix_cache_apart_unless_they_share() {
    for share in [false, true] {
        let mut setup = Setup::default();
        setup.config.api.prompt_tokens_details = true;
        setup.config.api_keys = vec!["first".into(), "second".into()];
        setup.config.share_prefix_cache = share;
        let server = setup.start().await;
        assert_eq!(cached(&server, "first", None).await, 0);
        assert_eq!(cached(&server, "first", None).await, 96);
        assert_eq!(cached(&server, "second", None).await, if share { 96 } else { 0 });
        assert_eq!(cached(&server, "first", Some("mine")).await, 0, "the request's own salt counts, too");
        assert_eq!(cached(&server, "first", Some("mine")).await, 96);
        assert_eq!(cached(&server, "second", Some("mine")).await, if share { 96 } else { 0 });
    }
}
