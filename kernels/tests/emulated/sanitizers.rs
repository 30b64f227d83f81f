//! Runs the small tests again with kernels and emulation compiled for the address and undefined-behaviour sanitizers:
//! every access that is outside an array, misaligned or to uninitialised memory by C++'s rules ends the run.

use std::process::{Command, Output};

use octavo_kernels::emulation::{SANITIZE, address_sanitizer};

use crate::machine::sum_of;

/// Runs this program again under the sanitizers.
fn run_sanitized(arguments: &[&str]) -> (Output, String) {
    let output = Command::new(std::env::current_exe().expect("a path"))
        .args(arguments)
        .env(SANITIZE, "1")
        .env("LD_PRELOAD", address_sanitizer().expect("g++ has one"))
        // Memory that Rust's runtime keeps until the end is not a leak.
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .output()
        .expect("it starts");
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).join("\n");
    (output, text)
}

#[test]
#[ignore = "it takes minutes"]
fn small_tests_pass_under_sanitizers() {
    let (output, text) = run_sanitized(&["small_"]);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("test attention::small_attention ... ok"), "{text}");
}

#[test]
#[ignore = "it is a defect: the next test runs it"]
fn read_beyond_an_array() {
    // The array is on the heap, because the sanitizer does not know the bounds of constants in a Rust program.
    let input = vec![1.0; 63];
    sum_of(&input);
}

#[test]
fn sanitizers_see_what_kernels_do() {
    let (output, text) = run_sanitized(&["--exact", "sanitizers::read_beyond_an_array", "--ignored"]);
    assert!(!output.status.success() && text.contains("AddressSanitizer: heap-buffer-overflow"), "{text}");
    assert!(text.contains("sum_template"), "the report names the kernel: {text}");
}
