//! Tests of the choice of products by measurements. On the stand-in all ways take the same time, so the usual ones are kept; the
//! tests write other choices to the file, and set times of cuBLASLt's algorithms.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::H200;
use octavo_backend_cuda::{CudaConfig, Dtype, Tuning};
use octavo_ops::Backend as _;
use octavo_ops::testing::{PagedBatches, TestRng};

use crate::common::{BLOCKS, loaded, wide};
use crate::config;

fn tuned(folder: &Path) -> CudaConfig {
    let tuning = Some(Tuning { folder: folder.to_owned(), time: Duration::from_secs(600) });
    CudaConfig { device: H200, dtype: Some(Dtype::Bf16), tuning, max_num_batched_tokens: 80, max_rows: 16, ..config() }
}

/// Returns the only file of a folder.
fn file(folder: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

/// Loads a model and runs a step of three rows. Returns whether products were measured, and the number of products in the step
/// that cuBLASLt computed.
fn run(config: CudaConfig, control: &Control) -> (bool, u64) {
    control.reset();
    let (measured, by_library) = run_rows(config, 3, control);
    (measured, by_library[0])
}

/// Loads a model and runs a step of so many rows. Returns whether products were measured, and the number of products in the step that
/// cuBLASLt computed: all, and by its first three algorithms.
fn run_rows(config: CudaConfig, rows: usize, control: &Control) -> (bool, [u64; 4]) {
    control.set_clock();
    let mut backend = loaded(config, &wide(), BLOCKS);
    let measured = control.calls("cuEventElapsedTime") > 0;
    let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
    batches.add(TestRng(6).tokens(rows, 101));
    let mut batch = batches.step(&[(0, rows)]);
    batch.pooled_rows.clear();
    batch.sampled_rows = vec![rows as u32 - 1];
    control.reset();
    backend.forward(&batch).unwrap();
    let counted = ["cublasLtMatmul", "cublasLt algorithm 1", "cublasLt algorithm 2", "cublasLt algorithm 3"];
    (measured, counted.map(|name| control.calls(name)))
}

#[test]
fn products_are_measured_once_and_computed_as_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::new();
    assert_eq!(run(tuned(folder.path()), &control), (true, 0));
    let path = file(folder.path());
    let written = fs::read_to_string(&path).unwrap();
    // Three rows are computed like four.
    let ways = ["vectors", "vectors", "vectors", "skinny", "skinny", "skinny", "library"];
    let table: serde_json::Value = serde_json::from_str(&written).unwrap();
    let shapes = table["ways"].as_object().unwrap();
    assert!(shapes.len() >= 4 && shapes.values().all(|choice| choice["ways"] == serde_json::json!(ways)), "{written}");
    assert_eq!(run(tuned(folder.path()), &control), (false, 0), "the file is known");

    for (way, by_library) in [("library", true), ("tiles", false), ("skinny", false)] {
        fs::write(&path, written.replace("vectors", way)).unwrap();
        let (measured, products) = run(tuned(folder.path()), &control);
        assert_eq!((measured, products > 0), (false, by_library), "{way}");
    }
    fs::write(&path, "not a table").unwrap();
    assert_eq!(run(tuned(folder.path()), &control), (true, 0));
    assert_eq!(fs::read_to_string(&path).unwrap(), written);
}

/// Returns the number of the only algorithm of products that cuBLASLt computed: those of two layers at least.
fn only(counts: [u64; 4]) -> Option<usize> {
    let [all, by @ ..] = counts;
    by.iter().position(|count| *count == all && all >= 2 * 4).map(|at| at + 1)
}

#[test]
fn the_fastest_algorithm_of_cublaslt_is_measured_once() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::new();
    let run = |config: CudaConfig, rows| {
        let (measured, counts) = run_rows(config, rows, &control);
        (measured, only(counts))
    };
    control.reset();
    control.set_algorithm_times(&[1.0, 0.99, 0.7]);
    assert_eq!(run(tuned(folder.path()), 70), (true, Some(3)));
    // Times are not needed any more. The other ways are slower for few rows too.
    assert_eq!(run(tuned(folder.path()), 70), (false, Some(3)));
    assert_eq!(run(tuned(folder.path()), 3), (false, Some(3)));

    // An algorithm that the library no longer has gives way to the first one.
    control.refuse("cublasLt algorithm 3", 15);
    assert_eq!(run(tuned(folder.path()), 70), (false, Some(1)));
    // Larger steps have more products to measure, and the others keep what was chosen.
    let larger = CudaConfig { max_num_batched_tokens: 100, ..tuned(folder.path()) };
    assert!(run(larger, 90).0);
    assert_eq!(run(tuned(folder.path()), 70), (false, Some(3)));
}

#[test]
fn algorithms_that_do_not_run_or_gain_nothing_are_not_chosen() {
    for (times, refused, chosen) in
        [([1.0, 0.5, 0.7], Some("cublasLt algorithm 2"), 3), ([1.0, 0.98, 0.98], None, 1), ([1.0, 0.5, 0.4], None, 3)]
    {
        let folder = tempfile::tempdir().unwrap();
        let control = Control::new();
        control.reset();
        control.set_algorithm_times(&times);
        refused.inspect(|name| control.refuse(name, 15));
        let (measured, counts) = run_rows(tuned(folder.path()), 70, &control);
        assert!(measured && only(counts) == Some(chosen), "{times:?}: {counts:?}");
    }
}

#[test]
fn products_without_time_for_measurements_keep_the_first_algorithm() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::new();
    let hurried = Tuning { folder: folder.path().to_owned(), time: Duration::ZERO };
    let hurried = CudaConfig { tuning: Some(hurried), ..tuned(folder.path()) };
    for measured in [true, false] {
        control.reset();
        control.set_algorithm_times(&[1.0, 0.5, 0.7]);
        // The ways for few rows are measured all the same. Later starts with more time give the same bits.
        let config = if measured { hurried.clone() } else { tuned(folder.path()) };
        let (has_measured, counts) = run_rows(config, 70, &control);
        assert_eq!((has_measured, only(counts)), (measured, Some(1)));
    }
    let written = fs::read_to_string(file(folder.path())).unwrap();
    let table: serde_json::Value = serde_json::from_str(&written).unwrap();
    let algorithms = table["algorithms"].as_object().unwrap();
    let mut kept = algorithms.values().flat_map(|rows| rows.as_object().unwrap().values());
    assert!(algorithms.len() >= 4 && kept.all(serde_json::Value::is_null), "{written}");
}

#[test]
fn what_has_one_way_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::new();
    let config = tuned(folder.path());
    for config in [
        CudaConfig { batch_invariant: true, ..config.clone() },
        CudaConfig { dtype: Some(Dtype::F32), ..config.clone() },
        CudaConfig { tuning: None, ..config },
    ] {
        assert!(!run(config.clone(), &control).0, "{config:?}");
    }
    // Times without a clock have no meaning.
    control.reset();
    loaded(tuned(folder.path()), &wide(), BLOCKS);
    assert_eq!(control.calls("cuEventElapsedTime"), 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
