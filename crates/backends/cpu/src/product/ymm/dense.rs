//! Products of floating-point weights with AVX2.

use std::arch::x86_64::*;

use super::LANES;
use crate::weights::{PANEL, PanelKind};

/// Multiplies a few rows with a panel of f32, f16 or bf16. The inputs of a row are added in order.
///
/// # Safety
/// AVX2, FMA and F16C must be available; the panel must hold as many inputs as the rows.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::product) unsafe fn dense(kind: PanelKind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]) {
    let panel = panel.as_ptr();
    // SAFETY: the caller guarantees this.
    unsafe {
        match x {
            [a] => dense_rows(kind, panel, [a], results),
            [a, b] => dense_rows(kind, panel, [a, b], results),
            [a, b, c] => dense_rows(kind, panel, [a, b, c], results),
            [a, b, c, d] => dense_rows(kind, panel, [a, b, c, d], results),
            _ => unreachable!("{} rows are not few", x.len()),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dense_rows<const N: usize>(kind: PanelKind, panel: *const u8, x: [&[f32]; N], results: &mut [[f32; PANEL]]) {
    let cols = x[0].len();
    assert!(x.iter().all(|x| x.len() == cols) && results.len() >= N);
    let mut sums = Sums { x, sums: [[_mm256_setzero_ps(); 2]; N] };
    // SAFETY: rows have `cols` elements, and the panel as many inputs of sixteen output rows.
    unsafe {
        match kind {
            PanelKind::F32 => {
                for k in 0..cols {
                    let at = panel.cast::<f32>().add(k * PANEL);
                    sums.add(k, [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(LANES))]);
                }
            }
            PanelKind::F16 => {
                for k in 0..cols {
                    let at = panel.add(2 * k * PANEL).cast::<__m128i>();
                    let halves = [_mm_loadu_si128(at), _mm_loadu_si128(at.add(1))];
                    sums.add(k, [_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])]);
                }
            }
            // Two inputs of an output row are beside each other.
            PanelKind::Bf16 => {
                for pair in 0..cols.div_ceil(2) {
                    let at = panel.add(4 * pair * PANEL).cast::<__m256i>();
                    let pairs = [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))];
                    let (first, second) = (_mm256_slli_epi32::<16>(pairs[0]), _mm256_slli_epi32::<16>(pairs[1]));
                    sums.add(2 * pair, [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]);
                    if 2 * pair + 1 < cols {
                        let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                        let (first, second) = (_mm256_and_si256(pairs[0], upper), _mm256_and_si256(pairs[1], upper));
                        sums.add(2 * pair + 1, [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]);
                    }
                }
            }
            PanelKind::Quant(..) | PanelKind::Packed(_) | PanelKind::Short => {
                unreachable!("only plain elements are multiplied as they are")
            }
        }
        for (sums, result) in sums.sums.iter().zip(results) {
            _mm256_storeu_ps(result.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(result.as_mut_ptr().add(LANES), sums[1]);
        }
    }
}

/// Sums of a few rows, two registers of output rows each.
struct Sums<'a, const N: usize> {
    x: [&'a [f32]; N],
    sums: [[__m256; 2]; N],
}

impl<const N: usize> Sums<'_, N> {
    /// Adds weights, times an input of each row.
    ///
    /// # Safety
    /// AVX2 and FMA must be available, and rows must have this input.
    #[inline(always)]
    unsafe fn add(&mut self, k: usize, weights: [__m256; 2]) {
        for (x, sums) in self.x.iter().zip(&mut self.sums) {
            // SAFETY: the caller guarantees this.
            unsafe {
                let x = _mm256_set1_ps(*x.get_unchecked(k));
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = _mm256_fmadd_ps(weights, x, *sum);
                }
            }
        }
    }
}
