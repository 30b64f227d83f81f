//! Tests that failures are errors with a clear message, and never panics.

use std::collections::BTreeMap;

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::{CudaConfig, Dtype, Memory};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow};
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, BackendError, StepBatch};

use crate::common::{loaded, open, wide};
use crate::config;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
const ILLEGAL_ADDRESS: i32 = 700;

fn batch(tokens: usize) -> StepBatch {
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(tokens, 50));
    let mut batch = batches.step(&[(sequence, tokens)]);
    batch.sampled_rows = vec![tokens as u32 - 1];
    batch.pooled_rows.clear();
    batch
}

#[test]
fn a_failed_allocation_is_an_error_and_the_next_one_works() {
    let control = Control::new();
    let (program, weights) = TinyModel::default().build().unwrap();
    let mut backend = open(config());
    control.reset();
    control.fail("cuMemAlloc_v2", 0, OUT_OF_MEMORY, false);
    let error = backend.load(&program, &weights, &mut |_| {}).unwrap_err();
    assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    control.fail("cuMemHostAlloc", 1, OUT_OF_MEMORY, false);
    let error = backend.load(&program, &weights, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY");
    backend.load(&program, &weights, &mut |_| {}).expect("there is memory now");
    backend.allocate_kv(16, 8).unwrap();
    backend.forward(&batch(20)).unwrap();
}

#[test]
fn a_refused_launch_is_an_error_and_the_next_step_runs() {
    let control = Control::new();
    let mut backend = loaded(config(), &TinyModel::default(), 8);
    control.reset();
    control.fail("cuLaunchKernelEx", 3, INVALID_VALUE, false);
    let error = backend.forward(&batch(20)).unwrap_err();
    assert_eq!(error.to_string(), "the cuda backend failed: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE");
    let (params, mut out) = (SampleParams::default(), Vec::new());
    let rows = [SampleRow::new(&params)];
    let error = backend.sample(&SampleBatch { rows: &rows }, &mut out).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: 1 rows to sample, but the forward pass left 0");
    backend.forward(&batch(20)).unwrap();
    backend.sample(&SampleBatch { rows: &rows }, &mut out).unwrap();
    assert_eq!(out.len(), 1);
}

#[test]
fn a_device_that_is_lost_is_told_apart() {
    let control = Control::new();
    let mut backend = loaded(config(), &TinyModel::default(), 8);
    control.reset();
    // The error is that of an invalid access in a kernel: it appears on waiting and is permanent. The first two waits are for
    // the host memory of the step and of the block tables.
    control.fail("cuEventSynchronize", 2, ILLEGAL_ADDRESS, true);
    backend.forward(&batch(20)).unwrap();
    let (params, mut out) = (SampleParams::default(), Vec::new());
    let rows = [SampleRow::new(&params)];
    let expected = "the cuda backend lost its device: cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS";
    let error = backend.sample(&SampleBatch { rows: &rows }, &mut out).unwrap_err();
    assert!(matches!(error, BackendError::DeviceLost { .. }));
    assert_eq!(error.to_string(), expected);
    for _ in 0..2 {
        let error = backend.forward(&batch(20)).unwrap_err();
        assert!(matches!(error, BackendError::DeviceLost { .. }), "{error}");
    }
    // Dropping the backend does not panic either.
    drop(backend);
    control.reset();
}

/// If cuBLASLt refuses a product when it chooses an algorithm, or when the algorithm first runs, our own kernels
/// compute it and nothing fails.
#[test]
fn what_the_library_does_not_multiply_our_own_kernels_do() {
    /// `CUBLAS_STATUS_NOT_SUPPORTED`.
    const NOT_SUPPORTED: i32 = 15;
    let control = Control::new();
    let run = |refuses: Option<(&str, u32)>| {
        let config = CudaConfig { dtype: Some(Dtype::Bf16), ..config() };
        let (program, weights) = wide().build().unwrap();
        let mut backend = open(config);
        control.reset();
        refuses.into_iter().for_each(|(function, after)| control.fail(function, after, NOT_SUPPORTED, false));
        backend.load(&program, &weights, &mut |_| {}).unwrap();
        backend.allocate_kv(16, 8).unwrap();
        let mut batches = PagedBatches::new(16, 2, 8, &mut TestRng(3));
        let sequence = batches.add(TestRng(4).tokens(40, 101));
        backend.forward(&batches.step(&[(sequence, 40)])).unwrap();
        (backend.logits().unwrap(), control.calls("cublasLtMatmul"))
    };
    let (expected, products) = run(None);
    // There are four products per layer and the logits; before that, each algorithm runs once: with a bias, without,
    // and in f32.
    assert_eq!(products, 2 * 4 + 1 + 3);
    // The failing calls are the first product's plan for 48 rows, and the first run of an algorithm.
    for (function, after) in [("cublasLtMatmulAlgoGetHeuristic", 2), ("cublasLtMatmul", 0)] {
        let (found, fewer) = run(Some((function, after)));
        assert!(fewer < products, "{function}: {fewer} of {products}");
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let worst = found.iter().zip(&expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(found.len() == expected.len() && worst <= 0.06 * largest, "{function}: off by {worst} of {largest}");
    }
}

#[test]
fn an_error_while_recording_ends_the_recording() {
    let control = Control::new();
    let (program, weights) = TinyModel::default().build().unwrap();
    let mut backend = open(CudaConfig { graphs: true, ..config() });
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    control.reset();
    control.fail("cuStreamEndCapture", 0, INVALID_VALUE, false);
    assert!(backend.allocate_kv(16, 8).is_err());
    control.reset();
}

#[test]
fn steps_beyond_what_memory_was_taken_for_are_errors() {
    let config = CudaConfig { max_num_batched_tokens: 16, max_model_len: 64, max_rows: 4, ..config() };
    let mut backend = loaded(config, &TinyModel::default(), 8);
    let error = backend.forward(&batch(20)).unwrap_err().to_string();
    assert_eq!(error, "the cuda backend failed: a step has 20 tokens, but memory was taken for 16");
    let mut many = batch(10);
    many.sampled_rows = (0..5).collect();
    let error = backend.forward(&many).unwrap_err().to_string();
    assert!(error.ends_with("a step has 5 sampled rows, but memory was taken for 4"), "{error}");
    backend.forward(&batch(16)).unwrap();
}

#[test]
fn too_little_memory_is_said() {
    let (program, weights) = TinyModel::default().build().unwrap();
    for memory in [Memory::KvCache(2 << 30), Memory::Share(0.2)] {
        let mut backend = open(CudaConfig { memory, ..config() });
        let error = backend.load(&program, &weights, &mut |_| {}).unwrap_err().to_string();
        assert!(error.starts_with("not enough memory for weights and step buffers on Emulated H200"), "{error}");
    }
}

#[test]
fn a_share_of_the_memory_leaves_the_rest_to_the_cache() {
    let (program, weights) = TinyModel::default().build().unwrap();
    let mut backend = open(CudaConfig { device: 1, memory: Memory::Share(0.4), ..config() });
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    let taken = backend.weight_bytes() + backend.step_bytes() + backend.kv_bytes();
    // The limit is 0.4 GiB minus the driver's reserve; others may use some of this device's memory too.
    assert!(taken < (1 << 30) * 4 / 10 - (200 << 20), "{taken}");
    assert!(backend.kv_bytes() > 0);
    assert_eq!(backend.kv_dtype(), "float32");
}

#[test]
fn a_corrupt_kernel_cache_is_compiled_anew() {
    let folder = tempfile::tempdir().unwrap();
    let config = CudaConfig { kernel_cache: folder.path().into(), ..config() };
    let entries = || {
        let paths = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        paths.map(|path| (std::fs::read(&path).unwrap(), path)).collect::<BTreeMap<_, _>>()
    };
    loaded(config.clone(), &TinyModel::default(), 8);
    let whole = entries();
    assert!(whole.len() > 5, "{}", whole.len());
    for (number, path) in whole.values().enumerate() {
        let spoiled = if number % 2 == 0 { &b"not a cubin"[..] } else { &[] };
        std::fs::write(path, spoiled).unwrap();
    }
    loaded(config.clone(), &TinyModel::default(), 8).forward(&batch(20)).unwrap();
    assert_eq!(entries(), whole);
    // The kernels now come from the cache.
    loaded(config, &TinyModel::default(), 8).forward(&batch(20)).unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_costs_only_time() {
    let config = CudaConfig { kernel_cache: "/proc/no/such/folder".into(), dtype: Some(Dtype::F32), ..config() };
    loaded(config, &TinyModel::default(), 8).forward(&batch(20)).unwrap();
}
