//! Products whose results are the two halves of a gated activation. A piece computes some columns of both halves and then the
//! activation of these, so that the results of the product stay in a cache of the thread.

use std::cell::RefCell;

use octavo_ops::GluKind;

use super::{Origin, PIECE_PANELS, Product, Range, SKINNY_ROWS};
use crate::activation::{Activation, Forms, Rows, Span};
use crate::isa::Isa;
use crate::rows::GROUP;
use crate::weights::{Matrix, PANEL, Part};

/// Number of columns of each half in a piece: whole groups of integers.
const COLUMNS: usize = PIECE_PANELS * PANEL;

/// Number of rows after a row whose activations are prefetched, which are written to other places of memory.
const AHEAD: usize = 4;

thread_local! {
    /// Results of a piece: the gates, the other half, and the activation.
    static HALVES: RefCell<Activation> = RefCell::new(Activation::new(3 * COLUMNS, Forms::default()));
}

/// A product and the gated activation of its results.
pub(crate) struct Gated<'a> {
    /// Its output is not used.
    pub(crate) product: Product<'a>,
    pub(crate) kind: GluKind,
    pub(crate) out: Rows,
    /// Whether the output is read in f32 too.
    pub(crate) plain: bool,
}

/// Returns whether pieces of the product with a matrix can consist of columns of both halves.
pub(crate) fn halves(matrix: &Matrix) -> bool {
    let half = matrix.rows() / 2;
    half.is_multiple_of(GROUP) && matrix.parts.iter().skip(1).all(|part| part.first == half)
}

/// Returns whether a product of so many rows is faster with its activation. With a few rows, memory limits the speed, which is read
/// in sequence.
pub(crate) fn pays(rows: usize) -> bool {
    rows > SKINNY_ROWS
}

impl Gated<'_> {
    /// Returns the number of pieces of work.
    pub(crate) fn pieces(&self) -> usize {
        self.out.cols.div_ceil(COLUMNS) * self.product.blocks()
    }

    /// Computes one piece.
    ///
    /// # Safety
    /// The conditions of [`Product::run`] apply.
    pub(crate) unsafe fn run(&self, isa: Isa, piece: usize) {
        let chunks = self.out.cols.div_ceil(COLUMNS);
        let (from, rows) = (piece % chunks * COLUMNS, self.product.block(isa, piece / chunks));
        let Range { start: first, end } = rows;
        let len = COLUMNS.min(self.out.cols - from);
        HALVES.with_borrow_mut(|halves| {
            halves.reserve(rows.len());
            let halves = halves.shared();
            for half in 0..2 {
                let from = half * self.out.cols + from;
                let (part, panels) = panels(self.product.matrix, from..from + len);
                let origin = Origin { row: first, from, column: half * COLUMNS };
                let product = Product { out: halves, origin, largest: None, ..self.product };
                // SAFETY: the caller guarantees this; the results belong to this thread.
                unsafe { product.run_panels(isa, part, panels, rows.clone()) };
            }
            for row in rows {
                let gate = Span { row: row - first, from: 0, len };
                let out = Span { row, from, len };
                // Rows after the last one may be another thread's.
                if row + AHEAD < end {
                    self.out.prefetch_forms(Span { row: row + AHEAD, ..out });
                }
                // SAFETY: as above; the columns of the output belong to this piece.
                unsafe {
                    let up = halves.read(Span { from: COLUMNS, ..gate });
                    let gated =
                        if self.plain { self.out.write(out) } else { halves.write(Span { from: 2 * COLUMNS, ..gate }) };
                    isa.glu(self.kind, halves.read(gate), up, gated);
                    self.out.prepare_from(isa, gated, out);
                }
            }
        });
    }
}

/// Returns the part of some columns, and their panels.
fn panels(matrix: &Matrix, columns: Range) -> (&Part, Range) {
    let part = matrix.part_of(columns.start);
    let start = (columns.start - part.first) / PANEL;
    (part, start..start + columns.len().div_ceil(PANEL))
}
