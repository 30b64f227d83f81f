//! Tests of the unmodified backend over a stand-in for the driver and the libraries: kernels run on the CPU emulation.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod bench;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod dummy;
mod faults;
mod graphs;
mod images;
mod overlap;
mod programs;
mod quantised;
mod sampling;

use octavo_backend_cuda::testing::{devices::H200, kernel_cache, standin};
use octavo_backend_cuda::{CudaConfig, Dtype, Memory};

/// Returns sizes for the shared suite and for small models, on the newest of the stand-in's devices.
fn config() -> CudaConfig {
    CudaConfig {
        device: H200,
        dtype: Some(Dtype::F32),
        libraries: vec![standin()],
        kernel_pack: None,
        kernel_cache: kernel_cache(),
        max_num_batched_tokens: 256,
        max_num_seqs: 8,
        max_rows: 256,
        max_model_len: 512,
        max_patches: 512,
        memory: Memory::KvCache(16 << 20),
        graphs: false,
        batch_invariant: false,
    }
}
