//! The kernel in plain Rust, in lanes of sixteen.

use super::{Block, KEYS, Keys, ROWS};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};
use crate::rows::{exp, fma, tanh};

/// A value below every score that is far enough from infinity to be subtracted.
pub(super) const FLOOR: f32 = -1e30;

/// Running state of a row: the largest score, and the sum of `e^(score − largest)`.
#[derive(Clone, Copy)]
pub(super) struct Running {
    pub(super) largest: f32,
    pub(super) sum: f32,
}

impl Running {
    /// Returns the state before the first key. A sink is like a key whose value is zero.
    pub(super) fn start(sink: Option<f32>) -> Self {
        match sink {
            None => Self { largest: FLOOR, sum: 0.0 },
            Some(sink) => {
                let largest = sink.max(FLOOR);
                // NaN stays in the sum.
                Self { largest, sum: (sink - largest).exp() }
            }
        }
    }
}

/// Processes a tile of keys with one row after the other, because an array of rows of lanes is not vectorised.
#[inline(always)]
pub(super) fn attend_plain<const FMA: bool>(isa: Isa, block: Block<'_>) {
    let Block { mut keys, q, sees, starts, softcap, weights, out, partial, .. } = block;
    let (q_width, out_width) = (q.len() / sees.len(), out.len() / sees.len());
    out.fill(0.0);
    let weights = &mut weights[0];
    let mut running: [Running; ROWS] = std::array::from_fn(|row| starts[row.min(starts.len() - 1)]);
    let first = sees.iter().map(|see| see.0).min().unwrap_or(0);
    let last = sees.iter().map(|see| see.1).max().unwrap_or(0);
    for tile in first / KEYS..=last / KEYS {
        let end = (tile + 1) * (KEYS / BLOCK);
        keys.enter(isa, tile * (KEYS / BLOCK)..end.min(last / BLOCK + 1));
        let rows = q.chunks_exact(q_width).zip(out.chunks_exact_mut(out_width));
        for ((q, out), (&(first, last), running)) in rows.zip(sees.iter().zip(&mut running)) {
            if !(first / KEYS..=last / KEYS).contains(&tile) {
                continue;
            }
            let blocks = tile * (KEYS / BLOCK)..end.min(last / BLOCK + 1);
            for (index, block) in blocks.clone().enumerate() {
                let scores = score::<FMA>(q, keys.block(block).0);
                weights[index * BLOCK..][..BLOCK].copy_from_slice(&scores);
            }
            let scores = &mut weights[..blocks.len() * BLOCK];
            if let Some((scales, _)) = keys.scales() {
                isa.multiply(scores, scales);
            }
            if let Some(cap) = softcap {
                let inverse = 1.0 / cap;
                scores.iter_mut().for_each(|x| *x = cap * tanh::<FMA>(*x * inverse));
            }
            visible(scores, tile * KEYS, (first, last));
            let fade = weigh::<FMA>(scores, running);
            if let Some((_, scales)) = keys.scales() {
                isa.multiply(scores, scales);
            }
            out.iter_mut().for_each(|x| *x *= fade);
            for (weights, block) in scores.as_chunks::<BLOCK>().0.iter().zip(blocks) {
                gather::<FMA>(whole(&keys, block, partial), weights, out);
            }
        }
    }
    for (out, running) in out.chunks_exact_mut(out_width).zip(&running) {
        let inverse = 1.0 / running.sum;
        out.iter_mut().for_each(|x| *x *= inverse);
    }
}

#[inline(always)]
pub(super) fn turn_plain<const FMA: bool>(keys: &[u32], values: &mut [u32]) {
    let pairs = keys.as_chunks::<BLOCK>().0;
    let chunks = values.as_chunks_mut::<CHUNK>().0.as_chunks_mut::<{ BLOCK / 2 }>().0;
    for (chunk, slots) in chunks.iter_mut().enumerate() {
        for pair in 0..CHUNK / 2 {
            let words = pairs.get(chunk * (CHUNK / 2) + pair).unwrap_or(&[0; BLOCK]);
            for (values, &[even, odd]) in slots.iter_mut().zip(words.as_chunks().0) {
                values[2 * pair] = even & 0xffff | odd << 16;
                values[2 * pair + 1] = even >> 16 | odd & 0xffff_0000;
            }
        }
    }
}

/// Returns the low half of a word of two bf16, as f32.
#[inline(always)]
fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

/// Returns the high half as f32.
#[inline(always)]
fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xffff_0000)
}

/// Returns a row's scores with the sixteen keys of a block.
#[inline(always)]
fn score<const FMA: bool>(q: &[f32], keys: &[u32]) -> [f32; BLOCK] {
    let (mut even, mut odd) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (&[a, b], words) in q.as_chunks().0.iter().zip(keys.as_chunks::<BLOCK>().0) {
        for lane in 0..BLOCK {
            even[lane] = fma::<FMA>(a, low(words[lane]), even[lane]);
        }
        for lane in 0..BLOCK {
            odd[lane] = fma::<FMA>(b, high(words[lane]), odd[lane]);
        }
    }
    for lane in 0..BLOCK {
        even[lane] += odd[lane];
    }
    even
}

/// Masks the scores of keys that a row does not see. The first score is that of position `start`.
#[inline(always)]
pub(super) fn visible(scores: &mut [f32], start: usize, (first, last): (usize, usize)) {
    let end = scores.len();
    scores[..first.saturating_sub(start).min(end)].fill(f32::NEG_INFINITY);
    scores[(last + 1).saturating_sub(start).min(end)..].fill(f32::NEG_INFINITY);
}

/// Converts a tile's scores to weights. Returns the factor for the values accumulated before.
#[inline(always)]
pub(super) fn weigh<const FMA: bool>(scores: &mut [f32], running: &mut Running) -> f32 {
    let mut largest = [running.largest; BLOCK];
    for scores in scores.as_chunks::<BLOCK>().0 {
        for lane in 0..BLOCK {
            largest[lane] = if scores[lane] > largest[lane] { scores[lane] } else { largest[lane] };
        }
    }
    let largest = largest.into_iter().fold(FLOOR, |a, b| if b > a { b } else { a });
    scores.iter_mut().for_each(|score| *score = exp::<FMA>(*score - largest));
    let mut sums = [0.0; BLOCK];
    for scores in scores.as_chunks::<BLOCK>().0 {
        for lane in 0..BLOCK {
            sums[lane] += scores[lane];
        }
    }
    let mut width = BLOCK;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    let fade = exp::<FMA>(running.largest - largest);
    *running = Running { largest, sum: fma::<FMA>(running.sum, fade, sums[0]) };
    fade
}

/// Returns a block's values. Slots without a token, whose content is arbitrary, are replaced by zeros.
#[inline(always)]
pub(super) fn whole<'a>(keys: &'a Keys<'_>, block: usize, partial: &'a mut [u32]) -> &'a [u32] {
    let values = keys.block(block).1;
    let filled = keys.len.saturating_sub(block * BLOCK);
    if filled >= BLOCK {
        return values;
    }
    partial.copy_from_slice(values);
    for chunk in partial.as_chunks_mut::<CHUNK>().0.as_chunks_mut::<{ BLOCK / 2 }>().0 {
        let (kept, dropped) = chunk.split_at_mut(filled.div_ceil(2));
        dropped.as_flattened_mut().fill(0);
        if let Some(words) = kept.last_mut().filter(|_| filled % 2 == 1) {
            words.iter_mut().for_each(|word| *word &= 0xffff);
        }
    }
    partial
}

/// Adds a block's values to the accumulated output of a row.
#[inline(always)]
fn gather<const FMA: bool>(values: &[u32], weights: &[f32; BLOCK], out: &mut [f32]) {
    let chunks = values.as_chunks::<CHUNK>().0.as_chunks::<{ BLOCK / 2 }>().0;
    for (out, pairs) in out.as_chunks_mut::<CHUNK>().0.iter_mut().zip(chunks) {
        let mut sums = *out;
        for (&[a, b], words) in weights.as_chunks().0.iter().zip(pairs) {
            for lane in 0..CHUNK {
                sums[lane] = fma::<FMA>(a, low(words[lane]), sums[lane]);
            }
            for lane in 0..CHUNK {
                sums[lane] = fma::<FMA>(b, high(words[lane]), sums[lane]);
            }
        }
        *out = sums;
    }
}
