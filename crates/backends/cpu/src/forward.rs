//! One forward pass: a single parallel region with a barrier after each stage.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use octavo_ops::{
    BufferId, Element, Embed, EmbedIds, EncodeBatch, Glu, PoolKind, PoolRows, Program, Residual, Rows as RowCount,
    Sight, StepBatch, sampling,
};

use crate::Isa;
use crate::activation::{Activation, Rows, Span};
use crate::attention::{Attention, Run, Task};
use crate::experts::Routing;
use crate::kv::{BLOCK, FreshPage, KvCache, LayerCache};
use crate::loaded::Copies;
use crate::lora::{Adapter, LoraScratch};
use crate::media::{MediaCache, MediaRows};
use crate::memory::{Lines, Shared};
use crate::plan::{Attended, Gated, Norm, Plan, Product, Stage, prepares_by_head};
use crate::pool::{Help, Pool, Worker};
use crate::product::{self, Epilogue, gated};
use crate::rows;
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
    pub(crate) angles: Vec<(Shared<f32>, Shared<f32>)>,
    /// Caches by KV group and layer.
    pub(crate) caches: Vec<Vec<LayerCache>>,
    fresh_pages: Vec<FreshPage>,
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

thread_local! {
    /// Buffer for a row of an in-place norm, or the keys of a row.
    pub(crate) static ROW: RefCell<Vec<f32>> = RefCell::default();
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
            activation.reserve(forward.count(BufferId(index)));
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
        kv.share(&batch.slot_mapping, &mut self.caches, &mut self.fresh_pages);
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

/// Returns when threads help each other if so many groups of them have rows of their own.
fn help_among(groups: usize) -> Help {
    if groups > 1 { Help::Late } else { Help::Always }
}

impl Forward<'_> {
    /// Runs every stage. The batch must have been checked.
    pub(crate) fn run(&self, pool: &mut Pool, memory: Memory<'_>) {
        let scratch = self.set_up(memory);
        pool.run(&|worker| {
            if !scratch.fresh_pages.is_empty() {
                // SAFETY: the cache is borrowed until the region ends, and each page is taken by one thread.
                worker.share(scratch.fresh_pages.len(), |page| unsafe { scratch.fresh_pages[page].map() });
                worker.barrier();
            }
            for stage in &self.plan.stages {
                if self.is_skipped(stage, scratch) {
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
            if self.is_skipped(stage, scratch) {
                return Duration::ZERO;
            }
            // SAFETY: as in `run`.
            pool.run(&|worker| unsafe { self.stage(stage, worker, scratch) });
            begun.elapsed()
        };
        self.plan.stages.iter().map(time).collect()
    }

    /// Returns whether a stage has no work in this step.
    fn is_skipped(&self, stage: &Stage, scratch: &Scratch) -> bool {
        match stage {
            Stage::Expand(_) => scratch.lora.is_idle(),
            Stage::Glu { op, gates } => *gates && self.gates(op, scratch),
            _ => false,
        }
    }

    /// Returns whether the product before a gated activation computes it in this step, if it can.
    fn gates(&self, op: &Glu, scratch: &Scratch) -> bool {
        scratch.lora.is_idle() && gated::pays(self.count(op.out))
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

    /// Returns when threads help each other in a stage whose pieces are in the order of so many rows.
    pub(crate) fn help(&self, rows: usize, worker: Worker<'_>) -> Help {
        help_among(self.groups(rows, worker))
    }

    /// Returns the number of groups of threads that have some of so many rows each.
    fn groups(&self, rows: usize, worker: Worker<'_>) -> usize {
        product::groups(self.plan.group_rows, rows, worker.threads())
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
                Stage::Glu { op, .. } => self.glu(op, worker, scratch),
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
                Stage::GatherColumns { order, input, out } => {
                    let (count, input, out) = (self.count(*out), scratch.rows[input.0], scratch.rows[out.0]);
                    worker.share(count, |row| {
                        let source = input.read(input.span(row));
                        let columns = out.write(out.span(row)).iter_mut().zip(order);
                        columns.for_each(|(to, &column)| *to = source[column]);
                        out.prepare(self.isa, out.span(row));
                    });
                }
                Stage::Pool(op) => self.pool(op, worker, scratch),
                Stage::Prepare(buffer) => {
                    let rows = scratch.rows[buffer.0];
                    let count = self.count(*buffer);
                    worker.share_with(self.help(count, worker), count, |row| rows.prepare(self.isa, rows.span(row)));
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
        let plain = op.plain || !scratch.lora.is_idle();
        let count = self.count(op.out);
        let own = worker.own(count);
        worker.share_with(self.help(count, worker), count, |row| {
            let span = out.span(row);
            if own.contains(&(row + 1)) {
                out.prefetch_forms(out.span(row + 1));
            }
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
                if plain && !in_place {
                    normalise(out.write(span));
                    return out.prepare(self.isa, span);
                }
                ROW.with_borrow_mut(|normed| {
                    normed.resize(span.len, 0.0);
                    normalise(normed);
                    if plain {
                        out.write(span).copy_from_slice(normed);
                    }
                    out.prepare_from(self.isa, normed, span);
                });
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
        // The input of the head is small beside its weights.
        let groups = if op.is_head { 1 } else { self.groups(rows, worker) };
        let help = help_among(groups);
        let product = product::Product { rows, epilogue, largest, groups, ..product::Product::new(matrix, input, out) };
        if let Some(Gated { op, plain }) = op.gated.as_ref().filter(|gated| self.gates(&gated.op, scratch)) {
            let gated = gated::Gated { product, kind: op.kind, out: scratch.rows[op.out.0], plain: *plain };
            // SAFETY: the caller guarantees this; each piece is taken by one thread.
            return worker.share_with(help, gated.pieces(), |piece| unsafe { gated.run(self.isa, piece) });
        }
        // SAFETY: the caller guarantees this.
        let (pieces, shrink) = (product.pieces(), unsafe { self.shrink_pieces(op.shrink, scratch) });
        worker.share_with(help, pieces + shrink, |piece| {
            // SAFETY: the caller guarantees this; each piece is taken by one thread.
            unsafe {
                match piece.checked_sub(pieces) {
                    None => product.run(self.isa, piece),
                    Some(piece) => self.shrink(op.shrink, piece, scratch),
                }
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
            plain: op.plain || !scratch.lora.is_idle(),
            prepares: out.forms.any() && prepares_by_head(op.heads),
        };
        let heads = op.heads.kv;
        let parts = attention.parts(runs.len(), worker.threads());
        let task = |index: usize| {
            let (task, part) = (index / parts, index % parts);
            // The keys of one head of a large image fit a cache that those of all heads exceed.
            let (run, head) = match op.sight {
                Sight::Causal | Sight::Spans => (task / heads, task % heads),
                Sight::Both => (task % runs.len(), task / runs.len()),
            };
            Task { run: runs[run], head, heads: attention.part(head, part, parts) }
        };
        let tasks = runs.len() * heads * parts;
        worker.share(tasks, |index| {
            let next = (index + 1 < tasks).then(|| task(index + 1));
            // SAFETY: the caller guarantees this; each part of a head of a run is taken by one thread.
            unsafe { attention.run(self.isa, &task(index), next) };
        });
    }

    unsafe fn glu(&self, op: &Glu, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let chunks = out.cols.div_ceil(GLU_COLS);
        let rows = self.count(op.out);
        worker.share_with(self.help(rows, worker), rows * chunks, |task| {
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
