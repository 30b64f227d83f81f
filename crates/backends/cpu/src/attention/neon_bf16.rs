//! The kernel with NEON in bf16, for several rows at once: it rounds queries and weights like keys and values and multiplies pairs
//! directly.

use std::arch::aarch64::*;

use super::plain::{Running, visible, weigh, whole};
use super::walk::{by_rows, each_row, queries, walk};
use super::{Block, KEYS, ROWS, chunk_of};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};
use crate::product::neon::bf16::dot;

/// Number of elements of a register.
const LANES: usize = 4;

/// Number of registers of the sums of a row, with the keys of a block or with a chunk of the values.
const REGISTERS: usize = BLOCK / LANES;

/// Computes attention of up to [`ROWS`] rows in bf16.
///
/// # Safety
/// NEON with bf16 must be available.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn attend(block: Block<'_>) {
    // SAFETY: the caller guarantees this.
    unsafe { by_rows!(rows, block, ROWS, 7 | 8 => 8, 9..=12 => 12) }
}

/// Calls a kernel for a few of `R` rows at a time: the sums of four rows, and the words that are multiplied, take most of the registers.
macro_rules! few_at_once {
    ($kernel:ident::<$rows:ident>($($arg:expr),*)) => {
        match $rows {
            1..=4 => $kernel::<$rows, $rows>(0, $($arg),*),
            6 => [0, 3].into_iter().for_each(|from| $kernel::<$rows, 3>(from, $($arg),*)),
            _ => (0..$rows).step_by(4).for_each(|from| $kernel::<$rows, 4>(from, $($arg),*)),
        }
    };
}

/// Computes `R` rows in bf16. Rows that do not exist repeat the first.
#[target_feature(enable = "neon,bf16")]
unsafe fn rows<const R: usize>(block: Block<'_>) {
    // There is room for more rows in bf16 than there are.
    let q = queries::<_, R>(&block.narrow_q[..block.q.len()], block.sees.len());
    // SAFETY: the caller guarantees this; weights have room for a tile, and the output has as many chunks as a value.
    unsafe {
        walk!(
            Isa::Neon,
            block,
            R,
            1,
            |keys: &[&[u32]], _, weights: &mut [[f32; KEYS]; ROWS], at| few_at_once!(score::<R>(
                &q,
                keys[0],
                &mut *weights,
                at
            )),
            each_row!(weigh::<true>, R),
            |scores: &[f32], narrow: &mut [u16; KEYS]| Isa::Neon.to_bf16(scores, &mut narrow[..scores.len()]),
            |values: &[&[u32]],
             _: &[[f32; KEYS]; ROWS],
             narrow: &[[u16; KEYS]; ROWS],
             at,
             fades: &[f32; R],
             count,
             out: &mut [f32]| few_at_once!(gather::<R>(values, (narrow, at), fades, count, &mut *out))
        );
    }
}

/// Adds the products of sixteen pairs with the pair of each row that has an index.
#[inline(always)]
unsafe fn add_pairs<const N: usize>(
    sums: &mut [[float32x4_t; REGISTERS]; N],
    pairs: &[u32; BLOCK],
    rows: [*const u16; N],
    index: usize,
) {
    // SAFETY: the caller guarantees the instruction set and that the rows have this pair; there are so many others.
    unsafe {
        let pairs: [_; REGISTERS] = std::array::from_fn(|i| vld1q_u16(pairs.as_ptr().add(i * LANES).cast()));
        for (sums, row) in sums.iter_mut().zip(rows) {
            let both = vreinterpretq_u16_u32(vdupq_n_u32(row.cast::<u32>().add(index).read_unaligned()));
            for (sum, pair) in sums.iter_mut().zip(pairs) {
                *sum = dot::<0>(*sum, pair, both);
            }
        }
    }
}

/// Writes the scores of `N` rows, from a row on, with the sixteen keys of a block to `weights[..][at..]`, one pair of dimensions after the
/// other.
#[inline]
#[target_feature(enable = "neon,bf16")]
unsafe fn score<const R: usize, const N: usize>(
    from: usize,
    q: &[&[u16]; R],
    keys: &[u32],
    weights: &mut [[f32; KEYS]; ROWS],
    at: usize,
) {
    let (keys, pairs) = (keys.as_chunks::<BLOCK>().0, q[0].len() / 2);
    assert!(from + N <= R && R <= ROWS && at + BLOCK <= KEYS);
    assert!(q.iter().all(|q| q.len() >= 2 * pairs));
    // SAFETY: there are so many rows of so many pairs, and room for a block in each row of weights, as asserted.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; N];
        let rows: [_; N] = std::array::from_fn(|r| q[from + r].as_ptr());
        for (index, keys) in keys[..pairs].iter().enumerate() {
            add_pairs(&mut sums, keys, rows, index);
        }
        for (row, sums) in weights[from..].iter_mut().zip(sums) {
            for (i, sum) in sums.into_iter().enumerate() {
                vst1q_f32(row.as_mut_ptr().add(at + i * LANES), sum);
            }
        }
    }
}

/// Scales the accumulated output of `N` of `count` rows, from a row on, by its factor and adds the values of blocks, one pair of slots
/// after the other. The weights are read from a key on.
#[inline]
#[target_feature(enable = "neon,bf16")]
unsafe fn gather<const R: usize, const N: usize>(
    from: usize,
    values: &[&[u32]],
    (weights, at): (&[[u16; KEYS]; ROWS], usize),
    fades: &[f32; R],
    count: usize,
    out: &mut [f32],
) {
    let width = out.len() / count;
    assert!(from + N <= R && R <= ROWS && at + values.len() * BLOCK <= KEYS);
    let existing = from..count.min(from + N);
    for chunk in 0..width / CHUNK {
        let place = |row: usize, i: usize| row * width + chunk * CHUNK + i * LANES;
        // SAFETY: an existing row has as many chunks as a value, and every row has a tile's weights.
        unsafe {
            let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; N];
            for row in existing.clone() {
                for (i, sum) in sums[row - from].iter_mut().enumerate() {
                    *sum = vmulq_n_f32(vld1q_f32(out.as_ptr().add(place(row, i))), fades[row]);
                }
            }
            for (block, values) in values.iter().enumerate() {
                let rows: [_; N] = std::array::from_fn(|r| weights[from + r][at + block * BLOCK..].as_ptr());
                for (index, slots) in chunk_of(values, chunk).iter().enumerate() {
                    add_pairs(&mut sums, slots, rows, index);
                }
            }
            for (row, sums) in existing.clone().zip(sums) {
                for (i, sum) in sums.into_iter().enumerate() {
                    vst1q_f32(out.as_mut_ptr().add(place(row, i)), sum);
                }
            }
        }
    }
}
