//! Latent attention: the products of each head, and the queries and rows of the cache.

use half::bf16;
use octavo_ops::{BufferId, HeadShape, NormKind, WeightId};

use crate::activation::{Rows, Span};
use crate::attention::Run;
use crate::forward::{Forward, ROW, Scratch};
use crate::kv::{KvDtype, LayerCache};
use crate::pool::Worker;
use crate::product::{self, Origin, Product};
use crate::qkv_post::{Angles, KEPT, NAN_E4M3, all, code};
use crate::rows::{self, CodedRow};

/// Work of the ops of latent attention between two barriers.
pub(crate) enum Stage {
    /// Copies the first columns of each head of a token to a row, head by head.
    Split { heads: usize, input: BufferId, out: BufferId },
    /// Multiplies the rows of each head with its matrix. The results are columns of the token's row.
    Product { weight: WeightId, input: BufferId, out: BufferId },
    /// Completes the queries and writes the cache.
    Post(Post),
}

/// `LatentPost`.
pub(crate) struct Post {
    pub(crate) q: BufferId,
    pub(crate) kv: BufferId,
    pub(crate) out: BufferId,
    pub(crate) heads: HeadShape,
    /// Weight of the latent's norm.
    pub(crate) norm: Vec<f32>,
    pub(crate) eps: f32,
    /// Index of the rotary embedding.
    pub(crate) rope: usize,
    pub(crate) group: usize,
    pub(crate) layer: usize,
}

impl Forward<'_> {
    /// Runs a thread's part of a stage.
    ///
    /// # Safety
    /// The conditions of `stage` apply, in all of the following functions.
    pub(crate) unsafe fn latent(&self, stage: &Stage, worker: Worker<'_>, scratch: &Scratch) {
        // SAFETY: the caller guarantees this.
        unsafe {
            match stage {
                Stage::Split { heads, input, out } => {
                    self.split(*heads, (scratch.rows[input.0], scratch.rows[out.0]), worker);
                }
                Stage::Product { weight, input, out } => {
                    self.head_products(*weight, (scratch.rows[input.0], scratch.rows[out.0]), worker);
                }
                Stage::Post(post) => self.latent_post(post, worker, scratch),
            }
        }
    }

    unsafe fn split(&self, heads: usize, (input, out): (Rows, Rows), worker: Worker<'_>) {
        let (tokens, width) = (self.batch.tokens(), input.cols / heads);
        worker.share(heads * tokens, |row| {
            let (head, token) = (row / tokens, row % tokens);
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            unsafe {
                let x = input.read(Span { row: token, from: head * width, len: out.cols });
                out.write(out.span(row)).copy_from_slice(x);
                out.prepare(self.isa, out.span(row));
            }
        });
    }

    unsafe fn head_products(&self, weight: WeightId, (input, out): (Rows, Rows), worker: Worker<'_>) {
        let matrices = self.weights.near(worker)[weight.0].experts();
        let (tokens, width) = (self.batch.tokens(), out.cols / matrices.len());
        // All heads have the same parts.
        let chunks = matrices.first().map_or(0, |matrix| product::chunks(matrix, tokens));
        worker.share(matrices.len() * chunks, |piece| {
            let head = piece / chunks;
            let origin = Origin { row: head * tokens, from: 0, column: head * width };
            let product = Product { rows: tokens, origin, ..Product::new(&matrices[head], input, out) };
            // SAFETY: the caller guarantees this; the chunk of these rows is taken by one thread.
            unsafe { product.run_rows(self.isa, piece % chunks, origin.row..origin.row + tokens) };
        });
    }

    unsafe fn latent_post(&self, op: &Post, worker: Worker<'_>, scratch: &Scratch) {
        let angles = Angles::new(self.plan, scratch, op.rope);
        let cache = scratch.caches[op.group][op.layer];
        let [q, kv, out] = [op.q, op.kv, op.out].map(|id| scratch.rows[id.0]);
        let slots = &self.batch.slot_mapping[op.group];
        worker.share(scratch.blocks.len(), |task| {
            let Run { first, count, .. } = scratch.blocks[task];
            for (row, &slot) in slots.iter().enumerate().skip(first).take(count) {
                // SAFETY: the caller guarantees this; a run's rows and its block belong to this thread, and the tables
                // were written before the last barrier.
                unsafe {
                    self.rotate_queries(op, row, (q, out), &angles);
                    ROW.with_borrow_mut(|key| {
                        self.complete_key(op, row, kv.read(kv.span(row)), &angles, key);
                        self.keep_latent(cache, slot, key);
                    });
                }
            }
        });
    }

    /// Copies the last columns of each head of a row and rotates them.
    ///
    /// # Safety
    /// During the call, no other thread may write the queries or the tables, or use the row of the output.
    unsafe fn rotate_queries(&self, op: &Post, row: usize, (q, out): (Rows, Rows), angles: &Angles) {
        let (width, rotated) = (q.cols / op.heads.q, op.heads.dim - op.heads.value_dim());
        for head in 1..=op.heads.q {
            let last = |width: usize| Span { row, from: head * width - rotated, len: rotated };
            // SAFETY: the caller guarantees this.
            unsafe {
                let out = out.write(last(op.heads.dim));
                out.copy_from_slice(q.read(last(width)));
                angles.rotate(self.isa, row, out, rotated);
            }
        }
    }

    /// Normalises the latent and rotates the key beside it.
    ///
    /// # Safety
    /// During the call, no other thread may write the tables.
    unsafe fn complete_key(&self, op: &Post, row: usize, x: &[f32], angles: &Angles, key: &mut Vec<f32>) {
        let rank = op.heads.value_dim();
        let norm = rows::Norm { kind: NormKind::Rms, weight: &op.norm, bias: None, eps: op.eps };
        key.resize(x.len(), 0.0);
        self.isa.norm(&x[..rank], norm, &mut key[..rank]);
        key[rank..].copy_from_slice(&x[rank..]);
        // SAFETY: the caller guarantees this.
        unsafe { angles.rotate(self.isa, row, &mut key[rank..], x.len() - rank) };
    }

    /// Writes a row of the cache.
    ///
    /// A latent that is not finite is stored as 0, and the rotated key beside it as NaN. The latent is multiplied by whole
    /// blocks, with a weight of 0 for queries that do not see the key, and 0 · NaN is NaN. A score that is NaN affects
    /// only the rows that see it.
    ///
    /// # Safety
    /// During the call, no other thread may use the block of the slot.
    unsafe fn keep_latent(&self, cache: LayerCache, slot: u32, row: &[f32]) {
        let rank = cache.heads().value_dim();
        KEPT.with_borrow_mut(|(narrow, codes)| match cache.dtype() {
            KvDtype::Bf16 => {
                narrow.resize(row.len(), 0);
                self.isa.to_bf16(row, narrow);
                if !all(narrow, |x| bf16::from_bits(x).is_finite()) {
                    narrow[..rank].fill(0);
                    narrow[rank..].fill(bf16::NAN.to_bits());
                }
                // SAFETY: the caller guarantees this.
                unsafe { cache.write(slot, 0, narrow, &[]) };
            }
            KvDtype::Fp8 => {
                codes.resize(row.len(), 0);
                self.isa.to_e4m3(row, cache.scales().key, codes);
                if !all(row, f32::is_finite) {
                    codes[..rank].fill(0);
                    codes[rank..].fill(NAN_E4M3);
                }
                let [key, value] = [&codes[..], &[]].map(|codes| CodedRow { codes, scale: 1.0 });
                // SAFETY: the caller guarantees this.
                unsafe { cache.write_codes(slot, 0, key, value) };
            }
            KvDtype::Int8 => {
                codes.resize(row.len(), 0);
                let mut key = code(self.isa, row, codes);
                let mut value = CodedRow { codes: &[], scale: key.scale };
                // Integer codes have no NaN, so the scale marks it.
                if !all(row, f32::is_finite) {
                    (key.scale, value.scale) = (f32::NAN, 0.0);
                }
                // SAFETY: the caller guarantees this.
                unsafe { cache.write_codes(slot, 0, key, value) };
            }
        });
    }
}
