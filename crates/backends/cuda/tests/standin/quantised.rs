//! Weights that stay quantised.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::testing::TinyModel;
use octavo_ops::testing::suite::Suite;
use octavo_ops::{Backend, HeadShape, StorageType};

use crate::{config, open};

/// Shapes that fit every format: rows of whole super-blocks.
fn model(storage: StorageType) -> TinyModel {
    TinyModel {
        vocab_size: 90,
        hidden: 256,
        inner: 256,
        heads: HeadShape { q: 4, kv: 2, dim: 64 },
        layers: vec![0],
        storage,
        ..TinyModel::default()
    }
}

#[test]
fn every_format_means_what_candle_reads() {
    let candle = || -> Box<dyn Backend> { Box::new(CandleBackend::new()) };
    let candle = Suite { backend: &candle, worst: 0.0, mean: 0.0 };
    use StorageType::{Q4_0, Q4_1, Q4K, Q6K, Q8_0};
    for (storage, device, dtype) in [
        (Q4_0, H200, Dtype::F32),
        (Q4_1, H200, Dtype::Bf16),
        (Q8_0, H200, Dtype::F32),
        (Q4K, V100, Dtype::F16),
        (Q6K, H200, Dtype::F32),
    ] {
        let config = CudaConfig { device, dtype: Some(dtype), ..config() };
        let backend = || -> Box<dyn Backend> { Box::new(open(config.clone())) };
        // Few rows are multiplied with activations of 8 bits, many with the values of the weights.
        let suite = Suite { backend: &backend, worst: 0.08, mean: 0.015 };
        for tokens in [3, 20] {
            suite.near_other(&candle, &model(storage), tokens).unwrap_or_else(|e| panic!("{storage}: {e}"));
        }
    }
}
