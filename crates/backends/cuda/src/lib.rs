//! The CUDA backend: programs on NVIDIA GPUs, from Volta on.
//!
//! Nothing of CUDA is needed to build it, and nothing is linked: the driver, NVRTC and cuBLASLt are looked for when a backend is
//! made ([`CudaBackend::new`]), and where one is missing an error says which and how to get it. Kernels are CUDA C++
//! (`octavo-kernels`), compiled by NVRTC for the chip at hand when a model is loaded, and kept on disk; or ahead of time
//! ([`build_pack`]), and then there need be no NVRTC.
//!
//! One piece of device memory holds weights, step buffers and the KV cache; after [`Backend::allocate_kv`] nothing is
//! allocated any more. A step is one copy to the device, the launches of the program, or of a CUDA graph that was recorded
//! of them where all sequences decode, one copy for sampling, and one copy back.
//!
//! **Invariant:** a step's results are the same from run to run. With [`CudaConfig::batch_invariant`] a row's bits do not depend
//! on the other rows of the step.
//!
//! [`Backend::allocate_kv`]: octavo_ops::Backend::allocate_kv

mod arena;
mod backend;
mod bench;
mod build;
mod cache;
mod config;
mod driver;
mod dummy;
mod forward;
mod layout;
mod libraries;
mod linear;
mod lower;
mod model;
mod pack;
mod peaks;
mod probe;
mod sample;
mod step;
#[cfg(feature = "testing")]
pub mod testing;
mod weights;

pub use backend::CudaBackend;
pub use bench::{Ceilings, CeilingsBench, KernelBench, KernelBencher, KernelTime, ProductRate, Unmeasured};
pub use config::{CudaConfig, Memory};
pub use driver::{DeviceInfo, DriverError, Unavailable};
pub use libraries::{Candidate, Kind, OLDEST_CHIP, Unfit, Version, fits, named_folders};
pub use octavo_kernels::manifest::{Chip, Dtype, Target};
pub use pack::{KernelPack, PackError, PackMade, PackOrder, PackUnfit, build_pack};
pub use probe::{Found, Report, probe};

/// Name of the backend, for people and errors.
const NAME: &str = "cuda";

/// The device's own words about what failed.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}

/// What the backend was asked for and does not do.
fn unsupported(what: impl Into<String>) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Unsupported { backend: NAME, what: what.into() }
}
