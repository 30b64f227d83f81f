//! Quantisation with AVX2. It computes what [`super::plain`] does, which compilers vectorise badly: they narrow integers lane by lane.

use std::arch::x86_64::*;

use super::{ALL_STEPS, GROUP, LARGEST_CODE, LARGEST_OTHER, LARGEST_OUTLIER, LARGEST_PART, LOW_BITS, QuantRow};
use crate::weights::STEPS;

/// Number of elements of a register.
const WIDTH: usize = 8;

/// Number of groups whose ranges are found at once, each in a lane.
const AT_ONCE: usize = WIDTH;

/// Quantises a row of whole groups. With `COARSE`, it has 8 bits but for outlying steps.
///
/// # Safety
/// AVX2 must be available.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn quantise<const COARSE: bool>(x: &[f32], out: QuantRow<'_>) {
    let QuantRow { codes, scales, sums, totals, steps } = out;
    let (x, codes) = (x.as_chunks::<GROUP>().0, codes.as_chunks_mut::<{ 2 * GROUP }>().0);
    let (codes, scales) = (&mut codes[..x.len()], &mut scales[..x.len()]);
    let (sums, totals, steps) = (&mut sums[..x.len()], &mut totals[..x.len()], &mut steps[..x.len()]);
    for start in (0..x.len()).step_by(AT_ONCE) {
        let some = start..(start + AT_ONCE).min(x.len());
        let ranges = ranges::<COARSE>(&x[some.clone()]);
        for (lane, group) in some.enumerate() {
            let (inverse, outlying) = (ranges.inverses[lane], ranges.outlying[lane] as usize);
            let halves = quantise_group::<COARSE>(&x[group], inverse, outlying, &mut codes[group]);
            let scale = ranges.scales[lane];
            // That of no step is shifted out.
            steps[group] = if COARSE { (1u32 << outlying) as u8 } else { ALL_STEPS };
            (scales[group], totals[group]) = (scale, halves);
            sums[group] = scale * halves[0].wrapping_add(halves[1]) as f32;
        }
    }
}

/// Ranges of groups.
#[repr(align(32))]
struct Ranges {
    scales: [f32; AT_ONCE],
    /// Factors that convert elements to codes.
    inverses: [f32; AT_ONCE],
    /// Outlying steps of coarse groups, or [`NO_STEP`].
    outlying: [i32; AT_ONCE],
}

/// Finds the ranges of up to [`AT_ONCE`] groups. A group is a lane, so that nothing is added across lanes and no group takes a branch of
/// its own.
#[inline]
#[target_feature(enable = "avx2")]
fn ranges<const COARSE: bool>(groups: &[[f32; GROUP]]) -> Ranges {
    let mut steps = [_mm256_setzero_ps(); AT_ONCE];
    for (steps, x) in steps.iter_mut().zip(groups) {
        *steps = largest_of_steps(x);
    }
    let steps = transposed(steps);
    let (mut largest, mut others) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for step in steps {
        others = _mm256_max_ps(others, _mm256_min_ps(largest, step));
        largest = _mm256_max_ps(largest, step);
    }
    let mut outlying = _mm256_set1_epi32(NO_STEP);
    let mut most = LARGEST_CODE;
    if COARSE {
        most = LARGEST_PART;
        let bound = _mm256_mul_ps(largest, _mm256_set1_ps(LARGEST_OTHER));
        // False if the largest is zero or infinite.
        let one = _mm256_cmp_ps::<_CMP_GT_OQ>(largest, bound);
        let one = _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(others, bound), one);
        for (index, step) in STEP_OF.into_iter().zip(steps) {
            let index = _mm256_castsi256_ps(_mm256_set1_epi32(index));
            let outlies = _mm256_and_ps(one, _mm256_cmp_ps::<_CMP_GT_OQ>(step, bound));
            outlying = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(outlying), index, outlies));
        }
        let least = _mm256_mul_ps(largest, _mm256_set1_ps(1.0 / LARGEST_OUTLIER));
        largest = _mm256_blendv_ps(largest, _mm256_max_ps(others, least), one);
    }
    let most = _mm256_set1_ps(most);
    let exists = _mm256_cmp_ps::<_CMP_GT_OQ>(largest, _mm256_setzero_ps());
    let mut ranges = Ranges { scales: [0.0; AT_ONCE], inverses: [0.0; AT_ONCE], outlying: [0; AT_ONCE] };
    // SAFETY: each array is an aligned register.
    unsafe {
        _mm256_store_ps(ranges.scales.as_mut_ptr(), _mm256_div_ps(largest, most));
        _mm256_store_ps(ranges.inverses.as_mut_ptr(), _mm256_and_ps(_mm256_div_ps(most, largest), exists));
        _mm256_store_si256(ranges.outlying.as_mut_ptr().cast(), outlying);
    }
    ranges
}

/// Steps by lane of [`largest_of_steps`].
const STEP_OF: [i32; STEPS] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Returns the largest magnitude in each step that is not NaN, in the order of [`STEP_OF`].
#[inline]
#[target_feature(enable = "avx2")]
fn largest_of_steps(x: &[f32; GROUP]) -> __m256 {
    let (sign, zero) = (_mm256_set1_ps(-0.0), _mm256_setzero_ps());
    // SAFETY: a register has eight elements. If the first operand is NaN, the result is the second.
    let magnitudes =
        |i: usize| unsafe { _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x.as_ptr().add(i * WIDTH))), zero) };
    let pairs =
        |a: __m256, b: __m256| _mm256_castps_pd(_mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    let (a, b) = (pairs(magnitudes(0), magnitudes(1)), pairs(magnitudes(2), magnitudes(3)));
    let [even, odd] = [_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b)].map(|x| _mm256_castpd_ps(x));
    _mm256_max_ps(even, odd)
}

/// Returns element i of register k as element k of register i.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(x: [__m256; WIDTH]) -> [__m256; WIDTH] {
    let pairs =
        |a: __m256, b: __m256| [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)].map(|x| _mm256_castps_pd(x));
    // Elements 0, 1, 2 and 3 of four registers, and in the second half the four that follow.
    let fours = |from: usize| {
        let ([a, b], [c, d]) = (pairs(x[from], x[from + 1]), pairs(x[from + 2], x[from + 3]));
        [_mm256_unpacklo_pd(a, c), _mm256_unpackhi_pd(a, c), _mm256_unpacklo_pd(b, d), _mm256_unpackhi_pd(b, d)]
            .map(|x| _mm256_castpd_ps(x))
    };
    let (first, second) = (fours(0), fours(4));
    std::array::from_fn(|i| match i {
        0..4 => _mm256_permute2f128_ps::<0x20>(first[i], second[i]),
        _ => _mm256_permute2f128_ps::<0x31>(first[i - 4], second[i - 4]),
    })
}

/// Index of a step that no group has.
const NO_STEP: i32 = STEPS as i32;

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
