//! Products of floating-point weights with AVX-512.

use std::arch::x86_64::*;

use super::PIECE_PANELS;
use super::read::{halves, line};
use crate::memory::LINE;
use crate::weights::{PANEL, PanelKind};

/// Multiplies a few rows with a few panels of f32, f16 or bf16.
///
/// # Safety
/// AVX-512 must be available; every panel must hold as many inputs as the rows.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn dense<const ROWS: usize>(
    kind: PanelKind,
    panels: &[&[u8]; PIECE_PANELS],
    x: &[&[f32]],
    results: &mut [[[f32; PANEL]; ROWS]; PIECE_PANELS],
) {
    let panels = panels.map(<[u8]>::as_ptr);
    // SAFETY: the caller guarantees this.
    unsafe {
        match x {
            [a] => dense_rows(kind, panels, [a], results),
            [a, b] => dense_rows(kind, panels, [a, b], results),
            [a, b, c] => dense_rows(kind, panels, [a, b, c], results),
            [a, b, c, d] => dense_rows(kind, panels, [a, b, c, d], results),
            _ => unreachable!("{} rows are not few", x.len()),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn dense_rows<const M: usize, const ROWS: usize>(
    kind: PanelKind,
    panels: [*const u8; PIECE_PANELS],
    x: [&[f32]; M],
    results: &mut [[[f32; PANEL]; ROWS]; PIECE_PANELS],
) {
    let mut sums = [[_mm512_setzero_ps(); M]; PIECE_PANELS];
    let cols = x[0].len();
    // SAFETY: rows have `cols` elements, panels as many inputs of sixteen rows.
    unsafe {
        macro_rules! add {
            ($k:expr, |$panel:ident| $weights:expr) => {
                for (sums, &$panel) in sums.iter_mut().zip(&panels) {
                    let weights = $weights;
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm512_fmadd_ps(weights, _mm512_set1_ps(*x.get_unchecked($k)), *sum);
                    }
                }
            };
        }
        match kind {
            PanelKind::F32 => {
                for k in 0..cols {
                    add!(k, |panel| _mm512_loadu_ps(panel.cast::<f32>().add(k * PANEL)));
                }
            }
            PanelKind::F16 => {
                for k in 0..cols {
                    add!(k, |panel| halves(panel.add(k * 2 * PANEL)));
                }
            }
            PanelKind::Bf16 => {
                for pair in 0..cols / 2 {
                    add!(2 * pair, |panel| even(line(panel.add(pair * LINE))));
                    add!(2 * pair + 1, |panel| odd(line(panel.add(pair * LINE))));
                }
                if !cols.is_multiple_of(2) {
                    add!(cols - 1, |panel| even(line(panel.add(cols / 2 * LINE))));
                }
            }
            PanelKind::Quant(..) | PanelKind::Packed(_) | PanelKind::Short => {
                unreachable!("integers are no plain elements")
            }
        }
    }
    for (results, sums) in results.iter_mut().zip(sums) {
        for (result, sum) in results.iter_mut().zip(sums) {
            // SAFETY: a result has sixteen elements.
            unsafe { _mm512_storeu_ps(result.as_mut_ptr(), sum) };
        }
    }
}

/// Returns the even elements of 32 bf16, as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn even(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))
}

/// Returns the odd elements as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn odd(pairs: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}
