//! What is between the projections of a layer and its attention: the norms of heads, their rotation and the cache.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;
use octavo_ops::{NormKind, Rope, RopeStyle};

use crate::Isa;
use crate::activation::{Rows, Span};
use crate::forward::{Forward, ROW, Scratch};
use crate::kv::{KvDtype, LayerCache};
use crate::memory::Shared;
use crate::plan::{HeadNorm, Plan, Projected};
use crate::pool::Worker;
use crate::rows::{self, CodedRow};

/// The e4m3 number that is NaN.
pub(crate) const NAN_E4M3: i8 = 0x7f;

thread_local! {
    /// Buffer for keys and values in the type of the cache.
    pub(crate) static KEPT: RefCell<(Vec<u16>, Vec<i8>)> = RefCell::default();
}

impl Forward<'_> {
    /// # Safety
    /// The conditions of a stage apply.
    pub(crate) unsafe fn qkv_post(&self, op: &Projected, worker: Worker<'_>, scratch: &Scratch) {
        let cache = scratch.caches[op.group][op.layer];
        let angles = op.rope.map(|rope| Angles::new(self.plan, scratch, rope));
        let post = QkvPost {
            isa: self.isa,
            op,
            input: scratch.rows[op.input.0],
            out: scratch.rows[op.out.0],
            cache,
            slots: &self.batch.slot_mapping[op.group],
            angles,
        };
        // A norm over all heads needs all of them in one task.
        let together = op.norm.as_ref().is_some_and(|norm| norm.spans_heads(op.heads));
        let parts = if together { 1 } else { op.heads.kv };
        let tasks = scratch.blocks.len() * parts;
        let of_task = |task: usize| {
            let heads = if together { 0..op.heads.kv } else { task % parts..task % parts + 1 };
            (scratch.blocks[task / parts], heads)
        };
        let own = worker.own(tasks);
        worker.share_with(self.help(self.batch.tokens(), worker), tasks, |task| {
            let (run, heads) = of_task(task);
            let end = run.first + run.count;
            for row in run.first..end {
                if row + 1 < end {
                    post.prefetch(row + 1, &heads);
                } else if own.contains(&(task + 1)) {
                    let (next, heads) = of_task(task + 1);
                    post.prefetch(next.first, &heads);
                    post.prefetch_cache(next.first, heads);
                }
                // SAFETY: the caller guarantees this; a run's rows and its block belong to this thread for these heads.
                unsafe { post.row(row, heads.clone()) };
            }
        });
    }
}

/// Rounds a row to integers.
pub(crate) fn code<'c>(isa: Isa, x: &[f32], codes: &'c mut [i8]) -> CodedRow<'c> {
    let mut scale = 0.0;
    isa.code(x, codes, &mut scale);
    CodedRow { codes, scale }
}

/// Returns whether a condition holds for all elements. The loop has no early exit, so that it can be vectorised.
pub(crate) fn all<T: Copy>(x: &[T], holds: impl Fn(T) -> bool) -> bool {
    x.iter().fold(true, |all, &x| all & holds(x))
}

/// Norm, rotation and cache write of one layer.
struct QkvPost<'a> {
    isa: Isa,
    op: &'a Projected,
    input: Rows,
    out: Rows,
    cache: LayerCache,
    slots: &'a [u32],
    angles: Option<Angles>,
}

/// The rotary embedding of a layer.
pub(crate) struct Angles {
    cos: Shared<f32>,
    sin: Shared<f32>,
    pairs: usize,
    style: RopeStyle,
}

impl Angles {
    /// Returns the embedding with this index in the plan.
    pub(crate) fn new(plan: &Plan, scratch: &Scratch, index: usize) -> Self {
        let ((cos, sin), Rope { inv_freq, style, .. }) = (scratch.angles[index], &plan.ropes[index]);
        Self { cos, sin, pairs: inv_freq.len(), style: *style }
    }

    /// Rotates the heads of a row, of `dim` elements each.
    ///
    /// # Safety
    /// The tables must not be moved, and no thread may write them during the call.
    pub(crate) unsafe fn rotate(&self, isa: Isa, row: usize, heads: &mut [f32], dim: usize) {
        let at = row * self.pairs;
        // SAFETY: the caller guarantees this.
        let (cos, sin) = unsafe { (self.cos.view(at, self.pairs), self.sin.view(at, self.pairs)) };
        heads.chunks_exact_mut(dim).for_each(|head| isa.rotate(self.style, head, cos, sin));
    }
}

impl QkvPost<'_> {
    /// Returns the places of the query, key and value heads of some KV heads in a row.
    fn spans(&self, row: usize, heads: &Range<usize>) -> [Span; 3] {
        let shape = self.op.heads;
        let group = shape.q / shape.kv * shape.dim;
        let span = |from: usize, each: usize| Span { row, from: from + heads.start * each, len: heads.len() * each };
        let (k, v) = (shape.q_cols(), shape.q_cols() + shape.kv_cols());
        [span(0, group), span(k, shape.dim), span(v, shape.dim)]
    }

    /// Prefetches what a row's processing reads and writes, except the cache. Adjacent rows are in other places of memory.
    fn prefetch(&self, row: usize, heads: &Range<usize>) {
        let spans = self.spans(row, heads);
        spans.iter().for_each(|span| self.input.prefetch(*span));
        self.out.prefetch(spans[0]);
    }

    /// Prefetches the places in the cache to which some KV heads of a row are written.
    fn prefetch_cache(&self, row: usize, heads: Range<usize>) {
        heads.for_each(|head| self.cache.prefetch(self.slots[row], head));
    }

    /// Processes some KV heads of a row, and the query heads that share them.
    ///
    /// # Safety
    /// During the call, no other thread may write the input or the tables, use these heads of the row or write their
    /// block.
    unsafe fn row(&self, row: usize, heads: Range<usize>) {
        let spans = self.spans(row, &heads);
        // SAFETY: the caller guarantees this.
        let (out, [q, k, v]) = unsafe { (self.out.write(spans[0]), spans.map(|span| self.input.read(span))) };
        let (q_norm, k_norm) = match &self.op.norm {
            Some(HeadNorm { q, k, eps }) => (Some((&q[..], *eps)), Some((&k[..], *eps))),
            None => (None, None),
        };
        ROW.with_borrow_mut(|key| {
            self.turn(row, q, q_norm, out);
            key.resize(k.len(), 0.0);
            self.turn(row, k, k_norm, key);
            // SAFETY: the caller guarantees this.
            unsafe { self.keep(self.slots[row], heads, key, v) };
        });
    }

    /// Writes the keys and values of some heads of a row to the cache.
    ///
    /// A value that is not finite is stored as 0, and its key as NaN. Values are multiplied by whole blocks, with a
    /// weight of 0 for queries that do not see the key, and 0 · NaN is NaN. A score that is NaN affects only the rows
    /// that see it.
    ///
    /// # Safety
    /// During the call, no other thread may use the block of the slot for these heads.
    unsafe fn keep(&self, slot: u32, heads: Range<usize>, key: &[f32], value: &[f32]) {
        let dim = self.op.heads.dim;
        KEPT.with_borrow_mut(|(narrow, codes)| match self.cache.dtype() {
            KvDtype::Bf16 => {
                narrow.resize(2 * key.len(), 0);
                let (keys, values) = narrow.split_at_mut(key.len());
                self.isa.to_bf16(key, keys);
                self.isa.to_bf16(value, values);
                let pairs = keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim));
                for (head, (key, value)) in heads.zip(pairs) {
                    if !all(value, |x| bf16::from_bits(x).is_finite()) {
                        key.fill(bf16::NAN.to_bits());
                        value.fill(0);
                    }
                    // SAFETY: the caller guarantees this.
                    unsafe { self.cache.write(slot, head, key, value) };
                }
            }
            KvDtype::Fp8 => {
                let scales = self.cache.scales();
                codes.resize(2 * dim, 0);
                let (keys, values) = codes.split_at_mut(dim);
                let pairs = key.chunks_exact(dim).zip(value.chunks_exact(dim));
                for (head, (key, value)) in heads.zip(pairs) {
                    self.isa.to_e4m3(key, scales.key, keys);
                    self.isa.to_e4m3(value, scales.value, values);
                    if !all(value, f32::is_finite) {
                        keys.fill(NAN_E4M3);
                        values.fill(0);
                    }
                    let [key, value] = [&*keys, &*values].map(|codes| CodedRow { codes, scale: 1.0 });
                    // SAFETY: the caller guarantees this.
                    unsafe { self.cache.write_codes(slot, head, key, value) };
                }
            }
            KvDtype::Int8 => {
                codes.resize(2 * dim, 0);
                let (keys, values) = codes.split_at_mut(dim);
                let pairs = key.chunks_exact(dim).zip(value.chunks_exact(dim));
                for (head, (key, value)) in heads.zip(pairs) {
                    let (mut key_row, mut value_row) = (code(self.isa, key, keys), code(self.isa, value, values));
                    if !all(value, f32::is_finite) {
                        (key_row.scale, value_row.scale) = (f32::NAN, 0.0);
                    }
                    // Integer codes have no NaN, so the scale marks it.
                    if !all(key, f32::is_finite) {
                        key_row.scale = f32::NAN;
                    }
                    // SAFETY: the caller guarantees this.
                    unsafe { self.cache.write_codes(slot, head, key_row, value_row) };
                }
            }
        });
    }

    /// Applies norm and rotation to some heads.
    fn turn(&self, row: usize, x: &[f32], norm: Option<(&[f32], f32)>, out: &mut [f32]) {
        match norm {
            Some((weight, eps)) => {
                let width = weight.len();
                for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                    let norm = rows::Norm { kind: NormKind::Rms, weight, bias: None, eps };
                    self.isa.norm(x, norm, out);
                }
            }
            None => out.copy_from_slice(x),
        }
        if let Some(angles) = &self.angles {
            // SAFETY: the tables were written before the last barrier.
            unsafe { angles.rotate(self.isa, row, out, self.op.heads.dim) };
        }
    }
}
