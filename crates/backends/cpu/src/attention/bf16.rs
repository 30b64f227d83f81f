//! The kernel with AVX-512 in bf16, for several rows at once: it rounds queries and weights like keys and values and multiplies
//! pairs directly.

use std::arch::x86_64::*;

use super::plain::{FLOOR, Running, visible, whole};
use super::walk::{FEW_ROWS, by_rows, each_row, queries, walk};
use super::wide::weigh_with;
use super::{Block, KEYS, ROWS};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};
use crate::memory::{Level, prefetch};
use crate::product::bf16::pairs;

/// Computes attention of up to [`ROWS`] rows in bf16.
///
/// # Safety
/// AVX-512 F, BW, DQ and BF16 must be available.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn attend(block: Block<'_>) {
    // SAFETY: the caller guarantees this.
    unsafe { by_rows!(rows, block, ROWS, 7 | 8 => 8, 9..=12 => 12) }
}

/// Computes `R` rows in bf16. Rows that do not exist repeat the first.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn rows<const R: usize>(block: Block<'_>) {
    // There is room for more rows in bf16 than there are.
    let q = queries::<_, R>(&block.narrow_q[..block.q.len()], block.sees.len());
    // SAFETY: the caller guarantees this; weights have room for a tile, and the output has as many chunks as a value.
    unsafe {
        walk!(
            Isa::Avx512,
            block,
            R,
            if R <= FEW_ROWS { 1 } else { 2 },
            |keys: &[&[u32]], ahead, weights, at| score(&q, keys, ahead, weights, at),
            |weights: &mut _, len, running: &mut _| weigh_rows(weights, len, running),
            |scores: &[f32], narrow: &mut [u16; KEYS]| narrow_weights(scores, narrow),
            |values: &[&[u32]], _: &[[f32; KEYS]; ROWS], narrow, at, fades: &[f32; R], count, out| gather(
                values, narrow, at, fades, count, out
            )
        );
    }
}

/// Writes the rows' scores with the sixteen keys of one or two blocks to `weights[..][at..]`, one pair of dimensions after the
/// other.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn score<const R: usize>(
    q: &[&[u16]; R],
    keys: &[&[u32]],
    ahead: (&[u32], &[u32]),
    weights: &mut [[f32; KEYS]; ROWS],
    at: usize,
) {
    let weights = &mut weights[..R];
    // SAFETY: the caller guarantees this.
    unsafe {
        match *keys {
            [keys] => score_some::<R, R, 1>(q, 0, [keys], ahead, weights, at),
            [first, second] => {
                let keys = [first, second];
                // The sums of eight rows with two blocks fill half of the registers.
                match R {
                    ROWS => {
                        for from in [0, 8] {
                            score_some::<R, 8, 2>(q, from, keys, ahead, &mut weights[from..], at);
                        }
                    }
                    12 => {
                        for from in [0, 6] {
                            score_some::<R, 6, 2>(q, from, keys, ahead, &mut weights[from..], at);
                        }
                    }
                    _ => score_some::<R, R, 2>(q, 0, keys, ahead, weights, at),
                }
            }
            _ => unreachable!("keys of one or two blocks"),
        }
    }
}

/// Does the same for `N` of the rows, from a row on, and for `B` blocks. With two blocks, a pair of a query is read once for both.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn score_some<const R: usize, const N: usize, const B: usize>(
    q: &[&[u16]; R],
    from: usize,
    keys: [&[u32]; B],
    (later_keys, values): (&[u32], &[u32]),
    weights: &mut [[f32; KEYS]],
    at: usize,
) {
    let keys = keys.map(|keys| keys.as_chunks::<BLOCK>().0);
    assert!(from + N <= R && weights.len() >= N && at + B * BLOCK <= KEYS);
    let steps = q[0].len() / 2;
    assert!(keys.iter().all(|keys| keys.len() >= steps) && q.iter().all(|q| q.len() >= 2 * steps));
    let mut sums = [[_mm512_setzero_ps(); N]; B];
    for pair in 0..steps {
        if R <= FEW_ROWS {
            let line = pair * BLOCK;
            prefetch(Level::First, later_keys.as_ptr().wrapping_add(line));
            prefetch(Level::Second, values.as_ptr().wrapping_add(line));
        }
        // SAFETY: every block has a register of words for this pair, and there are so many rows, as asserted.
        unsafe {
            let mut words = [_mm512_setzero_si512(); B];
            for b in 0..B {
                words[b] = _mm512_loadu_si512(keys[b].as_ptr().add(pair).cast());
            }
            for r in 0..N {
                let q = q[from + r].as_ptr().cast::<i32>().add(pair).read_unaligned();
                let q = pairs(_mm512_set1_epi32(q));
                for b in 0..B {
                    sums[b][r] = _mm512_dpbf16_ps(sums[b][r], pairs(words[b]), q);
                }
            }
        }
    }
    for b in 0..B {
        for r in 0..N {
            // SAFETY: a row of weights has room for these blocks, as asserted.
            unsafe { _mm512_storeu_ps(weights[r].as_mut_ptr().add(at + b * BLOCK), sums[b][r]) };
        }
    }
}

/// Converts a tile's scores of all rows to weights. Returns the factors for the values accumulated before. Rows are independent: what
/// is added across the lanes of one is added for sixteen at once, in the order of [`weigh`], so that no row waits for another.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn weigh_rows<const R: usize>(
    weights: &mut [[f32; KEYS]; ROWS],
    len: usize,
    running: &mut [Running; R],
) -> [f32; R] {
    const { assert!(R <= ROWS && ROWS == BLOCK) };
    // SAFETY: the caller guarantees the instruction set; a chunk of scores and an array of rows are registers.
    unsafe {
        if R <= FEW_ROWS {
            return each_row!(weigh, R)(weights, len, running);
        }
        let (mut largest, mut sums) = ([0.0; ROWS], [0.0; ROWS]);
        for (r, row) in running.iter().enumerate() {
            (largest[r], sums[r]) = (row.largest, row.sum);
        }
        let (before, sums) = (_mm512_loadu_ps(largest.as_ptr()), _mm512_loadu_ps(sums.as_ptr()));
        let mut rows = [_mm512_set1_ps(FLOOR); ROWS];
        for (r, row) in rows.iter_mut().enumerate().take(R) {
            for scores in weights[r][..len].as_chunks::<BLOCK>().0 {
                *row = _mm512_max_ps(*row, _mm512_loadu_ps(scores.as_ptr()));
            }
        }
        let found = across(rows, Op::Max);
        // If an operand is NaN, the result is the second.
        let after = _mm512_max_ps(_mm512_max_ps(found, before), _mm512_set1_ps(FLOOR));
        _mm512_storeu_ps(largest.as_mut_ptr(), after);
        let mut rows = [_mm512_setzero_ps(); ROWS];
        for (r, row) in rows.iter_mut().enumerate().take(R) {
            let largest = _mm512_set1_ps(largest[r]);
            for scores in weights[r][..len].as_chunks_mut::<BLOCK>().0 {
                let weights = exp(_mm512_sub_ps(_mm512_loadu_ps(scores.as_ptr()), largest));
                _mm512_storeu_ps(scores.as_mut_ptr(), weights);
                *row = _mm512_add_ps(*row, weights);
            }
        }
        let fade = exp(_mm512_sub_ps(before, after));
        let sums = _mm512_fmadd_ps(sums, fade, across(rows, Op::Add));
        let (mut fades, mut all) = ([0.0; ROWS], [0.0; ROWS]);
        _mm512_storeu_ps(fades.as_mut_ptr(), fade);
        _mm512_storeu_ps(all.as_mut_ptr(), sums);
        for (row, (&largest, &sum)) in running.iter_mut().zip(largest.iter().zip(&all)) {
            *row = Running { largest, sum };
        }
        std::array::from_fn(|r| fades[r])
    }
}

/// An operation of two lanes.
#[derive(Clone, Copy)]
enum Op {
    Add,
    Max,
}

impl Op {
    #[inline(always)]
    unsafe fn of(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller guarantees the instruction set.
        unsafe {
            match self {
                Self::Add => _mm512_add_ps(a, b),
                Self::Max => _mm512_max_ps(a, b),
            }
        }
    }
}

/// Returns the result of an operation over all lanes of each row, by row: of lanes eight apart, then four, two and one.
///
/// # Safety
/// AVX-512 F must be available.
#[inline(always)]
unsafe fn across(rows: [__m512; ROWS], op: Op) -> __m512 {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let (mut eights, mut fours, mut twos) = ([rows[0]; 8], [rows[0]; 4], [rows[0]; 2]);
        for (i, eights) in eights.iter_mut().enumerate() {
            // The last steps put four rows that are adjacent here into one quarter of the lanes each.
            let [a, b] = [2 * i, 2 * i + 1].map(|at| rows[at % 4 * 4 + at / 4]);
            let first = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
            *eights = op.of(first, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
        }
        for (fours, [a, b]) in fours.iter_mut().zip(eights.as_chunks().0) {
            let first = _mm512_shuffle_f32x4::<0b10_00_10_00>(*a, *b);
            *fours = op.of(first, _mm512_shuffle_f32x4::<0b11_01_11_01>(*a, *b));
        }
        for (twos, [a, b]) in twos.iter_mut().zip(fours.as_chunks().0) {
            let first = _mm512_shuffle_ps::<0b01_00_01_00>(*a, *b);
            *twos = op.of(first, _mm512_shuffle_ps::<0b11_10_11_10>(*a, *b));
        }
        let first = _mm512_shuffle_ps::<0b10_00_10_00>(twos[0], twos[1]);
        op.of(first, _mm512_shuffle_ps::<0b11_01_11_01>(twos[0], twos[1]))
    }
}

/// Converts a tile's scores to weights that are rounded to bf16 later. Returns the factor for the values accumulated before.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn weigh(scores: &mut [f32], running: &mut Running) -> f32 {
    // SAFETY: the caller guarantees this.
    unsafe { weigh_with(scores, running, |x| exp(x)) }
}

/// Computes `e^x` for x ≤ 0, with a relative error of 2^−23 and that of the product with log2 e; NaN stays NaN.
///
/// Of `x · log2 e`, the fraction in [0, 1) is the argument of a polynomial, which is exact at 0 and has the least error there is for its
/// degree, and the integer below scales its value: `scalef` rounds its exponent down.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp(x: __m512) -> __m512 {
    const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    let power = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
    let fraction = _mm512_reduce_ps::<DOWN>(power);
    let mut sum = _mm512_set1_ps(0.001_867_13);
    for term in [0.009_017_031, 0.055_799_913, 0.240_164_44, 0.693_151_3, 1.0] {
        sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(term));
    }
    _mm512_scalef_ps(sum, power)
}

/// Rounds a row's weights to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn narrow_weights(weights: &[f32], out: &mut [u16; KEYS]) {
    for (weights, out) in weights.as_chunks::<BLOCK>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        // SAFETY: there are sixteen elements, and as many halves.
        unsafe {
            let narrow = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights.as_ptr()));
            *out = std::mem::transmute::<__m256bh, [u16; BLOCK]>(narrow);
        }
    }
}

/// Scales the rows' accumulated output by its factor and adds the values of blocks, one pair of slots after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn gather<const R: usize>(
    values: &[&[u32]],
    weights: &[[u16; KEYS]; ROWS],
    at: usize,
    fades: &[f32; R],
    count: usize,
    out: &mut [f32],
) {
    let chunks = out.len() / count / CHUNK;
    // SAFETY: the caller guarantees this.
    unsafe {
        for chunk in (0..chunks).step_by(2) {
            let blocks = Values { blocks: values, at, chunk };
            if R <= FEW_ROWS || chunk + 1 == chunks {
                for chunk in chunk..(chunk + 2).min(chunks) {
                    gather_some::<R, R, 1>(Values { chunk, ..blocks }, weights, fades, (0, count), out);
                }
                continue;
            }
            match R {
                ROWS => {
                    for from in [0, 8] {
                        gather_some::<R, 8, 2>(blocks, weights, fades, (from, count), out);
                    }
                }
                12 => {
                    for from in [0, 6] {
                        gather_some::<R, 6, 2>(blocks, weights, fades, (from, count), out);
                    }
                }
                _ => gather_some::<R, R, 2>(blocks, weights, fades, (0, count), out),
            }
        }
    }
}

/// Values of blocks.
#[derive(Clone, Copy)]
struct Values<'a> {
    blocks: &'a [&'a [u32]],
    /// The first block's place in a row of weights.
    at: usize,
    /// The first chunk.
    chunk: usize,
}

/// Does the same for `C` chunks and for `N` of `count` rows, from a row on. With two chunks, a pair of weights is read once for both.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn gather_some<const R: usize, const N: usize, const C: usize>(
    values: Values<'_>,
    weights: &[[u16; KEYS]; ROWS],
    fades: &[f32; R],
    (from, count): (usize, usize),
    out: &mut [f32],
) {
    let (width, at) = (out.len() / count, values.chunk * CHUNK);
    assert!(from + N <= R && R <= ROWS && values.at + values.blocks.len() * BLOCK <= KEYS && at + C * CHUNK <= width);
    let weights = weights[from..].as_ptr().cast::<u16>().wrapping_add(values.at).cast::<i32>();
    let mut sums = [[_mm512_setzero_ps(); N]; C];
    // SAFETY: the rows below `count` have these chunks of the output, rows of weights have these blocks, and a pair of slots of
    // a chunk is one register of words.
    unsafe {
        for r in 0..N {
            if from + r < count {
                for c in 0..C {
                    let out = out.as_ptr().add((from + r) * width + at + c * CHUNK);
                    sums[c][r] = _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(fades[from + r]));
                }
            }
        }
        for (block, values_of) in values.blocks.iter().enumerate() {
            assert!(values_of.len() >= (values.chunk + C) * CHUNK * BLOCK / 2);
            let values = values_of.as_ptr().add(values.chunk * CHUNK * BLOCK / 2);
            for pair in 0..BLOCK / 2 {
                let mut words = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    words[c] = _mm512_loadu_si512(values.add((c * BLOCK / 2 + pair) * CHUNK).cast());
                }
                for r in 0..N {
                    let weight = weights.add(r * KEYS / 2 + block * BLOCK / 2 + pair).read_unaligned();
                    let weight = pairs(_mm512_set1_epi32(weight));
                    for c in 0..C {
                        sums[c][r] = _mm512_dpbf16_ps(sums[c][r], pairs(words[c]), weight);
                    }
                }
            }
        }
        for r in 0..N {
            if from + r < count {
                for c in 0..C {
                    _mm512_storeu_ps(out.as_mut_ptr().add((from + r) * width + at + c * CHUNK), sums[c][r]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_near_and_special_values_are_kept() {
        if !Isa::Avx512Bf16.is_available() {
            return;
        }
        let all = |x: [f32; BLOCK]| -> [f32; BLOCK] {
            // SAFETY: the instruction set is available; a register has sixteen elements.
            unsafe { std::mem::transmute(exp(_mm512_loadu_ps(x.as_ptr()))) }
        };
        let near = |x: f32, y: f32| {
            let exact = f64::from(x).exp();
            // The product with log2 e is rounded.
            (f64::from(y) - exact).abs() <= exact * (f64::from(x).abs() / 8_388_608.0 + 4e-7) + 1e-38
        };
        for from in (0..8800).step_by(BLOCK) {
            let x: [f32; BLOCK] = std::array::from_fn(|i| -((from + i) as f32) / 100.0);
            for (x, y) in x.into_iter().zip(all(x)) {
                assert!(near(x, y), "e^{x} is not {y}");
            }
        }
        let [one, zero, none, far] =
            *all(std::array::from_fn(|i| [0.0, f32::NEG_INFINITY, f32::NAN, -1e30][i % 4])).first_chunk().unwrap();
        assert!(one == 1.0 && zero == 0.0 && none.is_nan() && far == 0.0);
    }
}
