//! Tests of hostile and damaged checkpoints: each is an error that describes the defect, and none makes the process
//! allocate the size in its header. All are in one test, so that the memory it measures is its own.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::Path;

use octavo_models::{Checkpoint, Programs, build_programs};
use octavo_ops::WeightSource;

/// File of the model that is opened.
const MODEL: &str = "model.gguf";
/// Maximum address space that all the files together may add. A header that is trusted asks for terabytes.
const GROWTH_KIB: u64 = 256 << 10;

/// Returns `VmPeak` of this process, if the system reports it.
fn peak_address_space_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmPeak:"))?.split_whitespace().next()?.parse().ok()
}

/// Returns a GGUF header up to the counts.
fn header(version: u32, tensors: u64, keys: u64) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(keys.to_le_bytes());
    out
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Returns a key with a value of the given type id and bytes.
fn pair(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&string(key)[..], &kind.to_le_bytes(), value].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name);
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// Returns `(description, file, words of the error)`.
fn hostile_gguf() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let file = |keys: &[Vec<u8>], tensors: &[Vec<u8>]| {
        let mut out = header(3, tensors.len() as u64, keys.len() as u64);
        keys.iter().chain(tensors).for_each(|part| out.extend(part));
        out.resize(out.len() + 4096, 0);
        out
    };
    let padded = |mut bytes: Vec<u8>| {
        bytes.resize(bytes.len() + 4096, 0);
        bytes
    };
    let huge = u64::MAX.to_le_bytes();
    let array = |element: u32, len: u64| [&element.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let two = |a: Vec<u8>, b: Vec<u8>| file(&[], &[a, b]);
    vec![
        ("empty", vec![], "not a GGUF file"),
        ("text", b"hello, I am a model".to_vec(), "not a GGUF file"),
        ("version 1", padded(header(1, 0, 0)), "version 1"),
        ("big-endian", padded(header(3u32.swap_bytes(), 0, 0)), "big-endian"),
        ("only the magic", b"GGUF".to_vec(), "truncated"),
        ("2^40 tensors", padded(header(3, 1 << 40, 0)), "1099511627776 tensors"),
        ("2^64 - 1 tensors", padded(header(3, u64::MAX, 0)), "18446744073709551615 tensors"),
        ("2^40 keys", padded(header(3, 0, 1 << 40)), "1099511627776 metadata keys"),
        ("a key of 2^64 - 1 bytes", file(&[huge.to_vec()], &[]), "truncated"),
        ("a string of 2^63 bytes", file(&[pair("k", 8, &(1u64 << 63).to_le_bytes())], &[]), "truncated"),
        ("2^63 integers", file(&[pair("k", 9, &array(10, 1 << 63))], &[]), "truncated"),
        ("2^40 strings", file(&[pair("k", 9, &array(8, 1 << 40))], &[]), "truncated"),
        ("an array of arrays", file(&[pair("k", 9, &array(9, 1 << 40))], &[]), "array of arrays"),
        ("value type 99", file(&[pair("k", 99, &[])], &[]), "value type 99"),
        ("a key twice", file(&[pair("k", 7, &[1]), pair("k", 7, &[1])], &[]), "occurs twice"),
        ("a key that is not text", file(&[[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()], &[]), "not UTF-8"),
        ("alignment 0", file(&[pair("general.alignment", 4, &[0; 4])], &[]), "power of two"),
        ("alignment 3", file(&[pair("general.alignment", 4, &3u32.to_le_bytes())], &[]), "power of two"),
        ("alignment 2^63", file(&[pair("general.alignment", 10, &(1u64 << 63).to_le_bytes())], &[]), "power of two"),
        ("dimensions that overflow", file(&[], &[tensor("t", &[1 << 40, 1 << 40], 0, 0)]), "overflows"),
        ("blocks that overflow", file(&[], &[tensor("t", &[1 << 62], 0, 0)]), "overflows"),
        ("an empty tensor", file(&[], &[tensor("t", &[32, 0], 0, 0)]), "is empty"),
        ("no dimensions", file(&[], &[tensor("t", &[], 0, 0)]), "0 dimensions"),
        ("2^32 - 1 dimensions", file(&[], &[[&string("t")[..], &[0xff; 4], &[0; 20]].concat()]), "dimensions"),
        ("half a block", file(&[], &[tensor("t", &[48], 2, 0)]), "do not fill Q4_0 blocks"),
        ("type TQ1_0", file(&[], &[tensor("t", &[256], 34, 0)]), "TQ1_0"),
        ("type 4096", file(&[], &[tensor("t", &[256], 4096, 0)]), "number 4096"),
        ("an offset outside", file(&[], &[tensor("t", &[4], 0, 1 << 40)]), "truncated"),
        ("an offset that overflows", file(&[], &[tensor("t", &[4], 0, u64::MAX - 31)]), "overflows"),
        ("a crooked offset", file(&[], &[tensor("t", &[4], 0, 1)]), "not a multiple"),
        ("a tensor twice", two(tensor("t", &[4], 0, 0), tensor("t", &[4], 0, 32)), "occurs twice"),
        ("overlapping data", two(tensor("a", &[64], 0, 0), tensor("b", &[64], 0, 32)), "overlaps"),
        ("no architecture", file(&[], &[]), "general.architecture"),
        (
            "one piece of several",
            file(&[pair("general.architecture", 8, &string("llama")), pair("split.count", 2, &[2, 0])], &[]),
            "one of 2 pieces",
        ),
        ("an unknown one", file(&[pair("general.architecture", 8, &string("mamba"))], &[]), "supported: llama"),
    ]
}

fn open(folder: &Path, bytes: &[u8]) -> Result<Checkpoint, String> {
    open_with(folder, MODEL, bytes)
}

/// Writes a file and opens the model in its folder.
fn open_with(folder: &Path, file: &str, bytes: &[u8]) -> Result<Checkpoint, String> {
    std::fs::write(folder.join(file), bytes).unwrap();
    Checkpoint::open(&folder.join(MODEL)).map_err(|e| e.to_string())
}

/// Reads all data of a checkpoint.
fn exercise(checkpoint: &Checkpoint) {
    let _ = checkpoint.tokenizer();
    let _ = checkpoint.storage_summary();
    if let Ok(Programs { encoder: Some(encoder), .. }) = build_programs(checkpoint) {
        encoder.weights.iter().flat_map(|weight| &weight.parts).for_each(|part| {
            let _ = checkpoint.tensor(&part.tensor);
        });
    }
}

/// Opens truncated copies, and copies with changed bytes in the header. The header reader alone has property tests over
/// many more of them.
fn damaged_copies(folder: &Path, file: &str, valid: &[u8]) {
    for len in (0..valid.len()).step_by(4001).chain(0..64) {
        assert!(open_with(folder, file, &valid[..len]).is_err(), "{len} of {} bytes", valid.len());
    }
    // The bytes are those of the keys and tensor descriptions. A deterministic generator is sufficient here.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    const VALUES: [u8; 6] = [0, 1, 0x7f, 0x80, 0xfe, 0xff];
    for _ in 0..400 {
        let mut bytes = valid.to_vec();
        for _ in 0..1 + random(4) {
            let at = random(valid.len().min(12_000));
            bytes[at] = VALUES[random(VALUES.len())];
        }
        if let Ok(checkpoint) = open_with(folder, file, &bytes) {
            exercise(&checkpoint);
        }
    }
}

#[test]
fn hostile_files_are_errors_and_allocate_little() {
    let folder = tempfile::tempdir().unwrap();
    let before = peak_address_space_kib();
    for (what, bytes, words) in hostile_gguf() {
        let error = open(folder.path(), &bytes).expect_err(what);
        assert!(error.contains(words), "{what}: {error}");
    }
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata");
    let read = |file: &str| std::fs::read(testdata.join(file)).unwrap();
    damaged_copies(folder.path(), MODEL, &read("llama-gguf/model.gguf"));
    std::fs::write(folder.path().join(MODEL), read("qwen3-vl-gguf/model.gguf")).unwrap();
    damaged_copies(folder.path(), "mmproj.gguf", &read("qwen3-vl-gguf/mmproj-BF16.gguf"));
    if let (Some(before), Some(after)) = (before, peak_address_space_kib()) {
        assert!(after - before <= GROWTH_KIB, "the address space grew by {} KiB", after - before);
    }
}
