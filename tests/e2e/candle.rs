//! Tests of `--device candle`, which only a binary with the feature `candle` has.

use std::path::Path;

#[cfg(feature = "candle")]
use octavo_tests::Server;
#[cfg(feature = "candle")]
use serde_json::json;

use crate::OCTAVO;

/// A Llama of random weights.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

#[cfg(feature = "candle")]
#[tokio::test(flavor = "multi_thread")]
async fn candle_gives_the_tokens_of_the_processor() {
    let greedy = json!({"max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let mut texts = Vec::new();
    for device in ["candle", "cpu"] {
        let server = Server::start(Path::new(OCTAVO), Path::new(TINY), &["--device", device]);
        texts.push(server.complete("The sea is", &greedy).await.text);
        let (_, metrics) = server.get("/metrics").await;
        let build = metrics.lines().find(|line| line.starts_with("octavo_build_info{")).unwrap();
        assert!(build.contains(&format!("backend=\"{device}\"")), "{build}");
    }
    assert_eq!(texts[0], texts[1]);
}

#[cfg(not(feature = "candle"))]
#[test]
fn a_binary_without_candle_says_how_to_build_one() {
    let mut command = std::process::Command::new(OCTAVO);
    let output = command.args(["serve", TINY, "--host", "127.0.0.1", "--port", "0", "--device", "candle"]).output();
    let output = output.expect("octavo runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && Path::new(TINY).exists(), "{said}");
    assert!(said.contains("--device candle") && said.contains("cargo build --release --features candle"), "{said}");
}
