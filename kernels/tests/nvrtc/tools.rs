//! Search for the compiler and the disassemblers.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use octavo_kernels::manifest::Chip;
use octavo_kernels::nvrtc::Nvrtc;

/// Environment variable with the Python environment of the tools; by default the one created by `.ci/run`.
const FOLDER: &str = "OCTAVO_CUDA_TOOLS";
/// Environment variable: with 1, a missing tool is a failure.
const REQUIRED: &str = "OCTAVO_REQUIRE_NVRTC";

const NVRTC: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
const NVRTC_13: &str = "nvidia/cu13/lib/libnvrtc.so.13";
const NVDISASM: [&str; 2] = ["nvidia/cu13/bin/nvdisasm", "nvidia/cuda_nvdisasm/bin/nvdisasm"];
const NVDISASM_WITH_SM70: &str = "triton/backends/nvidia/bin/nvdisasm";

fn folder() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ci-venv-cuda");
    std::env::var_os(FOLDER).map_or_else(default, PathBuf::from)
}

/// Returns the first of `files` that is in an environment's packages.
fn find(files: &[&str]) -> Option<PathBuf> {
    let versions = fs::read_dir(folder().join("lib")).ok()?;
    let mut packages: Vec<_> = versions.flatten().map(|version| version.path().join("site-packages")).collect();
    packages.sort();
    packages.iter().flat_map(|package| files.iter().map(move |file| package.join(file))).find(|path| path.exists())
}

/// Reports that a check was skipped. libtest would capture the output of `println!` in a passing test.
fn skipped(what: &str) {
    let message = format!("skipped: {what} (expected in {}, or name the folder in {FOLDER})", folder().display());
    assert!(std::env::var_os(REQUIRED).is_none_or(|v| v != "1"), "{REQUIRED} is 1, but {message}");
    let _ = writeln!(std::io::stderr(), "{message}");
}

/// Returns the compiler, if it is installed.
pub(crate) fn nvrtc() -> Option<Nvrtc> {
    open(NVRTC)
}

/// Returns the compiler of the next major release, if it is installed.
pub(crate) fn nvrtc_13() -> Option<Nvrtc> {
    open(NVRTC_13)
}

fn open(file: &str) -> Option<Nvrtc> {
    let Some(path) = find(&[file]) else {
        skipped("no NVRTC, so kernels were not compiled for a GPU");
        return None;
    };
    Some(Nvrtc::open(&path).expect("a library that is there opens"))
}

/// Returns the disassembler for a chip, if it is installed.
pub(crate) fn nvdisasm(chip: Chip) -> Option<PathBuf> {
    let found = if chip == Chip::SM_70 { find(&[NVDISASM_WITH_SM70]) } else { find(&NVDISASM) };
    if found.is_none() {
        skipped(&format!("no nvdisasm for {}, so its machine code was not looked at", chip.arch()));
    }
    found
}

/// Returns the machine code of a cubin as text.
pub(crate) fn disassemble(nvdisasm: &Path, name: &str, cubin: &[u8]) -> String {
    let file = std::env::temp_dir().join(format!("octavo-{}-{name}.cubin", std::process::id()));
    fs::write(&file, cubin).expect("a temporary file");
    let output = Command::new(nvdisasm).arg("--print-code").arg(&file).output().expect("nvdisasm runs");
    let _ = fs::remove_file(&file);
    assert!(output.status.success(), "nvdisasm: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
