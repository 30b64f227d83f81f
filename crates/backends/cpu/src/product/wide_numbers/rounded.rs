//! Products of numbers as bf16 with rows in bf16.
//!
//! Products with groups whose scales are powers of two times each other are added first, up to four groups, and their sum times the scale
//! is added to the result. Pairs of inputs follow each other in the order of the lines that have them. Neither depends on the
//! number of rows, so that a row's bits do not depend on it.

use std::arch::x86_64::*;

use super::kinds::{AsBf16, F8Rounded, Lines, Nibbles, PLACES, Rounded};
use super::{BLOCK_PANELS, PAIRS, Stored, Unpacked, Words, some};
use crate::memory::Level;
use crate::product::bf16::{self, Rows, TileResults, pairs};
use crate::product::levels::{Fp4, Nf4};
use crate::product::pairs::{Sums, load, row_blocks, store};
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL, PanelKind};

/// Largest number of rows that are multiplied at once: with two panels, their products and their results take three quarters of the
/// registers.
const ROWS: usize = 6;

/// Number of rows up to which numbers are multiplied as they are read.
const FEW_ROWS: usize = 4;

/// Largest number of groups that are unpacked at once: those of two panels take half of the first-level cache.
const GROUPS: usize = 8;

/// Memory of a tile.
pub(in super::super) type RoundedTile = bf16::Tile<[Group; GROUPS]>;

impl Default for RoundedTile {
    fn default() -> Self {
        Self::new([const { [const { Group::ZERO }; GROUPS] }; BLOCK_PANELS])
    }
}

/// Returns the number of groups that are unpacked at once for so many rows. While a few rows are multiplied, others are unpacked.
fn groups_at_once(rows: usize) -> usize {
    if rows <= 64 { GROUPS / 2 } else { GROUPS }
}

/// Number of lines of a group, each of which has four pairs of inputs.
const LINES: usize = PAIRS / 4;

/// A group of a block of rows.
#[derive(Clone, Copy)]
struct Block {
    at: *const u16,
    stride: usize,
}

impl Block {
    /// Broadcasts a pair of inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pair(self, row: usize, pair: usize) -> __m512bh {
        // SAFETY: the caller guarantees that the row has it.
        let pair = unsafe { self.at.add(row * self.stride).cast::<i32>().add(pair).read_unaligned() };
        pairs(_mm512_set1_epi32(pair))
    }
}

/// Multiplies a tile of rows with two panels of numbers. `ahead` prefetches the two that follow in memory.
///
/// # Safety
/// AVX-512 with BF16 must be available, the panels must have the layout, and the rows its inputs. There must be room for an even number
/// of rows, and for four if there are three.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(in super::super) unsafe fn multiply_rounded(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    rows: Rows<'_>,
    ahead: bool,
    tile: &mut RoundedTile,
) {
    assert!(panels.iter().all(|panel| panel.len() >= layout.bytes) && layout.cols <= rows.stride);
    assert!(rows.elements.len() >= (rows.count.next_multiple_of(2) - 1) * rows.stride + layout.cols);
    let panels = Stored { starts: panels.map(<[u8]>::as_ptr), layout, ahead };
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Packed(Numbers::F8) => multiply_any::<F8Rounded>(panels, rows, tile),
            PanelKind::Packed(Numbers::Nf4) => multiply_any::<Nibbles<Rounded<Nf4>>>(panels, rows, tile),
            PanelKind::Packed(Numbers::Fp4) => multiply_any::<Nibbles<Rounded<Fp4>>>(panels, rows, tile),
            other => unreachable!("{other:?} is no kind of packed numbers"),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply_any<K: AsBf16>(panels: Stored<'_>, rows: Rows<'_>, tile: &mut RoundedTile) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match rows.count {
            1 => multiply_few::<K, 1>(panels, rows, &mut tile.results),
            2 => multiply_few::<K, 2>(panels, rows, &mut tile.results),
            3..=FEW_ROWS => multiply_few::<K, FEW_ROWS>(panels, rows, &mut tile.results),
            _ => multiply_many::<K>(panels, rows, tile),
        }
    }
}

/// Multiplies a few rows with numbers as they are read.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply_few<K: AsBf16, const N: usize>(panels: Stored<'_>, rows: Rows<'_>, results: &mut TileResults) {
    let mut ahead = panels.ahead();
    let [mut sums, mut dots] = [[[_mm512_setzero_ps(); N]; BLOCK_PANELS]; 2];
    let mut units = [_mm512_setzero_ps(); BLOCK_PANELS];
    for group in 0..panels.layout.groups() {
        ahead.iter_mut().for_each(|ahead| ahead.prefetch(Level::Second, K::LINES));
        // SAFETY: the caller guarantees this; the panels and the rows have this group.
        unsafe {
            let (mut weights, scales) = (panels.groups::<K>(group), panels.scales::<K>(group));
            for p in 0..BLOCK_PANELS {
                let unit = units[p];
                if begins_unit(&mut weights[p], group, scales[p][0], &mut units[p]) {
                    add_scaled(&mut dots[p], unit, &mut sums[p]);
                }
            }
            let block = Block { at: rows.elements.as_ptr().add(group * GROUP), stride: rows.stride };
            add_group(weights, block, &mut dots);
        }
    }
    // SAFETY: the instruction set is available.
    unsafe {
        for p in 0..BLOCK_PANELS {
            add_scaled(&mut dots[p], units[p], &mut sums[p]);
        }
        store(sums, 0, results);
    }
}

/// Brings a group into the unit of those before it, or makes its scales the unit. Returns whether it did the latter, so that the products
/// before it are complete.
#[inline(always)]
unsafe fn begins_unit<K: AsBf16>(weights: &mut K, group: usize, scales: __m512, unit: &mut __m512) -> bool {
    if !group.is_multiple_of(K::TOGETHER) {
        // SAFETY: the caller guarantees the instruction set.
        if let Some(in_unit) = unsafe { weights.in_unit(scales, *unit) } {
            *weights = in_unit;
            return false;
        }
    }
    *unit = scales;
    true
}

/// A group of a panel as bf16.
#[repr(align(64))]
pub(in super::super) struct Group {
    numbers: Unpacked,
    /// Scales of the products with this group and those before it.
    unit: [f32; PANEL],
    /// Whether the next group has another unit.
    is_last: bool,
}

impl Group {
    const ZERO: Self = Self { numbers: Unpacked::ZERO, unit: [0.0; PANEL], is_last: true };
}

/// Multiplies rows with groups that are unpacked once for all, beside the products of the first rows.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply_many<K: AsBf16>(panels: Stored<'_>, rows: Rows<'_>, tile: &mut RoundedTile) {
    let RoundedTile { unpacked: [first, second], results } = tile;
    let mut ahead = panels.ahead();
    let (groups, each) = (panels.layout.groups(), groups_at_once(rows.count));
    // What follows is prefetched between blocks, because memory would be busy for longer than all at once takes.
    let ahead_of_block = each.div_ceil((rows.count - FEW_ROWS).div_ceil(ROWS));
    for start in (0..groups).step_by(each) {
        let count = each.min(groups - start);
        let mut following = 0..count;
        // SAFETY: the caller guarantees this; the panels and the rows have these groups.
        unsafe {
            let block = |row: usize| Block {
                at: rows.elements.as_ptr().add(row * rows.stride + start * GROUP),
                stride: rows.stride,
            };
            unpack_beside::<K>(panels, start, [&mut first[..count], &mut second[..count]], block(0), results);
            let unpacked = [&first[..count], &second[..count]];
            for (row, of_block) in row_blocks(rows.count - FEW_ROWS, ROWS) {
                for _ in following.by_ref().take(ahead_of_block) {
                    ahead.iter_mut().for_each(|ahead| ahead.prefetch(Level::Second, K::LINES));
                }
                let (row, are_first) = (FEW_ROWS + row, start == 0);
                match of_block {
                    2 => add_groups::<2>(unpacked, block(row), (are_first, row), results),
                    4 => add_groups::<4>(unpacked, block(row), (are_first, row), results),
                    _ => add_groups::<ROWS>(unpacked, block(row), (are_first, row), results),
                }
            }
        }
    }
}

/// Unpacks groups from `start` on, a multiple of [`AsBf16::TOGETHER`], and adds their products with the first rows as [`add_groups`] does.
/// Numbers are unpacked while others are multiplied.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn unpack_beside<K: AsBf16>(
    panels: Stored<'_>,
    start: usize,
    mut unpacked: [&mut [Group]; BLOCK_PANELS],
    mut block: Block,
    results: &mut TileResults,
) {
    let mut dots = [[_mm512_setzero_ps(); FEW_ROWS]; BLOCK_PANELS];
    // SAFETY: the instruction set is available.
    let mut sums = unsafe { if start == 0 { dots } else { load(results, 0) } };
    let mut units = [_mm512_setzero_ps(); BLOCK_PANELS];
    for index in 0..unpacked[0].len() {
        // SAFETY: the caller guarantees this; the panels and the rows have this group, and an array of a panel fills a register.
        unsafe {
            let mut weights = panels.groups::<K>(start + index);
            let scales = panels.scales::<K>(start + index);
            for p in 0..BLOCK_PANELS {
                let unit = units[p];
                let begins = begins_unit(&mut weights[p], start + index, scales[p][0], &mut units[p]);
                if index > 0 {
                    unpacked[p][index - 1].is_last = begins;
                    if begins {
                        add_scaled(&mut dots[p], unit, &mut sums[p]);
                    }
                }
                let group = &mut unpacked[p][index];
                group.is_last = true;
                _mm512_store_ps(group.unit.as_mut_ptr(), units[p]);
            }
            let [first, second] = &mut unpacked;
            add_lines(weights, [&mut first[index].numbers, &mut second[index].numbers], block, &mut dots);
            block.at = block.at.add(GROUP);
        }
    }
    // SAFETY: the instruction set is available.
    unsafe {
        for p in 0..BLOCK_PANELS {
            add_scaled(&mut dots[p], units[p], &mut sums[p]);
        }
        store(sums, 0, results);
    }
}

/// Adds the products of unpacked groups with a block of rows to the results from a row on, of which there are none if the groups are the
/// first ones.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add_groups<const N: usize>(
    groups: [&[Group]; BLOCK_PANELS],
    mut block: Block,
    (are_first, row): (bool, usize),
    results: &mut TileResults,
) {
    let mut dots = [[_mm512_setzero_ps(); N]; BLOCK_PANELS];
    // SAFETY: the instruction set is available.
    let mut sums = unsafe { if are_first { dots } else { load(results, row) } };
    let [first, second] = groups;
    for groups in first.iter().zip(second) {
        // SAFETY: the caller guarantees this; the rows have these groups.
        unsafe {
            add_unpacked((&groups.0.numbers, &groups.1.numbers), block, &mut dots);
            if groups.0.is_last {
                add_scaled(&mut dots[0], _mm512_load_ps(groups.0.unit.as_ptr()), &mut sums[0]);
            }
            if groups.1.is_last {
                add_scaled(&mut dots[1], _mm512_load_ps(groups.1.unit.as_ptr()), &mut sums[1]);
            }
            block.at = block.at.add(GROUP);
        }
    }
    // SAFETY: the instruction set is available.
    unsafe { store(sums, row, results) };
}

/// Pairs of a group in the order of the lines that have them.
static PAIRS_BY_LINE: [u8; PAIRS] = {
    let mut pairs = [0; PAIRS];
    let mut at = 0;
    while at < PAIRS {
        pairs[at] = (at / PLACES.len() * 2 + PLACES[at % PLACES.len()]) as u8;
        at += 1;
    }
    pairs
};

/// Adds the products of an unpacked group. Each sum takes one product after the other of all others.
#[inline(always)]
unsafe fn add_unpacked<const N: usize>((first, second): (&Unpacked, &Unpacked), block: Block, dots: &mut Sums<N>) {
    for at in some(0..PAIRS) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let pair = usize::from(*PAIRS_BY_LINE.get_unchecked(at));
            add_pair([Words::pair(first, pair), Words::pair(second, pair)], block, pair, dots);
        }
    }
}

/// Adds the products of a pair of inputs.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline(always)]
unsafe fn add_pair<const N: usize>(weights: [__m512i; BLOCK_PANELS], block: Block, pair: usize, dots: &mut Sums<N>) {
    for r in 0..N {
        // SAFETY: the caller guarantees this.
        unsafe {
            let both = block.pair(r, pair);
            for p in 0..BLOCK_PANELS {
                dots[p][r] = _mm512_dpbf16_ps(dots[p][r], pairs(weights[p]), both);
            }
        }
    }
}

/// Unpacks a group and adds its products.
#[inline(always)]
unsafe fn add_lines<K: Lines>(
    weights: [K; BLOCK_PANELS],
    mut unpacked: [&mut Unpacked; BLOCK_PANELS],
    block: Block,
    dots: &mut Sums<FEW_ROWS>,
) {
    for line in some(0..LINES) {
        // SAFETY: the caller guarantees this.
        unsafe {
            for (weights, unpacked) in weights.into_iter().zip(&mut unpacked) {
                unpacked.fill_line(weights, line);
            }
            for place in PLACES {
                let pair = 2 * line + place;
                add_pair([Words::pair(&*unpacked[0], pair), Words::pair(&*unpacked[1], pair)], block, pair, dots);
            }
        }
    }
}

/// Adds the products of a group as it is read.
#[inline(always)]
unsafe fn add_group<W: Lines, const N: usize>(panels: [W; BLOCK_PANELS], block: Block, dots: &mut Sums<N>) {
    for line in some(0..LINES) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let weights = [panels[0].pairs(line), panels[1].pairs(line)];
            for (k, place) in PLACES.into_iter().enumerate() {
                add_pair([weights[0][k], weights[1][k]], block, 2 * line + place, dots);
            }
        }
    }
}

/// Adds products with a panel times its scales to the sums, and begins others.
#[inline(always)]
unsafe fn add_scaled<const N: usize>(dots: &mut [__m512; N], scales: __m512, sums: &mut [__m512; N]) {
    for r in 0..N {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            sums[r] = _mm512_fmadd_ps(dots[r], scales, sums[r]);
            dots[r] = _mm512_setzero_ps();
        }
    }
}
