//! The kernels for registers of 512 bits.
//!
//! They are written with intrinsics, because the compiler has kept sums of the common definition in memory, one number at a time. A
//! row's sums are one register. Its inputs are added to four of them by turns, whatever the number of rows, so that one row
//! does not wait for each addition, and its bits are the same beside others.

use std::arch::x86_64::*;

use super::ROWS;
use crate::memory::{LINE, Level, prefetch};
use crate::rows::LANES;

/// Numbers of a panel: f32, or the bits of bf16.
pub(super) trait Number: Copy {
    /// Widens a row of a panel.
    ///
    /// # Safety
    /// AVX-512 F must be available.
    unsafe fn widen(row: &[Self; LANES]) -> __m512;
}

impl Number for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen(row: &[f32; LANES]) -> __m512 {
        // SAFETY: a row fills a register.
        unsafe { _mm512_loadu_ps(row.as_ptr()) }
    }
}

impl Number for u16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen(row: &[u16; LANES]) -> __m512 {
        // SAFETY: a row fills half of a register.
        let row = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(row)))
    }
}

/// Number of sums of a row.
const SUMS: usize = 4;

/// Distance of what is prefetched in bytes. Adapters are read from memory, in pieces that are too short for the processor to find
/// out by itself.
const AHEAD: usize = 4 << 10;

/// Multiplies the first `count` rows with a panel of as many rows as they have elements.
///
/// # Safety
/// AVX-512 F must be available.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply<T: Number>(
    x: &[&[f32]; ROWS],
    count: usize,
    panel: &[[T; LANES]],
    sums: &mut [[f32; LANES]; ROWS],
) {
    assert!(x.iter().all(|row| row.len() >= panel.len()));
    let x = [x[0].as_ptr(), x[1].as_ptr(), x[2].as_ptr(), x[3].as_ptr()];
    // SAFETY: the caller guarantees this; the rows have an element for each row of the panel.
    unsafe {
        match count {
            1 => multiply_rows::<T, 1>(x, panel, sums),
            2 => multiply_rows::<T, 2>(x, panel, sums),
            _ => multiply_rows::<T, ROWS>(x, panel, sums),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn multiply_rows<T: Number, const N: usize>(
    x: [*const f32; ROWS],
    panel: &[[T; LANES]],
    out: &mut [[f32; LANES]; ROWS],
) {
    let mut sums = [[_mm512_setzero_ps(); N]; SUMS];
    let (turns, last) = panel.as_chunks::<SUMS>();
    // SAFETY: the caller guarantees this; a result fills a register.
    unsafe {
        for (turn, weights) in turns.iter().enumerate() {
            for line in 0..size_of_val(weights) / LINE {
                prefetch(Level::First, weights.as_ptr().cast::<u8>().wrapping_add(AHEAD + line * LINE));
            }
            for chain in 0..SUMS {
                add(x, SUMS * turn + chain, T::widen(&weights[chain]), &mut sums[chain]);
            }
        }
        for (chain, weights) in last.iter().enumerate() {
            add(x, SUMS * turns.len() + chain, T::widen(weights), &mut sums[chain]);
        }
        for row in 0..N {
            let [a, b, c, d] = sums.map(|sums| sums[row]);
            _mm512_storeu_ps(out[row].as_mut_ptr(), _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
        }
    }
}

/// Adds a row of a panel times element `at` of each row.
///
/// # Safety
/// AVX-512 F must be available, and the rows must have the element.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add<const N: usize>(x: [*const f32; ROWS], at: usize, weights: __m512, sums: &mut [__m512; N]) {
    for row in 0..N {
        // SAFETY: the caller guarantees this.
        let x = _mm512_set1_ps(unsafe { x[row].add(at).read() });
        sums[row] = _mm512_fmadd_ps(x, weights, sums[row]);
    }
}
