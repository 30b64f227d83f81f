//! Matrix products: every row of an activation with every panel of a weight.
//!
//! The order of a row's sums does not depend on the kernel: integer products are exact within a group, and every kernel
//! adds the groups in order, scale first, then minimum. For bf16, f16 and f32 weights each instruction set has one
//! kernel, which computes rows independently.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16;
pub(crate) mod gated;
#[cfg(target_arch = "x86_64")]
mod levels;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod numbers;
#[cfg(target_arch = "x86_64")]
mod outlying;
mod output;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod plain;
#[cfg(target_arch = "x86_64")]
mod read;
#[cfg(target_arch = "x86_64")]
mod short;
#[cfg(target_arch = "x86_64")]
mod vnni;
mod walk;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod wide_numbers;
#[cfg(target_arch = "x86_64")]
mod ymm;

use crate::activation::{Rows, Span, TILE};
use crate::isa::Isa;
use crate::memory::Shared;
use crate::weights::{Matrix, PANEL, PanelKind, Panels, Part, short as short_bf16};
use output::Output;
use walk::{Range, bf16_tiles, dense, quant, quant_halves, with_unpacked};
#[cfg(target_arch = "x86_64")]
use walk::{bf16_blocks, blocks, number_blocks, rounded_blocks, short_blocks, ymm_tiles};

/// Number of panels in a piece of work: large enough that taking pieces costs nothing, small enough that threads finish
/// together.
const PIECE_PANELS: usize = 4;

/// Number of panels in a piece of a small matrix, of which there would be too few pieces for threads to finish together, and with few
/// rows, for which a piece is little work.
const SMALL_PANELS: usize = 2;

/// Largest number of panels of a small matrix.
const SMALL_MATRIX: usize = 64;

/// Number of rows in a piece of work. Every piece unpacks its panels again.
const PIECE_ROWS: usize = 256;

/// Number of rows that a group of threads has of its own for each thread, at least, so that memory keeps up: each group reads all weights.
/// With AVX-512, threads that multiply so many rows read 35 GB/s of weights of 4 bits together.
const GROUP_ROWS_A_THREAD: usize = 4;

/// Number of rows up to which VNNI is used instead of AMX, and pieces are small.
const SKINNY_ROWS: usize = 4;

/// A product computed by the threads of a region.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) input: Rows,
    pub(crate) rows: usize,
    pub(crate) out: Rows,
    pub(crate) epilogue: Epilogue<'a>,
    /// Destination of the largest result of each row in each chunk, by row: [`chunks`] of them. The value is −∞ if no
    /// result is larger.
    pub(crate) largest: Option<Shared<f32>>,
    /// Place of the first result.
    pub(crate) origin: Origin,
    /// Number of groups of threads that have rows of their own: [`groups`], or one if the input was not written by rows.
    pub(crate) groups: usize,
}

/// Place of the first result of a product whose output is a part of a buffer.
#[derive(Clone, Copy, Default)]
pub(crate) struct Origin {
    /// Row of the input whose result is the first row of the output.
    pub(crate) row: usize,
    /// Column of the result that is the first column.
    pub(crate) from: usize,
    /// First column of the output.
    pub(crate) column: usize,
}

/// Operations on a result before it is stored, in this order.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) add: Option<Rows>,
}

/// Returns the number of panels in a piece of a part for this number of rows.
fn piece_panels(part: &Part, rows: usize) -> usize {
    if rows <= SKINNY_ROWS || part.panels() <= SMALL_MATRIX { SMALL_PANELS } else { PIECE_PANELS }
}

/// Returns the number of groups into which threads are divided in stages of many rows. In each of these stages, a group has the same
/// rows, so that rows stay in its caches. In exchange, each group reads all weights. `group_rows` is the smallest number of rows of a
/// group, which depends on the [weights](group_rows).
pub(crate) fn groups(group_rows: usize, rows: usize, threads: usize) -> usize {
    threads.min(rows / group_rows.max(GROUP_ROWS_A_THREAD * threads)).max(1)
}

/// Returns the smallest number of rows of a group of threads: unpacking panels for fewer would cost more than moving rows from cache to
/// cache.
pub(crate) fn group_rows(isa: Isa, kind: PanelKind) -> usize {
    match (isa, kind) {
        // Products are limited by reading weights up to many more rows.
        (Isa::Amx, _) => PIECE_ROWS,
        // Unpacking takes little time beside products, and rows are in more places of memory than others.
        (Isa::Avx512 | Isa::Avx512Bf16, PanelKind::Quant(..)) => 16,
        _ => 32,
    }
}

/// Returns the number of chunks of columns into which the product of `rows` rows is divided. For the product of each row
/// with one of several matrices, it is the mean number of rows of a matrix.
pub(crate) fn chunks(matrix: &Matrix, rows: usize) -> usize {
    matrix.parts.iter().map(|part| part.panels().div_ceil(piece_panels(part, rows))).sum()
}

/// Returns the part and the panels of a chunk.
fn chunk(matrix: &Matrix, rows: usize, mut index: usize) -> (&Part, Range) {
    for part in &matrix.parts {
        let each = piece_panels(part, rows);
        let chunks = part.panels().div_ceil(each);
        if index < chunks {
            return (part, index * each..((index + 1) * each).min(part.panels()));
        }
        index -= chunks;
    }
    unreachable!("the caller counts the chunks")
}

/// Returns the columns of a chunk.
pub(crate) fn chunk_columns(matrix: &Matrix, rows: usize, index: usize) -> Range {
    let (part, panels) = chunk(matrix, rows, index);
    part.first + panels.start * PANEL..part.first + (panels.end * PANEL).min(part.rows)
}

impl<'a> Product<'a> {
    /// Returns a product of no rows, without an epilogue.
    pub(crate) fn new(matrix: &'a Matrix, input: Rows, out: Rows) -> Self {
        let (epilogue, origin) = (Epilogue::default(), Origin::default());
        Self { matrix, input, rows: 0, out, epilogue, largest: None, origin, groups: 1 }
    }

    /// Returns the number of pieces of work.
    pub(crate) fn pieces(&self) -> usize {
        chunks(self.matrix, self.rows) * self.blocks()
    }

    /// Returns the number of blocks of rows, as many for each group.
    fn blocks(&self) -> usize {
        self.rows.div_ceil(PIECE_ROWS).next_multiple_of(self.groups)
    }

    /// Returns the rows of a block, about as many for each. A thread that has a block of its own finds the rows there that it has in
    /// stages that are divided by rows.
    fn block(&self, isa: Isa, index: usize) -> Range {
        let start = |block: usize| match block * self.rows / self.blocks() {
            // A tile of a few rows takes as long as a whole one.
            row if isa == Isa::Amx && row < self.rows => row / TILE * TILE,
            row => row,
        };
        start(index)..start(index + 1)
    }

    /// Computes one piece.
    ///
    /// # Safety
    /// The activations must not be moved, and each piece must be computed by one thread only. During the call, no other
    /// thread may write the input or use the piece's output.
    pub(crate) unsafe fn run(&self, isa: Isa, piece: usize) {
        // Threads begin with adjacent pieces, so that they have the same rows in each stage.
        let chunks = chunks(self.matrix, self.rows);
        let (index, rows) = (piece % chunks, self.block(isa, piece / chunks));
        let (part, panels) = chunk(self.matrix, self.rows, index);
        // SAFETY: the caller guarantees this.
        unsafe { self.run_panels(isa, part, panels, rows.clone()) };
        let Some(largest) = self.largest else { return };
        let columns = chunk_columns(self.matrix, self.rows, index);
        for row in rows {
            // SAFETY: the caller guarantees this; this piece has just written the columns, and no other thread writes
            // its result.
            unsafe {
                let results = self.out.read(Span { row, from: columns.start, len: columns.len() });
                isa.largest(results, &mut largest.part(row * chunks + index, 1)[0]);
            }
        }
    }

    /// Computes a chunk of columns for some rows only.
    ///
    /// # Safety
    /// The conditions of `run` apply to the chunk and the rows.
    pub(crate) unsafe fn run_rows(&self, isa: Isa, index: usize, rows: Range) {
        let (part, panels) = chunk(self.matrix, self.rows, index);
        // SAFETY: the caller guarantees this.
        unsafe { self.run_panels(isa, part, panels, rows) };
    }

    /// # Safety
    /// The conditions of `run` apply.
    unsafe fn run_panels(&self, isa: Isa, part: &Part, panels: std::ops::Range<usize>, rows: std::ops::Range<usize>) {
        // Blocks of whole tiles leave none for a group if there are few.
        if rows.is_empty() {
            return;
        }
        // SAFETY: the caller guarantees this.
        let output = &unsafe { Output::new(self, isa, part) };
        match part.layout.kind {
            PanelKind::Quant(..) => {
                // SAFETY: the caller guarantees this.
                let input = unsafe { self.input.quant() };
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx512 && (isa != Isa::Amx || rows.len() <= SKINNY_ROWS || part.layout.kind.has_halves())
                {
                    // SAFETY: the instruction set is available; the input has room for whole tiles of rows.
                    return unsafe { blocks(part, panels, &input, rows, output) };
                }
                #[cfg(target_arch = "x86_64")]
                if matches!(isa, Isa::Avx2 | Isa::AvxVnni) {
                    // SAFETY: the instruction set is available.
                    return unsafe { ymm_tiles(isa, part, panels, input, rows, output) };
                }
                #[cfg(target_arch = "aarch64")]
                if isa >= Isa::Neon {
                    // SAFETY: the instruction set is available.
                    return unsafe { neon::integers(isa, part, panels, input, rows, output) };
                }
                if part.layout.kind.has_halves() {
                    return quant_halves(part, panels, &input, rows, output);
                }
                quant(isa, part, panels, &input, rows, output);
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller guarantees this; the instruction set is available.
            kind @ PanelKind::Packed(_) if kind.takes_integers(isa) => unsafe {
                let input = self.input.quant();
                match isa {
                    Isa::Avx2 | Isa::AvxVnni => ymm_tiles(isa, part, panels, input, rows, output),
                    _ => number_blocks(part, panels, &input, rows, output),
                }
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller guarantees this; the instruction set is available, and there is room for whole tiles of rows.
            kind if kind.takes_rounded(isa) => unsafe {
                rounded_blocks(part, panels, self.input.bf16(), rows, output);
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller guarantees this; the instruction set is available.
            PanelKind::Short if isa.multiplies_short() => unsafe {
                short_blocks(part, panels, self.input.bf16(), rows, output);
            },
            // SAFETY: the caller guarantees this.
            PanelKind::Packed(_) | PanelKind::Short => with_unpacked(isa, part, panels.clone(), |weights| unsafe {
                self.run_numbers(isa, weights, panels, rows, output);
            }),
            // SAFETY: the caller guarantees this.
            PanelKind::Bf16 | PanelKind::F16 | PanelKind::F32 => unsafe {
                self.run_numbers(isa, part.stored(), panels, rows, output);
            },
        }
    }

    /// Multiplies with panels that are not integers.
    ///
    /// # Safety
    /// The conditions of `run` apply.
    unsafe fn run_numbers(&self, isa: Isa, weights: Panels<'_>, panels: Range, rows: Range, output: &Output<'_>) {
        match weights.layout.kind {
            PanelKind::Bf16 if isa == Isa::Amx => {
                // SAFETY: the caller guarantees this.
                let (input, stride) = unsafe { self.input.bf16() };
                bf16_tiles(weights, panels, (input, stride), rows, output);
            }
            #[cfg(target_arch = "x86_64")]
            PanelKind::Bf16 if isa == Isa::Avx512Bf16 => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe { bf16_blocks(weights, panels, self.input.bf16(), rows, output) };
            }
            #[cfg(target_arch = "aarch64")]
            PanelKind::Bf16 if isa == Isa::I8mmBf16 => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe { neon::bf16_rows(weights, panels, self.input.bf16(), rows, output) };
            }
            _ => {
                // SAFETY: the caller guarantees this.
                let input = |row: usize| unsafe { self.input.read(self.input.span(row)) };
                dense(isa, weights, panels, input, rows, output);
            }
        }
    }
}

/// Reads one row of a matrix as f32.
pub(crate) fn read_row(matrix: &Matrix, row: usize, out: &mut [f32]) {
    let part = matrix.part_of(row);
    let (panel, lane) = ((row - part.first) / PANEL, (row - part.first) % PANEL);
    let panel = part.panel(panel);
    match part.layout.kind {
        PanelKind::Quant(..) => plain::read_quant(panel, &part.layout, lane, out),
        PanelKind::Short => short_bf16::read(&part.layout, panel, lane, out),
        PanelKind::Packed(_) => numbers::read(panel, &part.layout, lane, out),
        kind @ (PanelKind::Bf16 | PanelKind::F16 | PanelKind::F32) => plain::read_dense(kind, panel, lane, out),
    }
}

#[cfg(test)]
mod tests;
