//! Products of bf16 with bf16 rows. Pairs of inputs are processed one after the other, so that a row's sums do not depend
//! on its neighbours.

use std::arch::aarch64::*;
use std::arch::asm;

use super::LANES;
use super::read::REGISTERS;
use crate::memory::LINE;
use crate::weights::PANEL;

/// Number of rows that are multiplied at once: their sums, inputs and a step's weights fill the registers.
pub(super) const ROWS: usize = 4;

/// Number of inputs in a register.
const INPUTS: usize = 8;

/// Multiplies up to [`ROWS`] rows, `stride` elements apart, with a panel of `cols` inputs, a multiple of [`INPUTS`].
///
/// # Safety
/// NEON with bf16 must be available.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn multiply(
    panel: &[u8],
    cols: usize,
    (input, stride): (&[u16], usize),
    results: &mut [[f32; PANEL]],
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match results {
            [_] => rows::<1>(panel, cols, (input, stride), results),
            [_, _] => rows::<2>(panel, cols, (input, stride), results),
            [_, _, _] => rows::<3>(panel, cols, (input, stride), results),
            _ => rows::<ROWS>(panel, cols, (input, stride), results),
        }
    }
}

#[inline(always)]
unsafe fn rows<const N: usize>(
    panel: &[u8],
    cols: usize,
    (input, stride): (&[u16], usize),
    results: &mut [[f32; PANEL]],
) {
    assert!(cols.is_multiple_of(INPUTS) && panel.len() >= cols / 2 * LINE && results.len() == N);
    assert!(input.len() >= (N - 1) * stride + cols);
    let (panel, input) = (panel.as_ptr(), input.as_ptr());
    // SAFETY: the caller guarantees the instructions; a panel has a line for each pair of inputs, and rows have their
    // inputs.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; N];
        for from in (0..cols).step_by(INPUTS) {
            let mut inputs = [vdupq_n_u16(0); N];
            for (r, inputs) in inputs.iter_mut().enumerate() {
                *inputs = vld1q_u16(input.add(r * stride + from));
            }
            macro_rules! pair {
                ($lane:literal) => {
                    let line = panel.add((from / 2 + $lane) * LINE).cast::<u16>();
                    for q in 0..REGISTERS {
                        let weights = vld1q_u16(line.add(8 * q));
                        for r in 0..N {
                            sums[r][q] = dot::<$lane>(sums[r][q], weights, inputs[r]);
                        }
                    }
                };
            }
            pair!(0);
            pair!(1);
            pair!(2);
            pair!(3);
        }
        for (result, sums) in results.iter_mut().zip(sums) {
            for (q, sum) in sums.into_iter().enumerate() {
                vst1q_f32(result.as_mut_ptr().add(q * LANES), sum);
            }
        }
    }
}

/// Adds to each sum the products of two weights with pair `LANE` of `a`. The intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,bf16")]
pub(crate) fn dot<const LANE: i32>(mut sums: float32x4_t, weights: uint16x8_t, a: uint16x8_t) -> float32x4_t {
    // SAFETY: the instruction only computes with its registers.
    unsafe {
        asm!(
            "bfdot {sums:v}.4s, {weights:v}.8h, {a:v}.2h[{lane}]",
            sums = inlateout(vreg) sums,
            weights = in(vreg) weights,
            a = in(vreg) a,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
