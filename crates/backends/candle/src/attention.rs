//! Attention over the paged cache, or over the keys of a step in the same layout.
//!
//! The loops are simple: a query row reads its keys in place, in ascending position, whether it came alone, in a chunk
//! or beside other sequences. Its result is a function of only its query and its keys, bit by bit.

use octavo_ops::{HeadShape, SequenceTables, Sight, StepBatch};
use rayon::prelude::*;

use crate::kv::{Half, KvCache};

/// Number of independent partial sums of a dot product. It is fixed, because it determines the order of sums.
const LANES: usize = 16;

/// One layer's attention.
pub(crate) struct Attention<'a> {
    pub(crate) cache: &'a KvCache,
    /// KV group, and layer in it.
    pub(crate) place: (usize, usize),
    pub(crate) tables: SequenceTables<'a>,
    pub(crate) heads: HeadShape,
    pub(crate) scale: f32,
    /// The keys that a query sees.
    pub(crate) sight: Sight,
    /// Number of keys that a query sees, or on each side of its own.
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
    /// Attention sinks by query head.
    pub(crate) sinks: Option<Vec<f32>>,
}

/// The keys and values that one query may see: those of one KV head at the positions `first..=last` of a sequence.
struct View<'a> {
    cache: &'a KvCache,
    place: (usize, usize),
    head: usize,
    dim: usize,
    table: &'a [u32],
    first: usize,
    last: usize,
}

impl Attention<'_> {
    /// Computes `q[T, Hq·D] → out[T, Hq·Dv]`. `sequences[t]` is the sequence of row t.
    pub(crate) fn run(&self, q: &[f32], batch: &StepBatch, sequences: &[usize]) -> Vec<f32> {
        let HeadShape { q: q_heads, kv: kv_heads, dim, .. } = self.heads;
        let value_dim = self.heads.value_dim();
        // The query heads that share a KV head are adjacent.
        let group = q_heads / kv_heads;
        let mut out = vec![0.0; q.len() / dim * value_dim];
        let tasks = out.par_chunks_mut(group * value_dim).zip(q.par_chunks(group * dim)).enumerate();
        tasks.for_each_init(Vec::new, |scores, (task, (out, q))| {
            let (row, head) = (task / kv_heads, task % kv_heads);
            let sequence = sequences[row];
            let places = batch.places(sequence);
            let place = places.start + row - batch.query_range(sequence).start;
            let seen_end = batch.seen_ends.get(row).map_or(0, |&end| end as usize);
            let (first, last) = self.sight.keys(place, places.end, seen_end, self.window);
            let table = self.tables.row(sequence);
            let view = View { cache: self.cache, place: self.place, head, dim, table, first, last };
            let heads = head * group..;
            for ((out, q), head) in out.chunks_exact_mut(value_dim).zip(q.chunks_exact(dim)).zip(heads) {
                let sink = self.sinks.as_ref().map(|sinks| sinks[head]);
                self.attend(q, &view, sink, scores, out);
            }
        });
        out
    }

    /// Computes one head of one query. `scores` is scratch memory.
    fn attend(&self, q: &[f32], view: &View<'_>, sink: Option<f32>, scores: &mut Vec<f32>, out: &mut [f32]) {
        scores.clear();
        view.for_each(Half::Key, |key| {
            let score = dot(q, key) * self.scale;
            scores.push(self.softcap.map_or(score, |cap| cap * (score / cap).tanh()));
        });
        let largest = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
        for score in scores.iter_mut() {
            *score = (*score - largest).exp();
            sum += *score;
        }
        let mut weights = scores.iter();
        view.for_each(Half::Value, |value| {
            let weight = weights.next().copied().unwrap_or(0.0) / sum;
            for (out, v) in out.iter_mut().zip(value) {
                *out += weight * v;
            }
        });
    }
}

impl View<'_> {
    /// Calls `f` with the elements of each position, in order.
    fn for_each(&self, half: Half, mut f: impl FnMut(&[f32])) {
        let size = self.cache.block_size();
        let blocks = self.table.iter().enumerate().take(self.last / size + 1).skip(self.first / size);
        for (index, &block) in blocks {
            let start = index * size;
            let (from, to) = (self.first.saturating_sub(start), (self.last + 1 - start).min(size));
            let elements = self.cache.read(self.place, half, block, self.head);
            elements[from * self.dim..to * self.dim].chunks_exact(self.dim).for_each(&mut f);
        }
    }
}

/// Computes the dot product as [`LANES`] partial sums that are added in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
