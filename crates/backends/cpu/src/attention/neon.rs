//! The kernel with NEON for several rows at once. It computes the same sums as [`super::plain`] and widens a key or value
//! once for a few rows.

use std::arch::aarch64::*;

use super::plain::{Running, visible, weigh, whole};
use super::walk::{by_rows, each_row, queries, walk};
use super::{Block, KEYS, ROWS, chunk_of};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};

/// Number of elements of two registers, which are processed together.
const LANES: usize = 8;

/// Computes attention of up to half of [`ROWS`] rows in f32.
///
/// # Safety
/// NEON must be available.
#[target_feature(enable = "neon")]
pub(super) unsafe fn attend(block: Block<'_>) {
    // SAFETY: the caller guarantees this.
    unsafe { by_rows!(rows, block, ROWS / 2) }
}

/// Computes `R` rows. Rows that do not exist repeat the first.
#[target_feature(enable = "neon")]
unsafe fn rows<const R: usize>(block: Block<'_>) {
    let q = queries::<_, R>(block.q, block.sees.len());
    // SAFETY: the caller guarantees this; every row has as many pairs as a key, weights have room for a tile, and the
    // output has as many chunks as a value.
    unsafe {
        walk!(
            Isa::Neon,
            block,
            R,
            1,
            |keys: &[&[u32]], _, weights: &mut [[f32; KEYS]; ROWS], at| {
                let keys = keys[0];
                // The sums of four rows and the inputs fill the registers.
                match R {
                    6 => {
                        score::<3>(&q[..3], keys, &mut weights[..3], at);
                        score::<3>(&q[3..], keys, &mut weights[3..], at);
                    }
                    8 => {
                        score::<4>(&q[..4], keys, &mut weights[..4], at);
                        score::<4>(&q[4..], keys, &mut weights[4..], at);
                    }
                    _ => score::<R>(&q, keys, &mut weights[..], at),
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
#[target_feature(enable = "neon")]
unsafe fn widened(words: *const u32) -> [[float32x4_t; 2]; 2] {
    // SAFETY: the caller has eight words.
    let words = unsafe { [vld1q_u32(words), vld1q_u32(words.add(LANES / 2))] };
    let mask = vdupq_n_u32(0xffff_0000);
    let low = [vshlq_n_u32::<16>(words[0]), vshlq_n_u32::<16>(words[1])];
    let high = [vandq_u32(words[0], mask), vandq_u32(words[1], mask)];
    [
        [vreinterpretq_f32_u32(low[0]), vreinterpretq_f32_u32(low[1])],
        [vreinterpretq_f32_u32(high[0]), vreinterpretq_f32_u32(high[1])],
    ]
}

/// Writes the rows' scores with the sixteen keys of a block to `weights[..][at..]`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn score<const R: usize>(q: &[&[f32]], keys: &[u32], weights: &mut [[f32; KEYS]], at: usize) {
    assert!(q.len() >= R && weights.len() >= R && at + BLOCK <= KEYS);
    for half in 0..BLOCK / LANES {
        let zeros = [[vdupq_n_f32(0.0); 2]; R];
        let (mut even, mut odd) = (zeros, zeros);
        for (pair, words) in keys.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: a block has four registers of words; rows are as long as all pairs.
            unsafe {
                let [low, high] = widened(words.as_ptr().add(half * LANES));
                for r in 0..R {
                    let q = vld1_f32(q.get_unchecked(r).as_ptr().add(2 * pair));
                    for i in 0..2 {
                        even[r][i] = vfmaq_lane_f32::<0>(even[r][i], low[i], q);
                        odd[r][i] = vfmaq_lane_f32::<1>(odd[r][i], high[i], q);
                    }
                }
            }
        }
        for r in 0..R {
            for i in 0..2 {
                // SAFETY: there is room for a block, as asserted.
                unsafe {
                    let out = weights[r].as_mut_ptr().add(at + half * LANES + i * LANES / 2);
                    vst1q_f32(out, vaddq_f32(even[r][i], odd[r][i]));
                }
            }
        }
    }
}

/// Scales the rows' accumulated output by its factor and adds the values of blocks, one pair of slots after the other.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn gather<const R: usize>(
    values: &[&[u32]],
    weights: &[[f32; KEYS]; ROWS],
    at: usize,
    fades: &[f32; R],
    count: usize,
    out: &mut [f32],
) {
    let width = out.len() / count;
    assert!(R <= ROWS && at + values.len() * BLOCK <= KEYS);
    for chunk in 0..width / CHUNK {
        for half in 0..CHUNK / LANES {
            let at_out = chunk * CHUNK + half * LANES;
            let mut sums = [[vdupq_n_f32(0.0); 2]; R];
            // SAFETY: an existing row has as many chunks as a value, and every row has a tile's weights.
            unsafe {
                for r in 0..R {
                    if r < count {
                        for (i, sum) in sums[r].iter_mut().enumerate() {
                            let before = vld1q_f32(out.as_ptr().add(r * width + at_out + i * LANES / 2));
                            *sum = vmulq_n_f32(before, fades[r]);
                        }
                    }
                }
                for (block, values) in values.iter().enumerate() {
                    for (pair, words) in chunk_of(values, chunk).iter().enumerate() {
                        let [low, high] = widened(words.as_ptr().add(half * LANES));
                        for r in 0..R {
                            let weight = vld1_f32(weights[r].as_ptr().add(at + block * BLOCK + 2 * pair));
                            for i in 0..2 {
                                sums[r][i] = vfmaq_lane_f32::<0>(sums[r][i], low[i], weight);
                                sums[r][i] = vfmaq_lane_f32::<1>(sums[r][i], high[i], weight);
                            }
                        }
                    }
                }
                for (r, sums) in sums.into_iter().enumerate().take(count) {
                    for (i, sum) in sums.into_iter().enumerate() {
                        vst1q_f32(out.as_mut_ptr().add(r * width + at_out + i * LANES / 2), sum);
                    }
                }
            }
        }
    }
}
