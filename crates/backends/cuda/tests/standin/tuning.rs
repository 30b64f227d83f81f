//! Tests of the choice of products by measurements. On the stand-in all ways take the same time, so the usual ones are kept; the
//! tests write other choices to the file.

use std::fs;
use std::path::{Path, PathBuf};

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::Backend as _;
use octavo_ops::testing::{PagedBatches, TestRng};

use crate::common::{BLOCKS, loaded, wide};
use crate::config;

fn tuned(folder: &Path) -> CudaConfig {
    let tuning = Some(folder.to_owned());
    CudaConfig { device: H200, dtype: Some(Dtype::Bf16), tuning, ..config() }
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
    control.set_clock();
    let mut backend = loaded(config, &wide(), BLOCKS);
    let measured = control.calls("cuEventElapsedTime") > 0;
    let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
    batches.add(TestRng(6).tokens(3, 101));
    control.reset();
    backend.forward(&batches.step(&[(0, 3)])).unwrap();
    (measured, control.calls("cublasLtMatmul"))
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
    let shapes = table.as_object().unwrap();
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

#[test]
fn what_has_one_way_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let control = Control::new();
    let config = tuned(folder.path());
    for config in [
        CudaConfig { batch_invariant: true, ..config.clone() },
        CudaConfig { dtype: Some(Dtype::F32), ..config.clone() },
        CudaConfig { device: V100, dtype: Some(Dtype::F16), ..config.clone() },
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
