//! Models and checks shared by the suites over the stand-in and on a GPU.

pub(crate) mod checkpoints;
pub(crate) mod images;
pub(crate) mod overlap;
pub(crate) mod quantised;
pub(crate) mod vectors;

use octavo_backend_cuda::{CudaBackend, CudaConfig};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken};
use octavo_ops::testing::suite::Suite;
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, HeadShape};

/// Number of KV blocks in [`generate`].
pub(crate) const BLOCKS: usize = 128;

pub(crate) fn open(config: CudaConfig) -> CudaBackend {
    CudaBackend::new(config).expect("there is such a device")
}

/// Returns a backend with a loaded model and `blocks` KV blocks.
pub(crate) fn loaded(config: CudaConfig, model: &TinyModel, blocks: usize) -> CudaBackend {
    let (program, weights) = model.build().expect("the model is well formed");
    let mut backend = open(config);
    backend.load(&program, &weights, &mut |_| {}).expect("the model is loaded");
    backend.allocate_kv(16, blocks).expect("there is memory");
    backend
}

/// Runs the suite of all backends, with limits for the worst and the mean error.
pub(crate) fn with_suite<T>(config: &CudaConfig, worst: f64, mean: f64, test: impl FnOnce(&Suite<'_>) -> T) -> T {
    let backend = || -> Box<dyn Backend> { Box::new(open(config.clone())) };
    // Weights of tokens are computed in f32.
    test(&Suite { backend: &backend, worst, mean, logprobs: 1e-6 })
}

/// Returns a model with heads for the tensor-core kernels: grouped queries, norms, biases, a window in every other
/// layer.
pub(crate) fn wide() -> TinyModel {
    TinyModel {
        vocab_size: 101,
        hidden: 64,
        inner: 96,
        heads: HeadShape::new(4, 2, 64),
        layers: vec![0, 1],
        windows: vec![None, Some(24)],
        biases: true,
        ..TinyModel::default()
    }
}

/// Prefills some sequences of [`wide`], calls `prefilled` and lets them decode together, while sequences end one by
/// one. Returns the bits of every step's logits.
pub(crate) fn generate(backend: &mut CudaBackend, prefilled: impl FnOnce()) -> Vec<Vec<u32>> {
    let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
    let mut rng = TestRng(6);
    let lengths = [70, 3, 33, 17, 40];
    for length in lengths {
        batches.add(rng.tokens(length, 101));
    }
    let params = SampleParams::default();
    let mut sampled: Vec<SampledToken> = Vec::with_capacity(16);
    let mut bits = Vec::new();
    let mut step = |parts: &[(usize, usize)]| {
        let mut batch = batches.step(parts);
        // As in an engine, there are no hidden states, and only each sequence's last row is sampled.
        batch.pooled_rows.clear();
        batch.sampled_rows = batch.query_start[1..].iter().map(|end| end - 1).collect();
        backend.forward(&batch).expect("the step runs");
        let rows = vec![SampleRow::new(&params); batch.sampled_rows.len()];
        backend.sample(&SampleBatch { rows: &rows }, &mut sampled).expect("it is sampled");
        bits.push(backend.logits().expect("there are logits").into_iter().map(f32::to_bits).collect());
    };
    // The first step takes all but five tokens, then comes one at a time; the second sequence has only its prompt.
    step(&[(0, 65), (1, 1), (2, 28), (3, 12), (4, 35)]);
    prefilled();
    for left in 0..5 {
        let parts: Vec<_> =
            (0..lengths.len()).filter(|&s| s + left < 6 && (s != 1 || left < 2)).map(|s| (s, 1)).collect();
        step(&parts);
    }
    bits
}
