//! The CUDA backend, which runs programs on NVIDIA GPUs from Volta on.
//!
//! Building it needs no part of CUDA, and nothing is linked: the driver, NVRTC and cuBLASLt are searched when a backend
//! is created ([`CudaBackend::new`]), and an error names a missing one and how to install it. Kernels are CUDA C++
//! (`octavo-kernels`). NVRTC compiles them for the present chip when a model is loaded, and they are cached on disk.
//! Alternatively they are compiled ahead of time ([`build_pack`]), and NVRTC is not needed.
//!
//! Device memory is allocated when a program is loaded, for its weights and step buffers, and for the caches
//! ([`Backend::allocate_kv`], [`Backend::allocate_media`]); no step allocates any. A step consists of one copy to the device, another one
//! if a sequence has new blocks, the launches of the program (or, if all sequences decode, of a CUDA graph recorded from
//! them), one copy for sampling, and one copy back.
//!
//! **Invariant:** a step's results are the same from run to run. With [`CudaConfig::batch_invariant`] a row's bits do not depend
//! on the other rows of the step.
//!
//! [`Backend::allocate_kv`]: octavo_ops::Backend::allocate_kv
//! [`Backend::allocate_media`]: octavo_ops::Backend::allocate_media

mod arena;
mod backend;
mod bench;
mod build;
mod cache;
mod config;
mod counts;
mod dense;
mod driver;
mod dummy;
mod encoder;
mod experts;
mod float8;
mod forward;
mod fuse;
mod fused_decode;
mod images;
mod integers;
mod latent;
mod launcher;
mod layout;
mod libraries;
mod linear;
mod loaded;
mod lora;
mod lower;
mod media;
mod model;
mod pack;
mod peaks;
mod predict;
mod probe;
mod rounded;
mod sample;
mod staged;
mod step;
mod tables;
#[cfg(feature = "testing")]
pub mod testing;
mod texts;
mod tuning;
mod uploads;
mod weights;

pub use backend::CudaBackend;
pub use bench::{
    Ceilings, CeilingsBench, ExpertSizes, KernelBench, KernelBencher, KernelTime, ProductRate, Unmeasured,
};
pub use config::{AdapterRoom, CudaConfig, Memory, Tuning, early_launches};
pub use driver::{DeviceInfo, DriverError, Unavailable};
pub use libraries::{Candidate, LibraryKind, OLDEST_CHIP, Unfit, Version, fits, named_folders};
pub use octavo_kernels::manifest::{CacheType, Chip, Dtype, PACKED, Target};
pub use pack::{KernelPack, PackError, PackMade, PackOrder, PackUnfit, build_pack};
pub use predict::{CORRECTED_BY, Cause, ChipModel, KernelPrediction, Loss, Predictor, StepPrediction};
pub use probe::{Found, Report, probe};

/// Name of the backend for display and errors.
const NAME: &str = "cuda";

/// Returns the error of a failed operation, with the device's message.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}

/// Returns the error of an unsupported request.
fn unsupported(what: impl Into<String>) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Unsupported { backend: NAME, what: what.into() }
}
