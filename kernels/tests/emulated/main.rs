//! Tests of the kernels on the CPU emulation, each compared with scalar f64: random shapes, the same bits
//! in every scheduling order, and outputs that are NaN before they are written. With OCTAVO_GPU=1 they run on a GPU
//! instead of the emulation; `tests/gpu/run.sh` does that.

mod attention;
mod attention_properties;
mod attention_segments;
mod banks;
mod common;
mod detector;
mod device;
mod experts;
mod fill;
mod float8;
mod fused;
mod fused_decode;
mod images;
mod latent;
mod launcher;
mod layout;
mod linear;
mod lora;
mod machine;
mod qkv_post;
mod quantized;
mod races;
mod rounded;
mod rows;
mod sampling;
mod sanitizers;
mod skinny;
mod skinny_quant;
mod support;
