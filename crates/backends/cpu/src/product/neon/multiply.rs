//! Products of a group's codes with a few rows, on each instruction set.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;
use std::ops::Range;

use super::read::{Order, Paired, REGISTERS, ReadCodes, Step, Steps, Stepwise};
use crate::rows::{GROUP, LOW_BITS};
use crate::weights::STEPS;

/// Number of steps whose inputs are in one register: those of half a group.
const HALF: usize = STEPS / 2;

/// Sums of sixteen output rows for each of a few rows.
pub(super) type Dots<const N: usize> = [[int32x4_t; N]; REGISTERS];

/// A group of a few rows.
#[derive(Clone, Copy)]
pub(super) struct Inputs<const N: usize> {
    /// Addresses of the codes.
    pub(super) rows: [*const i8; N],
    /// Whether any of them has high parts.
    pub(super) both: bool,
}

/// Products of a group's codes with those of a few rows.
pub(super) trait Multiply {
    /// Order of the codes if they are unpacked.
    type Order: Order;

    /// Returns the exact products of some halves of a group with rows.
    ///
    /// # Safety
    /// The instruction set must be available, and each address must have a row's high and low parts of a group.
    unsafe fn dots<const N: usize>(codes: &impl Steps, inputs: Inputs<N>, halves: Range<usize>) -> Dots<N>;
}

/// Products of bytes in 16 bits, added in pairs to 32 bits. With `COARSE`, here and below, only outlying steps have high parts.
pub(super) struct Bytes<C, const COARSE: bool>(PhantomData<C>);

/// Four products of bytes in 32 bits.
pub(super) struct Fours<const COARSE: bool>;

/// Products of eight inputs of two output rows with those of two rows. There must be two rows.
pub(super) struct Matrices<const COARSE: bool>;

impl<C: ReadCodes, const COARSE: bool> Multiply for Bytes<C, COARSE> {
    type Order = Stepwise;

    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, inputs: Inputs<N>, halves: Range<usize>) -> Dots<N> {
        // SAFETY: the caller guarantees this.
        unsafe {
            // The sums of half a panel fill the registers.
            let [a, b] = Self::registers::<0, N>(codes, inputs, halves.clone());
            let [c, d] = Self::registers::<2, N>(codes, inputs, halves);
            [a, b, c, d]
        }
    }
}

impl<C: ReadCodes, const COARSE: bool> Bytes<C, COARSE> {
    /// Returns the products of two registers of each step, from `FIRST` on.
    #[inline(always)]
    unsafe fn registers<const FIRST: usize, const N: usize>(
        codes: &impl Steps,
        Inputs { rows, both }: Inputs<N>,
        halves: Range<usize>,
    ) -> [[int32x4_t; N]; 2] {
        // SAFETY: the caller of `dots` guarantees this.
        unsafe {
            let parts = |part: usize| rows.map(|row| row.wrapping_add(part));
            let mut sums = [[[vdupq_n_s32(0); 2]; N]; 2];
            if !COARSE || both {
                add_part::<C, FIRST, N>(codes, parts(0), halves.clone(), C::PAUSE, &mut sums);
                sums = sums.map(|sums| sums.map(|sums| sums.map(|sum| shifted(sum))));
            }
            // Unless rows are coarse, low parts are at most 8 in magnitude: their sums need no pause.
            let pause = if COARSE { C::PAUSE } else { STEPS };
            add_part::<C, FIRST, N>(codes, parts(GROUP), halves, pause, &mut sums);
            sums.map(|sums| sums.map(|[first, second]| vpaddq_s32(first, second)))
        }
    }
}

/// Adds the products of two registers of each step, from `FIRST` on, with parts at these addresses. Products of `pause` steps are added
/// in 16 bits.
#[inline(always)]
unsafe fn add_part<C: ReadCodes, const FIRST: usize, const N: usize>(
    codes: &impl Steps,
    parts: [*const i8; N],
    halves: Range<usize>,
    pause: usize,
    sums: &mut [[[int32x4_t; 2]; N]; 2],
) {
    // SAFETY: the caller of `dots` guarantees this.
    unsafe {
        for from in (halves.start * HALF..halves.end * HALF).step_by(pause) {
            let mut words = [[[vdupq_n_s16(0); 2]; N]; 2];
            for step in from..(from + pause).min(halves.end * HALF) {
                let codes = codes.step(step);
                for (r, part) in parts.into_iter().enumerate() {
                    let a = four(part, step);
                    for q in 0..2 {
                        add_products(&mut words[q][r], codes[FIRST + q], a);
                    }
                }
            }
            for q in 0..2 {
                for r in 0..N {
                    for i in 0..2 {
                        sums[q][r][i] = vpadalq_s16(sums[q][r][i], words[q][r][i]);
                    }
                }
            }
        }
    }
}

/// Adds the products of bytes, those of the first eight to the first sum.
#[inline(always)]
unsafe fn add_products(sums: &mut [int16x8_t; 2], codes: int8x16_t, a: int8x16_t) {
    // SAFETY: the caller of `dots` guarantees this.
    unsafe {
        sums[0] = vmlal_s8(sums[0], vget_low_s8(codes), vget_low_s8(a));
        sums[1] = vmlal_high_s8(sums[1], codes, a);
    }
}

/// Broadcasts a word of a row.
#[inline(always)]
unsafe fn four(row: *const i8, word: usize) -> int8x16_t {
    // SAFETY: the caller of `dots` guarantees this.
    unsafe {
        let four: int8x16_t;
        // The compiler would take the halves of a broadcast from one of them, and move the codes instead.
        asm!(
            "ld1r {{{four:v}.4s}}, [{word}]",
            four = lateout(vreg) four,
            word = in(reg) row.add(4 * word),
            options(pure, readonly, nostack, preserves_flags)
        );
        four
    }
}

/// Returns sums of high parts in the unit of the low parts.
#[inline(always)]
unsafe fn shifted(sums: int32x4_t) -> int32x4_t {
    // SAFETY: the caller of `dots` guarantees this.
    unsafe { vshlq_n_s32::<{ LOW_BITS as i32 }>(sums) }
}

impl<const COARSE: bool> Multiply for Fours<COARSE> {
    type Order = Stepwise;

    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, inputs: Inputs<N>, halves: Range<usize>) -> Dots<N> {
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [[vdupq_n_s32(0); N]; REGISTERS];
            let (mut high, mut low) = (zeros, zeros);
            let (rows, both) = (inputs.rows, !COARSE || inputs.both);
            // Written out, because the compiler does not unroll every loop whose steps differ.
            macro_rules! steps {
                ($($half:literal $lane:literal),*) => {$(
                    if halves.contains(&$half) {
                        let codes: Step = codes.step($half * HALF + $lane);
                        for r in 0..N {
                            let row = rows[r].add($half * GROUP / 2);
                            for q in 0..REGISTERS {
                                low[q][r] = dot::<$lane>(low[q][r], codes[q], vld1q_s8(row.add(GROUP)));
                                if both {
                                    high[q][r] = dot::<$lane>(high[q][r], codes[q], vld1q_s8(row));
                                }
                            }
                        }
                    }
                )*};
            }
            if N == 1 {
                // Steps that share nibbles follow each other, so that these are loaded once.
                steps!(0 0, 1 0, 0 1, 1 1, 0 2, 1 2, 0 3, 1 3);
            } else {
                steps!(0 0, 0 1, 0 2, 0 3, 1 0, 1 1, 1 2, 1 3);
            }
            joined(high, low)
        }
    }
}

impl<const COARSE: bool> Multiply for Matrices<COARSE> {
    type Order = Paired;

    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, inputs: Inputs<N>, halves: Range<usize>) -> Dots<N> {
        const { assert!(N == 2) };
        // SAFETY: the caller guarantees this.
        unsafe {
            let zeros = [[vdupq_n_s32(0); 2]; REGISTERS];
            let (mut high, mut low) = (zeros, zeros);
            let (rows, both) = (inputs.rows, !COARSE || inputs.both);
            for pair in halves.start * HALF / 2..halves.end * HALF / 2 {
                let eight = |row: usize, part: usize| vld1_s8(rows[row].add(part + 8 * pair));
                let upper = vcombine_s8(eight(0, 0), eight(1, 0));
                let lower = vcombine_s8(eight(0, GROUP), eight(1, GROUP));
                for h in 0..2 {
                    let codes = codes.step(2 * pair + h);
                    for q in 0..2 {
                        for i in 0..2 {
                            let (codes, q) = (codes[2 * q + i], 2 * h + q);
                            low[q][i] = matrix(low[q][i], codes, lower);
                            if both {
                                high[q][i] = matrix(high[q][i], codes, upper);
                            }
                        }
                    }
                }
            }
            let mut dots = [[vdupq_n_s32(0); N]; REGISTERS];
            for (dots, [first, second]) in dots.iter_mut().zip(joined(high, low)) {
                // Even elements are products with the first row.
                dots[0] = vuzp1q_s32(first, second);
                dots[1] = vuzp2q_s32(first, second);
            }
            dots
        }
    }
}

/// Returns the sums of both parts.
#[inline(always)]
unsafe fn joined<const N: usize>(mut high: Dots<N>, low: Dots<N>) -> Dots<N> {
    for (high, low) in high.iter_mut().zip(low) {
        for (high, low) in high.iter_mut().zip(low) {
            // SAFETY: the caller of `dots` guarantees this.
            *high = unsafe { vaddq_s32(shifted(*high), low) };
        }
    }
    high
}

/// Adds to each sum the products of four codes with word `LANE` of `a`. The intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot<const LANE: i32>(mut sums: int32x4_t, codes: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only computes with its registers.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {codes:v}.16b, {a:v}.4b[{lane}]",
            sums = inlateout(vreg) sums,
            codes = in(vreg) codes,
            a = in(vreg) a,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Adds the products of two rows of eight codes with two rows of `a`, two by two. The intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn matrix(mut sums: int32x4_t, codes: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction only computes with its registers.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {codes:v}.16b, {a:v}.16b",
            sums = inlateout(vreg) sums,
            codes = in(vreg) codes,
            a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
