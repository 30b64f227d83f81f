//! Adapters beside a quantised model, as QLoRA makes them, and adapters of experts.

use std::path::Path;
use std::process::Command;

use octavo_tests::Server;
use serde_json::json;

use crate::OCTAVO;
use crate::quantised::{testdata, with_tokenizer};

const SMALL: [&str; 4] = ["--cpu-threads", "1", "--num-gpu-blocks-override", "64"];

async fn said(server: &Server, model: &str) -> String {
    let extra = json!({"model": model, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    server.complete("The capital of", &extra).await.text
}

#[tokio::test]
async fn an_adapter_is_served_beside_its_quantised_base() {
    check_served("quantised/nf4", "adapters/qlora").await;
}

#[tokio::test]
async fn an_adapter_of_experts_is_served_beside_its_base() {
    check_served("mixtral", "adapters/expert-modules").await;
}

async fn check_served(model: &str, adapter: &str) {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    with_tokenizer(&testdata(model), &base);
    let plain = Server::start(Path::new(OCTAVO), &base, &[&SMALL[..], &["--served-model-name", "base"]].concat());
    let expected = said(&plain, "base").await;
    drop(plain);

    let module = format!("tune={}", testdata(adapter).display());
    let flags = ["--served-model-name", "base", "--enable-lora", "--lora-modules", &module, "--max-loras", "2"];
    let server = Server::start(Path::new(OCTAVO), &base, &[&SMALL[..], &flags].concat());
    assert!(server.start_log().contains("adapter tune: "), "{}", server.start_log());
    assert_eq!(said(&server, "base").await, expected, "the base has the bits of a server without adapters");
    let tuned = said(&server, "tune").await;
    assert_ne!(tuned, expected);
    let mixed = tokio::join!(said(&server, "tune"), said(&server, "base"), said(&server, "tune"));
    assert_eq!(mixed, (tuned.clone(), expected, tuned));
    let (status, models) = server.get("/v1/models").await;
    assert!(status == 200 && models.contains("\"parent\":\"default\""), "{models}");
    assert!(server.metric("vllm:lora_requests_info", "max_lora=\"2\"").await > 0.0);
    let load = json!({"lora_name": "a", "lora_path": "/a"});
    assert_eq!(server.post("/v1/load_lora_adapter", &load).await.0, 404, "the operator has not allowed it");
}

/// Returns the errors of a server that must not start.
fn refused(flags: &[&str]) -> String {
    let model = testdata("llama-gguf/model.gguf");
    let output = Command::new(OCTAVO).arg("serve").arg(model).args(SMALL).args(flags).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn adapters_that_cannot_be_served_end_the_start() {
    let module = format!("tune={}", testdata("adapters/permuted").display());
    let without = refused(&["--lora-modules", &module]);
    assert!(without.contains("--lora-modules needs --enable-lora"), "{without}");
    let few = refused(&["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "1"]);
    assert!(few.contains("--max-cpu-loras 1: it must be at least --max-loras, 2"), "{few}");
    let small = refused(&["--enable-lora", "--max-lora-rank", "2", "--lora-modules", &module]);
    assert!(
        small.contains("--lora-modules tune: ") && small.contains("above the largest that is served, 2"),
        "{small}"
    );
    let absent = refused(&["--enable-lora", "--lora-modules", "tune=/nowhere"]);
    assert!(absent.contains("No adapter found for /nowhere"), "{absent}");
    let rank = refused(&["--enable-lora", "--max-lora-rank", "512"]);
    assert!(rank.contains("the largest rank is 256"), "{rank}");
}
