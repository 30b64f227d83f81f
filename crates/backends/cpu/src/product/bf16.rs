//! bf16 with AVX-512: processes pairs of inputs one after the other, so that a row's sums do not depend on its
//! neighbours.

use std::arch::x86_64::*;

use super::pairs::{BLOCK_PANELS, Results, store};
use crate::memory::{LINE, Level, prefetch};
use crate::rows::GROUP;
use crate::weights::PANEL;

/// Number of rows in a block: its sums with two panels and one step's operands fill the registers.
pub(super) const BLOCK_ROWS: usize = 8;

/// Rows in bf16.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) elements: &'a [u16],
    /// Number of elements from a row to the next.
    pub(super) stride: usize,
    pub(super) count: usize,
}

/// Number of rows of a tile, for which what is stored in fewer bits is unpacked once.
pub(super) const TILE_ROWS: usize = 256;

/// Results of a tile of rows with two panels, not 4 KiB apart, as in `vnni`.
pub(super) type TileResults = Results<{ TILE_ROWS + 1 }>;

/// Memory of a tile of rows and of what is unpacked for it. A thread keeps it.
pub(super) struct Tile<U> {
    pub(super) unpacked: [U; BLOCK_PANELS],
    pub(super) results: TileResults,
}

impl<U> Tile<U> {
    pub(super) fn new(unpacked: [U; BLOCK_PANELS]) -> Self {
        Self { unpacked, results: [[[0.0; PANEL]; TILE_ROWS + 1]; BLOCK_PANELS] }
    }
}

/// A panel of bf16.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    at: *const u8,
    bytes: usize,
}

impl Stored {
    /// Creates a panel of `cols` inputs.
    pub(super) fn new(panel: &[u8], cols: usize) -> Self {
        let bytes = cols * size_of::<u16>() * PANEL;
        assert!(panel.len() >= bytes);
        Self { at: panel.as_ptr(), bytes }
    }
}

impl Stored {
    /// Returns the weights of a pair of inputs.
    ///
    /// # Safety
    /// AVX-512 F, BW and BF16 must be available, and the panel must have this pair.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn pair(self, pair: usize) -> __m512bh {
        // SAFETY: the caller guarantees that the panel has a line for this pair.
        pairs(unsafe { _mm512_loadu_si512(self.at.add(pair * LINE).cast()) })
    }

    /// Prefetches the data `panels` panels after this pair.
    #[inline]
    fn prefetch(self, pair: usize, panels: usize) {
        prefetch(Level::Second, self.at.wrapping_add(pair * LINE + panels * self.bytes));
    }
}

/// Multiplies up to [`BLOCK_ROWS`] rows, `stride` elements apart, with panels of `cols` inputs, a multiple of [`GROUP`].
/// `ahead` prefetches the panels that follow in memory.
///
/// # Safety
/// AVX-512 F, BW and BF16 must be available, and the panels must have these inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn multiply(
    panels: [Stored; BLOCK_PANELS],
    cols: usize,
    (input, stride): (&[u16], usize),
    count: usize,
    ahead: bool,
    results: &mut Results<BLOCK_ROWS>,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match count {
            1 => rows::<1>(panels, cols, (input, stride), ahead, results),
            2 => rows::<2>(panels, cols, (input, stride), ahead, results),
            3 | 4 => rows::<4>(panels, cols, (input, stride), ahead, results),
            _ => rows::<BLOCK_ROWS>(panels, cols, (input, stride), ahead, results),
        }
    }
}

#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const ROWS: usize>(
    panels: [Stored; BLOCK_PANELS],
    cols: usize,
    (input, stride): (&[u16], usize),
    ahead: bool,
    results: &mut Results<BLOCK_ROWS>,
) {
    assert!(input.len() >= (ROWS - 1) * stride + cols);
    let mut sums = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
    for group in 0..cols / GROUP {
        // SAFETY: the panels and the rows have this group.
        unsafe {
            for pair in group * GROUP / 2..(group + 1) * GROUP / 2 {
                let weights = [panels[0].pair(pair), panels[1].pair(pair)];
                if ahead {
                    panels.iter().for_each(|panel| panel.prefetch(pair, BLOCK_PANELS));
                }
                for r in 0..ROWS {
                    let x = input.as_ptr().add(r * stride).cast::<i32>().add(pair).read_unaligned();
                    let x = pairs(_mm512_set1_epi32(x));
                    for p in 0..BLOCK_PANELS {
                        sums[p][r] = _mm512_dpbf16_ps(sums[p][r], weights[p], x);
                    }
                }
            }
        }
    }
    // SAFETY: the instruction set is available.
    unsafe { store(sums, 0, results) };
}

/// Converts pairs of bf16 to words.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn words(pairs: __m512bh) -> __m512i {
    // SAFETY: both types are 64 bytes for which every bit pattern is valid.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) }
}

/// Converts words to pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes for which every bit pattern is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
