//! Kernels for single rows: plain Rust in lanes of sixteen, compiled once for each instruction set.
//!
//! The order of every sum is written out in lanes, so it depends neither on the number of rows nor on the compiler.
//! Instruction sets differ only in the fusing of multiply-adds.

mod math;
mod plain;
#[cfg(target_arch = "x86_64")]
mod quantise;

pub(crate) use math::{exp, fma, tanh};
use octavo_ops::{GluKind, NormKind, RopeStyle};

use crate::isa::{Isa, per_isa};

/// Number of columns that share a scale of a quantised row: the quant block of every format whose weights are
/// multiplied as integers.
pub(crate) const GROUP: usize = 32;

/// Number of bits of the low part of a code.
pub(crate) const LOW_BITS: u32 = 4;

/// Largest magnitude of a code, and of one without a high part.
const LARGEST_CODE: f32 = (LARGEST_PART as i32 * LARGEST_OUTLIER as i32) as f32;
const LARGEST_PART: f32 = 127.0;

/// Largest magnitude of the other steps of a group, in that of an outlying step.
const LARGEST_OTHER: f32 = 0.5;

/// Largest magnitude of an outlier, in that of the other inputs of its group.
const LARGEST_OUTLIER: f32 = (1 << LOW_BITS) as f32;

/// Bits of all steps of a group.
const ALL_STEPS: u8 = u8::MAX;

/// Number of independent partial sums.
pub(crate) const LANES: usize = 16;

/// Parameters of a normalisation.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) kind: NormKind,
    /// Weight with any offset added.
    pub(crate) weight: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
}

/// A row as integers in a high and a low part: an element is `(high · 16 + low) · scale`.
///
/// With 12 bits, the rounding of activations is hardly noticeable. Weights of 4 bits times 16 still fit a byte, so one product of
/// 64 inputs gives both parts. Where reading weights limits the speed, the second part costs little.
///
/// Where multiplying limits it, rows are coarse: they have 8 bits, which are the low part. Those 8 bits are lost on the outliers of
/// some groups, which are many times larger than the other inputs. So each group may have one outlying step, four inputs whose
/// largest magnitude is at least twice that of all others: it has a high part too, and the scale is that of the others. The error is
/// less than half of that without outlying steps, and few steps are multiplied twice.
pub(crate) struct QuantRow<'a> {
    /// Codes: for each group the high parts, within ±127, then the low parts, −8 to 7. In coarse rows, low parts of the steps without
    /// high parts are within ±127.
    pub(crate) codes: &'a mut [i8],
    /// One scale for each group.
    pub(crate) scales: &'a mut [f32],
    /// Sum of each group, computed from its codes.
    pub(crate) sums: &'a mut [f32],
    /// Sum of the codes in each half of each group, for weights whose halves have a scale each.
    pub(crate) totals: &'a mut [[i32; 2]],
    /// The steps of each group that have high parts, as bits.
    pub(crate) steps: &'a mut [u8],
}

/// A row as integers of 8 bits with one scale: an element is `code · scale`.
#[derive(Clone, Copy)]
pub(crate) struct CodedRow<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scale: f32,
}

per_isa! {
    plain;
    /// Computes `out = norm(x)`.
    fn norm(x: &[f32], norm: Norm<'_>, out: &mut [f32]);

    /// Computes `x += y`.
    fn add(x: &mut [f32], y: &[f32]);

    /// Computes `x *= factor`.
    fn scale(x: &mut [f32], factor: f32);

    /// Computes `x = cap · tanh(x / cap)`.
    fn softcap(x: &mut [f32], cap: f32);

    /// Computes `out = act(gate) · up`, or the clamped form of both.
    fn glu(kind: GluKind, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// Computes `x = act(x)`.
    fn act(kind: GluKind, x: &mut [f32]);

    /// Computes `x += factor · y`.
    fn add_scaled(x: &mut [f32], y: &[f32], factor: f32);

    /// Computes `out = (byte − shift) / divisor`.
    fn normalise(bytes: &[u8], shift: f32, divisor: f32, out: &mut [f32]);

    /// Rotates the leading `2 · cos.len()` elements of a head.
    fn rotate(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32]);

    /// Does [`Isa::quantise`] on instruction sets without a special kernel.
    fn quantise_plain(x: &[f32], coarse: bool, out: QuantRow<'_>);

    /// Joins the parts of each code of whole groups to integers of 16 bits.
    fn join(codes: &[i8], words: &mut [i16]);

    /// Does the same, and exchanges the second and the third of each four inputs.
    fn join_crossed(codes: &[i8], words: &mut [i16]);

    /// Rounds to bf16, ties to even.
    fn to_bf16(x: &[f32], out: &mut [u16]);

    /// Rounds to integers of 8 bits, ties to even. The scale is the largest magnitude over 127.
    fn code(x: &[f32], codes: &mut [i8], scale: &mut f32);

    /// Converts words of four 8-bit integers to words of two bf16: a row of sixteen words becomes two rows.
    fn widen(words: &[u32], out: &mut [u32]);

    /// Does the same with e4m3 numbers.
    fn widen_e4m3(words: &[u32], out: &mut [u32]);

    /// Rounds `x / scale` to e4m3, ties to even.
    fn to_e4m3(x: &[f32], scale: f32, codes: &mut [i8]);

    /// Finds the largest element; −∞ if all are NaN or there is none.
    fn largest(x: &[f32], found: &mut f32);

    /// Computes `x *= factors` element by element.
    fn multiply(x: &mut [f32], factors: &[f32]);
}

impl Isa {
    /// Quantises a row of whole groups: the scale is the largest magnitude over 127 · 16, codes are rounded to nearest, ties to
    /// even. With `coarse`, the codes have 8 bits but for outlying steps, and the scale is the largest magnitude of the other steps
    /// over 127.
    pub(crate) fn quantise(self, x: &[f32], coarse: bool, out: QuantRow<'_>) {
        #[cfg(target_arch = "x86_64")]
        if self >= Self::Avx2 {
            // SAFETY: an `Isa` is only used where it is available.
            return unsafe {
                if coarse { quantise::quantise::<true>(x, out) } else { quantise::quantise::<false>(x, out) }
            };
        }
        self.quantise_plain(x, coarse, out);
    }
}

#[cfg(test)]
mod tests;
