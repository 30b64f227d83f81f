//! AMX: products of integers in whole tiles.

use std::arch::asm;
use std::arch::x86_64::*;

use super::walk::{GROUP_CODES, GROUP_SCALES, Quant};
use crate::activation::TILE;
use crate::memory::LINE;
use crate::rows::{GROUP, LOW_BITS};
use crate::tiles::{Shape, Tiles};
use crate::weights::PANEL;

/// Returns the number of rows of a tile used for `rows` rows: half a tile takes half the time.
fn tile_rows(rows: usize) -> usize {
    if rows <= TILE / 2 { TILE / 2 } else { TILE }
}

/// Sets up the tiles for `rows` rows. Registers 0 to 3 hold results; 4 and 5 hold rows of a group of integers, with
/// high and low parts in one register each or, if codes are doubled, together in one; 6 and 7 hold a group of a panel.
pub(super) fn tiles(doubled: bool, rows: usize) -> Tiles {
    let rows = tile_rows(rows);
    let inputs = if doubled { 2 * GROUP } else { GROUP };
    let (result, left, right) = (
        Shape { rows, row_bytes: LINE },
        Shape { rows, row_bytes: inputs },
        Shape { rows: inputs / 4, row_bytes: LINE },
    );
    Tiles::set_up([result, result, result, result, left, left, right, right])
}

/// Multiplies up to sixteen rows, from `first` on, with an unpacked panel.
///
/// # Safety
/// AMX must be available and set up for integers, for at least as many rows and for these codes. The input must have
/// room for whole tiles of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn integers(
    codes: &[u8],
    scales: &[f32],
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    let doubled = codes.len() / GROUP_CODES > scales.len() / GROUP_SCALES;
    // SAFETY: the caller guarantees this.
    unsafe {
        match (tile_rows(tile.len()), doubled) {
            (TILE, true) => integers_rows::<TILE, true>(codes, scales, input, first, tile),
            (TILE, false) => integers_rows::<TILE, false>(codes, scales, input, first, tile),
            (_, true) => integers_rows::<{ TILE / 2 }, true>(codes, scales, input, first, tile),
            (_, false) => integers_rows::<{ TILE / 2 }, false>(codes, scales, input, first, tile),
        }
    }
}

/// Exact products of one group, sixteen rows with sixteen: both parts together, or the high ones and the low ones.
#[repr(align(64))]
struct Dots([[[i32; PANEL]; TILE]; 2]);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn integers_rows<const ROWS: usize, const DOUBLED: bool>(
    codes: &[u8],
    scales: &[f32],
    input: &Quant<'_>,
    first: usize,
    tile: &mut [[f32; PANEL]],
) {
    let groups = scales.len() / GROUP_SCALES;
    let group_codes = if DOUBLED { 2 * GROUP_CODES } else { GROUP_CODES };
    let (a, a_scales, a_sums) = input.from(first);
    let stride = 2 * input.cols;
    assert!(input.cols == groups * GROUP && codes.len() >= groups * group_codes);
    assert!(a.len() >= TILE * stride && a_scales.len() >= TILE * groups && a_sums.len() >= TILE * groups);
    // Two buffers alternate: the unit multiplies one group while the other one is scaled.
    let mut dots = [const { Dots([[[0; PANEL]; TILE]; 2]) }; 2];
    let mut sums = [_mm512_setzero_ps(); ROWS];
    // SAFETY: every group that is read exists, as asserted.
    unsafe {
        if groups > 0 {
            multiply::<0, DOUBLED>(codes.as_ptr(), a.as_ptr(), stride, &mut dots[0]);
        }
        for group in 0..groups {
            let next = group + 1;
            if next < groups {
                let (codes, a) = (codes.as_ptr().add(next * group_codes), a.as_ptr().add(next * 2 * GROUP));
                if next.is_multiple_of(2) {
                    multiply::<0, DOUBLED>(codes, a, stride, &mut dots[0]);
                } else {
                    multiply::<1, DOUBLED>(codes, a, stride, &mut dots[1]);
                }
            }
            let scale = _mm512_loadu_ps(scales.as_ptr().add(group * GROUP_SCALES));
            let min = _mm512_loadu_ps(scales.as_ptr().add(group * GROUP_SCALES + PANEL));
            let [both, low] = &dots[group % 2].0;
            for (row, sum) in sums.iter_mut().enumerate() {
                let mut dot = _mm512_load_si512(both[row].as_ptr().cast());
                if !DOUBLED {
                    let high = _mm512_slli_epi32::<LOW_BITS>(dot);
                    dot = _mm512_add_epi32(high, _mm512_load_si512(low[row].as_ptr().cast()));
                }
                let dot = _mm512_cvtepi32_ps(dot);
                let a_scale = _mm512_set1_ps(*a_scales.as_ptr().add(row * groups + group));
                let a_sum = _mm512_set1_ps(*a_sums.as_ptr().add(row * groups + group));
                *sum = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, a_scale), *sum);
                *sum = _mm512_fmadd_ps(min, a_sum, *sum);
            }
        }
    }
    for (result, sum) in tile.iter_mut().zip(sums) {
        // SAFETY: a result has sixteen elements.
        unsafe { _mm512_storeu_ps(result.as_mut_ptr(), sum) };
    }
}

/// Computes `out = A · B` for rows of a group of integers, `stride` bytes apart, and a group of a panel, with one of
/// two sets of registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const SET: usize, const DOUBLED: bool>(
    codes: *const u8,
    a: *const i8,
    stride: usize,
    out: &mut Dots,
) {
    macro_rules! both {
        ($sum:literal, $a:literal, $b:literal) => {
            asm!(
                concat!("tilezero ", $sum),
                concat!("tileloadd ", $b, ", [{b} + {line}]"),
                concat!("tileloadd ", $a, ", [{a} + {stride}]"),
                concat!("tdpbsud ", $sum, ", ", $a, ", ", $b),
                concat!("tilestored [{out} + {line}], ", $sum),
                a = in(reg) a,
                stride = in(reg) stride,
                b = in(reg) codes,
                line = in(reg) LINE,
                out = in(reg) out,
                options(nostack, preserves_flags)
            )
        };
    }
    macro_rules! each {
        ($high:literal, $low:literal, $b:literal) => {
            asm!(
                concat!("tilezero ", $high),
                concat!("tilezero ", $low),
                concat!("tileloadd ", $b, ", [{b} + {line}]"),
                "tileloadd tmm4, [{a} + {stride}]",
                concat!("tdpbsud ", $high, ", tmm4, ", $b),
                "tileloadd tmm5, [{a} + {stride} + 32]",
                concat!("tdpbsud ", $low, ", tmm5, ", $b),
                concat!("tilestored [{out} + {line}], ", $high),
                concat!("tilestored [{out} + {line} + 1024], ", $low),
                a = in(reg) a,
                stride = in(reg) stride,
                b = in(reg) codes,
                line = in(reg) LINE,
                out = in(reg) out,
                options(nostack, preserves_flags)
            )
        };
    }
    // SAFETY: the tiles are set up, and the caller guarantees the memory that they read and write.
    unsafe {
        match (SET, DOUBLED) {
            (0, true) => both!("tmm0", "tmm4", "tmm6"),
            (0, false) => each!("tmm0", "tmm1", "tmm6"),
            (_, true) => both!("tmm1", "tmm5", "tmm7"),
            (_, false) => each!("tmm2", "tmm3", "tmm7"),
        }
    }
}
