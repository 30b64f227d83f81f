//! Adapters: chosen by the model of a request, listed, loaded and unloaded.

use std::path::Path;

use octavo_engine::Adapter;
use octavo_server::{AdapterLoadError, AdapterLoader, AdapterSource};
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::support::{Setup, TestServer, ok};

/// Finds adapters in folders that are called `good` or begin so, and damaged ones in `bad`.
pub struct FakeLoader;

impl AdapterLoader for FakeLoader {
    fn load(&self, source: AdapterSource<'_>) -> Result<Adapter, AdapterLoadError> {
        let AdapterSource { name, path, number, origin } = source;
        match path.file_name().and_then(|folder| folder.to_str()) {
            Some(folder) if folder.starts_with("good") => Ok(Adapter::new(number, name, origin, ())),
            Some("bad") => Err(AdapterLoadError::Refused("it is damaged".into())),
            _ => Err(AdapterLoadError::NotFound(path.display().to_string())),
        }
    }

    fn base_of(&self, path: &Path) -> Option<String> {
        let folder = path.file_name()?.to_str()?;
        (folder == "bad" || folder.starts_with("good")).then(|| "mock".into())
    }
}

fn load(server: &TestServer, body: Value) -> RequestBuilder {
    server.post("/v1/load_lora_adapter", &body)
}

fn unload(server: &TestServer, body: Value) -> RequestBuilder {
    server.post("/v1/unload_lora_adapter", &body)
}

/// The status and the text of a response.
async fn answer(request: RequestBuilder) -> (u16, String) {
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// The status, the type and the message of an error.
async fn error(request: RequestBuilder) -> (u16, String, String) {
    let (status, text) = answer(request).await;
    let body: Value = serde_json::from_str(&text).unwrap();
    let field = |name: &str| body["error"][name].as_str().unwrap().to_owned();
    (status, field("type"), field("message"))
}

async fn listed(server: &TestServer) -> Vec<String> {
    let models: Value = server.get("/v1/models").await.json().await.unwrap();
    models["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect()
}

async fn said(server: &TestServer, model: &str) -> (String, String) {
    let answer = ok(server.chat(json!({"model": model, "max_tokens": 8, "ignore_eos": true, "temperature": 0}))).await;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    (answer["model"].as_str().unwrap().to_owned(), text)
}

#[tokio::test]
async fn an_adapter_is_loaded_used_and_unloaded() {
    let server = Setup::adapted().start().await;
    let (name, base) = said(&server, "mock").await;
    assert_eq!(name, "mock");
    let loaded = answer(load(&server, json!({"lora_name": "sql", "lora_path": "/x/good"}))).await;
    assert_eq!(loaded, (200, "Success: LoRA adapter 'sql' added successfully.".into()));
    assert_eq!(listed(&server).await, ["mock", "alias", "sql"]);
    let card: Value = server.get("/v1/models/sql").await.json().await.unwrap();
    assert_eq!(
        (&card["root"], &card["parent"], &card["max_model_len"]),
        (&json!("/x/good"), &json!("mock"), &json!(null))
    );

    let (name, adapted) = said(&server, "sql").await;
    assert_eq!(name, "sql");
    assert_ne!(adapted, base);
    assert_eq!(said(&server, "sql").await.1, adapted);
    assert_eq!(said(&server, "alias").await.1, base);
    let completed = ok(server.completion(json!({"model": "sql", "max_tokens": 2}))).await;
    assert_eq!(completed["model"], "sql");
    let tokens = ok(server.post("/tokenize", &json!({"model": "sql", "prompt": "Hello"}))).await;
    assert!(tokens["count"].as_u64().unwrap() > 0);

    let removed = answer(unload(&server, json!({"lora_name": "sql"}))).await;
    assert_eq!(removed, (200, "Success: LoRA adapter 'sql' removed successfully.".into()));
    assert_eq!(listed(&server).await, ["mock", "alias"]);
    let (status, kind, message) = error(server.chat(json!({"model": "sql"}))).await;
    assert_eq!((status, &*kind), (404, "NotFoundError"));
    assert_eq!(message, "The model `sql` does not exist. Valid aliases: mock, alias.");
}

#[tokio::test]
async fn two_adapters_and_the_base_take_turns_in_one_slot() {
    let server = Setup::adapted().start().await;
    for name in ["a", "b"] {
        ok_text(load(&server, json!({"lora_name": name, "lora_path": format!("/x/good-{name}")}))).await;
    }
    let alone = [said(&server, "mock").await, said(&server, "a").await, said(&server, "b").await];
    let together = tokio::join!(said(&server, "b"), said(&server, "mock"), said(&server, "a"), said(&server, "b"));
    assert_eq!(together, (alone[2].clone(), alone[0].clone(), alone[1].clone(), alone[2].clone()));
    server.idle().await;
    let text = server.telemetry.render();
    let info = text.lines().find(|line| line.starts_with("vllm:lora_requests_info{")).unwrap();
    assert!(info.contains("max_lora=\"1\"") && info.contains("running_lora_adapters=\"\""), "{info}");
}

async fn ok_text(request: RequestBuilder) {
    let (status, text) = answer(request).await;
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn what_cannot_be_loaded_or_unloaded_is_refused_as_in_vllm() {
    let server = Setup::adapted().start().await;
    let named = |name: &str, path: &str| json!({"lora_name": name, "lora_path": path});
    ok_text(load(&server, named("sql", "/x/good"))).await;
    let both = "Both 'lora_name' and 'lora_path' must be provided.";
    for (body, status, kind, message) in [
        (json!({}), 400, "InvalidUserInput", both),
        (json!({"lora_name": "a"}), 400, "InvalidUserInput", both),
        (named("", "/x/good"), 400, "InvalidUserInput", both),
        (
            named("mock", "/x/good"),
            400,
            "InvalidUserInput",
            "The lora adapter 'mock' conflicts with a served base model.",
        ),
        (
            named("sql", "/x/good"),
            400,
            "InvalidUserInput",
            "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set \
             'load_inplace' to True.",
        ),
        (named("a", "/x/none"), 404, "NotFoundError", "Loading lora a failed: No adapter found for /x/none"),
        (named("a", "/x/bad"), 500, "InternalServerError", "it is damaged"),
    ] {
        assert_eq!(error(load(&server, body)).await, (status, kind.into(), message.into()));
    }
    assert_eq!(error(load(&server, json!({"lora_name": 1, "lora_path": "/x/good"}))).await.0, 400);
    let in_place = json!({"lora_name": "sql", "lora_path": "/x/good", "load_inplace": true});
    ok_text(load(&server, in_place)).await;
    for (body, status, kind, message) in [
        (json!({}), 400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter."),
        (json!({"lora_name": "none"}), 404, "NotFoundError", "The lora adapter 'none' cannot be found."),
    ] {
        assert_eq!(error(unload(&server, body)).await, (status, kind.into(), message.into()));
    }
}

#[tokio::test]
async fn an_adapter_of_an_unknown_name_is_found_in_the_folder() {
    let server = Setup::adapted().start().await;
    assert_eq!(said(&server, "good").await.0, "good");
    assert_eq!(listed(&server).await, ["mock", "alias", "good"]);
    let (status, _, message) = error(server.chat(json!({"model": "bad"}))).await;
    assert_eq!((status, &*message), (400, "it is damaged"));
    for name in ["../good", "/adapters/good", "none"] {
        assert_eq!(error(server.chat(json!({"model": name}))).await.0, 404, "{name}");
    }
}

#[tokio::test]
async fn the_routes_need_the_key_and_the_permission_of_the_operator() {
    let mut setup = Setup::adapted();
    setup.config.api_keys = vec!["secret".into()];
    let server = setup.start().await;
    let body = json!({"lora_name": "sql", "lora_path": "/x/good"});
    assert_eq!(answer(load(&server, body.clone())).await.0, 401);
    assert_eq!(answer(unload(&server, body.clone())).await.0, 401);
    assert_eq!(answer(load(&server, body.clone()).bearer_auth("secret")).await.0, 200);
    let mut setup = Setup::adapted();
    setup.config.adapter_routes = false;
    let server = setup.start().await;
    assert_eq!(answer(load(&server, body.clone())).await.0, 404);
    let mut setup = Setup::default();
    setup.config.adapter_routes = true;
    let server = setup.start().await;
    assert_eq!(answer(load(&server, body)).await.0, 404, "the server runs without adapters");
}

/// Loading and unloading under load loses no request.
#[tokio::test]
async fn adapters_change_under_load() {
    let server = Setup::adapted().start().await;
    let (_, base) = said(&server, "mock").await;
    let change = async {
        for round in 0..1000 {
            let name = format!("a{}", round % 3);
            ok_text(load(&server, json!({"lora_name": name, "lora_path": "/x/good"}))).await;
            if round % 10 == 0 {
                said(&server, &name).await;
            }
            ok_text(unload(&server, json!({"lora_name": name}))).await;
        }
    };
    let talk = async {
        for _ in 0..100 {
            assert_eq!(said(&server, "mock").await.1, base);
        }
    };
    tokio::join!(change, talk);
    server.idle().await;
    assert_eq!(listed(&server).await, ["mock", "alias"]);
}
