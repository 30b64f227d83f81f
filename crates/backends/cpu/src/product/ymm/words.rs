//! Products of weights in 16 bits.

use std::arch::x86_64::*;
use std::ops::Range;

use super::integers::{Dots, Way};
use super::read::{ReadCodes, Steps, Stored};
use super::{LANES, four};
use crate::rows::GROUP;

/// Pairs of inputs in a group.
pub(super) const PAIRS: usize = GROUP / 2;

/// Number of rows that are multiplied at once: eight registers of their sums, two of weights and one of inputs.
pub(super) const ROWS: usize = 4;

/// Weights of a group in 16 bits: for each pair of inputs, those of sixteen output rows in two registers, a row's two beside
/// each other. It is a trait because the compiler does not inline every closure that returns registers.
pub(super) trait Pairs {
    /// # Safety
    /// AVX2 must be available, and there must be this pair.
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2];
}

/// Returns the exact products of some pairs with rows whose group is at these addresses.
///
/// # Safety
/// AVX2 must be available, and each address must have [`ROW_BYTES`](super::ROW_BYTES) bytes.
#[inline(always)]
pub(super) unsafe fn dots<const N: usize>(
    weights: &impl Pairs,
    rows: [*const u8; N],
    pairs: Range<usize>,
) -> [[__m256i; N]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut dots = [[_mm256_setzero_si256(); N]; 2];
        for pair in pairs {
            let weights = weights.pair(pair);
            for r in 0..N {
                let both = four(rows[r], pair);
                for h in 0..2 {
                    dots[h][r] = _mm256_add_epi32(dots[h][r], _mm256_madd_epi16(weights[h], both));
                }
            }
        }
        dots
    }
}

/// Weights of a group, unpacked.
#[repr(align(64))]
pub(super) struct Unpacked([[[i16; 2 * LANES]; 2]; PAIRS]);

impl Unpacked {
    pub(super) const EMPTY: Self = Self([[[0; 2 * LANES]; 2]; PAIRS]);

    /// # Safety
    /// AVX2 must be available, and the weights must be of a whole group.
    #[inline(always)]
    pub(super) unsafe fn fill(&mut self, weights: &impl Pairs) {
        for (pair, [first, second]) in self.0.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; both are registers.
            unsafe {
                let [low, high] = weights.pair(pair);
                _mm256_store_si256(first.as_mut_ptr().cast(), low);
                _mm256_store_si256(second.as_mut_ptr().cast(), high);
            }
        }
    }
}

impl Pairs for &Unpacked {
    #[inline(always)]
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = self.0.get_unchecked(pair);
            [_mm256_load_si256(first.as_ptr().cast()), _mm256_load_si256(second.as_ptr().cast())]
        }
    }
}

/// A register of bytes.
#[repr(align(32))]
struct Register([i8; 4 * LANES]);

/// Order of the bytes of the first and of the second pair of inputs of each output row, as 16 bits. An index of −1 is a
/// byte of zero.
static ORDERS: [Register; 2] = {
    let mut orders = [const { Register([-1; 4 * LANES]) }; 2];
    let mut word = 0;
    while word < 2 * LANES {
        let from = (word / 2 % 4 * 4 + word % 2) as i8;
        orders[0].0[2 * word] = from;
        orders[1].0[2 * word] = from + 2;
        word += 1;
    }
    orders
};

/// Codes that are multiplied in 16 bits.
pub(super) struct InWords;

impl Way for InWords {
    type Unpacked = Unpacked;

    const EMPTY: Unpacked = Unpacked::EMPTY;

    #[inline(always)]
    fn stored<C: ReadCodes>(codes: Stored<'_, C>) -> impl Dots {
        Words(Widened(codes))
    }

    #[inline(always)]
    unsafe fn unpack<C: ReadCodes>(codes: Stored<'_, C>, unpacked: &mut Unpacked) -> impl Dots {
        // SAFETY: the caller guarantees this.
        unsafe { unpacked.fill(&Widened(codes)) };
        Words(&*unpacked)
    }
}

/// Codes in bytes that become pairs.
struct Widened<S>(S);

impl<S: Steps> Pairs for Widened<S> {
    #[inline(always)]
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; an order is a register.
        unsafe {
            let [first, second] = self.0.step(pair / 2);
            let order = _mm256_load_si256(ORDERS[pair % 2].0.as_ptr().cast());
            [_mm256_shuffle_epi8(first, order), _mm256_shuffle_epi8(second, order)]
        }
    }
}

struct Words<P>(P);

impl<P: Pairs> Dots for Words<P> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(&self, rows: [*const u8; N], steps: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this; a step is two pairs.
        unsafe { dots(&self.0, rows, 2 * steps.start..2 * steps.end) }
    }
}
