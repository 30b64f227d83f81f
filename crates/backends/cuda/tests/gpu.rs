//! The backend on a real GPU, the first that there is: what the stand-in cannot show. Without one every test says that it is
//! skipped. `tests/gpu/run.sh` runs it.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::PathBuf;

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::{CudaBackend, CudaConfig, Dtype, Memory, probe};
use octavo_ops::testing::suite::{Suite, real_sizes};
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, HeadShape, StorageType};

/// Folders of libraries beside the usual ones, separated by colons.
const LIBRARIES: &str = "OCTAVO_CUDA_LIBS";

/// Settings for small models in an element type, or `None` where there is no GPU for it.
fn config(dtype: Dtype) -> Option<CudaConfig> {
    let libraries: Vec<PathBuf> =
        std::env::var_os(LIBRARIES).map(|folders| std::env::split_paths(&folders).collect()).unwrap_or_default();
    let report = probe(&libraries);
    match report.usable(0) {
        Ok(device) if device.chip.has(dtype) => Some(CudaConfig {
            device: 0,
            dtype: Some(dtype),
            libraries,
            kernel_pack: None,
            kernel_cache: std::env::temp_dir().join("octavo-gpu-tests"),
            max_num_batched_tokens: 512,
            max_num_seqs: 64,
            max_rows: 512,
            max_model_len: 1024,
            memory: Memory::KvCache(64 << 20),
            graphs: false,
            batch_invariant: false,
        }),
        Ok(device) => {
            eprintln!("skipped: {} has no {dtype:?}", device.name);
            None
        }
        Err(reason) => {
            eprintln!("skipped: no GPU: {reason}");
            None
        }
    }
}

fn with_suite<T>(config: &CudaConfig, worst: f64, mean: f64, test: impl FnOnce(&Suite<'_>) -> T) -> T {
    let backend = || -> Box<dyn Backend> { Box::new(CudaBackend::new(config.clone()).unwrap()) };
    test(&Suite { backend: &backend, worst, mean })
}

/// A model whose heads the tensor-core kernels are made for: grouped queries, norms, biases, a window in every other layer.
fn wide() -> TinyModel {
    TinyModel {
        vocab_size: 101,
        hidden: 64,
        inner: 96,
        heads: HeadShape { q: 4, kv: 2, dim: 64 },
        layers: vec![0, 1],
        windows: vec![None, Some(24)],
        biases: true,
        ..TinyModel::default()
    }
}

#[test]
fn the_contract_is_kept() {
    let Some(config) = config(Dtype::F32) else { return };
    with_suite(&config, 3e-4, 2e-5, |suite| suite.contract());
}

#[test]
fn logits_are_near_the_naive_ones() {
    // Errors of an element type, at the worst and in the mean.
    for (dtype, worst, mean) in [(Dtype::F32, 3e-4, 2e-5), (Dtype::F16, 8e-3, 1.5e-3), (Dtype::Bf16, 0.06, 0.01)] {
        let Some(config) = config(dtype) else { continue };
        for tokens in [1, 12, 40, 100] {
            with_suite(&config, worst, mean, |suite| suite.near_reference(&wide(), tokens)).unwrap();
        }
        with_suite(&config, worst, mean, |suite| suite.near_reference(&real_sizes(2048), 12)).unwrap();
    }
}

#[test]
fn bits_do_not_depend_on_the_batch_if_that_is_asked_for() {
    for dtype in Dtype::ALL {
        let Some(config) = config(dtype) else { continue };
        let config = CudaConfig { batch_invariant: true, ..config };
        with_suite(&config, 1.0, 1.0, |suite| suite.same_bits(&wide(), 11)).unwrap();
    }
}

#[test]
fn quantised_weights_mean_what_candle_reads() {
    let Some(config) = config(Dtype::F32) else { return };
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = Suite { backend: &candle, worst: 0.0, mean: 0.0 };
    for storage in [StorageType::Q4_0, StorageType::Q4_1, StorageType::Q8_0, StorageType::Q4K, StorageType::Q6K] {
        let model = TinyModel { vocab_size: 256, hidden: 256, inner: 512, storage, ..wide() };
        with_suite(&config, 0.06, 0.012, |suite| suite.near_other(&candle, &model, 20)).unwrap();
    }
}

#[test]
fn recorded_decode_steps_have_the_bits_of_launched_ones_and_of_themselves() {
    for dtype in Dtype::ALL {
        let Some(eager) = config(dtype) else { continue };
        let recorded = CudaConfig { graphs: true, ..eager.clone() };
        let expected = decode(eager);
        assert_eq!(decode(recorded.clone()), expected, "{dtype:?}");
        assert_eq!(decode(recorded), expected, "{dtype:?}, once more");
    }
}

/// The bits of the logits of some sequences that decode together.
fn decode(config: CudaConfig) -> Vec<Vec<u32>> {
    let (program, weights) = wide().build().unwrap();
    let mut backend = CudaBackend::new(config).unwrap();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    backend.allocate_kv(16, &vec![64; program.kv_groups.len()]).unwrap();
    let mut batches = PagedBatches::new(16, program.kv_groups.len(), 64, &mut TestRng(5));
    let mut rng = TestRng(6);
    let lengths = [70, 13, 33, 17, 40];
    for length in lengths {
        batches.add(rng.tokens(length, 101));
    }
    let mut steps = vec![lengths.map(|length| length - 5)];
    steps.extend([[1; 5]; 5]);
    let mut bits = Vec::new();
    for rows in steps {
        let parts: Vec<_> = rows.into_iter().enumerate().collect();
        let mut batch = batches.step(&parts);
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        backend.forward(&batch).unwrap();
        bits.push(backend.logits().unwrap().into_iter().map(f32::to_bits).collect());
    }
    bits
}
