//! Tests of the origin of the kernels of `--device cuda`: a pack, the cache or the compiler; over the stand-in for the
//! driver and NVRTC.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use octavo_backend_cuda::testing::standin;
use octavo_tests::Server;
use serde_json::json;

use crate::OCTAVO;

const SERVE: [&str; 7] =
    ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--kv-cache-memory-bytes", "4M", "--enforce-eager"];

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/qwen3")
}

/// Returns a folder with only the stand-in's driver: a machine without NVRTC, unless the real machine has it.
fn driver_only(root: &Path) -> PathBuf {
    let folder = root.join("driver");
    fs::create_dir_all(&folder).unwrap();
    symlink(standin().join("libcuda.so.1"), folder.join("libcuda.so.1")).unwrap();
    folder
}

fn start(libraries: &Path, cache: &Path, variables: &[(&str, &Path)]) -> Server {
    let usual = [("OCTAVO_CUDA_LIBS", libraries), ("OCTAVO_CACHE", cache), ("OCTAVO_DEVICE", Path::new("cuda"))];
    Server::start_in(Path::new(OCTAVO), &model(), &SERVE, &[&usual, variables].concat())
}

/// Returns the command's output and whether it succeeded.
fn said(arguments: &[&str], libraries: &Path, cache: &Path) -> (bool, String) {
    let mut command = Command::new(OCTAVO);
    command.args(arguments).env("OCTAVO_CUDA_LIBS", libraries).env("OCTAVO_CACHE", cache);
    let output = command.output().expect("octavo runs");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.success(), text)
}

/// Returns the numbers of kernels from the pack, from the cache and from the compiler.
fn origins(server: &Server) -> [usize; 3] {
    let log = server.start_log();
    let line = log.lines().find(|line| line.contains("kernels: ")).unwrap_or_else(|| panic!("no such line:\n{log}"));
    let number = |end: &str| {
        let before = line.split(end).next().and_then(|start| start.split([' ', ':']).rfind(|word| !word.is_empty()));
        before.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no number before '{end}' in {line}"))
    };
    [number(" from the pack"), number(" from the cache"), number(" compiled")]
}

async fn answer(server: &Server) -> String {
    let request =
        json!({"model": "default", "prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let (status, answer) = server.post("/v1/completions", &request).await;
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().expect("a text").to_owned()
}

/// Returns the files of a kernel cache.
fn entries(cache: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(cache.join("kernels")).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

/// Returns a cache filled by one server, and the answer of that server.
fn filled() -> &'static (tempfile::TempDir, String) {
    static FILLED: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    FILLED.get_or_init(|| {
        let cache = tempfile::tempdir().unwrap();
        let server = start(&standin(), cache.path(), &[]);
        let [pack, cached, compiled] = origins(&server);
        assert!(pack == 0 && cached == 0 && compiled > 10, "{pack} {cached} {compiled}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let answer = runtime.block_on(answer(&server));
        (cache, answer)
    })
}

#[test]
fn two_servers_fill_one_cache_at_once() {
    // The results of g++ are cached from then on: the two servers wait for the same simulated compiler and no longer
    // for g++.
    let (reference, expected) = filled();
    let root = tempfile::tempdir().unwrap();
    let cache = root.path().join("cache");
    let slow = [("OCTAVO_STANDIN_COMPILE_MS", Path::new("150"))];
    let servers = std::thread::scope(|scope| {
        let starts = [(); 2].map(|()| scope.spawn(|| start(&standin(), &cache, &slow)));
        starts.map(|start| start.join().expect("the server starts"))
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut compiled = 0;
    for server in &servers {
        let origins = origins(server);
        assert_eq!(origins.iter().sum::<usize>(), entries(reference.path()).len(), "{origins:?}");
        compiled += origins[2];
        assert_eq!(runtime.block_on(answer(server)), *expected);
    }
    assert!(compiled > entries(&cache).len(), "both made the same, at the same time: {compiled}");
    assert_eq!(entries(&cache), entries(reference.path()), "nothing is missing, and no draft is left");
    drop(servers);
    // Every entry is complete: there is no compiler that could replace one.
    let server = start(&driver_only(root.path()), &cache, &[]);
    assert_eq!(origins(&server), [0, entries(&cache).len(), 0]);
    assert_eq!(runtime.block_on(answer(&server)), *expected);
}

#[test]
fn a_server_with_a_pack_needs_no_compiler() {
    let (reference, expected) = filled();
    let root = tempfile::tempdir().unwrap();
    let (driver, pack, cache) = (driver_only(root.path()), root.path().join("pack"), root.path().join("cache"));
    // These are the kernels that this model needs, from names of the form `CHIP-NAME-HASH-RELEASE.cubin`.
    let kernels: Vec<_> =
        entries(reference.path()).iter().map(|file| file.split('-').nth(1).unwrap().to_owned()).collect();
    let build =
        ["kernels", "build", "--arch", "sm_90a", "--output", pack.to_str().unwrap(), "--only", &kernels.join(",")];
    let (well, told) = said(&build, &standin(), &cache);
    assert!(well && told.contains("compiled by NVRTC 12.9"), "{told}");
    assert!(!cache.exists(), "the pack is made beside the cache");
    let (well, told) = said(&build, &standin(), &cache);
    assert!(well && told.contains(", 0 of them compiled by"), "{told}");

    let named = [("OCTAVO_KERNEL_PACK", pack.as_path())];
    // With `auto`, the GPU must be found usable without a compiler too.
    let server = start(&driver, &cache, &[&named[..], &[("OCTAVO_DEVICE", Path::new("auto"))]].concat());
    assert_eq!(origins(&server), [kernels.len(), 0, 0]);
    let log = server.start_log();
    assert!(log.contains("device: cuda, because Emulated H200 (sm_90a, 1.00 GiB) is usable"), "{log}");
    assert!(log.contains(&format!("kernel pack: {} (sm_90a; NVRTC 12.9)", pack.display())), "{log}");
    assert_eq!(tokio::runtime::Runtime::new().unwrap().block_on(answer(&server)), *expected);
    assert!(!cache.join("kernels").exists(), "nothing had to be kept");
    drop(server);
    let pack_flag = ["doctor", "--kernel-pack", pack.to_str().unwrap()];
    let (well, told) = said(&pack_flag, &driver, &cache);
    assert!(well && told.contains("kernels                  from the pack, for sm_90a"), "{told}");

    // The pack now has other kernels: a message says so and a compiler takes over; without a compiler, the error names
    // both.
    let index = pack.join("pack.json");
    let text = fs::read_to_string(&index).unwrap();
    let at = text.find("\"digest\": \"").unwrap() + 11;
    fs::write(&index, format!("{}0000{}", &text[..at], &text[at + 4..])).unwrap();
    let stale = "made it from other kernels than those of this one";
    let server = start(&standin(), &cache, &named);
    assert_eq!(origins(&server), [0, 0, entries(reference.path()).len()]);
    assert!(server.start_log().contains(stale));
    drop(server);
    let (well, told) = said(&pack_flag, &standin(), &cache);
    assert!(well && told.contains(stale) && told.contains("compiled by NVRTC 13.0"), "{told}");
    let model = model();
    let serve = [
        "serve",
        model.to_str().unwrap(),
        "--port",
        "0",
        "--device",
        "cuda",
        "--kernel-pack",
        named[0].1.to_str().unwrap(),
    ];
    let serve = [&serve[..], &SERVE].concat();
    let (well, told) = said(&serve, &driver, &root.path().join("empty"));
    if told.contains("compiler: NVRTC") {
        eprintln!("skipped: this machine has an NVRTC of its own");
    } else {
        assert!(!well && told.contains("no NVRTC is found") && told.contains(stale), "{told}");
    }
}

#[test]
fn what_keeps_a_pack_from_being_made_is_said() {
    let root = tempfile::tempdir().unwrap();
    let (only_13, occupied) = (root.path().join("13"), root.path().join("occupied"));
    for folder in [&only_13, &occupied] {
        fs::create_dir(folder).unwrap();
    }
    symlink(standin().join("libnvrtc.so.13"), only_13.join("libnvrtc.so.13")).unwrap();
    fs::write(occupied.join("notes.txt"), "").unwrap();
    let new = root.path().join("new");
    let (new, occupied) = (new.to_str().unwrap(), occupied.to_str().unwrap());
    let cases: [(&[&str], &Path, &str); 6] = [
        (&["--arch", "sm_60", "--output", new], &standin(), "there are no kernels for sm_60: sm_70 is the oldest chip"),
        (&["--arch", "sm_90", "--output", new], &standin(), "use sm_90a"),
        (
            &["--arch", "sm_89", "--output", new, "--only", "none"],
            &standin(),
            "no kernel for sm_89 has a name that begins with none",
        ),
        (&["--arch", "sm_89", "--output", occupied], &standin(), "neither empty nor a kernel pack"),
        (&["--arch", "sm_89", "--output", "/proc/pack"], &standin(), "the kernel pack /proc/pack cannot be written"),
        (&["--arch", "sm_89"], &standin(), "--output DIR is needed"),
    ];
    for (arguments, libraries, expected) in cases {
        let (well, told) = said(&[&["kernels", "build"], arguments].concat(), libraries, root.path());
        assert!(!well && told.contains(expected), "no '{expected}' in:\n{told}");
    }
    let (well, told) =
        said(&["kernels", "build", "--arch", "sm_70", "--output", new, "--only", "copy_blocks"], &only_13, root.path());
    let refused = "libnvrtc.so.13: it no longer knows sm_70): `pip install nvidia-cuda-nvrtc-cu12`, or name its folder in OCTAVO_CUDA_LIBS";
    if well {
        eprintln!("skipped: this machine has an NVRTC of its own");
    } else {
        assert!(told.contains("no NVRTC is found that compiles for sm_70 (") && told.contains(refused), "{told}");
    }
    assert!(!Path::new(new).join("pack.json").exists());
    let nothing = root.path().join("nothing");
    let (well, told) = said(&["doctor", "--kernel-pack", nothing.to_str().unwrap()], &standin(), root.path());
    assert!(well && told.contains("holds no kernel pack (no pack.json)"), "{told}");
}
