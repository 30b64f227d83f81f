//! The kernels with AVX-512 in f32, for several rows at once. They compute the same sums as [`super::plain`] and widen
//! a key or value once for all rows.

use std::arch::x86_64::*;

use super::plain::{FLOOR, Running, visible, whole};
use super::walk::{by_rows, each_row, queries, walk};
use super::{Block, KEYS, ROWS, chunk_of};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};

/// Does what [`super::turn`] says.
///
/// # Safety
/// AVX-512 F and BW must be available.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn turn(keys: &[u32], values: &mut [u32]) {
    // Of the halves of sixteen words, the low ones in pairs of words and then the high ones.
    let halves: [u16; 32] = std::array::from_fn(|i| {
        let (word, half) = (i / 2 % 8, i / 16);
        (4 * word + 2 * (i % 2) + half) as u16
    });
    // Of two registers, each of groups of `group` words for each of `count` slots: those of the first half of the slots,
    // or of the second, with the groups of both registers adjacent.
    let joined = |group: usize, second: usize| -> [u32; 16] {
        std::array::from_fn(|i| {
            let (slot, from, word) = (i / (2 * group), i / group % 2, i % group);
            (from * 16 + (slot + second * 16 / (2 * group)) * group + word) as u32
        })
    };
    // The first step has the two words of a slot eight apart.
    let apart = |second: usize| -> [u32; 16] {
        std::array::from_fn(|i| (i / 2 % 2 * 16 + i % 2 * 8 + i / 4 + second * 4) as u32)
    };
    let pairs = keys.as_chunks::<BLOCK>().0;
    let chunks = values.as_chunks_mut::<CHUNK>().0.as_chunks_mut::<{ BLOCK / 2 }>().0;
    // SAFETY: every array has the size of a register.
    unsafe {
        let load = |words: &[u32; 16]| _mm512_loadu_si512(words.as_ptr().cast());
        let halves = _mm512_loadu_si512(halves.as_ptr().cast());
        let steps = [
            [0, 1].map(|second| load(&apart(second))),
            [0, 1].map(|s| load(&joined(4, s))),
            [0, 1].map(|s| load(&joined(8, s))),
        ];
        for (chunk, slots) in chunks.iter_mut().enumerate() {
            let mut x: [__m512i; BLOCK / 2] = std::array::from_fn(|pair| {
                let words = pairs.get(chunk * (CHUNK / 2) + pair).unwrap_or(&[0; BLOCK]);
                _mm512_permutexvar_epi16(halves, load(words))
            });
            // Registers of more and more dimensions of fewer and fewer slots.
            for (step, [first, second]) in steps.into_iter().enumerate() {
                let stride = 1 << step;
                x = std::array::from_fn(|i| {
                    // Register i has the slots `i % (2 · stride)` of the dimensions `i / (2 · stride)`.
                    let (dims, part) = (i / (2 * stride), i % (2 * stride));
                    let from = dims * 2 * stride + part / 2;
                    let index = if part % 2 == 0 { first } else { second };
                    _mm512_permutex2var_epi32(x[from], index, x[from + stride])
                });
            }
            for (values, x) in slots.iter_mut().zip(x) {
                _mm512_storeu_si512(values.as_mut_ptr().cast(), x);
            }
        }
    }
}

/// Computes attention of up to half of [`ROWS`] rows in f32.
///
/// # Safety
/// AVX-512 F, BW and DQ must be available.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn attend(block: Block<'_>) {
    // SAFETY: the caller guarantees this.
    unsafe { by_rows!(rows, block, ROWS / 2) }
}

/// Computes `R` rows in f32. Rows that do not exist repeat the first.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn rows<const R: usize>(block: Block<'_>) {
    let q = queries::<_, R>(block.q, block.sees.len());
    // SAFETY: the caller guarantees this; every row has as many pairs as a key, weights have room for a tile, and the
    // output has as many chunks as a value.
    unsafe {
        walk!(
            Isa::Avx512,
            block,
            R,
            1,
            |keys: &[&[u32]], _, weights, at| score(&q, keys[0], weights, at),
            each_row!(weigh, R),
            |_: &[f32], _: &mut [u16; KEYS]| {},
            |values: &[&[u32]], weights, _: &[[u16; KEYS]; ROWS], at, fades: &[f32; R], count, out| gather(
                values, weights, at, fades, count, out
            )
        );
    }
}

/// Returns the low halves of sixteen words of two bf16, as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn low(words: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
}

/// Returns the high halves as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn high(words: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
}

/// Writes the rows' scores with the sixteen keys of a block to `weights[..][at..]`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn score<const R: usize>(q: &[&[f32]; R], keys: &[u32], weights: &mut [[f32; KEYS]; ROWS], at: usize) {
    let (mut even, mut odd) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
    for (pair, words) in keys.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: a chunk is one register of words; rows are as long as all pairs.
        unsafe {
            let words = _mm512_loadu_si512(words.as_ptr().cast());
            let (low, high) = (low(words), high(words));
            for r in 0..R {
                even[r] = _mm512_fmadd_ps(_mm512_set1_ps(*q[r].get_unchecked(2 * pair)), low, even[r]);
                odd[r] = _mm512_fmadd_ps(_mm512_set1_ps(*q[r].get_unchecked(2 * pair + 1)), high, odd[r]);
            }
        }
    }
    for r in 0..R {
        let scores = &mut weights[r][at..][..BLOCK];
        // SAFETY: the slice has sixteen elements.
        unsafe { _mm512_storeu_ps(scores.as_mut_ptr(), _mm512_add_ps(even[r], odd[r])) };
    }
}

/// Converts a tile's scores to weights. Returns the factor for the values accumulated before.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn weigh(scores: &mut [f32], running: &mut Running) -> f32 {
    // SAFETY: the caller guarantees this.
    unsafe { weigh_with(scores, running, |x| exp(x)) }
}

/// Does the same with another function for `e^x`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn weigh_with(scores: &mut [f32], running: &mut Running, exp: impl Fn(__m512) -> __m512) -> f32 {
    let chunks = scores.as_chunks_mut::<BLOCK>().0;
    let mut largest = _mm512_set1_ps(running.largest);
    for scores in chunks.iter() {
        // SAFETY: the slice has sixteen elements.
        largest = _mm512_max_ps(largest, unsafe { _mm512_loadu_ps(scores.as_ptr()) });
    }
    let largest = _mm512_reduce_max_ps(largest).max(FLOOR);
    let mut sums = _mm512_setzero_ps();
    for scores in chunks {
        // SAFETY: the slice has sixteen elements.
        unsafe {
            let x = _mm512_sub_ps(_mm512_loadu_ps(scores.as_ptr()), _mm512_set1_ps(largest));
            let weights = exp(x);
            _mm512_storeu_ps(scores.as_mut_ptr(), weights);
            sums = _mm512_add_ps(sums, weights);
        }
    }
    let fade = _mm512_cvtss_f32(exp(_mm512_set1_ps(running.largest - largest)));
    *running = Running { largest, sum: running.sum.mul_add(fade, _mm512_reduce_add_ps(sums)) };
    fade
}

/// Computes `e^x` for x ≤ 0 like [`crate::rows::exp`]; 0 below −87.3. NaN stays NaN, because the maximum instruction
/// returns its second operand if one is NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    let least = _mm512_set1_ps(-87.3);
    let clamped = _mm512_max_ps(least, x);
    let n = _mm512_roundscale_ps::<0>(_mm512_mul_ps(clamped, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), clamped);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    let mut sum = _mm512_set1_ps(1.0 / 5040.0);
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    }
    let value = _mm512_scalef_ps(sum, n);
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, least), value)
}

/// Scales the rows' accumulated output by its factor and adds the values of blocks.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn gather<const R: usize>(
    values: &[&[u32]],
    weights: &[[f32; KEYS]; ROWS],
    at: usize,
    fades: &[f32; R],
    count: usize,
    out: &mut [f32],
) {
    let width = out.len() / count;
    assert!(at + values.len() * BLOCK <= KEYS);
    for chunk in 0..width / CHUNK {
        let mut sums = [_mm512_setzero_ps(); R];
        for r in 0..R.min(count) {
            let at = &out[r * width + chunk * CHUNK..][..CHUNK];
            // SAFETY: the slice has sixteen elements.
            sums[r] = _mm512_mul_ps(unsafe { _mm512_loadu_ps(at.as_ptr()) }, _mm512_set1_ps(fades[r]));
        }
        for (block, values) in values.iter().enumerate() {
            for (pair, words) in chunk_of(values, chunk).iter().enumerate() {
                // SAFETY: a pair of slots of a chunk is one register of words; a row has a tile's weights.
                unsafe {
                    let words = _mm512_loadu_si512(words.as_ptr().cast());
                    let (low, high) = (low(words), high(words));
                    for r in 0..R {
                        let weights = weights[r].as_ptr().add(at + block * BLOCK + 2 * pair);
                        sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(*weights), low, sums[r]);
                        sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(*weights.add(1)), high, sums[r]);
                    }
                }
            }
        }
        for r in 0..R.min(count) {
            let at = &mut out[r * width + chunk * CHUNK..][..CHUNK];
            // SAFETY: the slice has sixteen elements.
            unsafe { _mm512_storeu_ps(at.as_mut_ptr(), sums[r]) };
        }
    }
}
