//! Adapters: what sequences add to the products of a step.
//!
//! The rows of an adapter are multiplied in tiles of four, first with A, beside the product itself, and then with B. A row's
//! sums are those of pieces of its inputs, added in their order, so they depend on no other row. The rows of a tile also
//! have the same expert, where there are some.

mod adapter;
mod plain;
mod routed;
#[cfg(target_arch = "x86_64")]
mod wide;

use std::cell::RefCell;
use std::ops::Range;

use octavo_ops::{BufferId, Rows as RowCount, SiteId, WeightId};

use crate::activation::Span;
use crate::experts::{self, Threads};
use crate::forward::{Forward, Scratch};
use crate::isa::{Isa, per_isa};
use crate::memory::{Lines, Shared};
use crate::plan::Stage;
use crate::pool::Worker;
use crate::product;
use crate::rows::LANES;
pub(crate) use adapter::Adapter;
use adapter::Matrices;
use routed::{RoutedRows, RoutedTiles};

/// Number of rows in a tile.
const ROWS: usize = 4;

/// Number of inputs of a partial sum.
const PIECE: usize = 1024;

/// Number of outputs in a piece of work.
const COLUMNS: usize = 256;

per_isa! {
    plain;
    /// Multiplies rows with a panel of as many rows as they have elements.
    fn multiply_f32(x: &[&[f32]; ROWS], panel: &[[f32; LANES]], sums: &mut [[f32; LANES]; ROWS]);

    /// Does the same with a panel of bf16 numbers.
    fn multiply_bf16(x: &[&[f32]; ROWS], panel: &[[u16; LANES]], sums: &mut [[f32; LANES]; ROWS]);
}

thread_local! {
    /// `A x` of the rows of a tile.
    static SHRUNK: RefCell<Vec<f32>> = RefCell::default();
}

/// The rows of the inputs and outputs of a site.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// The rows of the step.
    Tokens,
    /// The rows that reach the head.
    Sampled,
    /// The rows of tokens and experts, in the order of experts. The inputs may be the rows of tokens.
    Experts { routing: BufferId, by_token: bool },
}

/// The products with A at a site, which run beside the weight's own.
#[derive(Clone, Copy)]
pub(crate) struct Shrink {
    pub(crate) site: SiteId,
    pub(crate) input: BufferId,
    pub(crate) place: Place,
}

/// `Lora`, without the products with A.
pub(crate) struct Expand {
    pub(crate) site: SiteId,
    /// Input of the products with A; `None` if their results are rows of a table.
    pub(crate) input: Option<BufferId>,
    pub(crate) place: Place,
    pub(crate) scale: f32,
    pub(crate) out: BufferId,
    /// The head, if the outputs are logits, whose largest are known by chunk.
    pub(crate) head: Option<WeightId>,
    /// First output and number of outputs of each part of the weight, or of an expert's.
    pub(crate) parts: Vec<Range<usize>>,
}

/// Rows of a buffer that have the same adapter, and the same expert if there are some.
#[derive(Clone, Copy)]
struct Tile {
    /// Index among the tiles of the buffer.
    index: usize,
    /// Slot of the adapter.
    slot: usize,
    /// Expert; 0 if there are none.
    expert: usize,
    rows: [usize; ROWS],
    /// Rows of the input.
    sources: [usize; ROWS],
    count: usize,
}

/// The tiles of a buffer.
enum Tiles<'s> {
    Listed(&'s [Tile]),
    Routed(RoutedTiles),
}

impl Tiles<'_> {
    /// # Safety
    /// The rows of experts must have been divided before the last barrier.
    unsafe fn len(&self) -> usize {
        match self {
            Self::Listed(tiles) => tiles.len(),
            // SAFETY: the caller guarantees this.
            Self::Routed(tiles) => unsafe { tiles.len() },
        }
    }

    /// # Safety
    /// The conditions of `len` apply.
    unsafe fn get(&self, index: usize) -> Tile {
        match self {
            Self::Listed(tiles) => tiles[index],
            // SAFETY: the caller guarantees this.
            Self::Routed(tiles) => unsafe { tiles.get(index) },
        }
    }
}

/// Some outputs of a part of a site.
struct Piece<'a> {
    adapter: &'a Adapter,
    part: &'a adapter::Part,
    /// First output of the part.
    first: usize,
    /// Outputs of the piece, counted from that one.
    columns: Range<usize>,
}

/// Memory that is kept from step to step.
#[derive(Default)]
pub(crate) struct LoraScratch {
    /// Tiles of the rows of the step, and of its sampled rows.
    tiles: [Vec<Tile>; 2],
    /// Rows with their adapters, while they are divided into tiles.
    order: Vec<(u32, u32)>,
    /// 1 + the slot of each token's adapter, or 0.
    adapters: Vec<u32>,
    /// Rows of tokens and experts, by the buffer of experts.
    routed: Vec<RoutedRows>,
    /// Partial sums of `A x`, by row of the tiles, piece and column.
    partial: Lines<f32>,
    shared: Option<Shared<f32>>,
}

impl LoraScratch {
    /// Divides the rows of a step into tiles, and makes room for those of experts.
    pub(crate) fn set_up(&mut self, forward: &Forward<'_>) {
        let batch = forward.batch;
        let mut adapters = 0;
        for (tiles, rows) in self.tiles.iter_mut().zip([RowCount::Tokens, RowCount::Sampled]) {
            self.order.clear();
            self.order.extend(batch.adapted(rows).map(|(row, adapter)| (adapter - 1, row)));
            self.order.sort_unstable();
            tiles.clear();
            for same in self.order.chunk_by(|a, b| a.0 == b.0) {
                adapters += usize::from(rows == RowCount::Tokens);
                let first = tiles.len();
                tiles.extend(same.chunks(ROWS).zip(first..).map(|(rows, index)| {
                    // The rows after the last are computed and not used.
                    let all = std::array::from_fn(|index| rows[index.min(rows.len() - 1)].1 as usize);
                    Tile { index, slot: rows[0].0 as usize, expert: 0, rows: all, sources: all, count: rows.len() }
                }));
            }
        }
        if self.is_idle() {
            return;
        }
        self.adapters.clear();
        self.adapters.resize(batch.tokens(), 0);
        let mut adapted = 0;
        for (row, adapter) in batch.adapted(RowCount::Tokens) {
            self.adapters[row as usize] = adapter;
            adapted += 1;
        }
        self.routed.resize_with(forward.plan.buffers.len(), RoutedRows::default);
        self.routed.iter_mut().for_each(RoutedRows::clear);
        let mut sums = 0;
        for (shrink, experts) in forward.shrinks() {
            let tiles = match shrink.place {
                Place::Tokens => self.tiles[0].len(),
                Place::Sampled => self.tiles[1].len(),
                Place::Experts { routing, .. } => {
                    let rows = adapted * forward.plan.buffers[routing.0].cols;
                    self.routed[routing.0].reserve(rows, experts * adapters)
                }
            };
            let width = pieces(forward.plan.buffers[shrink.input.0].cols) * forward.panels(shrink.site) * LANES;
            sums = sums.max(tiles * ROWS * width);
        }
        self.partial.reserve_zeroed(sums);
        self.shared = Some(Shared::new(&mut self.partial));
    }

    /// Returns whether no sequence of the step has an adapter.
    pub(crate) fn is_idle(&self) -> bool {
        self.tiles[0].is_empty()
    }

    /// Divides the rows of tokens and experts into tiles, if adapters may change the products of the experts.
    ///
    /// # Safety
    /// The rows must have been sorted by this thread or before the last barrier. During the call, no other thread may use
    /// their tiles.
    pub(crate) unsafe fn divide(&self, routing: BufferId, threads: &Threads) {
        if !self.is_idle() {
            // SAFETY: the caller guarantees this.
            unsafe { self.routed[routing.0].divide(threads, &self.adapters) };
        }
    }

    fn tiles(&self, place: Place) -> Tiles<'_> {
        match place {
            Place::Tokens => Tiles::Listed(&self.tiles[0]),
            Place::Sampled => Tiles::Listed(&self.tiles[1]),
            Place::Experts { .. } if self.is_idle() => Tiles::Listed(&[]),
            Place::Experts { routing, by_token } => Tiles::Routed(self.routed[routing.0].tiles(by_token)),
        }
    }
}

/// Number of partial sums of a column of `A x` with so many inputs.
fn pieces(inputs: usize) -> usize {
    inputs.div_ceil(PIECE)
}

impl Forward<'_> {
    /// Returns the products with A of the plan, with the number of experts.
    fn shrinks(&self) -> impl Iterator<Item = (Shrink, usize)> {
        self.plan.stages.iter().filter_map(|stage| match stage {
            Stage::Product(op) => Some((op.shrink?, 0)),
            Stage::Experts(experts::Stage::Product(op)) => {
                Some((op.shrink?, self.weights.shapes()[op.weight.0].experts().len()))
            }
            _ => None,
        })
    }

    fn matrices(&self, tile: Tile, site: SiteId) -> Option<(&Adapter, &Matrices)> {
        self.adapters[tile.slot].as_ref().map(|adapter| (adapter, adapter.matrices(site, tile.expert)))
    }

    /// Returns the largest number of panels of A at a site.
    fn panels(&self, site: SiteId) -> usize {
        self.adapters.iter().flatten().map(|adapter| adapter.panels(site)).max().unwrap_or(0)
    }

    /// Returns the number of pieces of the products with A at a site.
    ///
    /// # Safety
    /// The conditions of `stage` apply.
    pub(crate) unsafe fn shrink_pieces(&self, op: Option<Shrink>, scratch: &Scratch) -> usize {
        let Some(op) = op else { return 0 };
        // SAFETY: the caller guarantees this.
        let tiles = unsafe { scratch.lora.tiles(op.place).len() };
        if tiles == 0 { 0 } else { tiles * self.panels(op.site) * pieces(scratch.rows[op.input.0].cols) }
    }

    /// Computes partial sums of a tile's `A x`.
    ///
    /// # Safety
    /// The conditions of `stage` apply, and each piece must be computed by one thread only.
    pub(crate) unsafe fn shrink(&self, op: Option<Shrink>, mut index: usize, scratch: &Scratch) {
        let (Some(op), Some(partial)) = (op, scratch.lora.shared) else { return };
        let input = scratch.rows[op.input.0];
        let (panels, pieces) = (self.panels(op.site), pieces(input.cols));
        let piece = index % pieces;
        index /= pieces;
        let (panel, at) = (index % panels, index / panels);
        // SAFETY: the caller guarantees this.
        let tile = unsafe { scratch.lora.tiles(op.place).get(at) };
        let Some((adapter, matrices)) = self.matrices(tile, op.site) else { return };
        let Some(a) = matrices.a.filter(|_| panel < matrices.panels) else { return };
        let from = piece * PIECE;
        let len = PIECE.min(input.cols - from);
        let mut sums = [[0.0; LANES]; ROWS];
        // SAFETY: the caller guarantees this; the sums of this piece belong to this thread.
        unsafe {
            let x = tile.sources.map(|row| input.read(Span { row, from, len }));
            adapter.multiply(self.isa, (&x, tile.count), (a, panel * input.cols + from), &mut sums);
            for (row, sums) in sums[..tile.count].iter().enumerate() {
                let place = ((at * ROWS + row) * pieces + piece) * panels + panel;
                partial.part(place * LANES, LANES).copy_from_slice(sums);
            }
        }
    }

    /// Multiplies the tiles' `A x` with B and adds the results to the output.
    ///
    /// # Safety
    /// The conditions of `stage` apply.
    pub(crate) unsafe fn expand(&self, op: &Expand, worker: Worker<'_>, scratch: &Scratch) {
        let tiles = scratch.lora.tiles(op.place);
        let (out, rows) = (scratch.rows[op.out.0], self.count(op.out));
        let head = op.head.map(|id| self.weights.shapes()[id.0].factor());
        let chunks = head.map_or(out.cols.div_ceil(COLUMNS), |head| product::chunks(head, rows));
        // SAFETY: the caller guarantees this.
        worker.share(unsafe { tiles.len() } * chunks, |index| {
            let (at, chunk) = (index / chunks, index % chunks);
            let columns = match head {
                Some(head) => product::chunk_columns(head, rows, chunk),
                None => chunk * COLUMNS..((chunk + 1) * COLUMNS).min(out.cols),
            };
            // SAFETY: as above.
            let tile = unsafe { tiles.get(at) };
            let Some((adapter, matrices)) = self.matrices(tile, op.site) else { return };
            for &row in &tile.rows[..tile.count] {
                out.prefetch(Span { row, from: columns.start, len: columns.len() });
            }
            for (range, part) in op.parts.iter().zip(&matrices.parts) {
                let (start, end) = (range.start.max(columns.start), range.end.min(columns.end));
                let Some(part) = part.as_ref().filter(|_| start < end) else { continue };
                let piece =
                    Piece { adapter, part, first: range.start, columns: start - range.start..end - range.start };
                SHRUNK.with_borrow_mut(|shrunk| {
                    // SAFETY: the caller guarantees this; these columns of the rows belong to this thread.
                    unsafe {
                        self.shrunk(op, tile, part, shrunk, scratch);
                        self.expand_piece(op, tile, &piece, shrunk, scratch);
                    }
                });
            }
            let (Some(head), Some(largest)) = (head, scratch.largest) else { return };
            let chunks = product::chunks(head, rows);
            for &row in &tile.rows[..tile.count] {
                // SAFETY: as above; the largest of a row's chunk belong to this thread.
                unsafe {
                    let logits = out.read(Span { row, from: columns.start, len: columns.len() });
                    self.isa.largest(logits, &mut largest.part(row * chunks + chunk, 1)[0]);
                }
            }
        });
    }

    /// Writes `s · A x` of a tile's rows for a part of a site's weight.
    unsafe fn shrunk(&self, op: &Expand, tile: Tile, part: &adapter::Part, shrunk: &mut Vec<f32>, scratch: &Scratch) {
        shrunk.clear();
        match (op.input, scratch.lora.shared) {
            (Some(input), Some(partial)) => {
                let (panels, pieces) = (self.panels(op.site), pieces(scratch.rows[input.0].cols));
                for row in 0..ROWS {
                    let first = shrunk.len();
                    shrunk.resize(first + part.rank, 0.0);
                    // The rows after the last are those of other tiles or of an earlier step, and are not used.
                    for piece in 0..pieces {
                        let place = ((tile.index * ROWS + row) * pieces + piece) * panels * LANES + part.from;
                        // SAFETY: the caller guarantees this.
                        let sums = unsafe { partial.view(place, part.rank) };
                        shrunk[first..].iter_mut().zip(sums).for_each(|(x, sum)| *x += sum);
                    }
                }
            }
            _ => {
                for row in tile.rows {
                    let token = self.batch.token_ids[row] as usize;
                    shrunk.extend_from_slice(&part.table[token * part.rank..][..part.rank]);
                }
            }
        }
        self.isa.scale(shrunk, part.scaling);
    }

    /// Adds the products with B for some of a part's columns.
    unsafe fn expand_piece(&self, op: &Expand, tile: Tile, piece: &Piece<'_>, shrunk: &[f32], scratch: &Scratch) {
        let Piece { adapter, part, first, columns } = piece;
        let out = scratch.rows[op.out.0];
        let x: [&[f32]; ROWS] = std::array::from_fn(|row| &shrunk[row * part.rank..][..part.rank]);
        for panel in columns.start / LANES..columns.end.div_ceil(LANES) {
            let mut sums = [[0.0; LANES]; ROWS];
            adapter.multiply(self.isa, (&x, tile.count), (part.b, panel * part.rank), &mut sums);
            let (start, end) = (columns.start.max(panel * LANES), columns.end.min((panel + 1) * LANES));
            for (&row, sums) in tile.rows[..tile.count].iter().zip(&sums) {
                // SAFETY: the caller guarantees this.
                let out = unsafe { out.write(Span { row, from: first + start, len: end - start }) };
                self.isa.add_scaled(out, &sums[start - panel * LANES..end - panel * LANES], op.scale);
            }
        }
    }
}
