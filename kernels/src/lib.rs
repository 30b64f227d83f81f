//! CUDA C++ kernels as embedded sources.
//!
//! - A source in `cuda/` holds **templates** and includes one header, `gpu.h`. It has no entry points: whoever compiles it
//!   appends a `KERNEL` line for each instance wanted.
//! - A kernel has one parameter, a plain struct ([`params`]), so a launch is a name, a grid, a number of threads, bytes of
//!   dynamic shared memory and one struct.
//! - The same text is compiled by NVRTC for a chip, and by g++ for the CPU emulation (feature `emulation`), which is how
//!   kernels are tested where there is no GPU.
//!
//! **Invariant:** this crate depends on no other crate of the workspace and links nothing of CUDA.

#[cfg(feature = "emulation")]
pub mod emulation;
pub mod manifest;
#[cfg(feature = "nvrtc")]
pub mod nvrtc;
pub mod params;
pub mod plan;
pub mod quant;
pub mod sources;
#[cfg(feature = "nvrtc")]
pub mod usage;
