//! The kernel with AVX2 for several rows at once. It computes the same sums as [`super::plain`] and widens a key or value
//! once for a few rows.

use std::arch::x86_64::*;

use super::plain::{Running, visible, weigh, whole};
use super::walk::{by_rows, each_row, queries, walk};
use super::{Block, KEYS, ROWS, chunk_of};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};

/// Number of elements of a register.
const LANES: usize = 8;

/// Computes attention of up to half of [`ROWS`] rows in f32.
///
/// # Safety
/// AVX2 and FMA must be available.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn attend(block: Block<'_>) {
    // SAFETY: the caller guarantees this.
    unsafe { by_rows!(rows, block, ROWS / 2) }
}

/// Computes `R` rows. Rows that do not exist repeat the first.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<const R: usize>(block: Block<'_>) {
    let q = queries::<_, R>(block.q, block.sees.len());
    // SAFETY: the caller guarantees this; every row has as many pairs as a key, weights have room for a tile, and the
    // output has as many chunks as a value.
    unsafe {
        walk!(
            Isa::Avx2,
            block,
            R,
            1,
            |keys: &[&[u32]], _, weights: &mut [[f32; KEYS]; ROWS], at| {
                let keys = keys[0];
                // The sums of six rows fill the registers.
                if R == 8 {
                    score::<4>(&q[..4], keys, &mut weights[..4], at);
                    score::<4>(&q[4..], keys, &mut weights[4..], at);
                } else {
                    score::<R>(&q, keys, &mut weights[..], at);
                }
            },
            each_row!(weigh::<true>, R),
            |_: &[f32], _: &mut [u16; KEYS]| {},
            |values: &[&[u32]],
             weights: &[[f32; KEYS]; ROWS],
             _: &[[u16; KEYS]; ROWS],
             at,
             fades: &[f32; R],
             count,
             out| { gather(values, weights, at, fades, count, out) }
        );
    }
}

/// Returns the low halves of eight words of two bf16, as f32, and the high halves.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widened(words: *const u32) -> [__m256; 2] {
    // SAFETY: the caller has eight words.
    let words = unsafe { _mm256_loadu_si256(words.cast()) };
    let high = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(high)]
}

/// Writes the rows' scores with the sixteen keys of a block to `weights[..][at..]`.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn score<const R: usize>(q: &[&[f32]], keys: &[u32], weights: &mut [[f32; KEYS]], at: usize) {
    assert!(q.len() >= R && weights.len() >= R && at + BLOCK <= KEYS);
    for half in 0..BLOCK / LANES {
        let (mut even, mut odd) = ([_mm256_setzero_ps(); R], [_mm256_setzero_ps(); R]);
        for (pair, words) in keys.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: a block has two registers of words; rows are as long as all pairs.
            unsafe {
                let [low, high] = widened(words.as_ptr().add(half * LANES));
                for r in 0..R {
                    let q = q.get_unchecked(r).as_ptr().add(2 * pair);
                    even[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(&*q), low, even[r]);
                    odd[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(&*q.add(1)), high, odd[r]);
                }
            }
        }
        for r in 0..R {
            // SAFETY: there is room for a block, as asserted.
            unsafe {
                let out = weights[r].as_mut_ptr().add(at + half * LANES);
                _mm256_storeu_ps(out, _mm256_add_ps(even[r], odd[r]));
            }
        }
    }
}

/// Scales the rows' accumulated output by its factor and adds the values of blocks, one pair of slots after the other.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn gather<const R: usize>(
    values: &[&[u32]],
    weights: &[[f32; KEYS]; ROWS],
    at: usize,
    fades: &[f32; R],
    count: usize,
    out: &mut [f32],
) {
    for chunk in 0..out.len() / count / CHUNK {
        let columns = [2 * chunk, 2 * chunk + 1];
        // SAFETY: the caller guarantees this.
        unsafe {
            // The sums of six rows with two registers fill the registers.
            if R <= 6 {
                gather_some::<R, 2>(values, columns, (weights, at), (fades, count), out);
            } else {
                for column in columns {
                    gather_some::<R, 1>(values, [column], (weights, at), (fades, count), out);
                }
            }
        }
    }
}

/// Does the same for some registers of columns of one chunk.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn gather_some<const R: usize, const C: usize>(
    values: &[&[u32]],
    columns: [usize; C],
    (weights, at): (&[[f32; KEYS]; ROWS], usize),
    (fades, count): (&[f32; R], usize),
    out: &mut [f32],
) {
    let width = out.len() / count;
    assert!(
        R <= ROWS && at + values.len() * BLOCK <= KEYS && columns.iter().all(|column| (column + 1) * LANES <= width)
    );
    let mut sums = [[_mm256_setzero_ps(); R]; C];
    // SAFETY: the rows below `count` have these columns, and every row has a tile's weights.
    unsafe {
        for c in 0..C {
            for r in 0..R {
                if r < count {
                    let sum = _mm256_loadu_ps(out.as_ptr().add(r * width + columns[c] * LANES));
                    sums[c][r] = _mm256_mul_ps(sum, _mm256_set1_ps(fades[r]));
                }
            }
        }
        let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        for (block, values) in values.iter().enumerate() {
            for (pair, words) in chunk_of(values, columns[0] / 2).iter().enumerate() {
                let words = columns.map(|column| words.as_ptr().add(column % 2 * LANES).cast::<__m256i>());
                debug_assert!(words.iter().all(|words| words.is_aligned()), "chunks fill cache lines");
                let weights = weights.as_ptr().cast::<f32>().add(at + block * BLOCK + 2 * pair);
                let mut halves = [_mm256_setzero_ps(); C];
                for c in 0..C {
                    halves[c] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(words[c])));
                }
                for r in 0..R {
                    let weight = _mm256_broadcast_ss(&*weights.add(r * KEYS));
                    for c in 0..C {
                        sums[c][r] = _mm256_fmadd_ps(weight, halves[c], sums[c][r]);
                    }
                }
                // If the words stayed in registers, sums would not.
                for c in 0..C {
                    halves[c] = _mm256_castsi256_ps(_mm256_and_si256(words[c].read_volatile(), high));
                }
                for r in 0..R {
                    let weight = _mm256_broadcast_ss(&*weights.add(r * KEYS + 1));
                    for c in 0..C {
                        sums[c][r] = _mm256_fmadd_ps(weight, halves[c], sums[c][r]);
                    }
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                if r < count {
                    _mm256_storeu_ps(out.as_mut_ptr().add(r * width + columns[c] * LANES), sums[c][r]);
                }
            }
        }
    }
}
