//! The kernels on the CPU emulation, each against the same in scalar f64: drawn shapes, every scheduling order, twice for the same
//! bits, outputs NaN before they are written. With OCTAVO_GPU=1 on a GPU in place of the emulation; `tests/gpu/run.sh` does that.

mod attention;
mod attention_properties;
mod banks;
mod common;
mod device;
mod fill;
mod launcher;
mod layout;
mod linear;
mod machine;
mod qkv_post;
mod quantized;
mod rows;
mod sampling;
mod sanitizers;
mod support;
