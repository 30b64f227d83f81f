//! Qwen2 and Qwen2.5: Llama with biases on q, k and v.

use octavo_ops::Program;

use super::ModelError;
use super::decoder::{Attention, Decoder};

pub(super) fn program(mut d: Decoder<'_>) -> Result<Program, ModelError> {
    let x = d.embed(1.0)?;
    for layer in 0..d.config().layers {
        d.attention(layer, x, Attention { qkv_bias: true, output_bias: false, qk_norm: false })?;
        d.gated_mlp(layer, x)?;
    }
    d.head(x)
}
