//! Quantisation with AVX2. It computes what [`super::plain`] does, which compilers vectorise badly: they narrow integers lane by lane.

use std::arch::x86_64::*;

use super::{GROUP, LARGEST_CODE, LOW_BITS, QuantRow};

/// Number of elements of a register.
const WIDTH: usize = 8;

/// Number of groups whose scales are computed at once.
const AT_ONCE: usize = 8;

/// Quantises a row of whole groups. With `COARSE`, the low parts are zero.
///
/// # Safety
/// AVX2 must be available.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn quantise<const COARSE: bool>(x: &[f32], out: QuantRow<'_>) {
    let QuantRow { codes, scales, sums, totals } = out;
    let (x, codes) = (x.as_chunks::<GROUP>().0, codes.as_chunks_mut::<{ 2 * GROUP }>().0);
    let groups = x.chunks(AT_ONCE).zip(codes.chunks_mut(AT_ONCE));
    let scales = scales.chunks_mut(AT_ONCE).zip(sums.chunks_mut(AT_ONCE)).zip(totals.chunks_mut(AT_ONCE));
    for ((x, codes), ((scales, sums), totals)) in groups.zip(scales) {
        let mut largest = [0.0; AT_ONCE];
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = largest_of(x);
        }
        let inverses = largest.map(|largest| if largest > 0.0 { LARGEST_CODE / largest } else { 0.0 });
        for (((x, codes), inverse), totals) in x.iter().zip(codes).zip(inverses).zip(&mut *totals) {
            *totals = quantise_group::<COARSE>(x, inverse, codes);
        }
        for (((scale, sum), largest), [first, second]) in scales.iter_mut().zip(sums).zip(largest).zip(totals) {
            *scale = largest / LARGEST_CODE;
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
    let four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps::<1>(largest));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
}

/// Writes the codes of a group, the high parts and then the low ones. Returns the sums of the codes of its halves.
#[inline]
#[target_feature(enable = "avx2")]
fn quantise_group<const COARSE: bool>(x: &[f32; GROUP], inverse: f32, codes: &mut [i8; 2 * GROUP]) -> [i32; 2] {
    const { assert!(GROUP == 4 * WIDTH) };
    let inverse = _mm256_set1_ps(inverse);
    // SAFETY: a register has eight elements.
    let rounded =
        |i: usize| unsafe { _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.as_ptr().add(i * WIDTH)), inverse)) };
    // Packing takes four elements of each operand by turns.
    let words = |i: usize| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(rounded(i), rounded(i + 1)));
    let half = _mm256_set1_epi16(1 << (LOW_BITS - 1));
    let upper = |words: __m256i| _mm256_srai_epi16::<{ LOW_BITS as i32 }>(_mm256_add_epi16(words, half));
    let shifted = |upper: __m256i| _mm256_slli_epi16::<{ LOW_BITS as i32 }>(upper);
    let packed = |a: __m256i, b: __m256i| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(a, b));

    let words = [words(0), words(2)];
    let high = [upper(words[0]), upper(words[1])];
    let coarse = [shifted(high[0]), shifted(high[1])];
    let low = if COARSE {
        _mm256_setzero_si256()
    } else {
        packed(_mm256_sub_epi16(words[0], coarse[0]), _mm256_sub_epi16(words[1], coarse[1]))
    };
    // SAFETY: the parts have 32 bytes each.
    unsafe {
        _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed(high[0], high[1]));
        _mm256_storeu_si256(codes.as_mut_ptr().add(GROUP).cast(), low);
    }
    let [first, second] = if COARSE { coarse } else { words };
    let ones = _mm256_set1_epi16(1);
    // Lanes of 128 bits have two partial sums of the first half and two of the second.
    let pairs = _mm256_hadd_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
    let four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let sums = _mm_hadd_epi32(four, four);
    [_mm_cvtsi128_si32(sums), _mm_extract_epi32::<1>(sums)]
}
