//! Products of floating-point numbers in fewer than 16 bits with AVX2.
//!
//! Numbers become integers of 16 bits, which are multiplied with the rows' own. The products of a group are added first, and
//! their sum is multiplied with the group's scale: weights are not rounded to bf16. Up to four rows are multiplied with numbers
//! as they are read. For more, a group of a panel is unpacked in the first-level cache first.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::super::levels::{FACTORS, MANTISSAS, Values};
use super::LANES;
use super::tile::{Group, Multiplied, Panel, Place};
use super::words::{self, AddProducts, Pair, Pairs, Unpacked};
use crate::memory::LINE;
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL};

/// Returns the scales of a group, for the integers of it, in the order of the rows in its registers.
#[inline(always)]
unsafe fn scales<S: Stored>(place: Place<'_>, group: usize) -> [__m256; 2] {
    // SAFETY: the caller guarantees that the panel has this group, and the instruction set.
    unsafe {
        let at = place.start.add(place.layout.number_scales_at(S::NUMBERS, group)).cast::<f32>();
        let factor = _mm256_set1_ps(S::FACTOR);
        let [first, second] = if S::IN_ORDER {
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(LANES))]
        } else {
            let second = _mm256_loadu2_m128(at.add(LANES + LANES / 2), at.add(LANES / 2));
            [_mm256_loadu2_m128(at.add(LANES), at), second]
        };
        [_mm256_mul_ps(first, factor), _mm256_mul_ps(second, factor)]
    }
}

/// Puts the results of a panel in the order of its rows.
#[inline(always)]
unsafe fn put_in_order(results: &mut [[f32; PANEL]]) {
    for result in results {
        // SAFETY: the caller guarantees the instruction set; arrays of a panel have two registers.
        unsafe {
            let at = result.as_mut_ptr();
            let (first, second) = (_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(LANES)));
            _mm256_storeu_ps(at, _mm256_permute2f128_ps::<0x20>(first, second));
            _mm256_storeu_ps(at.add(LANES), _mm256_permute2f128_ps::<0x31>(first, second));
        }
    }
}

/// A table of integers of 16 bits: their lower and their upper bytes.
struct Table {
    low: [u8; 16],
    high: [u8; 16],
}

impl Table {
    const fn new(words: &[i16; 16]) -> Self {
        let mut table = Self { low: [0; 16], high: [0; 16] };
        let mut index = 0;
        while index < words.len() {
            [table.low[index], table.high[index]] = words[index].to_le_bytes();
            index += 1;
        }
        table
    }
}

/// Integers of a group of a stored panel.
pub(super) trait Stored: Pairs {
    const NUMBERS: Numbers;

    /// Whether the registers of a pair have the rows in order. Otherwise, the first has the rows 0 to 3 and 8 to 11.
    const IN_ORDER: bool;

    /// Size of the codes of a group in bytes.
    const BYTES: usize;

    /// Factor of the integers.
    const FACTOR: f32;

    /// # Safety
    /// AVX2 must be available, and there must be [`Stored::BYTES`] bytes.
    unsafe fn new(codes: *const u8) -> Self;
}

/// Indices of a table.
pub(super) struct Indices<V> {
    codes: *const u8,
    low: __m256i,
    high: __m256i,
    values: PhantomData<V>,
}

impl<V: Values> Indices<V> {
    const TABLE: &'static Table = &Table::new(&V::LEVELS.words);
}

impl<V: Values> Stored for Indices<V> {
    const NUMBERS: Numbers = V::NUMBERS;
    const IN_ORDER: bool = true;
    const BYTES: usize = GROUP * PANEL / 2;
    const FACTOR: f32 = V::LEVELS.inverse;

    #[inline(always)]
    unsafe fn new(codes: *const u8) -> Self {
        // SAFETY: the caller guarantees this.
        unsafe { Self { codes, low: table(&Self::TABLE.low), high: table(&Self::TABLE.high), values: PhantomData } }
    }
}

impl<V: Values> Pairs for Indices<V> {
    const IN_NIBBLES: bool = true;

    #[inline(always)]
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let mut weights = [_mm256_setzero_si256(); 2];
            for (h, weights) in weights.iter_mut().enumerate() {
                let packed = _mm256_loadu_si256(self.codes.add(pair.line * LINE + h * LINE / 2).cast());
                let nibbles = if pair.half == 0 { packed } else { _mm256_srli_epi16::<4>(packed) };
                let codes = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
                let (low, high) = (_mm256_shuffle_epi8(self.low, codes), _mm256_shuffle_epi8(self.high, codes));
                *weights = match pair.parity {
                    0 => _mm256_unpacklo_epi8(low, high),
                    _ => _mm256_unpackhi_epi8(low, high),
                };
            }
            weights
        }
    }
}

/// Factors by the upper nibbles of codes.
static F8_FACTORS: Table = Table::new(&FACTORS.words);

/// Mantissas by the lower nibbles.
static F8_MANTISSAS: [u8; 16] = MANTISSAS;

/// Numbers in e4m3.
pub(super) struct F8 {
    codes: *const u8,
    low: __m256i,
    high: __m256i,
    mantissas: __m256i,
}

impl Stored for F8 {
    const NUMBERS: Numbers = Numbers::F8;
    const IN_ORDER: bool = false;
    const BYTES: usize = GROUP * PANEL;
    const FACTOR: f32 = FACTORS.inverse;

    #[inline(always)]
    unsafe fn new(codes: *const u8) -> Self {
        // SAFETY: the caller guarantees this.
        unsafe {
            Self { codes, low: table(&F8_FACTORS.low), high: table(&F8_FACTORS.high), mantissas: table(&F8_MANTISSAS) }
        }
    }
}

impl Pairs for F8 {
    const IN_NIBBLES: bool = false;

    #[inline(always)]
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = _mm256_loadu_si256(self.codes.add(pair.index * 2 * PANEL).cast());
            let nibble = _mm256_set1_epi8(15);
            let uppers = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
            let (low, high) = (_mm256_shuffle_epi8(self.low, uppers), _mm256_shuffle_epi8(self.high, uppers));
            let mantissas = _mm256_shuffle_epi8(self.mantissas, _mm256_and_si256(codes, nibble));
            // A mantissa is the higher byte of 16 bits.
            let zero = _mm256_setzero_si256();
            [
                _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(zero, mantissas), _mm256_unpacklo_epi8(low, high)),
                _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(zero, mantissas), _mm256_unpackhi_epi8(low, high)),
            ]
        }
    }
}

/// Returns a table for both halves of a register.
///
/// # Safety
/// AVX2 must be available.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: the caller guarantees this; a table has sixteen bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// A panel of numbers in its stored layout, which is multiplied with rows in 16 bits.
pub(super) struct NumberPanel<'a, S, A> {
    place: Place<'a>,
    kind: PhantomData<(S, A)>,
}

impl<'a, S, A> NumberPanel<'a, S, A> {
    pub(super) fn new(panel: &[u8], layout: &'a Layout) -> Self {
        Self { place: Place { start: panel.as_ptr(), layout }, kind: PhantomData }
    }
}

impl<S: Stored, A: AddProducts> Panel for NumberPanel<'_, S, A> {
    type Unpacked = Unpacked;
    type Scales = ();

    const EMPTY: (Unpacked, ()) = (Unpacked::EMPTY, ());
    const BLOCK: usize = usize::MAX;
    const LINES: usize = S::NUMBERS.lines();

    fn place(&self) -> Place<'_> {
        self.place
    }

    #[inline(always)]
    unsafe fn put_in_order(results: &mut [[f32; PANEL]]) {
        if !S::IN_ORDER {
            // SAFETY: the caller guarantees this.
            unsafe { put_in_order(results) };
        }
    }

    unsafe fn read_scales(&self, _: Range<usize>, (): &mut ()) {}

    #[inline(always)]
    unsafe fn group(&self, group: usize, (): &()) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe {
            let pairs = S::new(self.place.start.add(group * S::BYTES));
            NumberGroup { pairs, scales: scales::<S>(self.place, group), add: PhantomData::<A> }
        }
    }

    #[inline(always)]
    unsafe fn unpack(&self, group: usize, (): &(), unpacked: &mut Unpacked) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe {
            unpacked.fill(&S::new(self.place.start.add(group * S::BYTES)));
            NumberGroup { pairs: &*unpacked, scales: scales::<S>(self.place, group), add: PhantomData::<A> }
        }
    }
}

/// A group of numbers and its scales.
struct NumberGroup<P, A> {
    pairs: P,
    scales: [__m256; 2],
    add: PhantomData<A>,
}

impl<P: Pairs, A: AddProducts> Multiplied for NumberGroup<P, A> {
    #[inline(always)]
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let sums = words::dots::<A, N, P>(&self.pairs, rows.all_codes(), 0..2);
            rows.add_scaled(sums, self.scales, results);
        }
    }
}
