//! Qwen3 dense: q and k are normalised per head before the rotary embedding, and the head size is a separate number.
//! Its VL models add encoder outputs after the first layers.

use octavo_ops::Program;

use super::ModelError;
use super::decoder::{Attention, Decoder};

pub(super) fn program(mut d: Decoder<'_>) -> Result<Program, ModelError> {
    let bias = (d.config().qkv_bias, d.config().output_bias);
    let x = d.embed(1.0)?;
    d.inject_images(x);
    for layer in 0..d.config().layers {
        d.attention(layer, x, Attention { qkv_bias: bias.0, output_bias: bias.1, qk_norm: true })?;
        d.gated_mlp(layer, x)?;
        d.inject_deepstack(layer, x);
    }
    d.head(x)
}
