//! Products of floating-point numbers in fewer than 16 bits with AVX-512 VNNI.
//!
//! Numbers become the same integers of 16 bits as with AVX2, and are multiplied with the rows' own. Sums of a group are exact, and
//! groups are scaled and added in the same order, so the bits are the same, too. A register holds a pair of inputs of sixteen output
//! rows. Up to four rows are multiplied with numbers as they are read. For more, a group of two panels is unpacked in the
//! first-level cache first.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;
use std::marker::PhantomData;

use super::levels::{FACTORS, Fp4, MANTISSAS, Nf4, Values};
use super::walk::Quant;
use super::ymm::Ahead;
use crate::activation::join;
use crate::memory::Lines;
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL};

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Returns the end of a loop over the pairs of a group, which the compiler would unroll if it knew it.
#[inline(always)]
fn end() -> usize {
    black_box(PAIRS)
}

/// Number of panels that are multiplied at once.
pub(super) const BLOCK_PANELS: usize = 2;

/// Number of rows that are multiplied at once: with two panels, their sums take half of the registers.
const BLOCK_ROWS: usize = 8;

/// Number of rows of a tile, for which a group is unpacked once.
pub(super) const TILE_ROWS: usize = 4 * BLOCK_ROWS;

/// Number of rows up to which numbers are multiplied as they are read.
const FEW_ROWS: usize = 4;

/// Results of a tile of rows with two panels.
pub(super) type Results = [[[f32; PANEL]; TILE_ROWS]; BLOCK_PANELS];

/// Sums of the products of a group.
type Dots<const ROWS: usize> = [[__m512i; ROWS]; BLOCK_PANELS];

/// Returns the number of rows of the first block of so many. Some of them may not exist.
fn block_rows(count: usize) -> usize {
    match count {
        1 | 2 => count,
        3 | 4 => 4,
        _ => BLOCK_ROWS,
    }
}

/// A tile of rows in 16 bits, in blocks of [`block_rows`] rows each. A block has its rows' words group by group, so that all of a
/// group are beside each other. What it has for rows that do not exist is left over from others.
#[derive(Default)]
pub(super) struct TileRows {
    groups: usize,
    count: usize,
    words: Lines<i16>,
    scales: Lines<f32>,
}

impl TileRows {
    /// Reads `count` rows from `first` on, at most [`TILE_ROWS`].
    ///
    /// # Safety
    /// AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn read(&mut self, input: &Quant<'_>, (first, count): (usize, usize)) {
        assert!(count <= TILE_ROWS);
        let (cols, groups) = (input.cols, input.cols / GROUP);
        (self.groups, self.count) = (groups, count);
        self.words.reserve_zeroed(TILE_ROWS * cols);
        self.scales.reserve_zeroed(TILE_ROWS * groups);
        for block in (0..count).step_by(BLOCK_ROWS) {
            let rows = block_rows(count - block);
            for row in 0..rows.min(count - block) {
                let from = input.row(first + block + row);
                let words = self.words[block * cols..].as_chunks_mut().0.iter_mut().skip(row).step_by(rows);
                from.codes.iter().zip(words).for_each(|(codes, words)| join(codes, words));
                let scales = self.scales[block * groups..].iter_mut().skip(row).step_by(rows);
                from.scales.iter().zip(scales).for_each(|(from, scale)| *scale = *from);
            }
        }
    }

    /// Returns a group of the block from a row on, which has so many rows.
    fn block(&self, first: usize, rows: usize, group: usize) -> Block {
        let at = first * self.groups + group * rows;
        Block { words: self.words.as_ptr().wrapping_add(at * GROUP), scales: self.scales.as_ptr().wrapping_add(at) }
    }
}

/// A group of a block of rows.
#[derive(Clone, Copy)]
struct Block {
    words: *const i16,
    scales: *const f32,
}

impl Block {
    /// Broadcasts a pair of inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pair(self, row: usize, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees that the row has it.
        unsafe { _mm512_set1_epi32(self.words.add(row * GROUP).cast::<i32>().add(pair).read_unaligned()) }
    }

    /// Broadcasts a pair of inputs of a row to the lower half of a register, and the next one to the upper half.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn two_pairs(self, row: usize, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees that the row has them.
        let both = unsafe { _mm_loadl_epi64(self.words.add(row * GROUP + 2 * pair).cast()) };
        let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        _mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(both))
    }
}

/// Weights of a group of a panel.
trait Group: Copy {
    /// Returns the exact products of a group of two panels with the first rows.
    ///
    /// # Safety
    /// AVX-512 with VNNI must be available, and there must be so many rows.
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block) -> Dots<ROWS>;
}

/// Weights of a group as integers.
trait Words: Copy {
    /// Returns the integers of a pair of inputs, each row's two beside each other.
    ///
    /// # Safety
    /// AVX-512 must be available, and the pair must exist.
    unsafe fn pair(self, pair: usize) -> __m512i;
}

/// Adds the products of two words to each sum. The intrinsic is avoided because the compiler replaces it by a product and an addition
/// where it expects these to be ready earlier.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_products(mut sums: __m512i, weights: __m512i, inputs: __m512i) -> __m512i {
    // SAFETY: the instruction reads and writes registers only.
    unsafe {
        asm!(
            "vpdpwssd {sums}, {weights}, {inputs}",
            sums = inout(zmm_reg) sums,
            weights = in(zmm_reg) weights,
            inputs = in(zmm_reg) inputs,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Multiplies pair by pair. The sums of one or two rows are divided between two registers each, so that products do not wait for
/// each other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn dots<W: Words, const ROWS: usize>(panels: [W; BLOCK_PANELS], rows: Block) -> Dots<ROWS> {
    let mut sums = [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS];
    // SAFETY: the caller guarantees this.
    unsafe {
        if ROWS > 2 {
            for pair in 0..end() {
                add_pair(&mut sums, panels, rows, pair);
            }
            return sums;
        }
        let mut others = sums;
        for pair in (0..end()).step_by(2) {
            add_pair(&mut sums, panels, rows, pair);
            add_pair(&mut others, panels, rows, pair + 1);
        }
        for p in 0..BLOCK_PANELS {
            for r in 0..ROWS {
                sums[p][r] = _mm512_add_epi32(sums[p][r], others[p][r]);
            }
        }
    }
    sums
}

/// Adds the products of a pair.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_pair<W: Words, const ROWS: usize>(
    sums: &mut Dots<ROWS>,
    panels: [W; BLOCK_PANELS],
    rows: Block,
    pair: usize,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let weights = [panels[0].pair(pair), panels[1].pair(pair)];
        for r in 0..ROWS {
            let both = rows.pair(r, pair);
            for p in 0..BLOCK_PANELS {
                sums[p][r] = add_products(sums[p][r], weights[p], both);
            }
        }
    }
}

/// A kind of numbers in a stored panel.
trait Kind: Copy {
    const NUMBERS: Numbers;

    /// Size of the codes of a group in bytes.
    const BYTES: usize;

    /// Factor of the integers.
    const FACTOR: f32;

    /// Begins a group.
    fn new(codes: *const u8) -> Self;
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

/// Nibbles of a group. Those of the output rows from 8 on are the high ones.
#[derive(Clone, Copy)]
struct Nibbles<V> {
    codes: *const u8,
    values: PhantomData<V>,
}

/// Order that repeats each of a pair's sixteen bytes: eight of them in each quarter of a register.
#[repr(align(64))]
struct Order([u8; 4 * PANEL]);

static ORDER: Order = {
    let mut order = Order([0; 4 * PANEL]);
    let mut at = 0;
    while at < order.0.len() {
        order.0[at] = (at / 2 % PANEL) as u8;
        at += 1;
    }
    order
};

impl<V: Values> Kind for Nibbles<V> {
    const NUMBERS: Numbers = V::NUMBERS;
    const BYTES: usize = GROUP * PANEL / 2;
    const FACTOR: f32 = V::LEVELS.inverse;

    fn new(codes: *const u8) -> Self {
        Self { codes, values: PhantomData }
    }
}

impl<V: Values> Words for Nibbles<V> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pair(self, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees this; the order fills a register.
        let (codes, order) = unsafe {
            let codes = _mm_loadu_si128(self.codes.add(pair * PANEL).cast());
            (_mm512_broadcast_i32x4(codes), _mm512_load_si512(ORDER.0.as_ptr().cast()))
        };
        let codes = _mm512_shuffle_epi8(codes, order);
        Self::TABLE.look_up(_mm512_mask_srli_epi16::<4>(codes, 0xffff_0000, codes))
    }
}

impl<V: Values> Nibbles<V> {
    const TABLE: &'static Table = &Table::new(&V::LEVELS.words);

    /// Returns the integers of two pairs, from `pair` on: those of the first and of the last eight output rows. Each register has
    /// the first pair in its lower half.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn two_pairs(self, pair: usize) -> [__m512i; 2] {
        // SAFETY: the caller guarantees this.
        let codes = unsafe { _mm256_loadu_si256(self.codes.add(pair * PANEL).cast()) };
        let codes = _mm512_cvtepu8_epi16(codes);
        [Self::TABLE.look_up(codes), Self::TABLE.look_up(_mm512_srli_epi16::<4>(codes))]
    }
}

impl<V: Values> Group for Nibbles<V> {
    /// Multiplies one or two rows with two pairs at once, whose codes need not be moved to the places of their output rows.
    #[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block) -> Dots<ROWS> {
        if ROWS > 2 {
            // SAFETY: the caller guarantees this.
            return unsafe { dots(panels, rows) };
        }
        let mut sums = [[[_mm512_setzero_si512(); 2]; ROWS]; BLOCK_PANELS];
        for pair in (0..end()).step_by(2) {
            // SAFETY: the caller guarantees this.
            unsafe {
                let weights = [panels[0].two_pairs(pair), panels[1].two_pairs(pair)];
                for r in 0..ROWS {
                    let inputs = rows.two_pairs(r, pair);
                    for p in 0..BLOCK_PANELS {
                        for h in 0..2 {
                            sums[p][r][h] = add_products(sums[p][r][h], weights[p][h], inputs);
                        }
                    }
                }
            }
        }
        let mut dots = [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS];
        for p in 0..BLOCK_PANELS {
            for r in 0..ROWS {
                let [first, last] = sums[p][r];
                let pair = _mm512_shuffle_i64x2::<0x44>(first, last);
                dots[p][r] = _mm512_add_epi32(pair, _mm512_shuffle_i64x2::<0xee>(first, last));
            }
        }
        dots
    }
}

/// Numbers in e4m3.
#[derive(Clone, Copy)]
struct F8 {
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
    const NUMBERS: Numbers = Numbers::F8;
    const BYTES: usize = GROUP * PANEL;
    const FACTOR: f32 = FACTORS.inverse;

    fn new(codes: *const u8) -> Self {
        Self { codes }
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
        unsafe { dots(panels, rows) }
    }
}

/// Integers of a group of a panel.
#[repr(align(64))]
struct Unpacked([[i16; 2 * PANEL]; PAIRS]);

impl Unpacked {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill(&mut self, weights: impl Words) {
        for (pair, words) in self.0.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; a pair fills a register.
            unsafe { _mm512_store_si512(words.as_mut_ptr().cast(), weights.pair(pair)) };
        }
    }
}

impl Words for &Unpacked {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pair(self, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees this.
        unsafe { _mm512_load_si512(self.0.as_ptr().add(pair).cast()) }
    }
}

impl Group for &Unpacked {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block) -> Dots<ROWS> {
        // SAFETY: the caller guarantees this.
        unsafe { dots(panels, rows) }
    }
}

/// Multiplies a tile of rows with two panels of numbers. `ahead` prefetches the two that follow in memory.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the panels must have this layout.
pub(super) unsafe fn multiply(
    numbers: Numbers,
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    rows: &TileRows,
    ahead: bool,
    results: &mut Results,
) {
    assert!(panels.iter().all(|panel| panel.len() >= layout.bytes) && layout.groups() == rows.groups);
    let panels = Stored { starts: panels.map(<[u8]>::as_ptr), layout, ahead };
    // SAFETY: the caller guarantees this.
    unsafe {
        match numbers {
            Numbers::F8 => multiply_kind::<F8>(panels, rows, results),
            Numbers::Nf4 => multiply_kind::<Nibbles<Nf4>>(panels, rows, results),
            Numbers::Fp4 => multiply_kind::<Nibbles<Fp4>>(panels, rows, results),
        }
    }
}

/// Two panels in memory.
#[derive(Clone, Copy)]
struct Stored<'a> {
    starts: [*const u8; BLOCK_PANELS],
    layout: &'a Layout,
    ahead: bool,
}

impl Stored<'_> {
    /// Returns what prefetches the panels that follow.
    fn ahead(self) -> [Ahead; BLOCK_PANELS] {
        let distance = if self.ahead { BLOCK_PANELS * self.layout.bytes } else { 0 };
        self.starts.map(|start| Ahead::new(start, self.layout, distance))
    }

    /// Returns a group of each panel.
    #[inline]
    fn groups<K: Kind>(self, group: usize) -> [K; BLOCK_PANELS] {
        let [first, second] = self.starts;
        [K::new(first.wrapping_add(group * K::BYTES)), K::new(second.wrapping_add(group * K::BYTES))]
    }

    /// Returns the scales of a group of each panel, for the integers.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scales<K: Kind>(self, group: usize) -> [__m512; BLOCK_PANELS] {
        let (at, factor) = (self.layout.number_scales_at(K::NUMBERS, group), _mm512_set1_ps(K::FACTOR));
        let [first, second] = self.starts;
        // SAFETY: the caller guarantees that the panels have this group, which has sixteen scales.
        unsafe {
            [
                _mm512_mul_ps(_mm512_loadu_ps(first.add(at).cast()), factor),
                _mm512_mul_ps(_mm512_loadu_ps(second.add(at).cast()), factor),
            ]
        }
    }
}

unsafe fn multiply_kind<K: Kind + Group + Words>(panels: Stored<'_>, rows: &TileRows, results: &mut Results) {
    let rows_of_blocks = rows.count.next_multiple_of(BLOCK_ROWS);
    results.iter_mut().for_each(|results| results[..rows_of_blocks].fill([0.0; PANEL]));
    // SAFETY: the caller guarantees this.
    unsafe {
        match block_rows(rows.count) {
            1 => multiply_few::<K, 1>(panels, rows, results),
            2 => multiply_few::<K, 2>(panels, rows, results),
            FEW_ROWS => multiply_few::<K, FEW_ROWS>(panels, rows, results),
            _ => multiply_many::<K>(panels, rows, results),
        }
    }
}

/// Multiplies a few rows with numbers as they are read.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_few<K: Kind + Group, const ROWS: usize>(panels: Stored<'_>, rows: &TileRows, results: &mut Results) {
    let mut ahead = panels.ahead();
    for group in 0..rows.groups {
        ahead.iter_mut().for_each(|ahead| ahead.prefetch(K::NUMBERS.lines()));
        // SAFETY: the caller guarantees this; the panels and the rows have this group.
        unsafe {
            let scales = panels.scales::<K>(group);
            add::<K, ROWS>(panels.groups(group), scales, rows.block(0, ROWS, group), (0, results));
        }
    }
}

/// Multiplies rows with groups that are unpacked once for all.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_many<K: Kind + Words>(panels: Stored<'_>, rows: &TileRows, results: &mut Results) {
    let mut ahead = panels.ahead();
    let mut unpacked = [const { Unpacked([[0; 2 * PANEL]; PAIRS]) }; BLOCK_PANELS];
    for group in 0..rows.groups {
        ahead.iter_mut().for_each(|ahead| ahead.prefetch(K::NUMBERS.lines()));
        // SAFETY: the caller guarantees this; the panels and the rows have this group.
        unsafe {
            unpacked.iter_mut().zip(panels.groups::<K>(group)).for_each(|(unpacked, panel)| unpacked.fill(panel));
            let (weights, scales) = ([&unpacked[0], &unpacked[1]], panels.scales::<K>(group));
            for first in (0..rows.count).step_by(BLOCK_ROWS) {
                let count = block_rows(rows.count - first);
                let (block, results) = (rows.block(first, count, group), (first, &mut *results));
                match count {
                    1 => add::<_, 1>(weights, scales, block, results),
                    2 => add::<_, 2>(weights, scales, block, results),
                    4 => add::<_, 4>(weights, scales, block, results),
                    _ => add::<_, BLOCK_ROWS>(weights, scales, block, results),
                }
            }
        }
    }
}

/// Adds the products of a group with a block of rows, times the scales of both, to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add<G: Group, const ROWS: usize>(
    panels: [G; BLOCK_PANELS],
    scales: [__m512; BLOCK_PANELS],
    rows: Block,
    (first, results): (usize, &mut Results),
) {
    // SAFETY: the caller guarantees this; a result has sixteen elements.
    unsafe {
        let dots = G::dots::<ROWS>(panels, rows);
        for p in 0..BLOCK_PANELS {
            let results = &mut results[p][first..first + ROWS];
            for r in 0..ROWS {
                let at = results[r].as_mut_ptr();
                let scale = _mm512_mul_ps(scales[p], _mm512_set1_ps(rows.scales.add(r).read()));
                let result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scale, _mm512_loadu_ps(at));
                _mm512_storeu_ps(at, result);
            }
        }
    }
}
