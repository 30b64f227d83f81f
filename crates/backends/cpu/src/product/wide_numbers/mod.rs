//! Products of floating-point numbers in fewer than 16 bits with AVX-512. With BF16, numbers become bf16 (`rounded`).
//!
//! Without it, they become the same integers of 16 bits as with AVX2, and are multiplied with the rows' own. Sums of a group are exact, and
//! groups are scaled and added in the same order, so the bits are the same, too. A register holds a pair of inputs of sixteen output
//! rows. Up to four rows are multiplied with numbers as they are read. For more, a group of two panels is unpacked in the
//! first-level cache first.

mod kinds;
mod rounded;
mod rows;

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use super::levels::{Fp4, Nf4};
use super::pairs::BLOCK_PANELS;
use super::ymm::Ahead;
use crate::memory::Level;
use crate::rows::GROUP;
use crate::weights::{Codes, Layout, Numbers, PANEL, PanelKind, Scales};
use kinds::{E2m1, F8, Lines, Nibbles, PLACES};
pub(super) use rounded::{RoundedTile, multiply_rounded};
pub(super) use rows::TileRows;
use rows::{Block, Blocks};

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Returns the range of a loop, which the compiler would unroll if it knew its end.
#[inline(always)]
fn some(range: Range<usize>) -> Range<usize> {
    range.start..black_box(range.end)
}

/// Number of rows that are multiplied at once: with two panels, their sums take half of the registers.
const BLOCK_ROWS: usize = 8;

/// Number of rows of a tile, for which a group is unpacked once.
pub(super) const TILE_ROWS: usize = 8 * BLOCK_ROWS;

/// Number of rows up to which numbers are multiplied as they are read.
const FEW_ROWS: usize = 4;

/// Results of a tile of rows with two panels, not 4 KiB apart, as in `vnni`.
type Results = super::pairs::Results<{ TILE_ROWS + 1 }>;

/// Memory of a tile of rows and of its results with two panels. A thread keeps it, because few rows are multiplied in less time than
/// all results are set to zero.
pub(super) struct Tile {
    pub(super) blocks: Blocks,
    pub(super) results: Results,
}

impl Default for Tile {
    fn default() -> Self {
        Self { blocks: Blocks::default(), results: [[[0.0; PANEL]; TILE_ROWS + 1]; BLOCK_PANELS] }
    }
}

/// Sums of the products of a group, or of half of it.
type Dots<const ROWS: usize> = [[__m512i; ROWS]; BLOCK_PANELS];

/// Returns the number of rows of the first block of so many. Some of them may not exist.
fn block_rows(count: usize) -> usize {
    match count {
        1 | 2 => count,
        3 | 4 => 4,
        _ => BLOCK_ROWS,
    }
}

/// Weights of a group of a panel.
trait Group: Copy {
    /// Returns the exact products of each half of a group of two panels with the first rows. Unless each half has a scale, the first are
    /// those of the whole group.
    ///
    /// # Safety
    /// AVX-512 with VNNI must be available, and there must be so many rows.
    unsafe fn dots<const ROWS: usize>(panels: [Self; BLOCK_PANELS], rows: Block<true>) -> [Dots<ROWS>; 2];
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

/// Multiplies some pairs, an even number. The sums of one or two rows are divided between two registers each, so that products do not wait for
/// each other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn dots<W: Words, const ROWS: usize, const FEW: bool>(
    panels: [W; BLOCK_PANELS],
    rows: Block<FEW>,
    pairs: Range<usize>,
) -> Dots<ROWS> {
    let mut sums = [[_mm512_setzero_si512(); ROWS]; BLOCK_PANELS];
    // SAFETY: the caller guarantees this.
    unsafe {
        if ROWS > 2 {
            for pair in some(pairs) {
                add_pair(&mut sums, panels, rows, pair);
            }
            return sums;
        }
        let mut others = sums;
        for pair in some(pairs).step_by(2) {
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
unsafe fn add_pair<W: Words, const ROWS: usize, const FEW: bool>(
    sums: &mut Dots<ROWS>,
    panels: [W; BLOCK_PANELS],
    rows: Block<FEW>,
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
trait Kind: Lines {
    /// Size of the codes of a group in bytes.
    const BYTES: usize;

    /// Number of cache lines that a group has on average, with its scales.
    const LINES: usize;

    /// Whether each half of a group has a scale.
    const HALVES: bool = false;

    /// Begins a group.
    fn new(codes: *const u8) -> Self;

    /// Returns the scales of the integers of a group's halves, which are the same unless each half has a scale.
    ///
    /// # Safety
    /// AVX-512 must be available, and the panel must have this layout and group.
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2];
}

/// Integers of a group of a panel.
#[repr(align(64))]
struct Unpacked([[i16; 2 * PANEL]; PAIRS]);

impl Unpacked {
    const ZERO: Self = Self([[0; 2 * PANEL]; PAIRS]);

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill(&mut self, weights: impl Lines) {
        for line in 0..PAIRS / PLACES.len() {
            // SAFETY: the caller guarantees this.
            unsafe { self.fill_line(weights, line) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill_line(&mut self, weights: impl Lines, line: usize) {
        // SAFETY: the caller guarantees this; a pair fills a register.
        unsafe {
            for (place, words) in PLACES.into_iter().zip(weights.pairs(line)) {
                _mm512_store_si512(self.0[2 * line + place].as_mut_ptr().cast(), words);
            }
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

/// Multiplies a tile of rows with two panels of numbers. `ahead` prefetches the two that follow in memory.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the panels must have the layout that the rows are prepared for.
pub(super) unsafe fn multiply(panels: [&[u8]; BLOCK_PANELS], rows: &TileRows<'_>, ahead: bool, results: &mut Results) {
    let layout = rows.layout;
    assert!(panels.iter().all(|panel| panel.len() >= layout.bytes));
    let panels = Stored { starts: panels.map(<[u8]>::as_ptr), layout, ahead };
    let rows_of_blocks = rows.count.next_multiple_of(BLOCK_ROWS);
    results.iter_mut().for_each(|results| results[..rows_of_blocks].fill([0.0; PANEL]));
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Packed(Numbers::F8) => multiply_any::<F8>(panels, rows, results),
            PanelKind::Packed(Numbers::Nf4) => multiply_any::<Nibbles<Nf4>>(panels, rows, results),
            PanelKind::Packed(Numbers::Fp4) => multiply_any::<Nibbles<Fp4>>(panels, rows, results),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => multiply_any::<Nibbles<E2m1>>(panels, rows, results),
            other => unreachable!("{other:?} is no kind of numbers"),
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
    #[inline(always)]
    fn groups<K: Kind>(self, group: usize) -> [K; BLOCK_PANELS] {
        let [first, second] = self.starts;
        [K::new(first.wrapping_add(group * K::BYTES)), K::new(second.wrapping_add(group * K::BYTES))]
    }

    /// Returns the scales of a group of each panel.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales<K: Kind>(self, group: usize) -> GroupScales {
        let [first, second] = self.starts;
        // SAFETY: the caller guarantees that the panels have this group.
        unsafe { [K::scales(first, self.layout, group), K::scales(second, self.layout, group)] }
    }
}

/// Scales of the halves of a group of each panel.
type GroupScales = [[__m512; 2]; BLOCK_PANELS];

/// Multiplies any number of rows.
unsafe fn multiply_any<K: Kind + Group>(panels: Stored<'_>, rows: &TileRows<'_>, results: &mut Results) {
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
unsafe fn multiply_few<K: Kind + Group, const ROWS: usize>(
    panels: Stored<'_>,
    rows: &TileRows<'_>,
    results: &mut Results,
) {
    let mut ahead = panels.ahead();
    for group in 0..panels.layout.groups() {
        ahead.iter_mut().for_each(|ahead| ahead.prefetch(Level::Second, K::LINES));
        // SAFETY: the caller guarantees this; the panels and the rows have this group.
        unsafe {
            let scales = panels.scales::<K>(group);
            let rows = rows.few(group);
            let [first, last] = K::dots::<ROWS>(panels.groups(group), rows);
            if K::HALVES {
                let mut both = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
                add_half(&mut both, first, scales, 0);
                add_half(&mut both, last, scales, 1);
                add_both(both, rows, (0, results));
            } else {
                add_scaled(first, scales, rows, (0, results));
            }
        }
    }
}

/// Multiplies rows with groups that are unpacked once for all.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_many<K: Kind>(panels: Stored<'_>, rows: &TileRows<'_>, results: &mut Results) {
    let mut ahead = panels.ahead();
    let mut unpacked = [const { Unpacked::ZERO }; BLOCK_PANELS];
    for group in 0..panels.layout.groups() {
        ahead.iter_mut().for_each(|ahead| ahead.prefetch(Level::Second, K::LINES));
        // SAFETY: the caller guarantees this; the panels and the rows have this group.
        unsafe {
            unpacked.iter_mut().zip(panels.groups::<K>(group)).for_each(|(unpacked, panel)| unpacked.fill(panel));
            let (weights, scales) = ([&unpacked[0], &unpacked[1]], panels.scales::<K>(group));
            for first in (0..rows.count).step_by(BLOCK_ROWS) {
                let count = block_rows(rows.count - first);
                let (block, results) = (rows.block(first, count, group), (first, &mut *results));
                match count {
                    1 => add::<K, 1>(weights, scales, block, results),
                    2 => add::<K, 2>(weights, scales, block, results),
                    4 => add::<K, 4>(weights, scales, block, results),
                    _ => add::<K, BLOCK_ROWS>(weights, scales, block, results),
                }
            }
        }
    }
}

/// Adds the products of a group with a block of rows to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add<K: Kind, const ROWS: usize>(
    panels: [&Unpacked; BLOCK_PANELS],
    scales: GroupScales,
    rows: Block<false>,
    (first, results): (usize, &mut Results),
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        if K::HALVES {
            let mut both = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
            for half in 0..2 {
                let dots = dots::<_, ROWS, _>(panels, rows, half * PAIRS / 2..(half + 1) * PAIRS / 2);
                add_half(&mut both, dots, scales, half);
            }
            add_both(both, rows, (first, results));
        } else {
            add_scaled(dots::<_, ROWS, _>(panels, rows, 0..PAIRS), scales, rows, (first, results));
        }
    }
}

/// Adds the products of a half of a group, times its scales.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_half<const ROWS: usize>(
    both: &mut [[__m512; ROWS]; BLOCK_PANELS],
    dots: Dots<ROWS>,
    scales: GroupScales,
    half: usize,
) {
    for p in 0..BLOCK_PANELS {
        for r in 0..ROWS {
            both[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scales[p][half], both[p][r]);
        }
    }
}

/// Adds scaled products of both halves with a block of rows, times the scales of the rows, to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_both<const ROWS: usize, const FEW: bool>(
    both: [[__m512; ROWS]; BLOCK_PANELS],
    rows: Block<FEW>,
    (first, results): (usize, &mut Results),
) {
    for p in 0..BLOCK_PANELS {
        let results = &mut results[p][first..first + ROWS];
        for r in 0..ROWS {
            // SAFETY: the caller guarantees that there are the rows.
            add_to(&mut results[r], both[p][r], unsafe { rows.scale(r) });
        }
    }
}

/// Adds products with a block of rows, times the scales of both, to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn add_scaled<const ROWS: usize, const FEW: bool>(
    dots: Dots<ROWS>,
    scales: GroupScales,
    rows: Block<FEW>,
    (first, results): (usize, &mut Results),
) {
    for p in 0..BLOCK_PANELS {
        let results = &mut results[p][first..first + ROWS];
        for r in 0..ROWS {
            // SAFETY: the caller guarantees that there are the rows.
            let scale = _mm512_mul_ps(scales[p][0], unsafe { rows.scale(r) });
            add_to(&mut results[r], _mm512_cvtepi32_ps(dots[p][r]), scale);
        }
    }
}

/// Adds products times scales to a result.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_to(result: &mut [f32; PANEL], products: __m512, scales: __m512) {
    let at = result.as_mut_ptr();
    // SAFETY: a result has sixteen elements.
    unsafe { _mm512_storeu_ps(at, _mm512_fmadd_ps(products, scales, _mm512_loadu_ps(at))) };
}
