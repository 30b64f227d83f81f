//! Tests of `octavo bench` with a tiny model, and of the files it writes.

use std::path::Path;
use std::process::{Command, Output};

use octavo_backend_cuda::testing::{cache, standin};
use octavo_tests::Server;
use serde_json::Value;

/// A Llama with random weights and a context of 256 tokens.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

/// Runs `octavo bench WHAT TINY ARGS` with both kinds of output files in `folder`.
fn bench(what: &str, args: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(crate::OCTAVO);
    command.args(["bench", what, TINY, "--cpu-threads", "1", "--num-gpu-blocks-override", "64"]).args(args);
    command.arg("--output-json").arg(folder.join("figures.json")).arg("--plot").arg(folder.join("plot.svg"));
    command.output().unwrap()
}

/// Returns the output and the JSON that was written.
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
    // The figures exactly as they are written: serde_json may be off by a unit in the last place when it reads a number.
    let text = std::fs::read_to_string(folder.path().join("figures.json")).unwrap();
    let written = |key: &str| -> f64 {
        let value = text.split_once(&format!("\"{key}\": ")).unwrap().1;
        value[..value.find([',', '\n']).unwrap()].parse().unwrap()
    };
    let average = written("avg_latency");
    assert!((average - latencies.iter().sum::<f64>() / 4.0).abs() < 1e-9);
    for percent in ["10", "25", "50", "75", "90", "99"] {
        let value = written(percent);
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

/// Runs `octavo bench serve ARGS` against a server of the tiny model; what was said, and the file of figures.
fn load(server: &Server, args: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(crate::OCTAVO);
    command.args(["bench", "serve", "--base-url", &server.url(""), "--save-detailed", "--result-filename", "f.json"]);
    let output = command.arg("--result-dir").arg(folder.path()).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    (said, serde_json::from_slice(&std::fs::read(folder.path().join("f.json")).unwrap()).unwrap())
}

#[test]
fn a_whole_line_of_vllm_measures_a_server() {
    let server = Server::start(Path::new(crate::OCTAVO), Path::new(TINY), &["--cpu-threads", "1"]);
    let line = "--backend vllm --endpoint /v1/completions --dataset-name random --random-input-len 20 --random-output-len 6 \
                --random-range-ratio 0.25 --random-prefix-len 8 --num-prompts 9 --request-rate 200 --burstiness 0.5 \
                --max-concurrency 3 --num-warmups 1 --seed 4 --ignore-eos --trust-remote-code --percentile-metrics ttft,e2el \
                --metric-percentiles 50,90 --goodput ttft:60000 --metadata run=7 --tokenizer";
    let line: Vec<&str> = line.split_whitespace().chain([TINY]).collect();
    let (said, json) = load(&server, &line);
    assert!(said.contains("--trust-remote-code has no effect: "), "{said}");
    assert!(said.contains("P90 E2EL (ms):") && !said.contains("ITL"), "{said}");
    assert_eq!((&json["completed"], &json["failed"], &json["run"]), (&9.into(), &0.into(), &"7".into()));
    let lengths = |key: &str| serde_json::from_value::<Vec<u64>>(json[key].clone()).unwrap();
    assert!(lengths("input_lens").iter().all(|tokens| (23..=33).contains(tokens)), "{json}");
    assert!(lengths("output_lens").iter().all(|tokens| (4..=8).contains(tokens)), "{json}");
    assert!(json["request_goodput"].as_f64().unwrap() > 0.0 && json["burstiness"] == 0.5, "{json}");
}

#[test]
fn conversations_are_measured_by_the_servers_tokenizer() {
    let server = Server::start(Path::new(crate::OCTAVO), Path::new(TINY), &["--cpu-threads", "1"]);
    let file = tempfile::NamedTempFile::new().unwrap();
    let turns =
        |prompt: &str, answer: &str| serde_json::json!({"conversations": [{"value": prompt}, {"value": answer}]});
    let entries = [turns("What is it?", "It is something else."), turns("", "This prompt is too short.")];
    std::fs::write(file.path(), serde_json::to_string(&entries).unwrap()).unwrap();
    let path = file.path().to_str().unwrap();
    let sharegpt = ["--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", "3", "--ignore-eos"];
    let (said, json) = load(&server, &sharegpt);
    assert!(said.contains("the dataset has 1 usable prompts; some are repeated"), "{said}");
    let lengths = |key: &str| serde_json::from_value::<Vec<u64>>(json[key].clone()).unwrap();
    assert_eq!((lengths("input_lens").len(), json["completed"].as_u64()), (3, Some(3)));
    assert!(lengths("output_lens").iter().all(|tokens| *tokens == lengths("output_lens")[0] && *tokens >= 4), "{json}");

    std::fs::write(file.path(), "{\"prompt\": \"Hello\"}\n").unwrap();
    let custom = ["--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "2", "--custom-output-len", "5"];
    let (_, json) = load(&server, &[&custom[..], &["--skip-chat-template", "--extra-body.seed", "3"]].concat());
    assert_eq!(json["completed"], 2);
}

/// Runs `octavo bench ARGS` on the stand-in for a GPU, with a file of results. Returns the output and the results.
fn on_standin(args: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures.json");
    let mut command = Command::new(crate::OCTAVO);
    command.arg("bench").args(args).arg("--output-json").arg(&path);
    command.env("OCTAVO_CUDA_LIBS", standin()).env("OCTAVO_CACHE", cache());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    (said, serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())
}

/// Checks that each result has a time, and rates that match it.
fn check_rates(rows: &[Value]) {
    for row in rows {
        let figure = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
        let seconds = figure("seconds");
        assert!(seconds > 0.0, "{row}");
        assert!((figure("bytes_per_second") * seconds / figure("bytes") - 1.0).abs() < 1e-9, "{row}");
        let flops = figure("flops_per_second") * seconds - figure("flops");
        assert!(flops.abs() <= 1e-6 * figure("flops"), "{row}");
    }
}

#[test]
fn steps_are_held_against_the_processors_limits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("figures.json");
    let mut command = Command::new(crate::OCTAVO);
    command.args(["bench", "roofline", TINY, "--device", "cpu", "--batch-sizes", "1,3", "--contexts", "40"]);
    command.args(["--prefill", "50", "--max-num-batched-tokens", "20", "--num-gpu-blocks-override", "7"]);
    let output = command.args(["--min-time", "0.02", "--output-json"]).arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let bandwidth = json["limits"]["bandwidth_bytes_per_second"].as_f64().unwrap();
    assert!(bandwidth > 1e8 && said.contains("(measured: reads of memory, the fastest unit)"), "{said}");
    let steps = json["steps"].as_array().unwrap();
    let kinds: Vec<&str> = steps.iter().map(|step| step["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["decode", "decode", "prefill"]);
    // Three sequences of 40 tokens need 9 blocks and the null block, but there are only 7.
    assert_eq!(steps[1]["error"], "it does not fit the KV cache");
    assert!(said.contains("decode 3 x 40: does not fit the KV cache"), "{said}");
    let measured = [steps[0].clone(), steps[2].clone()];
    check_rates(&measured);
    for step in &measured {
        let figure = |key: &str| step[key].as_f64().unwrap();
        assert!((figure("fraction_of_bound") * figure("seconds") / figure("bound_seconds") - 1.0).abs() < 1e-9);
        assert!(figure("bound_seconds") >= figure("bytes") / bandwidth * 0.999, "{step}");
        assert!(figure("least_seconds") <= figure("seconds"), "{step}");
    }
    // The prompt's weights are read in each of its three steps.
    let weights = |step: &Value| step["weight_bytes"].as_u64().unwrap();
    assert!(weights(&measured[1]) > 2 * weights(&measured[0]), "{measured:?}");
}

#[test]
fn steps_and_kernels_are_measured_on_a_gpu() {
    let shape = Path::new(TINY).join("../qwen3");
    let sizes = ["--batch-sizes", "1,3", "--contexts", "20", "--prefill", "24", "--min-time", "0"];
    let model = shape.to_str().unwrap();
    let roofline = ["roofline", model, "--device", "cuda", "--load-format", "dummy", "--kv-cache-memory-bytes", "4M"];
    let (said, json) = on_standin(&[&roofline[..], &sizes].concat());
    assert!(said.contains("Emulated H200 (sm_90a, 1.00 GiB), bfloat16"), "{said}");
    // The limits of an emulation are unknown.
    assert!(said.contains("limits: unknown") && json["limits"].is_null(), "{said}");
    let steps = json["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3);
    check_rates(steps);
    assert!(steps.iter().all(|step| step["fraction_of_bound"].is_null()), "{steps:?}");

    let (said, json) = on_standin(&[&["kernels", model][..], &sizes].concat());
    let kernels = json["kernels"].as_array().unwrap();
    check_rates(kernels);
    assert!(kernels.iter().all(|kernel| kernel["copies"].as_u64().unwrap() >= 2), "{kernels:?}");
    let families = [
        "gemv_bf16",
        "gemm_mma_bf16",
        "cublasLt",
        "paged_attention",
        "norm_rms",
        "embed",
        "glu_silu",
        "gather_rows",
        "gather_columns",
        "qkv_post",
        "copy_blocks",
        "sampling",
        "mmvq_q4_0",
        "mmvq_q8_0",
        "dequantize_q4_1",
        "quantize_activations",
    ];
    for family in families {
        let named = |kernel: &&Value| kernel["kernel"].as_str().unwrap().starts_with(family);
        assert!(kernels.iter().any(|kernel| named(&kernel)) && said.contains(family), "no {family} in {said}");
    }
    let (_, json) = on_standin(&[&["kernels", model, "--filter", "head"][..], &sizes].concat());
    let kernels = json["kernels"].as_array().unwrap();
    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel["on"].as_str().unwrap().contains("head")));
    // Three rows of the head have 320 outputs in f32 from 64 inputs.
    let gemm = kernels.iter().find(|kernel| kernel["on"] == "head 320x64, 3 rows").unwrap();
    assert_eq!(
        (gemm["flops"].as_u64(), gemm["bytes"].as_u64()),
        (Some(2 * 3 * 320 * 64), Some(2 * (320 + 3) * 64 + 3 * 320 * 4))
    );
}

#[test]
fn without_a_gpu_no_kernel_is_measured() {
    let mut command = Command::new(crate::OCTAVO);
    command.args(["bench", "kernels"]).env("OCTAVO_CUDA_LIBS", standin()).env("OCTAVO_STANDIN_DEVICES", "");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("kernels are measured on a GPU, and none can be used: the NVIDIA driver finds no GPU"),
        "{said}"
    );
}
