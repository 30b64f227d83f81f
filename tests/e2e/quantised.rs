//! Quantised Hugging Face directories, and an adapter that is merged into one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use octavo_tests::Server;
use serde_json::json;

use crate::OCTAVO;

pub(crate) fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// Copies a tiny model, which has no tokenizer, with that of another.
pub(crate) fn with_tokenizer(model: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), to.join(name)).unwrap();
    }
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(testdata("llama").join(name), to.join(name)).unwrap();
    }
}

/// Serves a model and returns the answer to a prompt, with the log of the start.
async fn answer(model: &Path, flags: &[&str]) -> (String, String) {
    let small = ["--cpu-threads", "1", "--num-gpu-blocks-override", "64"];
    let server = Server::start(Path::new(OCTAVO), model, &[&small, flags].concat());
    let found = server.complete("The capital of", &json!({"max_tokens": 12, "temperature": 0})).await;
    (found.text, server.start_log().to_owned())
}

#[tokio::test]
async fn quantised_models_are_served_and_merged_with_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let (base, merged) = (folder.path().join("base"), folder.path().join("merged"));
    with_tokenizer(&testdata("quantised/nf4"), &base);
    let (text, log) = answer(&base, &["--quantization", "bitsandbytes"]).await;
    assert!(log.contains("quantisation: bitsandbytes") && log.contains("7 as NF4"), "{log}");

    let arguments =
        ["merge", base.to_str().unwrap(), testdata("adapters/qlora").to_str().unwrap(), "-o"].map(str::to_owned);
    let output = Command::new(OCTAVO).args(&arguments).arg(&merged).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), merged.to_str().unwrap());
    assert!(errors.contains("7 weights changed") && errors.contains("7 quantised weights were unpacked"), "{errors}");
    let (adapted, log) = answer(&merged, &[]).await;
    assert!(!log.contains("quantisation:"), "{log}");
    assert_ne!(adapted, text);

    let again = Command::new(OCTAVO).args(&arguments).arg(&merged).output().unwrap();
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists and is not empty"));
}
