//! Reading of a group of a stored panel with AVX2.

use std::arch::x86_64::*;

use crate::memory::LINE;
use crate::weights::{Codes, FP4_CODES, FP4_OFFSET, Layout, PANEL, STEPS, Scales};

/// A group of a panel.
#[repr(align(64))]
pub(super) struct Group {
    /// Codes as bytes, by step: four inputs of sixteen output rows.
    pub(super) codes: [[u8; LINE]; STEPS],
    pub(super) scales: [f32; PANEL],
    pub(super) minima: [f32; PANEL],
    /// Factors of the halves, if they have any.
    pub(super) factors: [[i32; PANEL]; 2],
}

impl Group {
    pub(super) const EMPTY: Self = Self {
        codes: [[0; LINE]; STEPS],
        scales: [0.0; PANEL],
        minima: [0.0; PANEL],
        factors: [[0; PANEL]; 2],
    };
}

/// Unpacks a group.
///
/// # Safety
/// AVX2 and F16C must be available, and the panel must have this layout, kind and group.
#[inline(always)]
pub(super) unsafe fn group(
    panel: *const u8,
    layout: &Layout,
    (codes, scales): (Codes, Scales),
    index: usize,
    group: &mut Group,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let packed = panel.add(layout.codes_at(codes, index));
        let uppers = panel.add(layout.uppers_at(codes, index));
        match codes {
            Codes::Four => by_nibbles(packed, group, |codes, _, _| codes),
            Codes::Five => by_nibbles(packed, group, |codes, step, half| fifth(codes, uppers, step, half)),
            Codes::Six => by_nibbles(packed, group, |codes, step, half| sixth(codes, uppers, step, half)),
            Codes::Fp4 => {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(FP4_CODES.as_ptr().cast()));
                by_nibbles(packed, group, |codes, _, _| _mm256_shuffle_epi8(table, codes));
            }
            Codes::Eight => {
                for (step, line) in group.codes.iter_mut().enumerate() {
                    std::ptr::copy_nonoverlapping(packed.add(step * LINE), line.as_mut_ptr(), LINE);
                }
            }
        }
        let (at, supers) = (panel.add(layout.scales_at(scales, index)), panel.add(layout.supers_at(scales, index)));
        for half in 0..2 {
            let lanes = half * PANEL / 2;
            let (scale, min) = pair_of(scales, at.cast(), supers.cast(), lanes);
            _mm256_storeu_ps(group.scales.as_mut_ptr().add(lanes), scale);
            _mm256_storeu_ps(group.minima.as_mut_ptr().add(lanes), min);
            if matches!(scales, Scales::Halves) {
                for (part, factors) in group.factors.iter_mut().enumerate() {
                    let bytes = _mm_loadl_epi64(at.add(part * PANEL + lanes).cast());
                    _mm256_storeu_si256(factors.as_mut_ptr().add(lanes).cast(), _mm256_cvtepi8_epi32(bytes));
                }
            }
        }
    }
}

/// Returns scales and minima of eight rows.
#[inline(always)]
unsafe fn pair_of(scales: Scales, at: *const u8, supers: *const u8, lanes: usize) -> (__m256, __m256) {
    // SAFETY: the caller of `group` guarantees this.
    unsafe {
        match scales {
            Scales::Fixed(offset) => {
                let scale = halves(at, lanes);
                (scale, _mm256_mul_ps(scale, _mm256_set1_ps(offset)))
            }
            Scales::Two => (halves(at, lanes), halves(at, PANEL + lanes)),
            Scales::Super => {
                let negative = _mm256_sub_ps(_mm256_setzero_ps(), halves(supers, PANEL + lanes));
                let scale = _mm256_mul_ps(halves(supers, lanes), bytes(at.add(lanes)));
                (scale, _mm256_mul_ps(negative, bytes(at.add(PANEL + lanes))))
            }
            Scales::Halves => (halves(supers, lanes), _mm256_setzero_ps()),
            Scales::Power => {
                let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(lanes).cast()));
                // Half of 2^(exponent − 127). The two smallest are denormal.
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)));
                let denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x20_0000), exponents);
                let is_normal = _mm256_cmpgt_epi32(exponents, _mm256_set1_epi32(1));
                let scale = _mm256_castsi256_ps(_mm256_blendv_epi8(denormal, normal, is_normal));
                (scale, _mm256_mul_ps(scale, _mm256_set1_ps(-f32::from(FP4_OFFSET))))
            }
        }
    }
}

/// Unpacks nibbles: those of step j are the low ones of line j, those of step j + 4 its high ones. `finish` makes codes of
/// the nibbles of a step and a half of the line.
#[inline(always)]
unsafe fn by_nibbles(packed: *const u8, group: &mut Group, finish: impl Fn(__m256i, usize, usize) -> __m256i) {
    // SAFETY: the caller of `group` guarantees this.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        for step in 0..STEPS / 2 {
            for half in 0..2 {
                let at = half * LINE / 2;
                let both = _mm256_loadu_si256(packed.add(step * LINE + at).cast());
                let low = _mm256_and_si256(both, mask);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
                for (step, codes) in [(step, low), (step + STEPS / 2, high)] {
                    let to = group.codes[step].as_mut_ptr().add(at).cast();
                    _mm256_storeu_si256(to, finish(codes, step, half));
                }
            }
        }
    }
}

/// Adds the fifth bits, a mask of 64 for each step.
#[inline(always)]
unsafe fn fifth(codes: __m256i, uppers: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller of `group` guarantees this.
    unsafe {
        let bits = uppers.add(step * 8 + half * 4).cast::<i32>().read_unaligned();
        // Each byte gets the byte of the mask that has its bit, then only that bit.
        let order = _mm256_setr_epi64x(
            0,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), order);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(16)))
    }
}

/// Adds the two upper bits: those of step j are in register j % 2, from bit j / 2 · 2 on.
#[inline(always)]
unsafe fn sixth(codes: __m256i, uppers: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller of `group` guarantees this.
    unsafe {
        let uppers = _mm256_loadu_si256(uppers.add(step % 2 * LINE + half * LINE / 2).cast());
        // The bits move to bits 4 and 5; bits from the neighbouring byte are next to them and are masked.
        let uppers = match step / 2 {
            0 => _mm256_slli_epi16::<4>(uppers),
            1 => _mm256_slli_epi16::<2>(uppers),
            2 => uppers,
            _ => _mm256_srli_epi16::<2>(uppers),
        };
        _mm256_or_si256(codes, _mm256_and_si256(uppers, _mm256_set1_epi8(0x30)))
    }
}

/// Reads eight f16, from element `from` on.
#[inline(always)]
unsafe fn halves(at: *const u8, from: usize) -> __m256 {
    // SAFETY: the caller of `group` guarantees this.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(2 * from).cast())) }
}

/// Reads eight bytes.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> __m256 {
    // SAFETY: the caller of `group` guarantees this.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()))) }
}

/// Prefetches a group's part of a panel.
#[inline(always)]
pub(super) fn prefetch(panel: *const u8, layout: &Layout, group: usize) {
    let bytes = layout.bytes / layout.groups();
    for line in 0..bytes.div_ceil(LINE) {
        // SAFETY: a prefetch is a hint and may have any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(panel.wrapping_add(group * bytes + line * LINE).cast()) };
    }
}
