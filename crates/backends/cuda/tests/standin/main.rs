//! The backend as it is, over a stand-in for the driver and the libraries: kernels run on the CPU emulation.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod bench;
mod checkpoints;
mod devices;
mod dummy;
mod faults;
mod graphs;
mod programs;
mod quantised;
mod sampling;

use octavo_backend_cuda::testing::{devices::H200, kernel_cache, standin};
use octavo_backend_cuda::{CudaBackend, CudaConfig, Dtype, Memory};
use octavo_ops::testing::TinyModel;
use octavo_ops::{Backend, HeadShape};

/// Sizes for the shared suite and for small models, on the newest of the stand-in's devices.
fn config() -> CudaConfig {
    CudaConfig {
        device: H200,
        dtype: Some(Dtype::F32),
        libraries: vec![standin()],
        kernel_cache: kernel_cache(),
        max_num_batched_tokens: 256,
        max_num_seqs: 8,
        max_rows: 256,
        max_model_len: 512,
        memory: Memory::KvCache(16 << 20),
        graphs: false,
        batch_invariant: false,
    }
}

fn open(config: CudaConfig) -> CudaBackend {
    CudaBackend::new(config).expect("the stand-in has such a device")
}

/// A backend that holds a model, with `blocks` blocks for each of its KV groups.
fn loaded(config: CudaConfig, model: &TinyModel, blocks: usize) -> CudaBackend {
    let (program, weights) = model.build().expect("the model is well formed");
    let mut backend = open(config);
    backend.load(&program, &weights, &mut |_| {}).expect("the model is loaded");
    backend.allocate_kv(16, &vec![blocks; program.kv_groups.len()]).expect("there is memory");
    backend
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
