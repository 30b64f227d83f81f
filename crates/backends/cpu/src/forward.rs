//! One forward pass: a single parallel region with a barrier after each stage.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use half::bf16;
use octavo_ops::{
    BufferId, Element, Embed, EmbedIds, EncodeBatch, Glu, NormKind, PoolKind, PoolRows, Program, Residual, Rope,
    RopeStyle, Rows as RowCount, Sight, StepBatch, sampling,
};

use crate::Isa;
use crate::activation::{Activation, Rows, Span, TILE};
use crate::attention::{Attention, Run};
use crate::experts::Routing;
use crate::kv::{BLOCK, KvCache, KvDtype, LayerCache};
use crate::loaded::Copies;
use crate::lora::{Adapter, LoraScratch};
use crate::media::{MediaCache, MediaRows};
use crate::memory::{Lines, Shared};
use crate::plan::{Attended, HeadNorm, Norm, Plan, Product, Projected, Stage, prepares_by_head};
use crate::pool::{Pool, Worker};
use crate::product::{self, Epilogue};
use crate::rows::{self, CodedRow};
use crate::weights::Matrix;

/// Number of columns of a gated activation in a piece of work; whole groups.
pub(crate) const GLU_COLS: usize = 512;

/// Memory that is kept from step to step.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Rows that share a block, so that one thread writes all slots that share a word of the cache.
    pub(crate) blocks: Vec<Run>,
    /// Attention tasks, by number of tokens.
    tiles: Vec<Vec<Run>>,
    /// Cosines `[T, pairs]`, by rotary embedding.
    cos: Vec<Lines<f32>>,
    sin: Vec<Lines<f32>>,
    /// Rows by buffer.
    pub(crate) rows: Vec<Rows>,
    /// Cosines and sines, by rotary embedding.
    angles: Vec<(Shared<f32>, Shared<f32>)>,
    /// Caches by KV group and layer.
    pub(crate) caches: Vec<Vec<LayerCache>>,
    /// Largest logit by row and chunk of the head.
    tops: Lines<f32>,
    pub(crate) largest: Option<Shared<f32>>,
    pub(crate) media: Option<MediaRows>,
    /// Experts of each token, by buffer.
    pub(crate) routings: Vec<Routing>,
    pub(crate) lora: LoraScratch,
}

/// Input and state of a pass.
pub(crate) struct Forward<'a> {
    pub(crate) isa: Isa,
    pub(crate) program: &'a Program,
    pub(crate) plan: &'a Plan,
    pub(crate) weights: &'a Copies,
    pub(crate) batch: &'a StepBatch,
    /// The batch of an encoder; `batch` is the same over the blocks of its keys.
    pub(crate) images: Option<&'a EncodeBatch>,
    /// Adapters by slot.
    pub(crate) adapters: &'a [Option<Adapter>],
}

/// Memory that a pass reads and writes.
pub(crate) struct Memory<'a> {
    pub(crate) activations: &'a mut [Activation],
    pub(crate) kv: &'a mut KvCache,
    pub(crate) media: &'a mut MediaCache,
    pub(crate) scratch: &'a mut Scratch,
}

/// The e4m3 number that is NaN.
pub(crate) const NAN_E4M3: i8 = 0x7f;

thread_local! {
    /// Buffer for a row of an in-place norm, or the keys of a row.
    pub(crate) static ROW: RefCell<Vec<f32>> = RefCell::default();
    /// Buffer for keys and values in the type of the cache.
    pub(crate) static KEPT: RefCell<(Vec<u16>, Vec<i8>)> = RefCell::default();
}

impl Scratch {
    fn set_up(
        &mut self,
        forward: &Forward<'_>,
        activations: &mut [Activation],
        kv: &mut KvCache,
        media: &mut MediaCache,
    ) {
        self.media = Some(media.shared());
        let Forward { plan, batch, .. } = forward;
        runs(batch, &mut self.blocks, |position| BLOCK - position % BLOCK);
        self.tiles.resize_with(plan.tiles.len(), Vec::new);
        for (tile, &tokens) in self.tiles.iter_mut().zip(&plan.tiles) {
            runs(batch, tile, |_| tokens);
        }
        self.rows.clear();
        for (index, activation) in activations.iter_mut().enumerate() {
            let buffer = &plan.buffers[index];
            // The rows of an expert may begin anywhere, and a tile of them may end beyond the last row.
            let spare = if matches!(buffer.rows, RowCount::Routed(_)) { TILE } else { 0 };
            activation.reserve(forward.count(BufferId(index)) + spare);
            self.rows.push(activation.shared());
        }
        self.routings.resize_with(plan.buffers.len(), Routing::default);
        for (routing, buffer) in self.routings.iter_mut().zip(&plan.buffers) {
            if buffer.element == Element::Routing {
                routing.reserve(batch.tokens(), buffer.cols);
            }
        }
        for tables in [&mut self.cos, &mut self.sin] {
            tables.resize_with(plan.ropes.len(), Lines::default);
            for (table, rope) in tables.iter_mut().zip(&plan.ropes) {
                table.reserve_zeroed(batch.tokens() * rope.inv_freq.len());
            }
        }
        self.angles.clear();
        let tables = self.cos.iter_mut().zip(&mut self.sin);
        self.angles.extend(tables.map(|(cos, sin)| (Shared::new(cos), Shared::new(sin))));
        if let Some((out, weight)) = plan.logits {
            let rows = forward.count(out);
            self.tops.reserve_zeroed(rows * product::chunks(forward.weights.shapes()[weight.0].factor(), rows));
            self.largest = Some(Shared::new(&mut self.tops));
        }
        self.lora.set_up(forward);
        kv.share(&mut self.caches);
    }
}

impl Scratch {
    /// Returns the index of the largest of a row of the last pass's logits, the first among equals; `None` if none is
    /// above −∞.
    pub(crate) fn argmax(&self, head: &Matrix, row: usize, rows: usize, logits: &[f32]) -> Option<u32> {
        let chunks = product::chunks(head, rows);
        let tops = &self.tops[row * chunks..][..chunks];
        let (mut chunk, mut largest) = (0, f32::NEG_INFINITY);
        for (index, &top) in tops.iter().enumerate() {
            if top > largest {
                (chunk, largest) = (index, top);
            }
        }
        let columns = product::chunk_columns(head, rows, chunk);
        sampling::largest(&logits[columns.clone()]).map(|id| columns.start as u32 + id)
    }
}

/// Divides the sequences of a step into runs. `length` returns the length of a run by its first position; the last run
/// may be shorter.
fn runs(batch: &StepBatch, out: &mut Vec<Run>, length: impl Fn(usize) -> usize) {
    out.clear();
    for sequence in 0..batch.sequences() {
        let rows = batch.query_range(sequence);
        let mut first = rows.start;
        while first < rows.end {
            let position = batch.places(sequence).start + first - rows.start;
            let count = length(position).min(rows.end - first);
            out.push(Run { sequence, first, count, position, len: batch.seq_lens[sequence] as usize });
            first += count;
        }
    }
}

impl Forward<'_> {
    /// Runs every stage. The batch must have been checked.
    pub(crate) fn run(&self, pool: &mut Pool, memory: Memory<'_>) {
        let scratch = self.set_up(memory);
        pool.run(&|worker| {
            for stage in &self.plan.stages {
                if matches!(stage, Stage::Expand(_)) && scratch.lora.is_idle() {
                    continue;
                }
                // SAFETY: activations, caches and tables are borrowed until the region ends. The threads of a stage
                // write disjoint parts and read nothing that the same stage writes elsewhere.
                unsafe { self.stage(stage, worker, scratch) };
                worker.barrier();
            }
        });
    }

    /// Runs every stage in a separate region and returns the time of each. The batch must have been checked.
    pub(crate) fn profile(&self, pool: &mut Pool, memory: Memory<'_>) -> Vec<Duration> {
        let scratch = self.set_up(memory);
        let time = |stage| {
            let begun = Instant::now();
            // SAFETY: as in `run`.
            pool.run(&|worker| unsafe { self.stage(stage, worker, scratch) });
            begun.elapsed()
        };
        self.plan.stages.iter().map(time).collect()
    }

    fn set_up<'m>(&self, memory: Memory<'m>) -> &'m Scratch {
        let Memory { activations, kv, media, scratch } = memory;
        scratch.set_up(self, activations, kv, media);
        scratch
    }

    /// Returns the number of rows of a buffer in this step.
    pub(crate) fn count(&self, buffer: BufferId) -> usize {
        match self.plan.buffers[buffer.0].rows {
            RowCount::Tokens => self.batch.tokens(),
            RowCount::Sampled => self.batch.sampled_rows.len(),
            RowCount::Pooled => self.batch.pooled_rows.len(),
            RowCount::Merged => self.batch.tokens() / self.program.merge(),
            RowCount::Routed(experts) => self.batch.tokens() * experts,
        }
    }

    /// Runs a thread's part of a stage.
    ///
    /// # Safety
    /// Every thread of the region must call this for the same stage, with a barrier before and after. Activations,
    /// caches and tables must not be moved.
    unsafe fn stage(&self, stage: &Stage, worker: Worker<'_>, scratch: &Scratch) {
        // SAFETY: the caller guarantees this.
        unsafe {
            match stage {
                Stage::Angles => self.angles(worker, scratch),
                Stage::Embed(op) => self.embed(op, worker, scratch.rows[op.out.0]),
                Stage::Patches { out } => self.patches(worker, scratch.rows[out.0]),
                Stage::EmbedTaps(op) => self.embed_taps(op, worker, scratch.rows[op.out.0]),
                Stage::Merge(op) => self.merge(op, worker, scratch),
                Stage::Store { input, column } => self.store(*input, *column, worker, scratch),
                Stage::Inject(op) => self.inject(op, worker, scratch),
                Stage::Act(op) => self.act(op, worker, scratch),
                Stage::Norm(op) => self.norm(op, worker, scratch),
                Stage::Product(op) => self.product(op, worker, scratch),
                Stage::QkvPost(op) => self.qkv_post(op, worker, scratch),
                Stage::Attention { op, tile } => self.attention(op, &scratch.tiles[*tile], worker, scratch),
                Stage::Glu(op) => self.glu(op, worker, scratch),
                Stage::GateRows(op) => self.gate_rows(op, worker, scratch),
                Stage::Experts(stage) => self.experts(stage, worker, scratch),
                Stage::Latent(stage) => self.latent(stage, worker, scratch),
                Stage::Expand(op) => self.expand(op, worker, scratch),
                Stage::Gather { input, out } => {
                    let sources = match self.program.buffers[out.0].rows {
                        RowCount::Pooled => &self.batch.pooled_rows,
                        RowCount::Tokens | RowCount::Sampled | RowCount::Merged | RowCount::Routed(_) => {
                            &self.batch.sampled_rows
                        }
                    };
                    let (input, out) = (scratch.rows[input.0], scratch.rows[out.0]);
                    worker.share(sources.len(), |row| {
                        let source = input.read(input.span(sources[row] as usize));
                        out.write(out.span(row)).copy_from_slice(source);
                        out.prepare(self.isa, out.span(row));
                    });
                }
                Stage::Pool(op) => self.pool(op, worker, scratch),
                Stage::Prepare(buffer) => {
                    let rows = scratch.rows[buffer.0];
                    worker.share(self.count(*buffer), |row| rows.prepare(self.isa, rows.span(row)));
                }
            }
        }
    }

    /// # Safety
    /// The conditions of `stage` apply, in all of the following functions.
    unsafe fn angles(&self, worker: Worker<'_>, scratch: &Scratch) {
        worker.share(self.batch.tokens(), |row| {
            let (positions, tokens) = (&self.batch.positions, self.batch.tokens());
            for (rope, (cos, sin)) in self.plan.ropes.iter().zip(&scratch.angles) {
                let pairs = rope.inv_freq.len();
                // SAFETY: the caller guarantees this; the row belongs to this thread.
                let (cos, sin) = unsafe { (cos.part(row * pairs, pairs), sin.part(row * pairs, pairs)) };
                for (pair, ((cos, sin), frequency)) in cos.iter_mut().zip(sin).zip(&rope.inv_freq).enumerate() {
                    let position = f64::from(positions[rope.stream(pair) * tokens + row]);
                    let (s, c) = (position * frequency).sin_cos();
                    (*cos, *sin) = ((c * rope.magnitude) as f32, (s * rope.magnitude) as f32);
                }
            }
        });
    }

    unsafe fn embed(&self, op: &Embed, worker: Worker<'_>, out: Rows) {
        let table = self.weights.near(worker)[op.table.0].factor();
        let StepBatch { token_ids, positions, token_types, .. } = self.batch;
        let id = |row: usize| match op.ids {
            EmbedIds::Tokens => token_ids[row] as usize,
            EmbedIds::Positions { offset } => positions[row] as usize + offset,
            EmbedIds::Types => token_types[row] as usize,
        };
        worker.share(self.batch.tokens(), |row| {
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            unsafe {
                let values = out.write(out.span(row));
                if op.add {
                    ROW.with_borrow_mut(|learned| {
                        learned.resize(out.cols, 0.0);
                        product::read_row(table, id(row), learned);
                        self.isa.add_scaled(values, learned, op.scale);
                    });
                } else {
                    product::read_row(table, id(row), values);
                    if op.scale != 1.0 {
                        self.isa.scale(values, op.scale);
                    }
                }
                out.prepare(self.isa, out.span(row));
            }
        });
    }

    unsafe fn pool(&self, op: &PoolRows, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let StepBatch { pooled_rows, pooled_lens, .. } = self.batch;
        worker.share(pooled_rows.len(), |row| {
            let (end, len) = (pooled_rows[row] as usize + 1, pooled_lens[row] as usize);
            // SAFETY: the caller guarantees this; the row of the output belongs to this thread.
            unsafe {
                let values = out.write(out.span(row));
                values.copy_from_slice(input.read(input.span(end - len)));
                if op.kind == PoolKind::Mean && len > 1 {
                    (end - len + 1..end).for_each(|row| self.isa.add(values, input.read(input.span(row))));
                    self.isa.scale(values, 1.0 / len as f32);
                }
                out.prepare(self.isa, out.span(row));
            }
        });
    }

    unsafe fn norm(&self, op: &Norm, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let add = op.add.map(Residual::buffer);
        let residual = add.map(|id| scratch.rows[id.0]);
        let norm = rows::Norm { kind: op.kind, weight: &op.weight, bias: op.bias.as_deref(), eps: op.eps };
        let in_place = op.out == op.input || add == Some(op.out);
        worker.share(self.count(op.out), |row| {
            let span = out.span(row);
            // SAFETY: the caller guarantees this; the row belongs to this thread in every buffer.
            let (x, after) = unsafe {
                match (op.add, residual) {
                    (Some(Residual::Before(_)), Some(residual)) => {
                        let sum = residual.write(span);
                        self.isa.add(sum, input.read(span));
                        (&*sum, None)
                    }
                    (_, residual) => (input.read(span), residual),
                }
            };
            let normalise = |into: &mut [f32]| {
                self.isa.norm(x, norm, into);
                if let Some(residual) = after {
                    // SAFETY: as above.
                    self.isa.add(into, unsafe { residual.read(span) });
                }
            };
            // SAFETY: as above; if the output is also an input, the row is written after it has been read.
            unsafe {
                if in_place {
                    ROW.with_borrow_mut(|scratch| {
                        scratch.resize(span.len, 0.0);
                        normalise(scratch);
                        out.write(span).copy_from_slice(scratch);
                    });
                } else {
                    normalise(out.write(span));
                }
                out.prepare(self.isa, span);
            }
        });
    }

    unsafe fn product(&self, op: &Product, worker: Worker<'_>, scratch: &Scratch) {
        let matrix = self.weights.near(worker)[op.weight.0].factor();
        let rows = self.count(op.out);
        let add = op.add.map(|id| scratch.rows[id.0]);
        let epilogue = Epilogue { bias: op.bias.as_deref(), scale: op.scale, softcap: op.softcap, add };
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let largest = op.is_head.then(|| scratch.largest.expect("room was made for the head's"));
        let product = product::Product { rows, epilogue, largest, ..product::Product::new(matrix, input, out) };
        // SAFETY: the caller guarantees this.
        let (pieces, shrink) = (product.pieces(), unsafe { self.shrink_pieces(op.shrink, scratch) });
        worker.share(pieces + shrink, |piece| {
            // SAFETY: the caller guarantees this; each piece is taken by one thread.
            unsafe {
                match piece.checked_sub(pieces) {
                    None => product.run(self.isa, piece),
                    Some(piece) => self.shrink(op.shrink, piece, scratch),
                }
            }
        });
    }

    unsafe fn qkv_post(&self, op: &Projected, worker: Worker<'_>, scratch: &Scratch) {
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
        worker.share(scratch.blocks.len() * parts, |task| {
            let (run, part) = (scratch.blocks[task / parts], task % parts);
            let heads = if together { 0..op.heads.kv } else { part..part + 1 };
            for row in run.first..run.first + run.count {
                // SAFETY: the caller guarantees this; a run's rows and its block belong to this thread for these heads.
                unsafe { post.row(row, heads.clone()) };
            }
        });
    }

    unsafe fn attention(&self, op: &Attended, runs: &[Run], worker: Worker<'_>, scratch: &Scratch) {
        let out = scratch.rows[op.out.0];
        let attention = Attention {
            cache: scratch.caches[op.group][op.layer],
            tables: self.batch.tables(op.group),
            heads: op.heads,
            scale: op.scale,
            sight: op.sight,
            seen_ends: &self.batch.seen_ends,
            window: op.window,
            softcap: op.softcap,
            sinks: op.sinks.as_deref(),
            q: scratch.rows[op.q.0],
            out,
            prepares: out.forms.any() && prepares_by_head(op.heads),
        };
        let heads = op.heads.kv;
        let parts = attention.parts(runs.len(), worker.threads());
        worker.share(runs.len() * heads * parts, |task| {
            let (task, part) = (task / parts, task % parts);
            // The keys of one head of a large image fit a cache that those of all heads exceed.
            let (run, head) = match op.sight {
                Sight::Causal | Sight::Spans => (task / heads, task % heads),
                Sight::Both => (task % runs.len(), task / runs.len()),
            };
            // SAFETY: the caller guarantees this; each part of a head of a run is taken by one thread.
            unsafe { attention.run(self.isa, runs[run], head, attention.part(head, part, parts)) };
        });
    }

    unsafe fn glu(&self, op: &Glu, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let chunks = out.cols.div_ceil(GLU_COLS);
        worker.share(self.count(op.out) * chunks, |task| {
            let (row, from) = (task / chunks, task % chunks * GLU_COLS);
            let span = Span { row, from, len: GLU_COLS.min(out.cols - from) };
            // SAFETY: the caller guarantees this; the span belongs to this thread.
            unsafe {
                let gate = input.read(span);
                let up = input.read(Span { from: out.cols + from, ..span });
                self.isa.glu(op.kind, gate, up, out.write(span));
                out.prepare(self.isa, span);
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
    /// Processes some KV heads of a row, and the query heads that share them.
    ///
    /// # Safety
    /// During the call, no other thread may write the input or the tables, use these heads of the row or write their
    /// block.
    unsafe fn row(&self, row: usize, heads: std::ops::Range<usize>) {
        let shape = self.op.heads;
        let group = shape.q / shape.kv;
        let columns = |from: usize, heads: &std::ops::Range<usize>, each: usize| Span {
            row,
            from: from + heads.start * each,
            len: heads.len() * each,
        };
        let q = columns(0, &heads, group * shape.dim);
        // SAFETY: the caller guarantees this.
        let (out, q, k, v) = unsafe {
            let k = self.input.read(columns(shape.q_cols(), &heads, shape.dim));
            let v = self.input.read(columns(shape.q_cols() + shape.kv_cols(), &heads, shape.dim));
            (self.out.write(q), self.input.read(q), k, v)
        };
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
    unsafe fn keep(&self, slot: u32, heads: std::ops::Range<usize>, key: &[f32], value: &[f32]) {
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
