//! Tests of `tests/gpu/run.sh` without a GPU, and over a stand-in for one.

use std::path::Path;
use std::process::{Command, Output};

use octavo_backend_cuda::testing::{cache, standin};
use serde_json::Value;

use crate::OCTAVO;

/// Runs parts of the suite with the program under test and its results in `folder`.
fn run(parts: &[&str], folder: &Path, variables: &[(&str, &str)]) -> (Output, String) {
    let suite = folder.join("suite");
    if !suite.exists() {
        std::fs::create_dir(&suite).unwrap();
        std::os::unix::fs::symlink(OCTAVO, suite.join("octavo")).unwrap();
        std::fs::write(suite.join("COMMIT"), "0123abc\n").unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gpu/run.sh");
    let mut command = Command::new(script);
    command.args(parts).env("OCTAVO_GPU_SUITE", &suite).env("OCTAVO_GPU_RESULTS", folder).env("OCTAVO_CACHE", cache());
    let output = command.envs(variables.iter().copied()).output().expect("the script starts");
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    (output, text)
}

#[test]
fn without_a_gpu_it_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let (output, said) = run(&[], folder.path(), &[("OCTAVO_CUDA_LIBS", "/nowhere")]);
    if !said.contains("skipped: no GPU") {
        eprintln!("skipped: this machine has a GPU of its own");
        return;
    }
    assert!(output.status.success(), "{said}");
    let (output, said) = run(&["everything"], folder.path(), &[]);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("no part is called everything: there are correctness volta"), "{said}");
}

#[test]
fn a_part_is_run_and_its_result_is_kept() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let libraries = standin();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/qwen3");
    let model = format!(
        "{model} --max-num-seqs 4 --max-num-batched-tokens 64 --kv-cache-memory-bytes 4M --tokens 6 --characters 60"
    );
    let variables = [("OCTAVO_CUDA_LIBS", libraries.to_str().unwrap()), ("OCTAVO_GPU_MODEL", model.as_str())];
    let (output, said) = run(&["agreement"], folder.path(), &variables);
    assert!(output.status.success(), "{said}");
    let results = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    let results = results.filter(|path| path.join("summary.json").exists()).collect::<Vec<_>>();
    let [results] = &results[..] else { panic!("{results:?}\n{said}") };
    let name = results.file_name().unwrap().to_string_lossy().into_owned();
    assert!(name.ends_with("-0123abc-emulated-h200"), "{name}");
    let json = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(results.join(name)).unwrap()).unwrap() };
    let summary = json("summary.json");
    assert_eq!(summary["parts"][0]["part"], "agreement", "{summary}");
    assert_eq!(summary["parts"][0]["result"], "passed", "{summary}");
    assert_eq!(json("agreement.json")["answers"].as_array().map(Vec::len), Some(4));
}

/// The suite runs next to its programs, from its own folder, as in a copy that has lost its executable bits.
#[test]
fn a_part_that_fails_keeps_nothing_else_from_being_known() {
    let folder = tempfile::tempdir().unwrap();
    let suite = folder.path().join("suite");
    std::fs::create_dir(&suite).unwrap();
    std::os::unix::fs::symlink(OCTAVO, suite.join("octavo")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(suite.join(name), text).unwrap();
    for name in ["run.sh", "report.py"] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gpu").join(name);
        write(name, &std::fs::read_to_string(source).unwrap());
    }
    write("COMMIT", "0123abc\n");
    write("kernels", "#!/bin/sh\necho kernels on $OCTAVO_GPU\nexit 3\n");
    write("backend", "#!/bin/sh\necho backend with $OCTAVO_TESTDATA\n");
    let mut command = Command::new("bash");
    command.args(["run.sh", "correctness", "volta"]).current_dir(&suite).env_remove("OCTAVO_GPU_SUITE");
    command.env("OCTAVO_GPU_RESULTS", folder.path()).env("OCTAVO_CACHE", cache()).env("OCTAVO_CUDA_LIBS", standin());
    let output = command.output().expect("bash starts");
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert_eq!(output.status.code(), Some(1), "{said}");
    for words in ["kernels on 1", "backend with /", "kernels on volta"] {
        assert!(said.contains(words), "{words} is not in {said}");
    }
    let results = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    let results = results.filter(|path| path.join("summary.json").exists()).collect::<Vec<_>>();
    let [results] = &results[..] else { panic!("{results:?}\n{said}") };
    let summary: Value = serde_json::from_slice(&std::fs::read(results.join("summary.json")).unwrap()).unwrap();
    let found: Vec<_> =
        summary["parts"].as_array().unwrap().iter().map(|part| [&part["part"], &part["result"]]).collect();
    assert_eq!(found, [["correctness", "failed"], ["volta", "failed"]], "{summary}");
    assert!(std::fs::read_to_string(results.join("doctor.log")).unwrap().contains("Emulated H200"));
}
