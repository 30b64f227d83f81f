//! Rotary position embedding.

use candle_core::{D, Device, Result, Tensor};
use octavo_ops::{Rope, RopeStyle};

/// Rotates the leading elements of every head of `x[T, heads, D]` by the positions `[P,T]` of its row.
pub(crate) fn rotate(x: &Tensor, rope: &Rope, positions: &[u32]) -> Result<Tensor> {
    let (tokens, heads, dim) = x.dims3()?;
    let pairs = rope.inv_freq.len();
    let rotary = rope.rotary_dim();
    let (cos, sin) = angles(rope, positions, tokens)?;
    let rotated = x.narrow(D::Minus1, 0, rotary)?;
    // The pair is (first, second) along a dimension of two, which is the outer one for NeoX and the inner one for
    // GPT-J.
    let (shape, axis) = match rope.style {
        RopeStyle::NeoX => ((tokens, heads, 2, pairs), 2),
        RopeStyle::GptJ => ((tokens, heads, pairs, 2), 3),
    };
    let rotated = rotated.reshape(shape)?;
    let first = rotated.narrow(axis, 0, 1)?.squeeze(axis)?;
    let second = rotated.narrow(axis, 1, 1)?.squeeze(axis)?;
    let new_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let new_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    let rotated = Tensor::stack(&[new_first, new_second], axis)?.reshape((tokens, heads, rotary))?;
    if rotary == dim {
        return Ok(rotated);
    }
    Tensor::cat(&[rotated, x.narrow(D::Minus1, rotary, dim - rotary)?], D::Minus1)
}

/// Returns cosine and sine `[T, 1, rotary_dim / 2]`, computed from angles in f64.
fn angles(rope: &Rope, positions: &[u32], tokens: usize) -> Result<(Tensor, Tensor)> {
    let angle =
        |token: usize, pair: usize| f64::from(positions[rope.stream(pair) * tokens + token]) * rope.inv_freq[pair];
    let table = |f: fn(f64) -> f64| {
        let pairs = rope.inv_freq.len();
        let angles = (0..tokens).flat_map(|token| (0..pairs).map(move |pair| angle(token, pair)));
        let values: Vec<f32> = angles.map(|angle| (f(angle) * rope.magnitude) as f32).collect();
        Tensor::from_vec(values, (tokens, 1, pairs), &Device::Cpu)
    };
    Ok((table(f64::cos)?, table(f64::sin)?))
}
