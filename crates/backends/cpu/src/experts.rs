//! Mixtures of experts: the rows of a step ordered by expert, so that each expert multiplies adjacent rows.

use std::cell::RefCell;

use octavo_ops::{BufferId, ChoiceScratch, ExpertSum, GateRows, Route, WeightId};

use crate::activation::Span;
use crate::forward::{Forward, ROW, Scratch};
use crate::lora::Shrink;
use crate::memory::{Lines, Shared};
use crate::pool::Worker;
use crate::product::{self, Epilogue, Product};

/// Work of the ops of a mixture of experts between two barriers.
pub(crate) enum Stage {
    /// Chooses the experts of each token from its logits.
    Choose { op: Route, logits: BufferId, correction: Vec<f32> },
    /// Orders the rows of tokens and experts by expert, on one thread.
    Sort { routing: BufferId, experts: usize },
    /// Copies the row of each token to those of its experts. `plain` is whether they are read in f32.
    Dispatch { routing: BufferId, input: BufferId, out: BufferId, plain: bool },
    /// Multiplies the rows of each expert with its weight.
    Product(ExpertProduct),
    /// Adds the rows of each token.
    Sum(ExpertSum),
}

/// `ExpertLinear` over rows in the order of experts.
pub(crate) struct ExpertProduct {
    pub(crate) weight: WeightId,
    /// Bias of all experts, one after the other.
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) input: BufferId,
    pub(crate) routing: BufferId,
    pub(crate) out: BufferId,
    /// Products of adapters that run beside it.
    pub(crate) shrink: Option<Shrink>,
}

/// The experts of the tokens of a step.
#[derive(Default)]
pub(crate) struct Routing {
    /// Number of experts of a token k.
    chosen: usize,
    experts: Lines<u32>,
    weights: Lines<f32>,
    /// Row of each token and expert, in the order of experts `[T,k]`.
    rows: Lines<u32>,
    /// Token of each row `[k·T]`.
    tokens: Lines<u32>,
    /// Expert and first row of each group of rows, and then the number of rows: `1 + 2 · (groups + 1)` numbers that
    /// begin with the number of groups.
    groups: Lines<u32>,
    shared: Option<Threads>,
}

/// Access to the experts of a step for the threads of a region.
#[derive(Clone, Copy)]
pub(crate) struct Threads {
    chosen: usize,
    experts: Shared<u32>,
    weights: Shared<f32>,
    rows: Shared<u32>,
    tokens: Shared<u32>,
    groups: Shared<u32>,
}

/// Adjacent rows of one expert.
pub(crate) struct Group {
    pub(crate) expert: usize,
    pub(crate) rows: std::ops::Range<usize>,
}

thread_local! {
    static CHOICE: RefCell<ChoiceScratch> = RefCell::default();
    /// Next row of each expert.
    static NEXT: RefCell<Vec<u32>> = RefCell::default();
}

impl Routing {
    /// Makes room for the experts of a step.
    pub(crate) fn reserve(&mut self, tokens: usize, chosen: usize) {
        let rows = tokens * chosen;
        self.chosen = chosen;
        self.experts.reserve_zeroed(rows);
        self.weights.reserve_zeroed(rows);
        self.rows.reserve_zeroed(rows);
        self.tokens.reserve_zeroed(rows);
        // There are at most as many groups as rows.
        self.groups.reserve_zeroed(1 + 2 * (rows + 1));
        self.shared = Some(Threads {
            chosen,
            experts: Shared::new(&mut self.experts),
            weights: Shared::new(&mut self.weights),
            rows: Shared::new(&mut self.rows),
            tokens: Shared::new(&mut self.tokens),
            groups: Shared::new(&mut self.groups),
        });
    }

    fn threads(&self) -> Threads {
        self.shared.unwrap_or_else(|| unreachable!("room was made for the experts"))
    }
}

impl Threads {
    /// Orders the rows by expert, those of an expert by token.
    ///
    /// # Safety
    /// The memory of the experts must not be moved, and no other thread may use it during the call.
    unsafe fn sort(&self, tokens: usize, experts: usize) {
        let count = tokens * self.chosen;
        // SAFETY: the caller guarantees this.
        let (chosen, rows, sources, groups) = unsafe {
            let groups = self.groups.part(0, 1 + 2 * (count + 1));
            (self.experts.view(0, count), self.rows.part(0, count), self.tokens.part(0, count), groups)
        };
        NEXT.with_borrow_mut(|next| {
            next.clear();
            next.resize(experts, 0);
            chosen.iter().for_each(|&expert| next[expert as usize] += 1);
            let (mut first, mut found) = (0, 0);
            for (expert, next) in next.iter_mut().enumerate() {
                let length = std::mem::replace(next, first);
                if length > 0 {
                    groups[1 + 2 * found..][..2].copy_from_slice(&[expert as u32, first]);
                    found += 1;
                }
                first += length;
            }
            groups[1 + 2 * found..][..2].copy_from_slice(&[experts as u32, first]);
            groups[0] = found as u32;
            for (index, (row, &expert)) in rows.iter_mut().zip(chosen).enumerate() {
                *row = next[expert as usize];
                next[expert as usize] += 1;
                sources[*row as usize] = (index / self.chosen) as u32;
            }
        });
    }

    /// Returns the number of groups.
    ///
    /// # Safety
    /// The rows must be sorted, and no thread may sort them during the call.
    pub(crate) unsafe fn groups(&self) -> usize {
        // SAFETY: the caller guarantees this.
        unsafe { self.groups.view(0, 1)[0] as usize }
    }

    /// Returns a group.
    ///
    /// # Safety
    /// The conditions of `groups` apply.
    pub(crate) unsafe fn group(&self, index: usize) -> Group {
        // SAFETY: the caller guarantees this.
        let numbers = unsafe { self.groups.view(1 + 2 * index, 4) };
        Group { expert: numbers[0] as usize, rows: numbers[1] as usize..numbers[3] as usize }
    }

    /// Returns the token of a row.
    ///
    /// # Safety
    /// The conditions of `groups` apply.
    pub(crate) unsafe fn token(&self, row: usize) -> usize {
        // SAFETY: the caller guarantees this.
        unsafe { self.tokens.view(row, 1)[0] as usize }
    }
}

impl Forward<'_> {
    /// Runs a thread's part of a stage.
    ///
    /// # Safety
    /// The conditions of `stage` apply, in all of the following functions.
    pub(crate) unsafe fn experts(&self, stage: &Stage, worker: Worker<'_>, scratch: &Scratch) {
        let of = |routing: &BufferId| scratch.routings[routing.0].threads();
        match stage {
            // SAFETY: the caller guarantees this.
            Stage::Choose { op, logits, correction } => unsafe {
                self.choose(op, *logits, correction, worker, scratch)
            },
            Stage::Sort { routing, experts } => {
                // SAFETY: the caller guarantees this; one thread takes the only piece.
                worker.share(1, |_| unsafe {
                    of(routing).sort(self.batch.tokens(), *experts);
                    scratch.lora.divide(*routing, &of(routing));
                });
            }
            Stage::Dispatch { routing, input, out, plain } => {
                let (routing, input, out) = (of(routing), scratch.rows[input.0], scratch.rows[out.0]);
                worker.share(self.batch.tokens() * routing.chosen, |row| {
                    // SAFETY: the caller guarantees this; the row belongs to this thread.
                    unsafe { out.copy_row(row, &input, routing.token(row), *plain) };
                });
            }
            // SAFETY: the caller guarantees this.
            Stage::Product(op) => unsafe { self.expert_product(op, worker, scratch) },
            // SAFETY: the caller guarantees this.
            Stage::Sum(op) => unsafe { self.expert_sum(op, worker, scratch) },
        }
    }

    unsafe fn choose(&self, op: &Route, logits: BufferId, correction: &[f32], worker: Worker<'_>, scratch: &Scratch) {
        let (routing, logits) = (scratch.routings[op.out.0].threads(), scratch.rows[logits.0]);
        let chosen = routing.chosen;
        worker.share(self.batch.tokens(), |token| {
            // SAFETY: the caller guarantees this; the token belongs to this thread.
            let (logits, experts, weights) = unsafe {
                let experts = routing.experts.part(token * chosen, chosen);
                (logits.read(logits.span(token)), experts, routing.weights.part(token * chosen, chosen))
            };
            CHOICE.with_borrow_mut(|scratch| op.choose(logits, correction, scratch, experts, weights));
        });
    }

    unsafe fn expert_product(&self, op: &ExpertProduct, worker: Worker<'_>, scratch: &Scratch) {
        let routing = scratch.routings[op.routing.0].threads();
        let matrices = self.weights.near(worker)[op.weight.0].experts();
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        // SAFETY: the caller guarantees this; the rows were sorted before the last barrier.
        let groups = unsafe { routing.groups() };
        let mean = (self.batch.tokens() * routing.chosen).div_ceil(groups.max(1));
        // All experts have the same parts.
        let chunks = matrices.first().map_or(0, |matrix| product::chunks(matrix, mean));
        // SAFETY: as above.
        let shrink = unsafe { self.shrink_pieces(op.shrink, scratch) };
        worker.share(groups * chunks + shrink, |piece| {
            if let Some(piece) = piece.checked_sub(groups * chunks) {
                // SAFETY: as above; the piece is taken by one thread.
                return unsafe { self.shrink(op.shrink, piece, scratch) };
            }
            // SAFETY: as above.
            let Group { expert, rows } = unsafe { routing.group(piece / chunks) };
            let bias = op.bias.as_ref().map(|bias| &bias[expert * out.cols..][..out.cols]);
            let epilogue = Epilogue { bias, ..Epilogue::default() };
            let matrix = &matrices[expert];
            let product = Product { rows: mean, epilogue, ..Product::new(matrix, input, out) };
            // SAFETY: the caller guarantees this; the chunk of these rows is taken by one thread.
            unsafe { product.run_rows(self.isa, piece % chunks, rows) };
        });
    }

    unsafe fn expert_sum(&self, op: &ExpertSum, worker: Worker<'_>, scratch: &Scratch) {
        let routing = scratch.routings[op.routing.0].threads();
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let add = op.add.map(|id| scratch.rows[id.0]);
        let chosen = routing.chosen;
        worker.share(self.batch.tokens(), |token| {
            let span = out.span(token);
            ROW.with_borrow_mut(|sum| {
                sum.clear();
                sum.resize(span.len, 0.0);
                // SAFETY: the caller guarantees this; the token's row of the output belongs to this thread.
                unsafe {
                    let rows = routing.rows.view(token * chosen, chosen);
                    for (&row, &weight) in rows.iter().zip(routing.weights.view(token * chosen, chosen)) {
                        let row = Span { row: row as usize, ..span };
                        self.isa.add_scaled(sum, input.read(row), weight);
                    }
                    if op.scale != 1.0 {
                        self.isa.scale(sum, op.scale);
                    }
                    if let Some(add) = add {
                        self.isa.add(sum, add.read(span));
                    }
                    out.write(span).copy_from_slice(sum);
                }
            });
        });
    }

    pub(crate) unsafe fn gate_rows(&self, op: &GateRows, worker: Worker<'_>, scratch: &Scratch) {
        let (gate, out) = (scratch.rows[op.gate.0], scratch.rows[op.out.0]);
        worker.share(self.count(op.out), |row| {
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            unsafe {
                let logit = gate.read(gate.span(row))[0];
                self.isa.scale(out.write(out.span(row)), 1.0 / (1.0 + (-logit).exp()));
                out.prepare(self.isa, out.span(row));
            }
        });
    }
}
