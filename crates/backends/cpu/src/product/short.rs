//! bf16 in twelve bits with AVX-512: eight inputs of two panels are unpacked in registers and multiplied as [`super::bf16`] does, so that
//! results have the same bits. The first block of rows leaves the unpacked panels for those that follow.

use std::arch::x86_64::*;

use super::Range;
use super::bf16::{self, BLOCK_ROWS, Following, Stored, pairs, words};
use super::pairs::{BLOCK_PANELS, PanelPair, Results, store};
use crate::memory::{LINE, Level, Lines, prefetch};
use crate::weights::short::{OCTET, OCTET_BYTES, OCTET_WEIGHTS, TABLE};
use crate::weights::{Layout, PANEL, PanelKind, Part};

/// Number of pairs of inputs in an octet, each of which is a line of bf16.
const PAIRS: usize = OCTET / 2;

/// Number of blocks of rows between which the lines of the panels that follow are divided: each prefetches one of each octet.
const SHARES: usize = OCTET_BYTES / LINE;

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

/// Rows in bf16 for a block, `stride` elements apart.
#[derive(Clone, Copy)]
struct Block<'a> {
    input: &'a [u16],
    stride: usize,
}

/// Multiplies any number of rows with panels of bf16 in twelve bits. `unpacked` is scratch memory.
///
/// # Safety
/// AVX-512 with BF16 must be available.
pub(super) unsafe fn multiply(
    part: &Part,
    panels: &PanelPair<'_>,
    (input, stride): (&[u16], usize),
    rows: Range,
    unpacked: &mut Lines<u8>,
) {
    let layout = &part.layout;
    let packed = panels.weights(|panel| part.panel(panel)).map(|panel| Panel::new(panel, layout));
    let bytes = layout.cols * size_of::<u16>() * PANEL;
    unpacked.reserve_zeroed(BLOCK_PANELS * bytes);
    let (blocks, mut results) = (rows.len().div_ceil(BLOCK_ROWS), [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS]);
    for (index, first) in rows.clone().step_by(BLOCK_ROWS).enumerate() {
        let count = (rows.end - first).min(BLOCK_ROWS);
        panels.prefetch(first..first + count);
        let block = Block { input: &input[first * stride..], stride };
        // SAFETY: the caller guarantees this; the panels have this layout, and there is room for both.
        unsafe {
            if index == 0 {
                first_block(packed, block, (count, blocks), unpacked, &mut results);
            } else {
                let stored = [0, bytes].map(|at| Stored::new(&unpacked[at..], layout.cols));
                let following = (index < SHARES && blocks >= SHARES).then(|| Following {
                    at: packed.map(|panel| {
                        panel.at.wrapping_add(BLOCK_PANELS * layout.bytes + layout.octets_at() + index * LINE)
                    }),
                    stride: OCTET_BYTES,
                    inputs: OCTET,
                });
                bf16::multiply_unpacked(stored, layout.cols, (block.input, stride), count, following, &mut results);
            }
        }
        panels.store(first, 0..count, &mut results);
    }
}

/// Multiplies the first of some blocks of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn first_block(
    panels: [Panel; BLOCK_PANELS],
    block: Block<'_>,
    (count, blocks): (usize, usize),
    unpacked: &mut Lines<u8>,
    results: &mut Results<BLOCK_ROWS>,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match (count, blocks) {
            (1, 1) => rows::<1, false, SHARES>(panels, block, unpacked, results),
            (2, 1) => rows::<2, false, SHARES>(panels, block, unpacked, results),
            (3 | 4, 1) => rows::<4, false, SHARES>(panels, block, unpacked, results),
            (_, 1) => rows::<BLOCK_ROWS, false, SHARES>(panels, block, unpacked, results),
            (_, 2) => rows::<BLOCK_ROWS, true, SHARES>(panels, block, unpacked, results),
            (_, _) => rows::<BLOCK_ROWS, true, 1>(panels, block, unpacked, results),
        }
    }
}

/// Multiplies `ROWS` rows. With `KEEP`, it stores the unpacked panels. Prefetches so many lines of each octet of the panels that follow.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const ROWS: usize, const KEEP: bool, const AHEAD: usize>(
    panels: [Panel; BLOCK_PANELS],
    Block { input, stride }: Block<'_>,
    unpacked: &mut Lines<u8>,
    results: &mut Results<BLOCK_ROWS>,
) {
    let layout = panels[0].layout;
    let (cols, header) = (layout.cols, layout.octets_at());
    assert!(input.len() >= (ROWS - 1) * stride + cols && unpacked.len() >= BLOCK_PANELS * cols * 2 * PANEL);
    (0..header).step_by(LINE).for_each(|line| panels.iter().for_each(|panel| panel.prefetch(line)));
    let kept = [0, cols * 2 * PANEL].map(|at| unpacked[at..].as_mut_ptr());
    let mut exceptions = panels.map(|panel| panel.exceptions());
    let mut sums = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
    // SAFETY: the panels and the rows have these octets, as the caller guarantees and as asserted.
    unsafe {
        let tables = [panels[0].table(), panels[1].table()];
        for octet in 0..cols / OCTET {
            let mut weights = [panels[0].octet(tables[0], octet), panels[1].octet(tables[1], octet)];
            for p in 0..BLOCK_PANELS {
                exceptions[p].replace(octet, &mut weights[p]);
            }
            for pair in 0..PAIRS {
                let at = octet * PAIRS + pair;
                if pair < AHEAD {
                    panels.iter().for_each(|panel| panel.prefetch(header + octet * OCTET_BYTES + pair * LINE));
                }
                if KEEP {
                    for p in 0..BLOCK_PANELS {
                        _mm512_store_si512(kept[p].add(at * LINE).cast(), words(weights[p][pair]));
                    }
                }
                for r in 0..ROWS {
                    let x = input.as_ptr().add(r * stride).cast::<i32>().add(at).read_unaligned();
                    let x = pairs(_mm512_set1_epi32(x));
                    for p in 0..BLOCK_PANELS {
                        sums[p][r] = _mm512_dpbf16_ps(sums[p][r], weights[p][pair], x);
                    }
                }
            }
        }
        store(sums, 0, results);
    }
}
