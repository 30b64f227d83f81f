//! Mistral: Llama without biases and with a sliding window (`windows` of the configuration).

use octavo_ops::Program;

use super::ModelError;
use super::decoder::{Attention, Decoder};

pub(super) fn program(mut d: Decoder<'_>) -> Result<Program, ModelError> {
    let x = d.embed(1.0)?;
    for layer in 0..d.config().layers {
        d.attention(layer, x, Attention { qkv_bias: false, output_bias: false, qk_norm: false })?;
        d.gated_mlp(layer, x)?;
    }
    d.head(x)
}
