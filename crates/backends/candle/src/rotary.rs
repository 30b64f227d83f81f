//! Rotary position embedding.

use candle_core::{D, Device, Result, Tensor};
use octavo_ops::{Rope, RopeStyle};

/// Rotates the leading elements of every head of `x[T, heads, D]` by its row's position.
pub(crate) fn rotate(x: &Tensor, rope: &Rope, positions: &[u32]) -> Result<Tensor> {
    let (tokens, heads, dim) = x.dims3()?;
    let pairs = rope.inv_freq.len();
    let rotary = rope.rotary_dim();
    let (cos, sin) = angles(rope, positions)?;
    let rotated = x.narrow(D::Minus1, 0, rotary)?;
    // The pair is (first, second) along a dimension of two: NeoX has it outside, GPT-J inside.
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

/// Cosine and sine `[T, 1, rotary_dim / 2]`, from angles in f64.
fn angles(rope: &Rope, positions: &[u32]) -> Result<(Tensor, Tensor)> {
    let table = |f: fn(f64) -> f64| {
        let rows = positions.iter().flat_map(|&p| rope.inv_freq.iter().map(move |w| f64::from(p) * w));
        let values: Vec<f32> = rows.map(|angle| (f(angle) * rope.magnitude) as f32).collect();
        Tensor::from_vec(values, (positions.len(), 1, rope.inv_freq.len()), &Device::Cpu)
    };
    Ok((table(f64::cos)?, table(f64::sin)?))
}
