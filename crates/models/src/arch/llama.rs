//! Llama 1 to 3.x and models with the same architecture: SmolLM2, TinyLlama, Yi, ...
//!
//! A pre-norm decoder with rotary embedding, grouped-query attention and a gated MLP. Rotary scaling is in the
//! configuration. Idefics3 and SmolVLM are Llama with images.

use octavo_ops::Program;

use super::ModelError;
use super::decoder::{Attention, Decoder};

pub(super) fn program(mut d: Decoder<'_>) -> Result<Program, ModelError> {
    let bias = (d.config().qkv_bias, d.config().output_bias);
    let x = d.embed(1.0)?;
    d.inject_images(x);
    for layer in 0..d.config().layers {
        d.attention(layer, x, Attention { qkv_bias: bias.0, output_bias: bias.1, qk_norm: false })?;
        d.gated_mlp(layer, x)?;
    }
    d.head(x)
}
