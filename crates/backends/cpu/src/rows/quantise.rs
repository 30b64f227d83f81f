//! Quantisation with AVX2. It computes what [`super::plain`] does, which compilers vectorise badly: they narrow integers lane by lane.

use std::arch::x86_64::*;

use super::{GROUP, LARGEST_CODE, LARGEST_OTHER, LARGEST_OUTLIER, LARGEST_PART, LOW_BITS, QuantRow};
use crate::weights::STEPS;

/// Number of elements of a register.
const WIDTH: usize = 8;

/// Number of groups whose scales are computed at once.
const AT_ONCE: usize = 8;

/// Quantises a row of whole groups. With `COARSE`, it has 8 bits but for outlying steps.
///
/// # Safety
/// AVX2 must be available.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn quantise<const COARSE: bool>(x: &[f32], out: QuantRow<'_>) {
    let QuantRow { codes, scales, sums, totals } = out;
    let (x, codes) = (x.as_chunks::<GROUP>().0, codes.as_chunks_mut::<{ 2 * GROUP }>().0);
    let groups = x.chunks(AT_ONCE).zip(codes.chunks_mut(AT_ONCE));
    let scales = scales.chunks_mut(AT_ONCE).zip(sums.chunks_mut(AT_ONCE)).zip(totals.chunks_mut(AT_ONCE));
    let most = if COARSE { LARGEST_PART } else { LARGEST_CODE };
    for ((x, codes), ((scales, sums), totals)) in groups.zip(scales) {
        let (mut largest, mut outlying) = ([0.0; AT_ONCE], [NO_STEP; AT_ONCE]);
        for ((largest, outlying), x) in largest.iter_mut().zip(&mut outlying).zip(x) {
            if COARSE {
                (*largest, *outlying) = coarse_range(x);
            } else {
                *largest = largest_of(x);
            }
        }
        let inverses = largest.map(|largest| if largest > 0.0 { most / largest } else { 0.0 });
        let groups = x.iter().zip(codes).zip(inverses).zip(outlying);
        for ((((x, codes), inverse), outlying), totals) in groups.zip(&mut *totals) {
            *totals = quantise_group::<COARSE>(x, inverse, outlying, codes);
        }
        for (((scale, sum), largest), [first, second]) in scales.iter_mut().zip(sums).zip(largest).zip(totals) {
            *scale = largest / most;
            *sum = *scale * first.wrapping_add(*second) as f32;
        }
    }
}

/// Returns the largest magnitude that is not NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of(x: &[f32; GROUP]) -> f32 {
    let sign = _mm256_set1_ps(-0.0);
    let mut largest = _mm256_setzero_ps();
    for x in x.as_chunks::<WIDTH>().0 {
        // SAFETY: a register has eight elements.
        let magnitude = _mm256_andnot_ps(sign, unsafe { _mm256_loadu_ps(x.as_ptr()) });
        // If the first operand is NaN, the result is the second.
        largest = _mm256_max_ps(magnitude, largest);
    }
    largest_lane(largest)
}

/// Index of a step that no group has.
const NO_STEP: usize = STEPS;

/// Words of −1 for the elements of a step, by its index.
static ELEMENTS: [[[i16; 2 * WIDTH]; 2]; STEPS + 1] = {
    let mut elements = [[[0; 2 * WIDTH]; 2]; STEPS + 1];
    let mut k = 0;
    while k < GROUP {
        elements[k / 4][k / (2 * WIDTH)][k % (2 * WIDTH)] = -1;
        k += 1;
    }
    elements
};

/// Returns the magnitude of a coarse group that becomes the largest part, and the outlying step.
#[inline]
#[target_feature(enable = "avx2")]
fn coarse_range(x: &[f32; GROUP]) -> (f32, usize) {
    let (sign, zero) = (_mm256_set1_ps(-0.0), _mm256_setzero_ps());
    // SAFETY: a register has eight elements. If the first operand is NaN, the result is the second.
    let magnitudes =
        |i: usize| unsafe { _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x.as_ptr().add(i * WIDTH))), zero) };
    let pairs = |a: __m256, b: __m256| _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let [a, b] = [pairs(magnitudes(0), magnitudes(1)), pairs(magnitudes(2), magnitudes(3))];
    let [a, b] = [_mm256_castps_pd(a), _mm256_castps_pd(b)];
    let steps = |pairs: __m256d| _mm256_castpd_ps(pairs);
    // The largest of each step: the even steps in the first half, and then the odd ones.
    let steps = _mm256_max_ps(steps(_mm256_unpacklo_pd(a, b)), steps(_mm256_unpackhi_pd(a, b)));
    let largest = largest_lane(steps);
    let outlies = _mm256_cmp_ps::<_CMP_GT_OQ>(steps, _mm256_set1_ps(LARGEST_OTHER * largest));
    let lanes = _mm256_movemask_ps(outlies) as u32;
    if lanes.count_ones() != 1 {
        return (largest, NO_STEP);
    }
    let lane = lanes.trailing_zeros() as usize;
    let others = largest_lane(_mm256_andnot_ps(outlies, steps));
    let least = largest / LARGEST_OUTLIER;
    (if others > least { others } else { least }, lane % 4 * 2 + lane / 4)
}

/// Returns the largest element.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_lane(x: __m256) -> f32 {
    let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
}

/// Writes the codes of a group, the high parts and then the low ones. With `COARSE`, only the outlying step has high parts. Returns
/// the sums of the codes of its halves.
#[inline]
#[target_feature(enable = "avx2")]
fn quantise_group<const COARSE: bool>(
    x: &[f32; GROUP],
    inverse: f32,
    outlying: usize,
    codes: &mut [i8; 2 * GROUP],
) -> [i32; 2] {
    const { assert!(GROUP == 4 * WIDTH) };
    let inverse = _mm256_set1_ps(inverse);
    // SAFETY: a register has eight elements.
    let rounded =
        |i: usize| unsafe { _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.as_ptr().add(i * WIDTH)), inverse)) };
    // Packing takes four elements of each operand by turns.
    let words = |i: usize| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(rounded(i), rounded(i + 1)));
    let half = _mm256_set1_epi16(1 << (LOW_BITS - 1));
    let upper = |words: __m256i, i: usize| {
        let upper = _mm256_srai_epi16::<{ LOW_BITS as i32 }>(_mm256_add_epi16(words, half));
        // SAFETY: a register has sixteen words.
        let elements = || unsafe { _mm256_loadu_si256(ELEMENTS[outlying][i].as_ptr().cast()) };
        if COARSE { _mm256_and_si256(upper, elements()) } else { upper }
    };
    let lower =
        |words: __m256i, upper: __m256i| _mm256_sub_epi16(words, _mm256_slli_epi16::<{ LOW_BITS as i32 }>(upper));
    let packed = |a: __m256i, b: __m256i| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(a, b));

    let [first, second] = [words(0), words(2)];
    let high = [upper(first, 0), upper(second, 1)];
    // SAFETY: the parts have 32 bytes each.
    unsafe {
        _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed(high[0], high[1]));
        let low = packed(lower(first, high[0]), lower(second, high[1]));
        _mm256_storeu_si256(codes.as_mut_ptr().add(GROUP).cast(), low);
    }
    let ones = _mm256_set1_epi16(1);
    // Lanes of 128 bits have two partial sums of the first half and two of the second.
    let pairs = _mm256_hadd_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
    let four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let sums = _mm_hadd_epi32(four, four);
    [_mm_cvtsi128_si32(sums), _mm_extract_epi32::<1>(sums)]
}
