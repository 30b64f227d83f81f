//! The pages for people, and the description of the API.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::Setup;

const PAGES: [(&str, &str); 8] = [
    ("/", "text/html; charset=utf-8"),
    ("/assets/main.js", "text/javascript; charset=utf-8"),
    ("/assets/style.css", "text/css; charset=utf-8"),
    ("/assets/vendor/licences.txt", "text/plain; charset=utf-8"),
    ("/assets/vendor/marked.esm.js", "text/javascript; charset=utf-8"),
    ("/docs", "text/html; charset=utf-8"),
    ("/redoc", "text/html; charset=utf-8"),
    ("/openapi.json", "application/json"),
];

#[tokio::test]
async fn pages_are_sent_once_and_confined() {
    let server = Setup::default().start().await;
    for (path, content_type) in PAGES {
        let response = server.get(path).await;
        assert_eq!(response.status(), 200, "{path}");
        let headers = response.headers().clone();
        assert_eq!(headers["content-type"], content_type, "{path}");
        assert_eq!(headers["cache-control"], "no-cache", "{path}");
        assert_eq!(headers["x-content-type-options"], "nosniff", "{path}");
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; ") && !policy.contains("unsafe"), "{path}: {policy}");
        let request = |method| server.client.request(method, format!("{}{path}", server.url));
        let again = request(Method::GET).header("if-none-match", &headers["etag"]).send().await.unwrap();
        assert_eq!((again.status().as_u16(), &again.headers()["etag"]), (304, &headers["etag"]), "{path}");
        assert!(again.bytes().await.unwrap().is_empty());
        let head = request(Method::HEAD).send().await.unwrap();
        assert_eq!((head.status().as_u16(), &head.headers()["etag"]), (200, &headers["etag"]), "{path}");
    }
    let policy = server.get("/").await.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("script-src 'sha256-") && policy.contains("connect-src 'self'"), "{policy}");
    for part in ["style-src 'self'; ", "base-uri 'self'; ", "trusted-types 'none'", "img-src data:; "] {
        assert!(policy.contains(part), "{part}: {policy}");
    }
    let docs = server.get("/docs").await.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(docs.contains("base-uri 'none'; ") && docs.matches("'self'").count() == 1, "{docs}");
}

#[tokio::test]
async fn the_chat_and_its_files_need_no_key_and_follow_the_root_path() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["key".into()];
    setup.config.root_path = "/octavo".into();
    let server = setup.start().await;
    for (path, content_type) in PAGES {
        for path in [path.to_owned(), format!("/octavo{path}")] {
            let response = server.get(&path).await;
            assert_eq!(
                (response.status().as_u16(), &response.headers()["content-type"]),
                (200, &content_type.parse().unwrap()),
                "{path}"
            );
        }
    }
    let url = format!("{}/server_info?config_format=json", server.url);
    assert_eq!(server.client.get(url).bearer_auth("key").send().await.unwrap().status(), 200);
    for path in ["/server_info?config_format=json", "/v1/models", "/assets", "/assets/"] {
        assert_eq!(server.get(path).await.status(), 401, "{path}");
    }
}

#[tokio::test]
async fn only_the_files_of_the_chat_are_assets() {
    let server = Setup::default().start().await;
    for path in [
        "/assets/index.html",
        "/assets/main.js/",
        "/assets/vendor",
        "/assets/../main.js",
        "/assets/%2e%2e/Cargo.toml",
        "/assets/%ff",
    ] {
        assert_eq!(server.get(path).await.status(), 404, "{path}");
    }
    let posted = server.client.post(format!("{}/assets/main.js", server.url)).send().await.unwrap();
    assert_eq!(posted.status(), 405);
}

#[tokio::test]
async fn the_description_is_of_this_server() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["key".into()];
    let server = setup.start().await;
    let document: Value = server.get("/openapi.json").await.json().await.unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["version"], "0.0.0");
    assert_eq!(document["components"]["schemas"]["Model"]["examples"], json!(["mock", "alias"]));
    assert!(document["paths"]["/v1/chat/completions"]["post"].is_object());
}

#[tokio::test]
async fn the_description_can_be_turned_off_and_the_chat_stays() {
    let mut setup = Setup::default();
    setup.config.disable_docs = true;
    let server = setup.start().await;
    for path in ["/docs", "/redoc", "/openapi.json"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        assert_eq!(response.json::<Value>().await.unwrap(), json!({"detail": "Not Found"}));
    }
    assert_eq!(server.get("/").await.status(), 200);
}
