//! The media cache, and the stages of images.

use octavo_ops::{Act, BackendError, BufferId, EmbedTaps, InjectMode, InjectRows, MergeKind, MergeRows};

use crate::activation::{Rows, Span};
use crate::failed;
use crate::forward::{Forward, GLU_COLS, ROW, Scratch};
use crate::memory::{Lines, Shared};
use crate::pool::Worker;
use crate::product;

/// Rows of encoder outputs, in f32.
#[derive(Default)]
pub(crate) struct MediaCache {
    columns: usize,
    rows: usize,
    values: Lines<f32>,
}

impl MediaCache {
    /// Allocates zeroed rows.
    pub(crate) fn new(rows: usize, columns: usize) -> Result<Self, BackendError> {
        let elements = rows.saturating_mul(columns);
        let rows = if columns == 0 { 0 } else { rows };
        Ok(Self { columns, rows, values: Lines::zeroed(elements, || "the media cache".into())? })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns a row.
    pub(crate) fn row(&self, row: u32) -> Result<&[f32], BackendError> {
        if row as usize >= self.rows {
            return Err(failed(format!("there is no row {row} in a media cache of {} rows", self.rows)));
        }
        Ok(&self.values[row as usize * self.columns..][..self.columns])
    }

    /// Returns access for the threads of a region.
    pub(crate) fn shared(&mut self) -> MediaRows {
        MediaRows { columns: self.columns, values: Shared::new(&mut self.values) }
    }
}

/// The media cache in a region.
#[derive(Clone, Copy)]
pub(crate) struct MediaRows {
    columns: usize,
    values: Shared<f32>,
}

/// Stages of images. The batches have been checked.
///
/// # Safety
/// The conditions of `Forward::stage` apply to all functions.
impl Forward<'_> {
    pub(crate) unsafe fn patches(&self, worker: Worker<'_>, out: Rows) {
        let Some(images) = self.images else { return };
        let each = out.cols / images.channels.len();
        worker.share(self.batch.tokens(), |row| {
            let bytes = &images.patches[row * out.cols..][..out.cols];
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            unsafe {
                let values = out.write(out.span(row)).chunks_exact_mut(each);
                for ((bytes, values), channel) in bytes.chunks_exact(each).zip(values).zip(&images.channels) {
                    self.isa.normalise(bytes, channel.shift, channel.divisor, values);
                }
                out.prepare(self.isa, out.span(row));
            }
        });
    }

    pub(crate) unsafe fn embed_taps(&self, op: &EmbedTaps, worker: Worker<'_>, out: Rows) {
        let Some(images) = self.images else { return };
        let table = self.weights.near(worker)[op.table.0].factor();
        worker.share(self.batch.tokens(), |row| {
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            let x = unsafe { out.write(out.span(row)) };
            ROW.with_borrow_mut(|learned| {
                learned.resize(out.cols, 0.0);
                for tap in images.taps[row].iter().filter(|tap| tap.weight != 0.0) {
                    product::read_row(table, tap.row as usize, learned);
                    self.isa.add_scaled(x, learned, tap.weight);
                }
            });
        });
    }

    pub(crate) unsafe fn merge(&self, op: &MergeRows, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let factor = self.program.merge();
        worker.share(self.batch.tokens() / factor, |row| {
            // SAFETY: the caller guarantees this; the row belongs to this thread.
            unsafe {
                let merged = out.write(out.span(row));
                let rows = (row * factor..(row + 1) * factor).map(|row| input.read(input.span(row)));
                match op.kind {
                    MergeKind::Concatenated => {
                        merged.chunks_exact_mut(input.cols).zip(rows).for_each(|(part, row)| part.copy_from_slice(row));
                    }
                    MergeKind::Mean => {
                        merged.fill(0.0);
                        rows.for_each(|row| merged.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
                        self.isa.scale(merged, 1.0 / factor as f32);
                    }
                }
                out.prepare(self.isa, out.span(row));
            }
        });
    }

    pub(crate) unsafe fn store(&self, input: BufferId, column: usize, worker: Worker<'_>, scratch: &Scratch) {
        let (Some(images), Some(media)) = (self.images, scratch.media) else { return };
        let input = scratch.rows[input.0];
        worker.share(images.store_rows.len(), |row| {
            let at = images.store_rows[row] as usize * media.columns + column;
            // SAFETY: the caller guarantees this; each row of the cache is stored once.
            unsafe { media.values.part(at, input.cols).copy_from_slice(input.read(input.span(row))) };
        });
    }

    pub(crate) unsafe fn inject(&self, op: &InjectRows, worker: Worker<'_>, scratch: &Scratch) {
        let Some(media) = scratch.media else { return };
        let (out, rows) = (scratch.rows[op.out.0], &self.batch.injected);
        worker.share(rows.len(), |index| {
            let at = rows[index].media as usize * media.columns + op.column;
            // SAFETY: the caller guarantees this; each row of the step is listed once, and a decoder writes no row of
            // the cache.
            unsafe {
                let (x, kept) = (out.write(out.span(rows[index].row as usize)), media.values.view(at, out.cols));
                match op.mode {
                    InjectMode::Replace => x.copy_from_slice(kept),
                    InjectMode::Add => self.isa.add(x, kept),
                }
            }
        });
    }

    pub(crate) unsafe fn act(&self, op: &Act, worker: Worker<'_>, scratch: &Scratch) {
        let (input, out) = (scratch.rows[op.input.0], scratch.rows[op.out.0]);
        let chunks = out.cols.div_ceil(GLU_COLS);
        worker.share(self.count(op.out) * chunks, |task| {
            let (row, from) = (task / chunks, task % chunks * GLU_COLS);
            let span = Span { row, from, len: GLU_COLS.min(out.cols - from) };
            // SAFETY: the caller guarantees this; the span belongs to this thread in both buffers.
            unsafe {
                if op.input != op.out {
                    out.write(span).copy_from_slice(input.read(span));
                }
                self.isa.act(op.kind, out.write(span));
                out.prepare(self.isa, span);
            }
        });
    }
}
