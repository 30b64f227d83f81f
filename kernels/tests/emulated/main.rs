//! The kernels on the CPU emulation, each against the same in scalar f64: drawn shapes, every scheduling order, twice for the same
//! bits, outputs NaN before they are written.

mod attention;
mod attention_properties;
mod common;
mod fill;
mod layout;
mod linear;
mod machine;
mod qkv_post;
mod quantized;
mod rows;
mod sampling;
mod sanitizers;
mod support;
