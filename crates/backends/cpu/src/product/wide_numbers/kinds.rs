//! Kinds of numbers as they are stored.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use half::bf16;

use super::rows::Block;
use super::{BLOCK_PANELS, Dots, Group, Kind, PAIRS, Words, add_products, dots, some};
use crate::memory::LINE;
use crate::product::levels::{E2M1_VALUES, FACTORS, MANTISSAS, Values};
use crate::product::read::{self, ReadScales};
use crate::rows::GROUP;
use crate::weights::{Codes, Layout, Numbers, PANEL};

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
pub(super) struct Table([i16; 2 * PANEL]);

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

/// A kind of numbers in nibbles. A line of 64 bytes has four inputs of each half of a group: the low nibbles those of the first half.
pub(super) trait InNibbles: Copy {
    /// Integers by the codes.
    const TABLE: &'static Table;

    /// Order that moves the codes of both inputs of a pair, of the same output row, to the lower or the upper bytes of two words beside
    /// each other. `None` if a row's four inputs are beside each other: those of the lower bytes then are the first and the third,
    /// and [`TileRows`](super::TileRows) has its inputs in this order.
    const ORDER: Option<&'static [u8; 16]>;

    /// The constants of [`Kind`].
    const LINES: usize;
    const HALVES: bool;

    /// # Safety
    /// The conditions of [`Kind::scales`] apply.
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2];
}

/// Numbers by [`nibble_at`](crate::weights::nibble_at).
impl<V: Values> InNibbles for V {
    const TABLE: &'static Table = &Table::new(&V::LEVELS.words);
    const ORDER: Option<&'static [u8; 16]> = Some(&[0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]);
    const LINES: usize = V::NUMBERS.lines();
    const HALVES: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { scales(panel, layout, (V::NUMBERS, group), V::LEVELS.inverse) }
    }
}

/// Numbers by [`nibble_at`](crate::weights::nibble_at), as bf16.
#[derive(Clone, Copy)]
pub(super) struct Rounded<V>(PhantomData<V>);

impl<V: Values> InNibbles for Rounded<V> {
    const TABLE: &'static Table = &Table::new(&rounded(V::VALUES));
    const ORDER: Option<&'static [u8; 16]> = V::ORDER;
    const LINES: usize = V::NUMBERS.lines();
    const HALVES: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { scales(panel, layout, (V::NUMBERS, group), 1.0) }
    }
}

/// Rounds values to bf16, as words.
const fn rounded(values: &[f32; 16]) -> [i16; 16] {
    let (mut words, mut code) = ([0; 16], 0);
    while code < words.len() {
        words[code] = bf16::from_f32_const(values[code]).to_bits() as i16;
        code += 1;
    }
    words
}

/// Numbers in e2m1, whose integers are twice their values. Each half of a group has a scale.
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl InNibbles for E2m1 {
    const TABLE: &'static Table = &{
        let mut words = [0; 16];
        let mut code = 0;
        while code < words.len() {
            words[code] = E2M1_VALUES[code] as i8 as i16;
            code += 1;
        }
        Table::new(&words)
    };
    const ORDER: Option<&'static [u8; 16]> = None;
    const LINES: usize = Codes::E2m1.lines();
    const HALVES: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { read::Pair::pair(panel, layout, group) }
    }
}

/// Nibbles of a group.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<V> {
    codes: *const u8,
    values: PhantomData<V>,
}

/// Number of lines of a group, each of which has four pairs.
const LINES: usize = PAIRS / 4;

impl<V: InNibbles> Kind for Nibbles<V> {
    const BYTES: usize = GROUP * PANEL / 2;
    const LINES: usize = V::LINES;
    const HALVES: bool = V::HALVES;

    fn new(codes: *const u8) -> Self {
        Self { codes, values: PhantomData }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { V::scales(panel, layout, group) }
    }
}

impl<V: InNibbles> Lines for Nibbles<V> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pairs(self, line: usize) -> [__m512i; 4] {
        // SAFETY: the caller guarantees that the group has the line.
        let mut codes = unsafe { _mm512_loadu_si512(self.codes.add(line * LINE).cast()) };
        if let Some(order) = V::ORDER {
            // SAFETY: the order has sixteen bytes.
            let order = unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(order.as_ptr().cast())) };
            codes = _mm512_shuffle_epi8(codes, order);
        }
        [
            V::TABLE.look_up(codes),
            V::TABLE.look_up(_mm512_srli_epi16::<8>(codes)),
            V::TABLE.look_up(_mm512_srli_epi16::<4>(codes)),
            V::TABLE.look_up(_mm512_srli_epi16::<12>(codes)),
        ]
    }
}

/// Weights of a group, a line of four pairs of inputs at a time.
pub(super) trait Lines: Copy {
    /// Returns the words of a line's four pairs, which are those of [`PLACES`] after twice the line, each row's two beside each other.
    ///
    /// # Safety
    /// AVX-512 must be available, and the group must have the line.
    unsafe fn pairs(self, line: usize) -> [__m512i; 4];
}

impl<W: Words> Lines for W {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pairs(self, line: usize) -> [__m512i; 4] {
        // SAFETY: the caller guarantees that the group has the pair.
        let pair = |place: usize| unsafe { self.pair(2 * line + place) };
        [pair(PLACES[0]), pair(PLACES[1]), pair(PLACES[2]), pair(PLACES[3])]
    }
}

/// Places of a line's pairs in the group, after that of its first one, which is twice the line. The first two are of the first half.
pub(super) const PLACES: [usize; 4] = [0, 1, PAIRS / 2, PAIRS / 2 + 1];

impl<V: InNibbles> Group for Nibbles<V> {
    /// Multiplies line by line. The sums of one or two rows are divided between four registers each, so that products do not wait for
    /// each other.
    #[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block<true>) -> [Dots<ROWS>; 2] {
        let mut sums = [[[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS]; 4];
        for line in some(0..LINES) {
            // SAFETY: the caller guarantees this.
            unsafe {
                let weights = [panels[0].pairs(line), panels[1].pairs(line)];
                for (k, place) in PLACES.into_iter().enumerate() {
                    let first = if V::HALVES { k / 2 * 2 } else { 0 };
                    let sums = &mut sums[if ROWS > 2 { first } else { k }];
                    for r in 0..ROWS {
                        let both = rows.pair(r, 2 * line + place);
                        for p in 0..BLOCK_PANELS {
                            sums[p][r] = add_products(sums[p][r], weights[p][k], both);
                        }
                    }
                }
            }
        }
        let [mut first, second, mut third, fourth] = sums;
        if ROWS <= 2 {
            add(&mut first, second);
            add(&mut third, fourth);
            if !V::HALVES {
                add(&mut first, third);
            }
        }
        [first, third]
    }
}

/// Adds sums to others.
#[inline]
#[target_feature(enable = "avx512f")]
fn add<const ROWS: usize>(to: &mut Dots<ROWS>, sums: Dots<ROWS>) {
    for p in 0..BLOCK_PANELS {
        for r in 0..ROWS {
            to[p][r] = _mm512_add_epi32(to[p][r], sums[p][r]);
        }
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
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block<true>) -> [Dots<ROWS>; 2] {
        // SAFETY: the caller guarantees this.
        let dots = unsafe { dots(panels, rows, 0..PAIRS) };
        [dots, [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS]]
    }
}

/// Numbers that are multiplied as bf16. Products with some groups are added before they are scaled.
pub(super) trait AsBf16: Kind {
    /// Number of groups whose products may be added.
    const TOGETHER: usize;

    /// Returns the group in the unit of one before it, of which these are the scales: the numbers times its own scales over these. `None`
    /// if that would not be exact.
    ///
    /// # Safety
    /// AVX-512 must be available.
    unsafe fn in_unit(self, scales: __m512, unit: __m512) -> Option<Self>;
}

impl<V: Values> AsBf16 for Nibbles<Rounded<V>> {
    const TOGETHER: usize = V::NUMBERS.groups_of_scale();

    #[inline(always)]
    unsafe fn in_unit(self, _: __m512, _: __m512) -> Option<Self> {
        // These groups have the same scales.
        Some(self)
    }
}

/// Numbers in e4m3, as bf16, in which they are exact. Numbers below 2⁻⁶ become 0: they are less than a 15000th of the largest of their
/// group and row.
#[derive(Clone, Copy)]
pub(super) struct F8Rounded {
    codes: *const u8,
    /// Addend of the exponents of each row's two numbers, in words.
    exponents: __m512i,
}

/// Number of bits of a mantissa in bf16.
const MANTISSA_BITS: u32 = 7;

/// What the bias of exponents in bf16 is larger by than that of e4m3, in its place.
const BIAS: i16 = 120 << MANTISSA_BITS;

impl Kind for F8Rounded {
    const BYTES: usize = GROUP * PANEL;
    const LINES: usize = Numbers::F8.lines();

    #[inline(always)]
    fn new(codes: *const u8) -> Self {
        // SAFETY: the caller guarantees the instruction set.
        Self { codes, exponents: unsafe { _mm512_set1_epi16(BIAS) } }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { scales(panel, layout, (Numbers::F8, group), 1.0) }
    }
}

impl Words for F8Rounded {
    /// Both formats have the sign first, and then the exponent.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pair(self, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        let codes = unsafe { _mm256_loadu_si256(self.codes.add(pair * 2 * PANEL).cast()) };
        let codes = _mm512_cvtepi8_epi16(codes);
        let fields = _mm512_and_si512(_mm512_slli_epi16::<4>(codes), _mm512_set1_epi16(0x87f0_u16 as i16));
        let has_exponent = _mm512_test_epi16_mask(fields, _mm512_set1_epi16(15 << MANTISSA_BITS));
        _mm512_maskz_add_epi16(has_exponent, fields, self.exponents)
    }
}

impl AsBf16 for F8Rounded {
    const TOGETHER: usize = 4;

    /// Groups of a row whose scale is that of a tensor, of the row or of 128 inputs were scaled by powers of two when they were loaded.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn in_unit(self, scales: __m512, unit: __m512) -> Option<Self> {
        const F32_MANTISSA_BITS: u32 = 23;
        // Exponents of numbers in bf16 are from 121 to 135, and stay in their range.
        const MOST: i32 = 60 << F32_MANTISSA_BITS;
        let over = _mm512_sub_epi32(_mm512_castps_si512(scales), _mm512_castps_si512(unit));
        let inexact = _mm512_test_epi32_mask(over, _mm512_set1_epi32((1 << F32_MANTISSA_BITS) - 1));
        let far = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(over), _mm512_set1_epi32(MOST));
        if inexact | far != 0 {
            return None;
        }
        let exponents = _mm512_srai_epi32::<{ F32_MANTISSA_BITS - MANTISSA_BITS }>(over);
        let first = _mm512_and_si512(exponents, _mm512_set1_epi32(0xffff));
        let both = _mm512_or_si512(first, _mm512_slli_epi32::<16>(exponents));
        Some(Self { exponents: _mm512_add_epi16(self.exponents, both), ..self })
    }
}
