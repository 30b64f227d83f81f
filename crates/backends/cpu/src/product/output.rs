//! The output of a product: what is done with the results of a tile, and where they are stored.

use super::{Epilogue, Origin, Product, Range};
use crate::activation::{Column, Rows, Span};
use crate::isa::{Isa, per_isa};
use crate::weights::{PANEL, PanelKind, Part, Scales};

/// Destination of a part's results in a piece of work.
pub(super) struct Output<'a> {
    isa: Isa,
    part: &'a Part,
    out: Rows,
    epilogue: Epilogue<'a>,
    origin: Origin,
}

impl<'a> Output<'a> {
    /// Returns the output of a product for one of its parts.
    ///
    /// # Safety
    /// The conditions of [`Product::run`] apply to the panels and rows whose results are stored.
    pub(super) unsafe fn new(product: &Product<'a>, isa: Isa, part: &'a Part) -> Self {
        let Product { out, epilogue, origin, .. } = *product;
        Self { isa, part, out, epilogue, origin }
    }

    /// Returns the place of a row's results in a panel.
    fn span(&self, row: usize, panel: usize) -> Span {
        let Origin { row: first, from, column } = self.origin;
        let from = column + self.part.first + panel * PANEL - from;
        Span { row: row - first, from, len: self.part.rows_of(panel) }
    }

    /// Prefetches the places of results, which are as many lines in other places of memory. It should be called before these
    /// results are computed.
    pub(super) fn prefetch(&self, rows: Range, panels: Range) {
        for panel in panels {
            let span = self.span(rows.start, panel);
            self.out.column(span).prefetch(rows.len());
            // It often is the output.
            if let Some(add) = self.epilogue.add {
                add.column(span).prefetch(rows.len());
            }
        }
    }

    /// Stores the results of a panel for the rows from `first` on.
    pub(super) fn store(&self, first: usize, panel: usize, tile: &mut [[f32; PANEL]]) {
        let Epilogue { bias, scale, softcap, add } = self.epilogue;
        let span = self.span(first, panel);
        if matches!(self.part.layout.kind, PanelKind::Quant(_, Scales::Pair)) {
            let factors = self.part.layout.row_factors(self.part.panel(panel));
            for result in &mut *tile {
                result.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            }
        }
        if let Some(bias) = bias {
            let bias = &bias[self.part.first + panel * PANEL..][..span.len];
            tile.iter_mut().for_each(|result| self.isa.add(&mut result[..span.len], bias));
        }
        if let Some(scale) = scale {
            self.isa.scale(tile.as_flattened_mut(), scale);
        }
        if let Some(cap) = softcap {
            self.isa.softcap(tile.as_flattened_mut(), cap);
        }
        if span.len == PANEL {
            self.isa.put(tile, add.map(|add| add.column(span)), self.out.column(span));
            return;
        }
        for (row, result) in (span.row..).zip(tile) {
            let span = Span { row, ..span };
            // SAFETY: the caller of `new` guarantees that no other thread uses these columns. Both buffers may be one: there is no
            // reference to the output yet.
            unsafe {
                if let Some(add) = add {
                    self.isa.add(&mut result[..span.len], add.read(span));
                }
                self.out.write(span).copy_from_slice(&result[..span.len]);
            }
        }
    }
}

per_isa! {
    plain;
    /// Stores results of a panel in a column, plus what another one has.
    fn put(results: &[[f32; PANEL]], add: Option<Column>, out: Column);
}

mod plain {
    use super::{Column, PANEL};

    #[inline(always)]
    pub(super) fn put<const FMA: bool>(results: &[[f32; PANEL]], add: Option<Column>, out: Column) {
        // SAFETY: the caller of `Output::new` guarantees that no other thread uses these columns.
        unsafe {
            match add {
                None => results.iter().enumerate().for_each(|(row, result)| *out.lanes(row) = *result),
                Some(add) => {
                    for (row, result) in results.iter().enumerate() {
                        // Both may be one: what is added is read before there is a reference to the output.
                        let mut sums = *add.lanes(row);
                        sums.iter_mut().zip(result).for_each(|(sum, result)| *sum += result);
                        *out.lanes(row) = sums;
                    }
                }
            }
        }
    }
}
