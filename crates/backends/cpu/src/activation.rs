//! Activations in the forms that their readers want.

use crate::Isa;
use crate::memory::{Lines, Shared};
use crate::rows::{GROUP, QuantRow};

/// Rows of a tile: room for whole tiles is made, so that a kernel may read rows that do not exist.
pub(crate) const TILE: usize = 16;

/// What a buffer is kept as, beside f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forms {
    /// Integers, for weights that are.
    pub(crate) quant: bool,
    /// Of 8 bits, where there are integers.
    pub(crate) coarse: bool,
    /// For tiles of bf16.
    pub(crate) bf16: bool,
}

impl Forms {
    pub(crate) fn any(self) -> bool {
        self.quant || self.bf16
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self { quant: self.quant || other.quant, coarse: self.coarse || other.coarse, bf16: self.bf16 || other.bf16 }
    }
}

/// A buffer of a program.
#[derive(Default)]
pub(crate) struct Activation {
    cols: usize,
    forms: Forms,
    plain: Lines<f32>,
    codes: Lines<i8>,
    scales: Lines<f32>,
    sums: Lines<f32>,
    totals: Lines<[i32; 2]>,
    bf16: Lines<u16>,
}

/// Elements of a row in bf16: inputs are padded to whole tiles.
fn bf16_stride(cols: usize) -> usize {
    cols.next_multiple_of(GROUP)
}

impl Activation {
    pub(crate) fn new(cols: usize, forms: Forms) -> Self {
        Self { cols, forms, ..Self::default() }
    }

    /// Makes room for so many rows.
    pub(crate) fn reserve(&mut self, rows: usize) {
        let rows = rows.next_multiple_of(TILE);
        self.plain.reserve_zeroed(rows * self.cols);
        if self.forms.quant {
            self.codes.reserve_zeroed(rows * 2 * self.cols);
            self.scales.reserve_zeroed(rows * (self.cols / GROUP));
            self.sums.reserve_zeroed(rows * (self.cols / GROUP));
            self.totals.reserve_zeroed(rows * (self.cols / GROUP));
        }
        if self.forms.bf16 {
            self.bf16.reserve_zeroed(rows * bf16_stride(self.cols));
        }
    }

    /// The first rows in f32, one after the other.
    pub(crate) fn rows(&self, count: usize) -> &[f32] {
        &self.plain[..count * self.cols]
    }

    /// Access for the threads of a region.
    pub(crate) fn shared(&mut self) -> Rows {
        Rows {
            cols: self.cols,
            forms: self.forms,
            plain: Shared::new(&mut self.plain),
            codes: Shared::new(&mut self.codes),
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
            totals: Shared::new(&mut self.totals),
            bf16: Shared::new(&mut self.bf16),
        }
    }
}

/// The rows of an activation, shared by the threads of a region. Every method is safe only as long as the activation
/// stays where it is, and no thread writes what another one uses: between two barriers each element belongs to one writer
/// or to its readers.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) cols: usize,
    pub(crate) forms: Forms,
    plain: Shared<f32>,
    codes: Shared<i8>,
    scales: Shared<f32>,
    sums: Shared<f32>,
    totals: Shared<[i32; 2]>,
    bf16: Shared<u16>,
}

/// Rows as integers.
#[derive(Clone, Copy)]
pub(crate) struct QuantRows<'a> {
    pub(crate) cols: usize,
    /// Whether all low parts are zeros.
    pub(crate) coarse: bool,
    codes: &'a [i8],
    scales: &'a [f32],
    sums: &'a [f32],
    totals: &'a [[i32; 2]],
}

impl<'a> QuantRows<'a> {
    /// One row.
    pub(crate) fn row(&self, row: usize) -> Quantised<'a> {
        let groups = self.cols / GROUP;
        let of = |values: &'a [f32]| &values[row * groups..][..groups];
        let codes = &self.codes[row * 2 * self.cols..][..2 * self.cols];
        let totals = &self.totals[row * groups..][..groups];
        Quantised { codes: codes.as_chunks().0, scales: of(self.scales), sums: of(self.sums), totals }
    }

    /// Codes, scales and sums from a row on, to the end of the buffer.
    pub(crate) fn from(&self, row: usize) -> (&'a [i8], &'a [f32], &'a [f32]) {
        let at = row * (self.cols / GROUP);
        (&self.codes[row * 2 * self.cols..], &self.scales[at..], &self.sums[at..])
    }

    /// The totals of halves of groups, from a row on.
    pub(crate) fn totals_from(&self, row: usize) -> &'a [[i32; 2]] {
        &self.totals[row * (self.cols / GROUP)..]
    }
}

/// A row as integers: [`QuantRow`], to be read.
#[derive(Clone, Copy)]
pub(crate) struct Quantised<'a> {
    /// By group.
    pub(crate) codes: &'a [[i8; 2 * GROUP]],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [f32],
    pub(crate) totals: &'a [[i32; 2]],
}

/// A slice of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) row: usize,
    pub(crate) from: usize,
    pub(crate) len: usize,
}

impl Rows {
    /// A whole row.
    pub(crate) fn span(&self, row: usize) -> Span {
        Span { row, from: 0, len: self.cols }
    }

    /// # Safety
    /// As for the type: nobody writes these elements meanwhile.
    pub(crate) unsafe fn read<'a>(&self, span: Span) -> &'a [f32] {
        // SAFETY: as the caller promises.
        unsafe { self.plain.view(span.row * self.cols + span.from, span.len) }
    }

    /// # Safety
    /// As for the type: nobody else uses these elements meanwhile.
    pub(crate) unsafe fn write<'a>(&self, span: Span) -> &'a mut [f32] {
        // SAFETY: as the caller promises.
        unsafe { self.plain.part(span.row * self.cols + span.from, span.len) }
    }

    /// The rows `from..` in f32, `count` of them.
    ///
    /// # Safety
    /// As for the type: nobody writes these rows meanwhile.
    pub(crate) unsafe fn read_rows<'a>(&self, from: usize, count: usize) -> &'a [f32] {
        // SAFETY: as the caller promises.
        unsafe { self.plain.view(from * self.cols, count * self.cols) }
    }

    /// All rows as integers, those that do not exist too.
    ///
    /// # Safety
    /// As for the type: nobody writes the form meanwhile.
    pub(crate) unsafe fn quant<'a>(&self) -> QuantRows<'a> {
        // SAFETY: as the caller promises.
        unsafe {
            QuantRows {
                cols: self.cols,
                coarse: self.forms.coarse,
                codes: self.codes.all(),
                scales: self.scales.all(),
                sums: self.sums.all(),
                totals: self.totals.all(),
            }
        }
    }

    /// All rows as bf16, and the elements from one row to the next.
    ///
    /// # Safety
    /// As for the type: nobody writes the form meanwhile.
    pub(crate) unsafe fn bf16<'a>(&self) -> (&'a [u16], usize) {
        // SAFETY: as the caller promises.
        (unsafe { self.bf16.all() }, bf16_stride(self.cols))
    }

    /// Brings what has been written as f32 into the other forms. A span of a row kept as integers must hold whole groups.
    ///
    /// # Safety
    /// As for the type: nobody else uses these elements, in any form, meanwhile.
    pub(crate) unsafe fn prepare(&self, isa: Isa, span: Span) {
        if !self.forms.any() {
            return;
        }
        // SAFETY: as the caller promises.
        let x = unsafe { self.read(span) };
        if self.forms.quant {
            debug_assert!(span.from.is_multiple_of(GROUP) && span.len.is_multiple_of(GROUP));
            let at = span.row * (self.cols / GROUP) + span.from / GROUP;
            let groups = span.len / GROUP;
            // SAFETY: as the caller promises; groups belong to their elements.
            let out = unsafe {
                QuantRow {
                    codes: self.codes.part(2 * (span.row * self.cols + span.from), 2 * span.len),
                    scales: self.scales.part(at, groups),
                    sums: self.sums.part(at, groups),
                    totals: self.totals.part(at, groups),
                }
            };
            if self.forms.coarse {
                isa.quantise_coarsely(x, out);
            } else {
                isa.quantise(x, out);
            }
        }
        if self.forms.bf16 {
            // SAFETY: as the caller promises.
            let out = unsafe { self.bf16.part(span.row * bf16_stride(self.cols) + span.from, span.len) };
            isa.to_bf16(x, out);
        }
    }
}
