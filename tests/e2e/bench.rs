//! `octavo bench latency` and `octavo bench throughput` with a tiny model, and what they leave behind.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A Llama of random weights with a context of 256 tokens.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

/// Runs `octavo bench WHAT TINY ARGS` with both kinds of files in `folder`.
fn bench(what: &str, args: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(crate::OCTAVO);
    command.args(["bench", what, TINY, "--cpu-threads", "1", "--num-gpu-blocks-override", "64"]).args(args);
    command.arg("--output-json").arg(folder.join("figures.json")).arg("--plot").arg(folder.join("plot.svg"));
    command.output().unwrap()
}

/// What was said, and the JSON that was written.
fn figures(output: &Output, folder: &Path) -> (String, Value) {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let plot = std::fs::read_to_string(folder.join("plot.svg")).unwrap();
    assert!(plot.starts_with("<svg ") && plot.contains("<polyline "), "{plot}");
    (said, serde_json::from_slice(&std::fs::read(folder.join("figures.json")).unwrap()).unwrap())
}

#[test]
fn latency_is_told_of_each_iteration() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--input-len=9", "--output_len=5", "--batch-size=3", "--num-iters-warmup=1", "--num-iters=4", "--n=2"];
    let (said, json) = figures(&bench("latency", &args, folder.path()), folder.path());
    let latencies: Vec<f64> = serde_json::from_value(json["latencies"].clone()).unwrap();
    assert_eq!(latencies.len(), 4);
    let average = json["avg_latency"].as_f64().unwrap();
    assert!((average - latencies.iter().sum::<f64>() / 4.0).abs() < 1e-9);
    for percent in ["10", "25", "50", "75", "90", "99"] {
        let value = json["percentiles"][percent].as_f64().unwrap();
        assert!(said.contains(&format!("{percent}% percentile latency: {value} seconds\n")), "{said}");
    }
    assert!(said.starts_with(&format!("Avg latency: {average} seconds\n")), "{said}");
}

#[test]
fn throughput_counts_every_token() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--dataset-name", "random", "--random-input-len", "8", "--output-len", "6", "--num-prompts", "5"];
    let (said, json) = figures(&bench("throughput", &args, folder.path()), folder.path());
    assert!(said.contains("Total num prompt tokens:  40\nTotal num output tokens:  30\n"), "{said}");
    assert_eq!((json["num_requests"].as_u64(), json["total_num_tokens"].as_u64()), (Some(5), Some(70)));
    let figure = |key: &str| json[key].as_f64().unwrap();
    let elapsed = figure("elapsed_time");
    assert!((figure("requests_per_second") * elapsed - 5.0).abs() < 1e-9);
    assert!((figure("tokens_per_second") * elapsed - 70.0).abs() < 1e-9);
    let rate = format!("Throughput: {:.2} requests/s, {:.2} total", 5.0 / elapsed, 70.0 / elapsed);
    assert!(said.starts_with(&rate), "{said}");
}

#[test]
fn what_does_not_fit_the_context_is_said_before_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    for what in ["latency", "throughput"] {
        let output = bench(what, &["--input-len", "250", "--output-len", "7"], folder.path());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("do not fit a context of 256 tokens"), "{said}");
    }
}
