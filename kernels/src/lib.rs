//! CUDA C++ kernels as embedded sources.
//!
//! - A source in `cuda/` contains **templates** and includes one header, `gpu.h`. It has no entry points: the code that
//!   compiles it appends a `KERNEL` line for each required instance.
//! - A kernel has one parameter, a plain struct ([`params`]), so a launch consists of a name, a grid, a number of
//!   threads, a size of dynamic shared memory and one struct.
//! - NVRTC compiles the same text for a chip, and g++ compiles it for the CPU emulation (feature `emulation`), with
//!   which kernels are tested without a GPU.
//!
//! **Invariant:** this crate depends on no other crate of the workspace and links no part of CUDA.

#[cfg(feature = "emulation")]
pub mod emulation;
#[cfg(feature = "nvrtc")]
pub mod figures;
pub mod manifest;
#[cfg(feature = "nvrtc")]
pub mod nvrtc;
pub mod params;
pub mod parts;
pub mod plan;
pub mod quant;
pub mod sources;
#[cfg(feature = "nvrtc")]
pub mod usage;
