//! Products of floating-point weights.

use std::arch::aarch64::*;

use super::read::REGISTERS;
use super::{LANES, widened};
use crate::memory::LINE;
use crate::weights::{PANEL, PanelKind};

/// Number of inputs that are read at once: a register of each row.
const INPUTS: usize = LANES;

/// Weights of one input of sixteen output rows.
type Weights = [float32x4_t; REGISTERS];

/// Reads a panel of one kind.
trait Read {
    /// Returns the weights of input `k` and, if they are beside them, those of the next one.
    ///
    /// # Safety
    /// NEON must be available, and the panel must have both inputs if `k` is even, or `k` otherwise.
    unsafe fn input(panel: *const u8, k: usize) -> Weights;
}

struct F32;
struct F16;
struct Bf16;

impl Read for F32 {
    #[inline(always)]
    unsafe fn input(panel: *const u8, k: usize) -> Weights {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.cast::<f32>().add(k * PANEL);
            [vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))]
        }
    }
}

impl Read for F16 {
    #[inline(always)]
    unsafe fn input(panel: *const u8, k: usize) -> Weights {
        // SAFETY: the caller guarantees this.
        unsafe {
            let at = panel.cast::<u16>().add(k * PANEL);
            [
                widened(vld1_u16(at)),
                widened(vld1_u16(at.add(4))),
                widened(vld1_u16(at.add(8))),
                widened(vld1_u16(at.add(12))),
            ]
        }
    }
}

impl Read for Bf16 {
    #[inline(always)]
    unsafe fn input(panel: *const u8, k: usize) -> Weights {
        // SAFETY: the caller guarantees this; a line has four registers of pairs.
        unsafe {
            let at = panel.add(k / 2 * LINE).cast::<u32>();
            let mut weights = [vdupq_n_f32(0.0); REGISTERS];
            for (index, weights) in weights.iter_mut().enumerate() {
                let pairs = vld1q_u32(at.add(index * LANES));
                // Two inputs of a row are beside each other: the halves of 32 bits.
                let bits = if k.is_multiple_of(2) {
                    vshlq_n_u32::<16>(pairs)
                } else {
                    vandq_u32(pairs, vdupq_n_u32(0xffff_0000))
                };
                *weights = vreinterpretq_f32_u32(bits);
            }
            weights
        }
    }
}

/// Multiplies one to four rows with a panel of f32, f16 or bf16.
///
/// # Safety
/// NEON must be available, and the panel must hold as many inputs as the rows.
#[target_feature(enable = "neon")]
pub(in crate::product) unsafe fn dense(kind: PanelKind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]) {
    let panel = panel.as_ptr();
    // SAFETY: the caller guarantees this.
    unsafe {
        match kind {
            PanelKind::F32 => rows::<F32>(panel, x, results),
            PanelKind::F16 => rows::<F16>(panel, x, results),
            PanelKind::Bf16 => rows::<Bf16>(panel, x, results),
            PanelKind::Quant(..) | PanelKind::Packed(_) | PanelKind::Short => {
                unreachable!("only plain elements are multiplied as they are")
            }
        }
    }
}

#[inline(always)]
unsafe fn rows<W: Read>(panel: *const u8, x: &[&[f32]], results: &mut [[f32; PANEL]]) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match (x, results) {
            (&[a], [p, ..]) => tile::<W, 1>(panel, [a], [p]),
            (&[a, b], [p, q, ..]) => tile::<W, 2>(panel, [a, b], [p, q]),
            (&[a, b, c], [p, q, r, ..]) => tile::<W, 3>(panel, [a, b, c], [p, q, r]),
            (&[a, b, c, d], [p, q, r, s, ..]) => tile::<W, 4>(panel, [a, b, c, d], [p, q, r, s]),
            _ => unreachable!("{} rows are not few", x.len()),
        }
    }
}

#[inline(always)]
unsafe fn tile<W: Read, const N: usize>(panel: *const u8, x: [&[f32]; N], results: [&mut [f32; PANEL]; N]) {
    let cols = x[0].len();
    let whole = cols / INPUTS * INPUTS;
    // SAFETY: the caller guarantees this; rows have `cols` elements, and results four registers.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; N];
        for from in (0..whole).step_by(INPUTS) {
            let mut inputs = [vdupq_n_f32(0.0); N];
            for r in 0..N {
                inputs[r] = vld1q_f32(x[r].as_ptr().add(from));
            }
            macro_rules! input {
                ($lane:literal) => {
                    let weights = W::input(panel, from + $lane);
                    for r in 0..N {
                        for q in 0..REGISTERS {
                            sums[r][q] = vfmaq_laneq_f32::<$lane>(sums[r][q], weights[q], inputs[r]);
                        }
                    }
                };
            }
            input!(0);
            input!(1);
            input!(2);
            input!(3);
        }
        for k in whole..cols {
            let weights = W::input(panel, k);
            for r in 0..N {
                for q in 0..REGISTERS {
                    sums[r][q] = vfmaq_n_f32(sums[r][q], weights[q], *x[r].get_unchecked(k));
                }
            }
        }
        for (result, sums) in results.into_iter().zip(sums) {
            for (q, sum) in sums.into_iter().enumerate() {
                vst1q_f32(result.as_mut_ptr().add(q * LANES), sum);
            }
        }
    }
}
