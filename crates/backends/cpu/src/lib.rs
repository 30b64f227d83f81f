//! The CPU backend.
//!
//! - **Weights** are repacked at load into panels of sixteen output rows ([`weights`]), in the order in which kernels
//!   read them; their size is about that in the checkpoint.
//! - **Products** ([`product`]) of integers are exact within a quant block: they use AVX-512 VNNI for a few rows and
//!   AMX for more. Activations are quantised once, where they are computed ([`activation`]).
//! - **Attention** ([`attention`]) reads a paged cache in bf16 or 8-bit integers, in a layout made for it ([`kv`]).
//! - **A step** is one parallel region of a pool of pinned threads ([`pool`]), with a barrier after each stage
//!   ([`forward`]).
//! - **The machine's limits** are measured by [`probe`], to compare a step with the roofline limit.
//!
//! The instruction set is chosen once, at run time ([`Isa`]).
//!
//! **Invariant:** on one instruction set, the bits of a row do not depend on the other rows of the step. A row has the
//! same result alone or in any batch, prefilled in one chunk or many, decoded or prefilled, with or without
//! prefix-cache hits, on any number of threads.

#![deny(clippy::undocumented_unsafe_blocks)]

mod activation;
mod ahead;
mod attention;
mod backend;
mod experts;
mod forward;
mod isa;
mod kv;
mod latent;
mod loaded;
mod lora;
mod media;
mod memory;
mod plan;
mod pool;
pub mod probe;
mod product;
mod qkv_post;
mod rows;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod weights;

pub use backend::{ActivationBits, CpuBackend, CpuConfig};
pub use isa::Isa;
pub use kv::KvDtype;
pub use memory::return_free_pages;
pub use weights::WeightDtype;

/// Name of the backend for display and errors.
const NAME: &str = "cpu";

/// Returns the error of a failed step, with the device's message.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}
