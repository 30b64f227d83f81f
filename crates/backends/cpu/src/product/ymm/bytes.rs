//! Products of codes in bytes.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::four;
use super::integers::{Dots, Way};
use super::read::{Bytewise, ReadCodes, Steps, Stored};
use super::tile::Group;
use crate::product::outlying::Bits;
use crate::rows::{GROUP, LOW_BITS};
use crate::weights::STEPS;

/// Number of rows that are multiplied at once: their sums, and a step's codes and inputs, fill the registers.
pub(super) const ROWS: usize = 2;

/// Returns the same for coarse rows, which have one sum for both parts: twice as many if products of all steps are added to it.
pub(super) const fn coarse_rows(pause: usize) -> usize {
    if pause == STEPS { 2 * ROWS } else { ROWS }
}

/// Products of a group's codes with those of a few rows.
pub(super) trait Multiply {
    /// Returns the exact products of some steps of a group with the first rows.
    ///
    /// # Safety
    /// The instruction set must be available, and there must be so many rows.
    unsafe fn dots<const N: usize>(codes: &impl Steps, rows: Group, steps: Range<usize>) -> [[__m256i; N]; 2];
}

/// Bytes times the high and the low parts, pairs of products in 16 bits. The sum of `PAUSE` products of parts of 8 bits does not
/// saturate. With `COARSE`, only outlying steps have high parts.
pub(super) struct Bytes<const PAUSE: usize, const COARSE: bool>;

/// Bytes times the high and the low parts, four products in 32 bits: AVX-VNNI.
pub(super) struct Vnni<const COARSE: bool>;

impl<const PAUSE: usize, const COARSE: bool> Multiply for Bytes<PAUSE, COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, first: Group, steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let rows: [_; N] = first.all_codes();
            let mut dots = [[_mm256_setzero_si256(); N]; 2];
            if COARSE {
                add_bytes::<PAUSE, N>(codes, rows.map(|row| row.add(GROUP)), steps.clone(), 1, &mut dots);
                for step in Bits::of(first.outlying::<N>(), steps) {
                    add_bytes::<PAUSE, N>(codes, rows, step..step + 1, 1 << LOW_BITS, &mut dots);
                }
                return dots;
            }
            let mut low = [[_mm256_setzero_si256(); N]; 2];
            for from in steps.clone().step_by(PAUSE) {
                let mut high = [[_mm256_setzero_si256(); N]; 2];
                for step in from..(from + PAUSE).min(steps.end) {
                    let codes = codes.step(step);
                    for (r, row) in rows.into_iter().enumerate() {
                        add_products(&mut high, r, codes, four(row, step));
                        // Low parts are at most 8 in magnitude: their sums need no pause.
                        add_products(&mut low, r, codes, four(row, STEPS + step));
                    }
                }
                add_pairs(&mut dots, high, 1 << LOW_BITS);
            }
            add_pairs(&mut dots, low, 1);
            dots
        }
    }
}

/// Adds the products with parts of 8 bits at these addresses, times a factor.
#[inline(always)]
unsafe fn add_bytes<const PAUSE: usize, const N: usize>(
    codes: &impl Steps,
    parts: [*const u8; N],
    steps: Range<usize>,
    factor: i16,
    dots: &mut [[__m256i; N]; 2],
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        for from in steps.clone().step_by(PAUSE) {
            let mut sums = [[_mm256_setzero_si256(); N]; 2];
            for step in from..(from + PAUSE).min(steps.end) {
                let codes = codes.step(step);
                for (r, part) in parts.into_iter().enumerate() {
                    add_products(&mut sums, r, codes, four(part, step));
                }
            }
            add_pairs(dots, sums, factor);
        }
    }
}

/// Adds the products of a step with four inputs of a row to its sums.
#[inline(always)]
unsafe fn add_products<const N: usize>(sums: &mut [[__m256i; N]; 2], row: usize, codes: [__m256i; 2], inputs: __m256i) {
    for h in 0..2 {
        // SAFETY: the caller guarantees this.
        sums[h][row] = unsafe { _mm256_add_epi16(sums[h][row], _mm256_maddubs_epi16(codes[h], inputs)) };
    }
}

/// Adds pairs of sums of 16 bits, times a factor.
#[inline(always)]
unsafe fn add_pairs<const N: usize>(dots: &mut [[__m256i; N]; 2], sums: [[__m256i; N]; 2], factor: i16) {
    for h in 0..2 {
        for r in 0..N {
            // SAFETY: the caller guarantees this.
            unsafe {
                let products = _mm256_madd_epi16(sums[h][r], _mm256_set1_epi16(factor));
                dots[h][r] = _mm256_add_epi32(dots[h][r], products);
            }
        }
    }
}

impl<const COARSE: bool> Multiply for Vnni<COARSE> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(codes: &impl Steps, first: Group, steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let rows: [_; N] = first.all_codes();
            let zeros = [[_mm256_setzero_si256(); N]; 2];
            let (mut high, mut low) = (zeros, zeros);
            for step in steps.clone() {
                let codes = codes.step(step);
                for r in 0..N {
                    let a = four(rows[r], STEPS + step);
                    for h in 0..2 {
                        low[h][r] = _mm256_dpbusd_avx_epi32(low[h][r], codes[h], a);
                    }
                    if COARSE {
                        continue;
                    }
                    let a = four(rows[r], step);
                    for h in 0..2 {
                        high[h][r] = _mm256_dpbusd_avx_epi32(high[h][r], codes[h], a);
                    }
                }
            }
            if COARSE {
                for step in Bits::of(first.outlying::<N>(), steps) {
                    let codes = codes.step(step);
                    for r in 0..N {
                        let a = four(rows[r], step);
                        for h in 0..2 {
                            high[h][r] = _mm256_dpbusd_avx_epi32(high[h][r], codes[h], a);
                        }
                    }
                }
            }
            for h in 0..2 {
                for r in 0..N {
                    high[h][r] = _mm256_add_epi32(_mm256_slli_epi32::<{ LOW_BITS as i32 }>(high[h][r]), low[h][r]);
                }
            }
            high
        }
    }
}

/// Codes that are multiplied as bytes.
pub(super) struct InBytes<M>(PhantomData<M>);

impl<M: Multiply> Way for InBytes<M> {
    type Unpacked = Bytewise;

    const EMPTY: Bytewise = Bytewise::EMPTY;

    #[inline(always)]
    fn stored<C: ReadCodes>(codes: Stored<'_, C>) -> impl Dots {
        ByteDots { codes, kind: PhantomData::<M> }
    }

    #[inline(always)]
    unsafe fn unpack<C: ReadCodes>(codes: Stored<'_, C>, unpacked: &mut Bytewise) -> impl Dots {
        // SAFETY: the caller guarantees this.
        unsafe { unpacked.fill(&codes) };
        ByteDots { codes: &*unpacked, kind: PhantomData::<M> }
    }
}

struct ByteDots<S, M> {
    codes: S,
    kind: PhantomData<M>,
}

impl<S: Steps, M: Multiply> Dots for ByteDots<S, M> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(&self, rows: Group, halves: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { M::dots(&self.codes, rows, halves.start * STEPS / 2..halves.end * STEPS / 2) }
    }
}
