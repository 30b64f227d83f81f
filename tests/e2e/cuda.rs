//! Tests of `--device cuda` over a stand-in for the driver and CUDA's libraries: the whole server, with its kernels on
//! the CPU emulation.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use octavo_backend_cuda::testing::{cache, standin};
use octavo_tests::Server;
use serde_json::{Value, json};

use crate::OCTAVO;

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// Flags for small steps, because the emulation takes a while for each.
const SIZES: [&str; 6] = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "4M"];

fn server(model: &str, args: &[&str]) -> Server {
    // The last of a repeated flag counts.
    let args = [&SIZES, args].concat();
    Server::start_in(
        Path::new(OCTAVO),
        &testdata(model),
        &args,
        &[("OCTAVO_CUDA_LIBS", &standin()), ("OCTAVO_CACHE", &cache())],
    )
}

/// Returns text and token ids of a greedy answer.
async fn ask(server: &Server) -> (String, Value) {
    let request = json!({
        "model": "default",
        "messages": [{"role": "user", "content": "Which block holds sixteen tokens?"}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": true,
        "return_token_ids": true
    });
    let (status, answer) = server.post("/v1/chat/completions", &request).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length", "{answer}");
    (choice["message"]["content"].as_str().unwrap().to_owned(), choice["token_ids"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_is_answered_on_the_gpu_as_on_the_processor() {
    // The CPU backend stores keys and values in bf16, which does not change this model's tokens.
    let expected = ask(&server("qwen3", &["--device", "cpu", "--cpu-threads", "1"])).await;
    assert_eq!(expected.1.as_array().map(Vec::len), Some(12), "{expected:?}");
    for args in [
        &["--device", "cuda", "--dtype", "float32"][..],
        &["--device", "cuda", "--dtype", "float32", "--enforce-eager"],
    ] {
        let server = server("qwen3", args);
        assert_eq!(ask(&server).await, expected, "{args:?}");
        server.idle().await;
        let log = server.start_log();
        assert!(log.contains("device: cuda, Emulated H200 (sm_90a, 1.00 GiB), float32"), "{log}");
    }
}

/// The second run has steps that cut images, and decodes with images beside prompts.
#[tokio::test(flavor = "multi_thread")]
async fn conversations_with_images_are_answered_as_by_pytorch() {
    for (model, args) in [
        ("qwen3-vl", &["--enforce-eager"][..]),
        ("qwen3-vl", &["--max-num-batched-tokens", "10"]),
        ("idefics3", &["--max-num-batched-tokens", "10"]),
        ("gemma3-images", &["--max-num-batched-tokens", "19", "--max-num-seqs", "4"]),
    ] {
        let mut cases: Vec<Value> =
            serde_json::from_slice(&std::fs::read(testdata(model).join("chat.json")).unwrap()).unwrap();
        // The others need other settings of the image processor.
        cases.retain(|case| case["settings"].as_object().is_none_or(|settings| settings.is_empty()));
        let server = server(model, &[&["--device", "cuda", "--dtype", "float32"], args].concat());
        let answers = cases.iter().map(|case| {
            let request =
                json!({"messages": case["messages"], "max_tokens": 8, "temperature": 0, "return_token_ids": true});
            let server = &server;
            async move { server.post("/v1/chat/completions", &request).await }
        });
        let answers = futures::future::join_all(answers).await;
        for (case, (status, answer)) in cases.iter().zip(answers) {
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["choices"][0]["token_ids"], case["answer"], "{} {args:?}", case["name"]);
            assert_eq!(answer["usage"]["prompt_tokens"], case["prompt_tokens"], "{}", case["name"]);
        }
        assert!(server.start_log().contains("images: an image takes at most "), "{}", server.start_log());
    }
}

/// Returns the numbers of a list.
fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list")).iter().map(|x| x.as_f64().unwrap()).collect()
}

fn assert_near(found: &Value, expected: &[f64]) {
    let found = numbers(found);
    assert_eq!(found.len(), expected.len(), "{found:?}");
    assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-4), "{found:?} instead of {expected:?}");
}

/// The given budget of a step is smaller than the longest text, which a step must hold.
#[tokio::test(flavor = "multi_thread")]
async fn vectors_are_those_of_pytorch() {
    for (model, route, longest) in [("bert-sentence", "/v1/embeddings", 60), ("bert-classifier", "/classify", 64)] {
        let server = server(model, &["--device", "cuda", "--dtype", "float32", "--max-num-batched-tokens", "2"]);
        let mut cases: Vec<Value> =
            serde_json::from_slice(&std::fs::read(testdata(model).join("golden.json")).unwrap()).unwrap();
        cases.retain(|case| case["pair"].is_null());
        let texts: Vec<_> = cases.iter().map(|case| case["text"].clone()).collect();
        let (status, answer) = server.post(route, &json!({"input": texts})).await;
        assert_eq!(status, 200, "{answer}");
        for (case, item) in cases.iter().zip(answer["data"].as_array().unwrap()) {
            let raw = numbers(&case["vector"]);
            if route == "/classify" {
                let sum: f64 = raw.iter().map(|x| x.exp()).sum();
                assert_near(&item["probs"], &raw.iter().map(|x| x.exp() / sum).collect::<Vec<_>>());
            } else {
                let length = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
                assert_near(&item["embedding"], &raw.iter().map(|x| x / length).collect::<Vec<_>>());
            }
        }
        server.idle().await;
        let log = server.start_log();
        assert!(log.contains(&format!("a step holds whole texts, up to {longest} tokens")), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gpu_is_chosen_where_there_is_one() {
    let server = server("qwen3", &[]);
    let log = server.start_log();
    assert!(log.contains("device: cuda, because Emulated H200 (sm_90a, 1.00 GiB) is usable"), "{log}");
    assert!(log.contains("graphs: decode steps of 3 sizes are recorded, up to 4 sequences"), "{log}");
    // This server uses bfloat16 and runs several requests at once.
    let answers = futures::future::join_all((0..3).map(|_| ask(&server))).await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

/// Maximum time of a request to a server whose device is lost. A hang would last forever.
const ANSWERED: Duration = Duration::from_secs(60);

async fn is_lost_by(fault: &str, more: &[&str], reason: &str) {
    let args = [&["--device", "cuda"], more, &SIZES[..]].concat();
    let (libraries, cache) = (standin(), cache());
    let variables = [
        ("OCTAVO_CUDA_LIBS", libraries.as_path()),
        ("OCTAVO_CACHE", cache.as_path()),
        ("OCTAVO_STANDIN_FAULT", Path::new(fault)),
    ];
    let server = Server::start_in(Path::new(OCTAVO), &testdata("qwen3"), &args, &variables);
    assert_eq!(server.get("/health").await.0, 200);
    let request = json!({"model": "default", "prompt": "one", "max_tokens": 30, "ignore_eos": true});
    let both =
        async { tokio::join!(server.post("/v1/completions", &request), server.post("/v1/completions", &request)) };
    let (first, second) = tokio::time::timeout(ANSWERED, both).await.expect("requests end when the device is lost");
    for (status, answer) in [first, second] {
        assert_eq!(status, 500, "{fault}: {answer}");
    }
    assert_eq!(server.get("/health").await.0, 503, "{fault}");
    let later = tokio::time::timeout(ANSWERED, server.post("/v1/completions", &request));
    let (status, answer) = later.await.expect("requests that come later end too");
    assert!(status >= 500, "{fault}: {status}: {answer}");
    server.logs(&format!("the cuda backend lost its device: {reason}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_device_fails_its_requests_and_the_health_check() {
    // The seventh decode step finds an invalid access of a kernel; from then on every call fails.
    is_lost_by("cuGraphLaunch:6:700", &[], "cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_may_be_lost_in_the_midst_of_a_step() {
    let reason = "cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED";
    is_lost_by("cuLaunchKernelEx:100:719", &["--enforce-eager"], reason).await;
}

/// Returns the command's output with a stand-in that simulates the given settings.
fn said(arguments: &[&str], pretended: &[(&str, &str)], libraries: &Path) -> (bool, String) {
    let mut command = Command::new(OCTAVO);
    command.args(arguments).env("OCTAVO_CUDA_LIBS", libraries).env("OCTAVO_CACHE", cache());
    let output = command.envs(pretended.iter().copied()).output().expect("octavo runs");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.success(), text)
}

#[test]
fn the_doctor_tells_what_there_is() {
    let (well, said) = said(&["doctor"], &[], &standin());
    assert!(well, "{said}");
    let folder = standin();
    let folder = folder.display();
    for line in [
        "supports CUDA 13.0",
        "Emulated H200 (sm_90a, 1.00 GiB)",
        "Emulated P100 (sm_60, 1.00 GiB): Emulated P100 is too old: its compute capability is 6.0, but 7.0 is needed",
        &format!("{folder}/libnvrtc.so.12 (not used: another one takes precedence)"),
        &format!("compiled by NVRTC 13.0 ({folder}/libnvrtc.so.13)"),
        &format!("{folder}/libcublasLt.so.12"),
    ] {
        assert!(said.contains(line), "no '{line}' in:\n{said}");
    }
}

#[test]
fn what_keeps_a_gpu_from_being_used_is_said() {
    let v100 = ("OCTAVO_STANDIN_DEVICES", "Emulated V100:70:1024");
    let cases: [(&[(&str, &str)], &str); 5] = [
        (&[("OCTAVO_STANDIN_DRIVER", "11040")], "it supports CUDA 11.4, but 12.0 is needed (driver 525 or later)"),
        (&[("OCTAVO_STANDIN_DEVICES", "")], "the NVIDIA driver finds no GPU"),
        (&[("OCTAVO_STANDIN_DEVICES", "Old:61:1024")], "Old is too old: its compute capability is 6.1"),
        (&[("OCTAVO_STANDIN_DEVICES", "Tiny:90:16")], "not enough memory for weights and step buffers on Tiny"),
        // A bf16 checkpoint becomes f16 on this chip, and the compiler that supports the chip is used.
        (&[v100], "has no bfloat16: use --dtype half"),
    ];
    let model = testdata("qwen3");
    let model = model.to_str().unwrap();
    for (pretended, expected) in cases {
        let dtype = if pretended.contains(&v100) { "bfloat16" } else { "auto" };
        let arguments = ["serve", model, "--device", "cuda", "--dtype", dtype, "--port", "0"];
        let (well, said) = said(&[&arguments[..], &SIZES].concat(), pretended, &standin());
        assert!(!well && said.contains(expected), "no '{expected}' in:\n{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
    // CUDA 13 supports neither a driver of CUDA 12 nor a V100.
    for (pretended, unfit) in [
        (("OCTAVO_STANDIN_DRIVER", "12040"), "libnvrtc.so.13 (not used: the driver supports CUDA 12.4 only)"),
        (v100, "libnvrtc.so.13 (not used: it no longer knows sm_70)"),
    ] {
        let (well, said) = said(&["doctor"], &[pretended], &standin());
        assert!(well && said.contains(unfit) && said.contains("compiled by NVRTC 12.9"), "{said}");
    }
}

#[test]
fn a_machine_without_a_driver_is_told_so() {
    let nothing = tempfile::tempdir().unwrap();
    let (well, told) = said(&["doctor"], &[], nothing.path());
    assert!(well, "{told}");
    if !told.contains("none: there is no NVIDIA driver") {
        eprintln!("skipped: this machine has a driver of its own");
        return;
    }
    let model = testdata("qwen3");
    let (well, told) =
        said(&["serve", model.to_str().unwrap(), "--device", "cuda", "--port", "0"], &[], nothing.path());
    assert!(!well && told.contains("--device cuda: there is no NVIDIA driver"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_alone_is_served_with_made_up_weights() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(testdata("qwen3").join("config.json"), folder.path().join("config.json")).unwrap();
    let (libraries, cache) = (standin(), cache());
    let variables = [("OCTAVO_CUDA_LIBS", libraries.as_path()), ("OCTAVO_CACHE", cache.as_path())];
    for device in ["cuda", "cpu"] {
        let args = [&["--device", device, "--load-format", "dummy"], &SIZES[..]].concat();
        let server = Server::start_in(Path::new(OCTAVO), folder.path(), &args, &variables);
        let request = json!({
            "model": "default", "prompt": " time year people", "max_tokens": 9, "temperature": 0, "ignore_eos": true
        });
        let (status, answer) = server.post("/v1/completions", &request).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&3.into(), &9.into()));
        assert!(!answer["choices"][0]["text"].as_str().unwrap().is_empty(), "{answer}");
        let log = server.start_log();
        assert!(log.contains("the weights are random") && log.contains("the model has no tokenizer.json"), "{log}");

        // The counts are those of a prefill and eight decodes of a model with this number of weights.
        let metric = async |name: &str| -> f64 {
            let (_, text) = server.get("/metrics").await;
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {text}"));
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        assert!(metric("vllm:estimated_read_bytes_per_gpu_total{").await > 9.0 * 100_000.0);
        assert!(metric("vllm:estimated_flops_per_gpu_total{").await > 11.0 * 100_000.0);
        assert!(metric("octavo_step_busy_seconds_sum{").await > 0.0);
        let (_, text) = server.get("/metrics").await;
        assert_eq!(text.contains("octavo_device_memory_bytes{"), device == "cuda", "{text}");
        let replayed = text.lines().find(|line| line.contains("mode=\"replayed\""));
        assert_eq!(
            replayed.is_some_and(|line| line.ends_with(" 8") || line.ends_with(" 8.0")),
            device == "cuda",
            "{text}"
        );
    }
}
