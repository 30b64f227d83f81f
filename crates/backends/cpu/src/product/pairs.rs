//! Two panels, with which AVX-512 multiplies blocks of rows at once.

use std::arch::x86_64::*;

use super::Range;
use super::output::Output;
use crate::weights::PANEL;

/// Number of panels.
pub(super) const BLOCK_PANELS: usize = 2;

/// Results of rows with both panels.
pub(super) type Results<const ROWS: usize> = [[[f32; PANEL]; ROWS]; BLOCK_PANELS];

/// Sums of `N` rows for both panels.
pub(super) type Sums<const N: usize> = [[__m512; N]; BLOCK_PANELS];

/// Two panels, or one if it is the last, and where their results are stored.
pub(super) struct PanelPair<'a> {
    panels: Range,
    output: &'a Output<'a>,
}

impl<'a> PanelPair<'a> {
    /// Divides panels into pairs.
    pub(super) fn all(panels: Range, output: &'a Output<'a>) -> impl Iterator<Item = Self> {
        let end = panels.end;
        panels.step_by(BLOCK_PANELS).map(move |from| Self { panels: from..(from + BLOCK_PANELS).min(end), output })
    }

    /// Returns the weights of both. A panel that does not exist repeats the last one; its results are not used.
    pub(super) fn weights<'w>(&self, panel: impl Fn(usize) -> &'w [u8]) -> [&'w [u8]; BLOCK_PANELS] {
        std::array::from_fn(|slot| panel((self.panels.start + slot).min(self.panels.end - 1)))
    }

    /// Prefetches the places of the results of some rows.
    pub(super) fn prefetch(&self, rows: Range) {
        self.output.prefetch(rows, self.panels.clone());
    }

    /// Stores results of rows from `first` on.
    pub(super) fn store<const ROWS: usize>(&self, first: usize, from: Range, results: &mut Results<ROWS>) {
        for (panel, results) in self.panels.clone().zip(results) {
            self.output.store(first, panel, &mut results[from.clone()]);
        }
    }
}

/// Divides rows into blocks of an even number of rows, at most `most`, which is 4, 6 or 8. Returns the first row of each and its number
/// of rows. The last row of the last block may not exist. Two rows have too few sums for them to be computed without waiting, so
/// that the last two are divided with those before them if blocks may have more than four.
pub(super) fn row_blocks(count: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let rows = match count.saturating_sub(next).next_multiple_of(2) {
            0 => return None,
            left if left <= most => left,
            left if left == most + 2 && most > 4 => most - 2,
            _ => most,
        };
        next += rows;
        Some((next - rows, rows))
    })
}

/// Reads the results of rows from `first` on.
///
/// # Safety
/// AVX-512 must be available.
#[inline(always)]
pub(super) unsafe fn load<const N: usize, const ROWS: usize>(results: &Results<ROWS>, first: usize) -> Sums<N> {
    // SAFETY: the caller guarantees the instruction set; a result has sixteen elements.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; BLOCK_PANELS];
        for p in 0..BLOCK_PANELS {
            let results = &results[p][first..first + N];
            for r in 0..N {
                sums[p][r] = _mm512_loadu_ps(results[r].as_ptr());
            }
        }
        sums
    }
}

/// Stores sums as the results of rows from `first` on.
///
/// # Safety
/// AVX-512 must be available.
#[inline(always)]
pub(super) unsafe fn store<const N: usize, const ROWS: usize>(
    sums: Sums<N>,
    first: usize,
    results: &mut Results<ROWS>,
) {
    for p in 0..BLOCK_PANELS {
        let results = &mut results[p][first..first + N];
        for r in 0..N {
            // SAFETY: the caller guarantees the instruction set; a result has sixteen elements.
            unsafe { _mm512_storeu_ps(results[r].as_mut_ptr(), sums[p][r]) };
        }
    }
}
