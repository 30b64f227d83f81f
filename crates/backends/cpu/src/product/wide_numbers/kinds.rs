//! Kinds of numbers as they are stored.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::rows::Block;
use super::{BLOCK_PANELS, Dots, Group, Kind, PAIRS, Unpacked, Words, add_products, dots, some};
use crate::memory::LINE;
use crate::product::levels::{FACTORS, MANTISSAS, Values};
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL};

/// Reads the scales of a group, times the factor of its integers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scales(panel: *const u8, layout: &Layout, (numbers, group): (Numbers, usize), factor: f32) -> [__m512; 2] {
    // SAFETY: the caller guarantees that the panel has this group, which has sixteen scales.
    let scales = unsafe { _mm512_loadu_ps(panel.add(layout.number_scales_at(numbers, group)).cast()) };
    [_mm512_mul_ps(scales, _mm512_set1_ps(factor)); 2]
}

/// A table of 32 words: sixteen of them twice, because five bits of an index count.
#[repr(align(64))]
struct Table([i16; 2 * PANEL]);

impl Table {
    const fn new(words: &[i16; 16]) -> Self {
        let mut table = Self([0; 2 * PANEL]);
        let mut index = 0;
        while index < table.0.len() {
            table.0[index] = words[index % words.len()];
            index += 1;
        }
        table
    }

    /// Replaces the lower nibbles of words by the table's words.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn look_up(&self, codes: __m512i) -> __m512i {
        // SAFETY: the table fills a register.
        _mm512_permutexvar_epi16(codes, unsafe { _mm512_load_si512(self.0.as_ptr().cast()) })
    }
}

/// Nibbles of a group.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<V> {
    codes: *const u8,
    values: PhantomData<V>,
}

/// Order that moves the codes of both pairs of four output rows beside each other: to one word.
static ORDER: [u8; 16] = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15];

/// Number of lines of a group, each of which has four pairs.
const LINES: usize = PAIRS / 4;

impl<V: Values> Kind for Nibbles<V> {
    const BYTES: usize = GROUP * PANEL / 2;
    const LINES: usize = V::NUMBERS.lines();

    fn new(codes: *const u8) -> Self {
        Self { codes, values: PhantomData }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { scales(panel, layout, (V::NUMBERS, group), V::LEVELS.inverse) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack(self, unpacked: &mut Unpacked) {
        for line in 0..LINES {
            // SAFETY: the caller guarantees this; a pair fills a register.
            unsafe {
                for (place, words) in PLACES.into_iter().zip(self.pairs(line)) {
                    _mm512_store_si512(unpacked.0[2 * line + place].as_mut_ptr().cast(), words);
                }
            }
        }
    }
}

impl<V: Values> Nibbles<V> {
    const TABLE: &'static Table = &Table::new(&V::LEVELS.words);

    /// Returns the integers of a line's four pairs, which are those of [`PLACES`] after the first.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pairs(self, line: usize) -> [__m512i; 4] {
        // SAFETY: the caller guarantees that the group has the line; the order has sixteen bytes.
        let (codes, order) = unsafe {
            let order = _mm512_broadcast_i32x4(_mm_loadu_si128(ORDER.as_ptr().cast()));
            (_mm512_loadu_si512(self.codes.add(line * LINE).cast()), order)
        };
        let codes = _mm512_shuffle_epi8(codes, order);
        [
            Self::TABLE.look_up(codes),
            Self::TABLE.look_up(_mm512_srli_epi16::<8>(codes)),
            Self::TABLE.look_up(_mm512_srli_epi16::<4>(codes)),
            Self::TABLE.look_up(_mm512_srli_epi16::<12>(codes)),
        ]
    }
}

/// Places of a line's pairs in the group, after that of its first one, which is twice the line.
const PLACES: [usize; 4] = [0, 1, PAIRS / 2, PAIRS / 2 + 1];

impl<V: Values> Group for Nibbles<V> {
    /// Multiplies line by line. The sums of one or two rows are divided between four registers each, so that products do not wait for
    /// each other.
    #[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block) -> Dots<ROWS> {
        let mut sums = [[[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS]; 4];
        for line in some(0..LINES) {
            // SAFETY: the caller guarantees this.
            unsafe {
                let weights = [panels[0].pairs(line), panels[1].pairs(line)];
                for (k, place) in PLACES.into_iter().enumerate() {
                    let sums = &mut sums[if ROWS > 2 { 0 } else { k }];
                    for r in 0..ROWS {
                        let both = rows.pair(r, 2 * line + place);
                        for p in 0..BLOCK_PANELS {
                            sums[p][r] = add_products(sums[p][r], weights[p][k], both);
                        }
                    }
                }
            }
        }
        let [mut dots, second, third, fourth] = sums;
        if ROWS <= 2 {
            for p in 0..BLOCK_PANELS {
                for r in 0..ROWS {
                    let first = _mm512_add_epi32(dots[p][r], second[p][r]);
                    dots[p][r] = _mm512_add_epi32(first, _mm512_add_epi32(third[p][r], fourth[p][r]));
                }
            }
        }
        dots
    }
}

/// Numbers in e4m3.
#[derive(Clone, Copy)]
pub(super) struct F8 {
    codes: *const u8,
}

/// Factors by the upper nibbles of codes.
static F8_FACTORS: Table = Table::new(&FACTORS.words);

/// Mantissas times 256 by the lower nibbles of codes.
static F8_MANTISSAS: Table = {
    let mut words = [0; 16];
    let mut bits = 0;
    while bits < words.len() {
        words[bits] = (MANTISSAS[bits] as i16) << 8;
        bits += 1;
    }
    Table::new(&words)
};

impl Kind for F8 {
    const BYTES: usize = GROUP * PANEL;
    const LINES: usize = Numbers::F8.lines();

    fn new(codes: *const u8) -> Self {
        Self { codes }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { scales(panel, layout, (Numbers::F8, group), FACTORS.inverse) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack(self, unpacked: &mut Unpacked) {
        // SAFETY: the caller guarantees this.
        unsafe { unpacked.fill(self) }
    }
}

impl Words for F8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pair(self, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        let codes = unsafe { _mm256_loadu_si256(self.codes.add(pair * 2 * PANEL).cast()) };
        let codes = _mm512_cvtepu8_epi16(codes);
        let factors = F8_FACTORS.look_up(_mm512_srli_epi16::<4>(codes));
        _mm512_mulhrs_epi16(F8_MANTISSAS.look_up(codes), factors)
    }
}

impl Group for F8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block) -> Dots<ROWS> {
        // SAFETY: the caller guarantees this.
        unsafe { dots(panels, rows, 0..PAIRS) }
    }
}
