//! The CPU backend.
//!
//! - **Weights** are repacked at load into panels of sixteen output rows ([`weights`]), in the order in which kernels read
//!   them, about as large as in the checkpoint.
//! - **Products** ([`product`]) of integers are exact within a quant block: with AVX-512 VNNI for a few rows, with AMX for
//!   more. Activations are quantised once, where they are made ([`activation`]).
//! - **Attention** ([`attention`]) reads a paged cache, in bf16 or in integers of 8 bits, that is laid out for it ([`kv`]).
//! - **A step** is one parallel region of a pool of pinned threads ([`pool`]), with a barrier after each stage
//!   ([`forward`]).
//! - **The machine's limits** are measured by [`probe`]: how far a step is from what any implementation could do.
//!
//! The instruction set is chosen once, at run time ([`Isa`]).
//!
//! **Invariant:** on one instruction set, the bits of a row do not depend on the other rows of the step: a row alone, in any
//! batch, prefilled in one chunk or many, decoded or prefilled, with or without prefix-cache hits, on any number of
//! threads, has the same result.

#![deny(clippy::undocumented_unsafe_blocks)]

mod activation;
mod attention;
mod backend;
mod forward;
mod isa;
mod kv;
mod memory;
mod plan;
mod pool;
pub mod probe;
mod product;
mod rows;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod weights;

pub use backend::{CpuBackend, CpuConfig};
pub use isa::Isa;
pub use kv::KvDtype;

/// Name of the backend, for people and errors.
const NAME: &str = "cpu";

/// The device's own words about a failed step.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}
