//! bf16 with AVX-512: processes pairs of inputs one after the other, so that a row's sums do not depend on its
//! neighbours.

use std::arch::x86_64::*;

use crate::memory::LINE;
use crate::weights::PANEL;

/// Number of rows and panels in a block: their sums and one step's operands fill the registers.
pub(super) const BLOCK_ROWS: usize = 8;
pub(super) const BLOCK_PANELS: usize = 2;

/// Results of a block of rows and panels.
pub(super) type Results = [[[f32; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];

/// Multiplies up to [`BLOCK_ROWS`] rows, `stride` elements apart, with panels of `cols` inputs, a multiple of two.
/// `ahead` prefetches the panels that follow in memory.
///
/// # Safety
/// AVX-512 F and BF16 must be available.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn multiply(
    panels: [&[u8]; BLOCK_PANELS],
    cols: usize,
    (input, stride): (&[u16], usize),
    count: usize,
    ahead: bool,
    results: &mut Results,
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
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const ROWS: usize>(
    panels: [&[u8]; BLOCK_PANELS],
    cols: usize,
    (input, stride): (&[u16], usize),
    ahead: bool,
    results: &mut Results,
) {
    let bytes = cols * size_of::<u16>() * PANEL;
    assert!(panels.iter().all(|panel| panel.len() >= bytes) && input.len() >= (ROWS - 1) * stride + cols);
    let mut sums = [[_mm512_setzero_ps(); ROWS]; BLOCK_PANELS];
    for pair in 0..cols / 2 {
        // SAFETY: a panel has a line for each pair of inputs, and rows have their inputs.
        unsafe {
            let mut weights = [_mm512_setzero_si512(); BLOCK_PANELS];
            for p in 0..BLOCK_PANELS {
                let line = panels[p].as_ptr().add(pair * LINE);
                weights[p] = _mm512_loadu_si512(line.cast());
                if ahead {
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(BLOCK_PANELS * bytes).cast());
                }
            }
            for r in 0..ROWS {
                let x = input.as_ptr().add(r * stride).cast::<i32>().add(pair).read_unaligned();
                let x = pairs(_mm512_set1_epi32(x));
                for p in 0..BLOCK_PANELS {
                    sums[p][r] = _mm512_dpbf16_ps(sums[p][r], pairs(weights[p]), x);
                }
            }
        }
    }
    for p in 0..BLOCK_PANELS {
        for r in 0..ROWS {
            // SAFETY: a result has sixteen elements.
            unsafe { _mm512_storeu_ps(results[p][r].as_mut_ptr(), sums[p][r]) };
        }
    }
}

/// Converts words to pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes for which every bit pattern is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
