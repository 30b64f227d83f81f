//! Kernels that work on one row: plain Rust in lanes of sixteen, compiled once for each instruction set.
//!
//! The order of every sum is written out in lanes, so it does not depend on how many rows there are or on how the
//! compiler cuts them. Across instruction sets only the fusing of products and sums differs.

mod math;
mod plain;

pub(crate) use math::{exp, fma, tanh};
use octavo_ops::{GluKind, NormKind, RopeStyle};

use crate::isa::{Isa, per_isa};

/// Columns that share a scale of a quantised row: the quant block of every format whose weights are multiplied as integers.
pub(crate) const GROUP: usize = 32;

/// Bits of the low part of a code.
pub(crate) const LOW_BITS: u32 = 4;

/// Independent partial sums.
pub(crate) const LANES: usize = 16;

/// What a normalisation needs beside its input.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) kind: NormKind,
    /// With any offset added.
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
}

/// A row as integers of 12 bits, each a high and a low part: an element is `(high · 16 + low) · scale`.
///
/// With 8 bits alone the rounding of activations would be what most tells a quantised model's answers from those of the
/// same weights in f32; with 12 it hardly shows. Weights of 4 bits take the factor 16 and stay bytes, so that one product
/// of 64 inputs gives both parts; and where reading weights is what takes time, the second part costs little anyway.
pub(crate) struct QuantRow<'a> {
    /// Of each group the high parts, within ±127, then the low ones, −8 to 7.
    pub(crate) codes: &'a mut [i8],
    /// One for each group.
    pub(crate) scales: &'a mut [f32],
    /// Each group's sum, as the codes have it.
    pub(crate) sums: &'a mut [f32],
    /// For each half of each group the sum of its codes, for weights whose halves have a scale each.
    pub(crate) totals: &'a mut [[i32; 2]],
}

/// A row as integers of 8 bits with one scale: an element is `code · scale`.
#[derive(Clone, Copy)]
pub(crate) struct CodedRow<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scale: f32,
}

per_isa! {
    plain;
    /// `out = norm(x)`.
    fn norm(x: &[f32], norm: Norm<'_>, out: &mut [f32]);

    /// `x += y`.
    fn add(x: &mut [f32], y: &[f32]);

    /// `x *= factor`.
    fn scale(x: &mut [f32], factor: f32);

    /// `x = cap · tanh(x / cap)`.
    fn softcap(x: &mut [f32], cap: f32);

    /// `out = act(gate) · up`.
    fn glu(kind: GluKind, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// Rotates the leading `2 · cos.len()` elements of a head.
    fn rotate(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]);

    /// Quantises a row of whole groups: the scale is the largest magnitude over 127 · 16, codes are rounded to nearest, ties to
    /// even.
    fn quantise(x: &[f32], out: QuantRow<'_>);

    /// The same with 8 bits: the low parts are zeros.
    fn quantise_coarsely(x: &[f32], out: QuantRow<'_>);

    /// Rounds to bf16, ties to even.
    fn to_bf16(x: &[f32], out: &mut [u16]);

    /// Rounds to integers of 8 bits, ties to even; the scale is the largest magnitude over 127.
    fn code(x: &[f32], codes: &mut [i8], scale: &mut f32);

    /// Four integers of 8 bits in a word to bf16, two in a word: a row of sixteen words becomes two.
    fn widen(words: &[u32], out: &mut [u32]);

    /// The largest element; −∞ where all are NaN or there is none.
    fn largest(x: &[f32], found: &mut f32);

    /// `x *= factors`, one by one.
    fn multiply(x: &mut [f32], factors: &[f32]);
}

#[cfg(test)]
mod tests;
