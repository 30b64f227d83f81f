//! Adapters: what sequences add to the products of a step.
//!
//! The rows of an adapter are multiplied in tiles of four, first with A, beside the product itself, and then with B. A row's
//! sums are those of pieces of its inputs, added in their order, so they depend on no other row.

mod adapter;
mod plain;

use std::cell::RefCell;
use std::ops::Range;

use octavo_ops::{LoraInput, Rows as RowCount, SiteId, StepBatch, WeightId};

use crate::activation::Span;
use crate::forward::{Forward, Scratch};
use crate::isa::{Isa, per_isa};
use crate::memory::{Lines, Shared};
use crate::pool::Worker;
use crate::product;
use crate::rows::LANES;
pub(crate) use adapter::Adapter;
use adapter::Matrices;

/// Number of rows in a tile.
const ROWS: usize = 4;

/// Number of inputs of a partial sum.
const PIECE: usize = 1024;

/// Number of outputs in a piece of work.
const COLUMNS: usize = 256;

per_isa! {
    plain;
    /// Multiplies rows with a panel of as many rows as they have elements.
    fn multiply_f32(x: [&[f32]; ROWS], panel: &[[f32; LANES]], sums: &mut [[f32; LANES]; ROWS]);

    /// Does the same with a panel of bf16 numbers.
    fn multiply_bf16(x: [&[f32]; ROWS], panel: &[[u16; LANES]], sums: &mut [[f32; LANES]; ROWS]);

    /// Does the same as `multiply_f32`, with the sums of even and of odd rows apart.
    fn multiply_f32_apart(x: [&[f32]; ROWS], panel: &[[f32; LANES]], sums: &mut [[f32; LANES]; ROWS]);

    /// Does the same as `multiply_bf16`, with the sums of even and of odd rows apart.
    fn multiply_bf16_apart(x: [&[f32]; ROWS], panel: &[[u16; LANES]], sums: &mut [[f32; LANES]; ROWS]);
}

thread_local! {
    /// `A x` of the rows of a tile.
    static SHRUNK: RefCell<Vec<f32>> = RefCell::default();
}

/// `Lora`, without the products with A, which run beside the weight's own.
pub(crate) struct Expand {
    pub(crate) site: SiteId,
    pub(crate) input: LoraInput,
    pub(crate) scale: f32,
    pub(crate) out: octavo_ops::BufferId,
    /// The head, if the outputs are logits, whose largest are known by chunk.
    pub(crate) head: Option<WeightId>,
    /// First output and number of outputs of each part.
    pub(crate) parts: Vec<Range<usize>>,
}

/// Rows of a buffer that have the same adapter.
#[derive(Clone, Copy)]
struct Tile {
    /// Index among the tiles of the buffer.
    index: usize,
    /// Slot of the adapter.
    slot: usize,
    rows: [usize; ROWS],
    count: usize,
}

/// Some outputs of a part of a site.
struct Piece<'a> {
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
    /// Partial sums of `A x`, by row of the tiles, piece and column.
    partial: Lines<f32>,
    shared: Option<Shared<f32>>,
}

impl LoraScratch {
    /// Divides the rows of a step into tiles. `width` returns the largest number of partial sums of a row, if any row has
    /// an adapter.
    pub(crate) fn set_up(&mut self, batch: &StepBatch, width: impl FnOnce() -> usize) {
        for (tiles, rows) in self.tiles.iter_mut().zip([RowCount::Tokens, RowCount::Sampled]) {
            self.order.clear();
            self.order.extend(batch.adapted(rows).map(|(row, adapter)| (adapter - 1, row)));
            self.order.sort_unstable();
            tiles.clear();
            for same in self.order.chunk_by(|a, b| a.0 == b.0) {
                let first = tiles.len();
                tiles.extend(same.chunks(ROWS).zip(first..).map(|(rows, index)| Tile {
                    index,
                    slot: rows[0].0 as usize,
                    // The rows after the last are computed and not used.
                    rows: std::array::from_fn(|index| rows[index.min(rows.len() - 1)].1 as usize),
                    count: rows.len(),
                }));
            }
        }
        let tiles = self.tiles.iter().map(Vec::len).max().unwrap_or(0);
        if tiles > 0 {
            self.partial.reserve_zeroed(tiles * ROWS * width());
        }
        self.shared = Some(Shared::new(&mut self.partial));
    }

    /// Returns whether no sequence of the step has an adapter.
    pub(crate) fn is_idle(&self) -> bool {
        self.tiles[0].is_empty()
    }
}

/// Number of partial sums of a column of `A x` with so many inputs.
pub(crate) fn pieces(inputs: usize) -> usize {
    inputs.div_ceil(PIECE)
}

impl Forward<'_> {
    fn tiles<'s>(&self, scratch: &'s Scratch, out: octavo_ops::BufferId) -> &'s [Tile] {
        &scratch.lora.tiles[usize::from(self.plan.buffers[out.0].rows == RowCount::Sampled)]
    }

    fn matrices(&self, tile: Tile, site: SiteId) -> Option<&Matrices> {
        self.adapters[tile.slot].as_ref().map(|adapter| &adapter.sites[site.0])
    }

    /// Returns the largest number of panels of A at a site.
    pub(crate) fn panels(&self, site: SiteId) -> usize {
        self.adapters.iter().flatten().map(|adapter| adapter.sites[site.0].panels).max().unwrap_or(0)
    }

    /// Returns the number of pieces of the products with A at a site.
    pub(crate) fn shrink_pieces(&self, op: &crate::plan::Product, scratch: &Scratch) -> usize {
        let Some(site) = op.site else { return 0 };
        let tiles = self.tiles(scratch, op.out).len();
        if tiles == 0 { 0 } else { tiles * self.panels(site) * pieces(scratch.rows[op.input.0].cols) }
    }

    /// Computes partial sums of a tile's `A x`.
    ///
    /// # Safety
    /// The conditions of `stage` apply, and each piece must be computed by one thread only.
    pub(crate) unsafe fn shrink(&self, op: &crate::plan::Product, mut index: usize, scratch: &Scratch) {
        let (Some(site), Some(partial)) = (op.site, scratch.lora.shared) else { return };
        let input = scratch.rows[op.input.0];
        let (panels, pieces) = (self.panels(site), pieces(input.cols));
        let piece = index % pieces;
        index /= pieces;
        let (panel, at) = (index % panels, index / panels);
        let tile = self.tiles(scratch, op.out)[at];
        let Some(matrices) = self.matrices(tile, site) else { return };
        let Some(a) = matrices.a.as_ref().filter(|_| panel < matrices.panels) else { return };
        let from = piece * PIECE;
        let len = PIECE.min(input.cols - from);
        let mut sums = [[0.0; LANES]; ROWS];
        // SAFETY: the caller guarantees this; the sums of this piece belong to this thread.
        unsafe {
            let x = tile.rows.map(|row| input.read(Span { row, from, len }));
            a.multiply(self.isa, x, panel * input.cols + from, &mut sums);
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
        let tiles = self.tiles(scratch, op.out);
        let (out, rows) = (scratch.rows[op.out.0], self.count(op.out));
        let head = op.head.map(|id| self.weights[id.0].factor());
        let chunks = head.map_or(out.cols.div_ceil(COLUMNS), |head| product::chunks(head, rows));
        worker.share(tiles.len() * chunks, |index| {
            let (at, chunk) = (index / chunks, index % chunks);
            let columns = match head {
                Some(head) => product::chunk_columns(head, rows, chunk),
                None => chunk * COLUMNS..((chunk + 1) * COLUMNS).min(out.cols),
            };
            let tile = tiles[at];
            let Some(matrices) = self.matrices(tile, op.site) else { return };
            for (range, part) in op.parts.iter().zip(&matrices.parts) {
                let (start, end) = (range.start.max(columns.start), range.end.min(columns.end));
                let Some(part) = part.as_ref().filter(|_| start < end) else { continue };
                let piece = Piece { part, first: range.start, columns: start - range.start..end - range.start };
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
            (LoraInput::Rows(input), Some(partial)) => {
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
        let Piece { part, first, columns } = piece;
        let out = scratch.rows[op.out.0];
        let x: [&[f32]; ROWS] = std::array::from_fn(|row| &shrunk[row * part.rank..][..part.rank]);
        for panel in columns.start / LANES..columns.end.div_ceil(LANES) {
            let mut sums = [[0.0; LANES]; ROWS];
            part.b.multiply(self.isa, x, panel * part.rank, &mut sums);
            let (start, end) = (columns.start.max(panel * LANES), columns.end.min((panel + 1) * LANES));
            for (&row, sums) in tile.rows[..tile.count].iter().zip(&sums) {
                // SAFETY: the caller guarantees this.
                let out = unsafe { out.write(Span { row, from: first + start, len: end - start }) };
                for (out, sum) in out.iter_mut().zip(&sums[start - panel * LANES..]) {
                    *out += op.scale * sum;
                }
            }
        }
    }
}
