//! bf16 in twelve bits with AVX-512. Pairs of inputs are multiplied one after the other, as [`super::bf16`] does, so that results have the
//! same bits. For a few rows, eight inputs of two panels are unpacked in registers; for more, some groups in the first-level cache.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::Range;
use super::bf16::{self, BLOCK_ROWS, Rows, TILE_ROWS, TileResults, pairs, words};
use super::pairs::{BLOCK_PANELS, Sums, load, row_blocks, store};
use crate::memory::{LINE, Level, prefetch};
use crate::rows::GROUP;
use crate::weights::short::{OCTET, OCTET_BYTES, OCTET_WEIGHTS, TABLE};
use crate::weights::{Layout, PANEL, PanelKind};

/// Number of pairs of inputs in an octet, each of which is a line of bf16.
const PAIRS: usize = OCTET / 2;

/// Number of lines of an octet as it is stored.
const OCTET_LINES: usize = OCTET_BYTES / LINE;

/// Weights of an octet by pair.
type Octet = [__m512bh; PAIRS];

/// A packed panel.
#[derive(Clone, Copy)]
struct Panel {
    at: *const u8,
    layout: Layout,
}

impl Panel {
    fn new(panel: &[u8], layout: &Layout) -> Self {
        assert!(layout.kind == PanelKind::Short && panel.len() >= layout.bytes);
        Self { at: panel.as_ptr(), layout: *layout }
    }

    /// Returns an octet as if it had no exceptions.
    ///
    /// # Safety
    /// AVX-512 F and BW must be available, and the panel must have this octet.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn octet(&self, table: __m512i, octet: usize) -> Octet {
        // SAFETY: the caller guarantees that the panel has these three lines.
        let [low, other_low, indices] = unsafe {
            let at = self.at.add(self.layout.octets_at() + octet * OCTET_BYTES);
            [0, LINE, 2 * LINE].map(|line| _mm512_loadu_si512(at.add(line).cast()))
        };
        let nibbles = _mm512_set1_epi8(15);
        let upper = _mm512_shuffle_epi8(table, _mm512_and_si512(indices, nibbles));
        let other = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(indices), nibbles));
        [
            pairs(_mm512_unpacklo_epi8(low, upper)),
            pairs(_mm512_unpackhi_epi8(low, upper)),
            pairs(_mm512_unpacklo_epi8(other_low, other)),
            pairs(_mm512_unpackhi_epi8(other_low, other)),
        ]
    }

    /// Broadcasts the table.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn table(&self) -> __m512i {
        // SAFETY: a panel begins with sixteen bytes of it.
        _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(self.at.cast()) })
    }

    /// Returns the exceptions.
    fn exceptions(&self) -> Exceptions {
        Exceptions { next: self.at.wrapping_add(TABLE).cast() }
    }

    /// Prefetches a line of the panel that has the place of this one in the next pair.
    #[inline]
    fn prefetch(&self, at: usize) {
        prefetch(Level::Second, self.at.wrapping_add(BLOCK_PANELS * self.layout.bytes + at));
    }

    /// Does so for a line of an octet.
    #[inline]
    fn prefetch_line(&self, octet: usize, line: usize) {
        self.prefetch(self.layout.octets_at() + octet * OCTET_BYTES + line * LINE);
    }
}

/// Exceptions of a panel that have not been reached.
#[derive(Clone, Copy)]
struct Exceptions {
    next: *const u32,
}

impl Exceptions {
    /// Replaces the upper bytes of an octet's exceptions.
    ///
    /// # Safety
    /// AVX-512 F must be available, and the list must not have ended before this octet.
    #[inline(always)]
    unsafe fn replace(&mut self, octet: usize, weights: &mut Octet) {
        let place = |entry: u32| (entry >> 8) as usize / OCTET_WEIGHTS;
        // SAFETY: the list ends with an entry that is of no octet.
        unsafe {
            if place(self.next.read_unaligned()) != octet {
                return;
            }
            let mut bytes = std::mem::transmute::<Octet, [[u8; 2]; OCTET_WEIGHTS]>(*weights);
            loop {
                let entry = self.next.read_unaligned();
                if place(entry) != octet {
                    break;
                }
                bytes[(entry >> 8) as usize % OCTET_WEIGHTS][1] = entry as u8;
                self.next = self.next.add(1);
            }
            *weights = std::mem::transmute::<[[u8; 2]; OCTET_WEIGHTS], Octet>(bytes);
        }
    }
}

/// Largest number of groups that are unpacked at once: those of two panels take half of the first-level cache.
const GROUPS: usize = 9;

/// Size of a group in bf16 in bytes.
const GROUP_BYTES: usize = GROUP * PANEL * size_of::<u16>();

/// Groups of a panel in bf16.
#[repr(align(64))]
pub(super) struct Unpacked([u8; GROUPS * GROUP_BYTES]);

/// Memory of a tile of many rows.
pub(super) type Tile = bf16::Tile<Unpacked>;

impl Default for Tile {
    fn default() -> Self {
        Self::new([const { Unpacked([0; GROUPS * GROUP_BYTES]) }; BLOCK_PANELS])
    }
}

/// Multiplies a tile of rows with two panels. `ahead` prefetches the two that follow in memory.
///
/// # Safety
/// AVX-512 with BF16 must be available, and there must be room for whole tiles of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn multiply(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    rows: Rows<'_>,
    ahead: bool,
    tile: &mut Tile,
) {
    let panels = panels.map(|panel| Panel::new(panel, layout));
    assert!(rows.count <= TILE_ROWS && layout.cols <= rows.stride);
    assert!(rows.elements.len() >= (rows.count.next_multiple_of(2) - 1) * rows.stride + layout.cols);
    if ahead {
        (0..layout.octets_at()).step_by(LINE).for_each(|line| panels.iter().for_each(|panel| panel.prefetch(line)));
    }
    // SAFETY: the caller guarantees this, and the rows are there, as asserted.
    unsafe {
        match rows.count {
            1 => few::<1>(panels, rows, &mut tile.results),
            2 => few::<2>(panels, rows, &mut tile.results),
            3 | 4 => few::<4>(panels, rows, &mut tile.results),
            5 | 6 => few::<6>(panels, rows, &mut tile.results),
            7..=BLOCK_ROWS => few::<BLOCK_ROWS>(panels, rows, &mut tile.results),
            _ => many(panels, rows, ahead, tile),
        }
    }
}

/// Multiplies a few rows with octets as they are unpacked.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn few<const N: usize>(panels: [Panel; BLOCK_PANELS], rows: Rows<'_>, results: &mut TileResults) {
    let layout = panels[0].layout;
    let mut exceptions = panels.map(|panel| panel.exceptions());
    let mut sums = [[_mm512_setzero_ps(); N]; BLOCK_PANELS];
    // SAFETY: the panels and the rows have these octets, as the caller guarantees.
    unsafe {
        let tables = [panels[0].table(), panels[1].table()];
        for octet in 0..layout.cols / OCTET {
            let mut weights = [panels[0].octet(tables[0], octet), panels[1].octet(tables[1], octet)];
            for p in 0..BLOCK_PANELS {
                exceptions[p].replace(octet, &mut weights[p]);
            }
            for pair in 0..PAIRS {
                if pair < OCTET_LINES {
                    panels.iter().for_each(|panel| panel.prefetch_line(octet, pair));
                }
                for r in 0..N {
                    let both = rows.pair(r, octet * PAIRS + pair);
                    for p in 0..BLOCK_PANELS {
                        sums[p][r] = _mm512_dpbf16_ps(sums[p][r], weights[p][pair], both);
                    }
                }
            }
        }
        store(sums, 0, results);
    }
}

impl Rows<'_> {
    /// Broadcasts a pair of inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pair(&self, row: usize, pair: usize) -> __m512bh {
        // SAFETY: the caller guarantees that the row has it.
        let at = unsafe { self.elements.as_ptr().add(row * self.stride).cast::<i32>().add(pair) };
        // SAFETY: as above.
        pairs(_mm512_set1_epi32(unsafe { at.read_unaligned() }))
    }
}

/// Multiplies rows with groups that are unpacked once for all, beside the products of the first block.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn many(panels: [Panel; BLOCK_PANELS], rows: Rows<'_>, ahead: bool, Tile { unpacked, results }: &mut Tile) {
    let groups = panels[0].layout.groups();
    let each = groups.div_ceil(groups.div_ceil(GROUPS));
    let mut exceptions = panels.map(|panel| panel.exceptions());
    // Memory would be busy for longer than one block takes.
    let lines = if rows.count.div_ceil(BLOCK_ROWS) >= OCTET_LINES { 1 } else { OCTET_LINES };
    for start in (0..groups).step_by(each) {
        let octets = start * GROUP / OCTET..(start + each).min(groups) * GROUP / OCTET;
        let out = [0, 1].map(|p: usize| unpacked[p].0.as_mut_ptr());
        for (block, (first, count)) in row_blocks(rows.count, BLOCK_ROWS).enumerate() {
            let following = if ahead { block * lines..((block + 1) * lines).min(OCTET_LINES) } else { 0..0 };
            let octets = Octets { panels, octets: octets.clone(), out, following };
            let some = Rows { elements: &rows.elements[first * rows.stride..], ..rows };
            // SAFETY: the caller guarantees this; the panels, the rows and the memory have these octets.
            unsafe {
                match (block, count) {
                    (0, 6) => octets.add_first::<6>(&mut exceptions, some, results),
                    (0, _) => octets.add_first::<BLOCK_ROWS>(&mut exceptions, some, results),
                    (_, 2) => octets.add::<2>(some, first, results),
                    (_, 4) => octets.add::<4>(some, first, results),
                    (_, 6) => octets.add::<6>(some, first, results),
                    _ => octets.add::<BLOCK_ROWS>(some, first, results),
                }
            }
        }
    }
}

/// Some octets of two panels that are unpacked together.
struct Octets {
    panels: [Panel; BLOCK_PANELS],
    octets: Range,
    /// Where they are when they are unpacked.
    out: [*mut u8; BLOCK_PANELS],
    /// The lines of each that are prefetched in the panels that follow.
    following: Range,
}

impl Octets {
    /// Prefetches lines of an octet in the panels that follow.
    #[inline(always)]
    fn prefetch(&self, octet: usize) {
        for line in self.following.clone() {
            self.panels.iter().for_each(|panel| panel.prefetch_line(octet, line));
        }
    }

    /// Unpacks the octets, and adds their products with the first rows to the results.
    ///
    /// # Safety
    /// AVX-512 with BF16 must be available. Panels and rows must have the octets, and there must be room for them where they are unpacked.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn add_first<const ROWS: usize>(
        &self,
        exceptions: &mut [Exceptions; BLOCK_PANELS],
        rows: Rows<'_>,
        results: &mut TileResults,
    ) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let tables = [self.panels[0].table(), self.panels[1].table()];
            let unpack = |octet| {
                for p in 0..BLOCK_PANELS {
                    let mut weights = self.panels[p].octet(tables[p], octet);
                    exceptions[p].replace(octet, &mut weights);
                    let out = self.out[p].add((octet - self.octets.start) * PAIRS * LINE);
                    for (pair, weights) in weights.into_iter().enumerate() {
                        _mm512_store_si512(out.add(pair * LINE).cast(), words(weights));
                    }
                }
                self.prefetch(octet);
            };
            self.add_each::<ROWS, 1>(rows, 0, unpack, results);
        }
    }

    /// Adds the products of the unpacked octets with a block of rows to the results from a row on.
    ///
    /// # Safety
    /// As for [`Self::add_first`]; they must have been unpacked.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn add<const ROWS: usize>(&self, rows: Rows<'_>, first: usize, results: &mut TileResults) {
        // SAFETY: the caller guarantees this.
        unsafe {
            if self.following.is_empty() {
                self.add_each::<ROWS, { GROUP / OCTET }>(rows, first, |_| (), results);
            } else {
                self.add_each::<ROWS, 1>(rows, first, |octet| self.prefetch(octet), results);
            }
        }
    }

    /// Does so, and calls a function before each `EACH` octets.
    #[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
    #[inline(always)]
    unsafe fn add_each<const ROWS: usize, const EACH: usize>(
        &self,
        rows: Rows<'_>,
        first: usize,
        mut before: impl FnMut(usize),
        results: &mut TileResults,
    ) {
        let Self { octets, out, .. } = self;
        // SAFETY: the caller guarantees the instruction set, and that rows and memory have these octets.
        unsafe {
            let mut sums: Sums<ROWS> =
                if octets.start == 0 { [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS] } else { load(results, first) };
            for octet in octets.clone().step_by(EACH) {
                before(octet);
                // The compiler would unroll a short loop, and then keep more in memory than in registers.
                for pair in octet * PAIRS..black_box((octet + EACH) * PAIRS) {
                    let line = (pair - octets.start * PAIRS) * LINE;
                    let weights = out.map(|start| pairs(_mm512_load_si512(start.add(line).cast())));
                    for r in 0..ROWS {
                        let both = rows.pair(r, pair);
                        for p in 0..BLOCK_PANELS {
                            sums[p][r] = _mm512_dpbf16_ps(sums[p][r], weights[p], both);
                        }
                    }
                }
            }
            store(sums, first, results);
        }
    }
}
