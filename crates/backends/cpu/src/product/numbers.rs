//! Unpacking of floating-point numbers in fewer than 16 bits to panels of bf16, which are multiplied as any other.
//!
//! A weight is its code's value times the group's scale, in f32, rounded to bf16: the same bits as if it had been unpacked
//! when it was loaded. A panel is unpacked once for all rows of a piece.

use half::bf16;
use octavo_ops::{FP4_VALUES, NF4_VALUES, e4m3};

use crate::isa::Isa;
use crate::memory::LINE;
use crate::rows::GROUP;
use crate::weights::{Kind, Layout, Numbers, PANEL};

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Values of the codes of e4m3.
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < values.len() {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

/// Unpacks a panel to one of bf16.
pub(super) fn unpack(isa: Isa, panel: &[u8], layout: &Layout, out: &mut [u8]) {
    let Kind::Packed(numbers) = layout.kind else { unreachable!("only packed numbers are unpacked") };
    let lines = &mut out.as_chunks_mut::<LINE>().0[..layout.groups() * PAIRS];
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: the instruction set is available; the panel has this layout, and there is a line for each pair.
        return unsafe { wide::unpack(numbers, panel, layout, lines) };
    }
    let _ = isa;
    for (index, line) in lines.iter_mut().enumerate() {
        for (at, number) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *number = bf16::from_f32(value(numbers, panel, layout, (index * 2 + at % 2, at / 2))).to_le_bytes();
        }
    }
}

/// Reads one row of a panel.
pub(super) fn read(panel: &[u8], layout: &Layout, lane: usize, out: &mut [f32]) {
    let Kind::Packed(numbers) = layout.kind else { unreachable!("only packed numbers are read") };
    for (k, out) in out.iter_mut().enumerate() {
        *out = bf16::from_f32(value(numbers, panel, layout, (k, lane))).to_f32();
    }
}

/// Returns the weight of an input and a row.
#[inline(always)]
fn value(numbers: Numbers, panel: &[u8], layout: &Layout, (k, lane): (usize, usize)) -> f32 {
    let (pair, odd) = (k / 2, k % 2);
    let nibble = || usize::from(panel[pair * PANEL + lane] >> (4 * odd) & 15);
    let value = match numbers {
        Numbers::F8 => E4M3[usize::from(panel[(pair * 2 + odd) * PANEL + lane])],
        Numbers::Nf4 => NF4_VALUES[nibble()],
        Numbers::Fp4 => FP4_VALUES[nibble()],
    };
    let at = layout.number_scales_at(k / GROUP) + 4 * lane;
    value * f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
}

#[cfg(target_arch = "x86_64")]
mod wide {
    //! The same with AVX-512.

    use std::arch::x86_64::*;

    use super::*;

    /// Unpacks a panel, a line of sixteen pairs at a time.
    ///
    /// # Safety
    /// AVX-512 must be available, the panel must have this layout, and there must be a line for each pair of inputs.
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    pub(super) unsafe fn unpack(numbers: Numbers, panel: &[u8], layout: &Layout, lines: &mut [[u8; LINE]]) {
        assert!(panel.len() >= layout.bytes && lines.len() == layout.groups() * PAIRS);
        // SAFETY: the caller guarantees this.
        unsafe {
            match numbers {
                Numbers::F8 => groups(panel, layout, lines, |pair| e4m3_pair(panel.as_ptr().add(pair * 2 * PANEL))),
                Numbers::Nf4 => tables(&NF4_VALUES, panel, layout, lines),
                Numbers::Fp4 => tables(&FP4_VALUES, panel, layout, lines),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn tables(values: &[f32; 16], panel: &[u8], layout: &Layout, lines: &mut [[u8; LINE]]) {
        // SAFETY: the caller guarantees this; the table fills a register.
        unsafe {
            let table = _mm512_loadu_ps(values.as_ptr());
            groups(panel, layout, lines, |pair| {
                let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(panel.as_ptr().add(pair * PANEL).cast()));
                // Of an index, only the lowest four bits count.
                [_mm512_permutexvar_ps(codes, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), table)]
            });
        }
    }

    /// Writes the scaled values of all pairs of inputs.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn groups(panel: &[u8], layout: &Layout, lines: &mut [[u8; LINE]], values: impl Fn(usize) -> [__m512; 2]) {
        for (group, lines) in lines.chunks_exact_mut(PAIRS).enumerate() {
            // SAFETY: the panel has sixteen scales for each group.
            let scale = unsafe { _mm512_loadu_ps(panel.as_ptr().add(layout.number_scales_at(group)).cast()) };
            for (index, line) in lines.iter_mut().enumerate() {
                let [even, odd] = values(group * PAIRS + index);
                let low = _mm512_srli_epi32::<16>(rounded(_mm512_mul_ps(even, scale)));
                let odd = rounded(_mm512_mul_ps(odd, scale));
                // The upper half of each word is that of the odd input.
                let pair = _mm512_mask_mov_epi16(low, 0xaaaa_aaaa, odd);
                // SAFETY: a line has 64 bytes.
                unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), pair) };
            }
        }
    }

    /// Adds to the bits of numbers so that their upper halves are rounded to nearest, ties to even.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    fn rounded(x: __m512) -> __m512i {
        let bits = _mm512_castps_si512(x);
        let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even)
    }

    /// Reads the values of sixteen rows for an even input, and for the next.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,f16c")]
    unsafe fn e4m3_pair(at: *const u8) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(at.cast()));
            let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)));
            let rest = _mm512_slli_epi16::<7>(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)));
            // As f16, whose exponent is five bits with a bias of 15, the bits are the value over 256.
            let halves = _mm512_or_si512(sign, rest);
            let factor = _mm512_set1_ps(256.0);
            [
                _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor),
                _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves)), factor),
            ]
        }
    }
}
