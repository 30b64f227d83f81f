//! Products of weights in 16 bits.

use std::arch::x86_64::*;
use std::hint::{assert_unchecked, black_box};
use std::ops::Range;

use super::integers::{Dots, Way};
use super::read::{ReadCodes, Steps, Stored};
use super::tile::Group;
use super::{LANES, four};
use crate::rows::GROUP;
use crate::weights::STEPS;

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Number of rows that are multiplied at once: eight registers of their sums, two of weights and one of inputs.
pub(super) const ROWS: usize = 4;

/// Weights of a group in 16 bits: for each pair of inputs, those of sixteen output rows in two registers, a row's two beside
/// each other. It is a trait because the compiler does not inline every closure that returns registers.
pub(super) trait Pairs {
    /// Whether the halves of a group are in nibbles of the same bytes, which are therefore read together.
    const IN_NIBBLES: bool;

    /// Returns the weights of a pair, which `N` rows are multiplied with.
    ///
    /// # Safety
    /// AVX2 must be available.
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2];
}

/// How products of words are added.
pub(super) trait AddProducts {
    /// Adds the products of the two words of each sum, of which `N` rows have two registers.
    ///
    /// # Safety
    /// The instruction set must be available.
    unsafe fn add<const N: usize>(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i;
}

/// Two instructions of AVX2.
pub(super) struct Avx2;

/// One instruction of AVX-VNNI.
pub(super) struct AvxVnni;

impl AddProducts for Avx2 {
    #[inline(always)]
    unsafe fn add<const N: usize>(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // SAFETY: the caller guarantees this.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(weights, inputs)) }
    }
}

impl AddProducts for AvxVnni {
    #[inline(always)]
    unsafe fn add<const N: usize>(sums: __m256i, weights: __m256i, inputs: __m256i) -> __m256i {
        // SAFETY: the caller guarantees this.
        unsafe {
            // The sum of a single row would wait for each product.
            if N > 1 { _mm256_dpwssd_avx_epi32(sums, weights, inputs) } else { Avx2::add::<N>(sums, weights, inputs) }
        }
    }
}

/// Two inputs of a group.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    /// Index in the group.
    pub(super) index: usize,
    pub(super) half: usize,
    /// Four inputs of the half.
    pub(super) line: usize,
    /// Whether they are the first or the second two of the line.
    pub(super) parity: usize,
}

impl Pair {
    /// Number of lines of a half of a group.
    const LINES: usize = STEPS / 2;

    #[inline(always)]
    const fn new(half: usize, line: usize, parity: usize) -> Self {
        Self { index: 2 * (half * Self::LINES + line) + parity, half, line, parity }
    }

    #[inline(always)]
    const fn at(index: usize) -> Self {
        let step = index / 2;
        Self { index, half: step / Self::LINES, line: step % Self::LINES, parity: index % 2 }
    }
}

/// Returns the end of a loop over the inputs of some rows, which the compiler unrolls if it knows it. With several rows it would
/// keep sums in memory.
#[inline(always)]
fn end<const N: usize>(end: usize) -> usize {
    if N > 1 { black_box(end) } else { end }
}

/// Runs a piece of code for each pair of some halves, with the sums of `$rows` rows. The compiler knows half and parity of a pair of
/// nibbles, so that these are read without branches. It also knows the first pair of nibbles of a half: `$begins` is true for it,
/// and its products need not be added to zero.
macro_rules! for_each_pair {
    ($weights:ty, $rows:expr, $halves:expr, |$pair:ident, $begins:ident| $run:block) => {
        if <$weights>::IN_NIBBLES {
            macro_rules! line {
                ($line:expr) => {
                    for half in $halves {
                        for parity in 0..2 {
                            let ($pair, $begins) = (Pair::new(half, $line, parity), $line == 0 && parity == 0);
                            $run
                        }
                    }
                };
            }
            line!(0);
            for line in 1..end::<{ $rows }>(Pair::LINES) {
                assert_unchecked(line > 0 && line < Pair::LINES);
                line!(line);
            }
        } else {
            for index in $halves.start * PAIRS / 2..end::<{ $rows }>($halves.end * PAIRS / 2) {
                assert_unchecked(index < PAIRS);
                let ($pair, $begins) = (Pair::at(index), false);
                $run
            }
        }
    };
}

/// Returns the exact products of some halves of the inputs with rows whose group is at these addresses.
///
/// # Safety
/// AVX2 must be available, and each address must have [`ROW_BYTES`](super::ROW_BYTES) bytes.
#[inline(always)]
pub(super) unsafe fn dots<A: AddProducts, const N: usize, P: Pairs>(
    weights: &P,
    rows: [*const u8; N],
    halves: Range<usize>,
) -> [[__m256i; N]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut dots = [[_mm256_setzero_si256(); N]; 2];
        for_each_pair!(P, N, halves.clone(), |pair, begins| {
            let weights = weights.pair::<N>(pair);
            for r in 0..N {
                let both = four(rows[r], pair.index);
                for h in 0..2 {
                    let begins = begins && pair.half == halves.start;
                    dots[h][r] = if begins {
                        _mm256_madd_epi16(weights[h], both)
                    } else {
                        A::add::<N>(dots[h][r], weights[h], both)
                    };
                }
            }
        });
        dots
    }
}

/// Returns the exact products of each half of the inputs. They fit the registers if there are no more than half of [`ROWS`].
///
/// # Safety
/// Those of [`dots`] apply.
#[inline(always)]
pub(super) unsafe fn dots_of_halves<A: AddProducts, const N: usize, P: Pairs>(
    weights: &P,
    rows: [*const u8; N],
) -> [[[__m256i; N]; 2]; 2] {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut dots = [[[_mm256_setzero_si256(); N]; 2]; 2];
        for_each_pair!(P, N, 0..2, |pair, begins| {
            let weights = weights.pair::<N>(pair);
            for r in 0..N {
                let both = four(rows[r], pair.index);
                for h in 0..2 {
                    let sum = &mut dots[pair.half][h][r];
                    *sum =
                        if begins { _mm256_madd_epi16(weights[h], both) } else { A::add::<N>(*sum, weights[h], both) };
                }
            }
        });
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
    pub(super) unsafe fn fill<P: Pairs>(&mut self, weights: &P) {
        // SAFETY: the caller guarantees this; both are registers.
        unsafe {
            for_each_pair!(P, ROWS, 0..2, |pair, _begins| {
                let ([first, second], [low, high]) = (&mut self.0[pair.index], weights.pair::<1>(pair));
                _mm256_store_si256(first.as_mut_ptr().cast(), low);
                _mm256_store_si256(second.as_mut_ptr().cast(), high);
            });
        }
    }
}

impl Pairs for &Unpacked {
    const IN_NIBBLES: bool = false;

    #[inline(always)]
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = &self.0[pair.index];
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
    const IN_NIBBLES: bool = true;

    #[inline(always)]
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; an order is a register.
        unsafe {
            let [first, second] = self.0.step(pair.half * Pair::LINES + pair.line);
            let order = _mm256_load_si256(ORDERS[pair.parity].0.as_ptr().cast());
            [_mm256_shuffle_epi8(first, order), _mm256_shuffle_epi8(second, order)]
        }
    }
}

struct Words<P>(P);

impl<P: Pairs> Dots for Words<P> {
    #[inline(always)]
    unsafe fn dots<const N: usize>(&self, rows: Group, halves: Range<usize>) -> [[__m256i; N]; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { dots::<Avx2, N, P>(&self.0, rows.all_codes(), halves) }
    }
}
