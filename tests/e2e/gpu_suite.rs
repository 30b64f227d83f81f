//! `tests/gpu/run.sh` where there is no GPU, and over a stand-in for one: slots, crashes, cut-offs, and the page of a run.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use octavo_backend_cuda::testing::{cache, standin};
use serde_json::Value;
use tempfile::TempDir;

use crate::OCTAVO;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gpu");
const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata");
/// Answers in place of every program of the suite.
const PROGRAM: &str = include_str!("gpu_suite/octavo.sh");

/// Parts of each slot, in their order, with the command that a break is injected into.
const SLOTS: [(&str, &[(&str, &str)]); 3] = [
    (
        "slot1",
        &[
            ("limits", "octavo bench limits"),
            ("smoke", "kernels attention::small_"),
            ("bench_kernels", "octavo bench kernels"),
            ("roofline", "octavo bench roofline"),
            ("ncu", "ncu --clock-control"),
            ("correctness", "backend the_contract"),
        ],
    ),
    (
        "slot2",
        &[
            ("compilers", "octavo kernels build"),
            ("bench_experts", "octavo bench kernels"),
            ("sanitizer", "compute-sanitizer --tool memcheck"),
            ("volta", "kernels linear::* on volta"),
            ("correctness", "kernels rows::* on 1"),
        ],
    ),
    // Stands for the other parts that ask a server.
    ("slot3", &[("conversation", "octavo serve")]),
];

/// A folder with the suite and the results of its runs.
struct Suite {
    folder: TempDir,
}

impl Suite {
    /// A suite with stand-ins for all of its programs.
    fn new() -> Self {
        let suite = Self { folder: tempfile::tempdir().unwrap() };
        for folder in ["suite/bin", "suite/share/octavo/kernels", "path", "results", "keep", "tmp"] {
            std::fs::create_dir_all(suite.path(folder)).unwrap();
        }
        symlink(TESTDATA, suite.path("suite/testdata")).unwrap();
        suite.write("suite/COMMIT", "0123abc\n");
        for shape in ["qwen3-8b", "qwen3-30b-a3b"] {
            suite.write(&format!("suite/{shape}.json"), "{}");
        }
        suite.write("suite/share/octavo/kernels/pack.json", r#"{"chips": {"sm_90a": {"nvrtc": "12.9"}}}"#);
        let usage = r#"{"sm_90a-gemv_bf16_m8-0123-12.9.cubin": {"registers": 96}}"#;
        suite.write("suite/share/octavo/kernels/usage.json", usage);
        for program in
            ["suite/bin/octavo", "suite/bin/kernels", "suite/bin/backend", "path/ncu", "path/compute-sanitizer"]
        {
            suite.write(program, PROGRAM);
            std::fs::set_permissions(suite.path(program), PermissionsExt::from_mode(0o755)).unwrap();
        }
        suite
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn command(&self, words: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new("bash");
        command.arg(Path::new(SOURCES).join("run.sh")).args(words).env("OCTAVO_CACHE", cache());
        command.env("OCTAVO_GPU_SUITE", self.path("suite")).env("OCTAVO_GPU_RESULTS", self.path("results"));
        command.env("OCTAVO_GPU_KEEP", self.path("keep")).env("TMPDIR", self.path("tmp"));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.path("path").display()));
        command.env("OCTAVO_GPU_MODEL", "no-model").envs(variables.iter().copied());
        command
    }

    fn run(&self, words: &[&str], variables: &[(&str, &str)]) -> (Output, String) {
        let output = self.command(words, variables).output().expect("bash starts");
        let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
        (output, text)
    }

    /// The files of the one archive, by their names.
    fn archive(&self) -> BTreeMap<String, String> {
        let is_archive = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gz");
        let results = std::fs::read_dir(self.path("results")).unwrap().flatten().map(|entry| entry.path());
        let archives: Vec<_> = results.filter(is_archive).collect();
        let [archive] = &archives[..] else { panic!("{archives:?}") };
        let unpacked = tempfile::tempdir().unwrap();
        let tar = Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(unpacked.path()).status().unwrap();
        assert!(tar.success(), "{} is whole", archive.display());
        let folder = std::fs::read_dir(unpacked.path()).unwrap().flatten().next().expect("one folder").path();
        let files = std::fs::read_dir(folder).unwrap().flatten();
        let read = |path: PathBuf| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
        files.map(|file| (file.file_name().into_string().unwrap(), read(file.path()))).collect()
    }

    /// Parts with their results, by the archive's summary.
    fn parts(&self) -> Vec<(String, String)> {
        let summary: Value = serde_json::from_str(&self.archive()["summary.json"]).unwrap();
        assert_eq!(
            (&summary["commit"], &summary["gpu"]),
            (&"0123abc".into(), &"Emulated H200 (sm_90a, 1.00 GiB)".into())
        );
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        summary["parts"].as_array().unwrap().iter().map(|part| (text(&part["part"]), text(&part["result"]))).collect()
    }
}

fn has_python() -> bool {
    Command::new("python3").arg("--version").output().is_ok()
}

#[test]
fn without_a_gpu_it_is_skipped() {
    let suite = Suite::new();
    std::fs::remove_file(suite.path("suite/bin/octavo")).unwrap();
    symlink(OCTAVO, suite.path("suite/bin/octavo")).unwrap();
    let (output, said) = suite.run(&[], &[("OCTAVO_CUDA_LIBS", "/nowhere")]);
    if !said.contains("skipped: no GPU") {
        eprintln!("skipped: this machine has a GPU of its own");
        return;
    }
    assert!(output.status.success(), "{said}");
    let (output, said) = suite.run(&["everything"], &[]);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("no slot or part is called everything: there are slot1 slot2 slot3 limits smoke"), "{said}");
}

#[test]
fn a_slot_leaves_one_archive_and_a_page() {
    let suite = Suite::new();
    let (output, said) = suite.run(&["slot1", "slot2"], &[]);
    assert!(output.status.success(), "{said}");
    let results = suite.parts();
    let expected: Vec<_> = SLOTS[..2].iter().flat_map(|(_, parts)| parts.iter().map(|part| part.0)).collect();
    assert_eq!(results.iter().map(|part| part.0.as_str()).collect::<Vec<_>>(), expected);
    assert!(results.iter().all(|part| part.1 == "passed"), "{results:?}");
    let files = suite.archive();
    for name in ["doctor.log", "limits.json", "kernels.json", "roofline.json", "correctness.log", "page.md"] {
        assert!(files.contains_key(name), "{name} is not among {:?}", files.keys());
    }
    // What passed in the first slot is not run again in the second.
    assert!(files["correctness.log"].contains("--- kernels attention (1): passed in an earlier slot"), "{files:?}");
    assert!(std::fs::read_dir(suite.path("results")).unwrap().count() == 2, "an archive and a page, and nothing else");
    let page = &files["page.md"];
    for line in [
        "# Emulated H200 (sm_90a, 1.00 GiB), ",
        "| copy, GB/s | 4300.0 | 4800.0 | 90% |",
        "| float16 product of 8192, TFLOP/s: refused: 15 | - | - | - |",
        "| decode 8 x 1024 | 5.000 | 3.500 | 70% | 80% | 5.000 | - | - |",
        // 5 ms less 36 times 40 and 20 µs; 36 times 30 µs; 36 times 2 µs.
        "- decode 8 x 1024: 2.840 ms the rest: gaps between launches, what is not measured; 1.080 ms attention \
         (paged_decode_bf16_d128_g8); 0.072 ms qkv product (gemv_bf16_m8)",
        "| cublasLt | qkv 6144x4096, 32 rows | refused: 15 |  |  |",
        "NVRTC 12.9 and 13.0: 1 of 1 kernels use other resources.",
        "- sm_90a gemv_bf16_m8: registers 96 -> 104, stack 0 -> 0 bytes, spills 0 -> 8 bytes",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
}

/// A part with its slot, and the command that a break is injected into.
struct Broken {
    slot: &'static str,
    parts: &'static [(&'static str, &'static str)],
    part: &'static str,
    command: &'static str,
}

/// Checks each part with a suite of its own, all at once: runs mostly wait. The programs of all suites are written before the first
/// runs, because a file that is open for writing cannot be executed.
fn check_each_part(check: impl Fn(&Suite, &Broken) + Sync) {
    let slots = SLOTS.into_iter();
    let broken = slots.flat_map(|(slot, parts)| {
        parts.iter().map(move |&(part, command)| (Suite::new(), Broken { slot, parts, part, command }))
    });
    let (broken, check) = (broken.collect::<Vec<_>>(), &check);
    std::thread::scope(|scope| {
        for (suite, broken) in &broken {
            scope.spawn(move || check(suite, broken));
        }
    });
}

#[test]
fn a_crash_in_any_part_loses_nothing_else() {
    check_each_part(|suite, &Broken { slot, parts, part, command }| {
        let (output, said) = suite.run(&[slot], &[("BREAK", command), ("HOW", "crash")]);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let results = suite.parts();
        let all = results.iter().find(|found| found.0 == part).unwrap();
        assert_eq!(all.1, "failed", "{slot} {part}: {results:?}");
        let others = parts.iter().filter(|other| other.1 != command).count();
        let passed = results.iter().filter(|found| found.1 == "passed").count();
        assert!(slot == "slot3" || passed == others, "{slot} {part}: {results:?}");
        let files = suite.archive();
        assert!(files[&format!("{part}.log")].contains("first figures of ") || slot == "slot3", "{part}: {files:?}");
        if part == "bench_kernels" {
            assert!(files["kernels.json"].contains("\"complete\": false"), "{}", files["kernels.json"]);
            assert!(!has_python() || files["page.md"].contains("The run was cut off: kernels are missing."));
        }
    });
}

#[test]
fn a_part_that_hangs_is_cut_off() {
    check_each_part(|suite, &Broken { slot, part, command, .. }| {
        let variables = [("BREAK", command), ("HOW", "hang"), ("OCTAVO_GPU_PART_LIMIT", "2")];
        let (output, said) = suite.run(&[part], &variables);
        assert_eq!(output.status.code(), Some(1), "{slot} {part}: {said}");
        assert_eq!(suite.parts(), [(part.to_owned(), "cut off after 2 s".to_owned())], "{said}");
    });
    // A slot's own end.
    let suite = Suite::new();
    let variables = [("BREAK", "octavo bench kernels"), ("HOW", "hang"), ("OCTAVO_GPU_SLOT_LIMIT", "4")];
    suite.run(&["limits", "slot1"], &variables);
    let results = suite.parts();
    assert!(results[3].1.starts_with("cut off after "), "{results:?}");
    assert_eq!(results[4], ("roofline".to_owned(), "not run: no time was left".to_owned()));
}

#[test]
fn a_run_that_is_killed_leaves_what_it_had() {
    let suite = Suite::new();
    let variables = [("BREAK", "octavo bench roofline"), ("HOW", "hang"), ("OCTAVO_GPU_PACK_EVERY", "0.2")];
    let mut command = suite.command(&["slot1"], &variables);
    let mut run = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    let at_roofline = || {
        let archives = std::fs::read_dir(suite.path("results")).unwrap().flatten();
        let is_there = archives.into_iter().any(|entry| entry.path().extension().is_some_and(|e| e == "gz"));
        is_there && suite.archive().contains_key("roofline.json")
    };
    while !at_roofline() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the archive follows the part that runs");
        std::thread::sleep(Duration::from_millis(100));
    }
    // As a device that is taken away: no trap runs.
    let group = format!("-{}", run.id());
    assert!(Command::new("kill").args(["-KILL", "--", &group]).status().unwrap().success());
    run.wait().unwrap();
    let results = suite.parts();
    let expected =
        ["limits", "smoke", "bench_kernels", "roofline"].into_iter().zip(["passed", "passed", "passed", "running"]);
    assert_eq!(results, expected.map(|(part, result)| (part.to_owned(), result.to_owned())).collect::<Vec<_>>());
    let files = suite.archive();
    assert!(
        files["kernels.json"].contains("\"complete\": true") && files["roofline.json"].contains("decode"),
        "{files:?}"
    );
}

#[test]
fn an_archive_that_is_too_large_leaves_out_reports_and_beginnings() {
    let suite = Suite::new();
    // Random bytes, which no compression makes smaller.
    let noisy = "#!/bin/sh\nhead -c 3000000 /dev/urandom | base64\necho the end\n";
    suite.write("suite/bin/backend", noisy);
    let (output, said) = suite.run(&["correctness"], &[("OCTAVO_GPU_ARCHIVE_LIMIT", "1000000")]);
    assert!(output.status.success(), "{}", said.len());
    let files = suite.archive();
    assert!(files["correctness.log"].len() <= 256 << 10, "{}", files["correctness.log"].len());
    assert!(files["correctness.log"].contains("the end") && files.contains_key("summary.json"));
}

/// The program under test on the stand-in's device, with tiny sizes, through every part that it has a share in.
#[test]
fn every_slot_runs_over_the_stand_in() {
    assert!(has_python(), "this test needs python3");
    let suite = Suite::new();
    std::fs::remove_file(suite.path("suite/bin/octavo")).unwrap();
    symlink(OCTAVO, suite.path("suite/bin/octavo")).unwrap();
    std::fs::remove_dir_all(suite.path("suite/share")).unwrap();
    let shape = format!("{TESTDATA}/qwen3/config.json");
    let small = "--max-num-seqs 4 --max-num-batched-tokens 64 --kv-cache-memory-bytes 4M";
    let model = format!("{TESTDATA}/qwen3 {small} --tokens 6");
    let libraries = standin();
    let [kernel_model, expert_model] = ["qwen3", "qwen3-moe"].map(|name| format!("{TESTDATA}/{name}"));
    let variables = [
        ("OCTAVO_CUDA_LIBS", libraries.to_str().unwrap()),
        ("OCTAVO_GPU_COPY_BYTES", "1M"),
        ("OCTAVO_GPU_PRODUCT_SIZE", "32"),
        ("OCTAVO_GPU_MIN_TIME", "0"),
        ("OCTAVO_GPU_KERNEL_MODEL", kernel_model.as_str()),
        ("OCTAVO_GPU_KERNEL_ROWS", "1,8"),
        ("OCTAVO_GPU_EXPERT_MODEL", expert_model.as_str()),
        ("OCTAVO_GPU_EXPERT_ROWS", "1,8"),
        ("OCTAVO_GPU_BATCH_SIZES", "1,2"),
        ("OCTAVO_GPU_CONTEXTS", "20"),
        ("OCTAVO_GPU_PREFILL", "24"),
        ("OCTAVO_GPU_SHAPE", shape.as_str()),
        ("OCTAVO_GPU_ROOFLINE_FLAGS", "--kv-cache-memory-bytes 4M --min-time 0"),
        ("OCTAVO_GPU_MODEL", model.as_str()),
        ("OCTAVO_GPU_ONLY_KERNELS", "gather_rows,embed"),
        ("OCTAVO_GPU_REQUESTS", "4"),
        ("OCTAVO_GPU_TOKENS", "8"),
        ("OCTAVO_GPU_SERVING_FLAGS", "--kv-cache-memory-bytes 4M --max-num-batched-tokens 64"),
        ("OCTAVO_GPU_CONVERSATION_FLAGS", "--any-answer --at-once 2"),
        ("OCTAVO_GPU_AGREEMENT_FLAGS", "--characters 60"),
    ];
    let (output, said) = suite.run(&["slot1", "slot2", "slot3"], &variables);
    let results = suite.parts();
    // PyTorch is not installed where tests run, or finds no GPU.
    let skips = |part: &str| ["pytorch"].contains(&part);
    for (part, result) in &results {
        assert!(result == "passed" || (result == "skipped" && (skips(part) || part == "compilers")), "{part}: {said}");
    }
    assert!(output.status.success() && results.len() == 15, "{results:?}\n{said}");
    let files = suite.archive();
    let json = |name: &str| -> Value { serde_json::from_str(&files[name]).unwrap() };
    assert_eq!(json("kernels.json")["complete"], true);
    assert!(json("experts.json")["kernels"].as_array().is_some_and(|kernels| !kernels.is_empty()));
    assert_eq!(json("roofline.json")["steps"].as_array().map(Vec::len), Some(3));
    assert_eq!(json("roofline.json")["ceilings"]["source"], "measured");
    assert!(json("roofline.json")["steps"][0]["fraction_of_ceiling"].as_f64().is_some_and(|fraction| fraction > 0.0));
    assert_eq!(json("agreement.json")["answers"].as_array().map(Vec::len), Some(4));
    assert_eq!(json("conversation.json")["answered"], 2);
    assert_eq!(json("serving.json")["completed"], 4);
    assert!(json("usage-machine.json").as_object().is_some_and(|usage| !usage.is_empty()));
    assert!(files["page.md"].contains("The three largest losses"), "{}", files["page.md"]);
}
