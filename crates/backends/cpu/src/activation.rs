//! Activations in the representations that their readers need.

use crate::Isa;
use crate::memory::{Level, Lines, Shared};
use crate::rows::{GROUP, LANES, QuantRow};
#[cfg(target_arch = "x86_64")]
use crate::weights::WordOrder;

/// Number of rows in a tile. Memory is allocated for whole tiles, so that a kernel may read rows that do not exist.
pub(crate) const TILE: usize = 16;

/// Representations of a buffer in addition to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forms {
    /// Integers, for quantised weights.
    pub(crate) quant: bool,
    /// Integers of 8 bits instead of 12, except outliers.
    pub(crate) coarse: bool,
    /// The integers in 16 bits too, for weights that are multiplied as such.
    pub(crate) words: bool,
    /// The same, in the order that NVFP4 is multiplied in: the second and the third of each four inputs are exchanged.
    pub(crate) crossed: bool,
    /// bf16, for tiles of bf16.
    pub(crate) bf16: bool,
}

impl Forms {
    pub(crate) fn any(self) -> bool {
        self.quant || self.bf16
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            quant: self.quant || other.quant,
            coarse: self.coarse || other.coarse,
            words: self.words || other.words,
            crossed: self.crossed || other.crossed,
            bf16: self.bf16 || other.bf16,
        }
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
    steps: Lines<u8>,
    words: Lines<i16>,
    crossed: Lines<i16>,
    bf16: Lines<u16>,
}

/// Returns the number of elements from a row in f32 to the next.
fn plain_stride(cols: usize) -> usize {
    odd_lines(cols, LANES)
}

/// Returns the number of elements from a row in bf16 to the next; it has room for whole tiles.
fn bf16_stride(cols: usize) -> usize {
    odd_lines(cols, GROUP)
}

/// Returns the elements of an odd number of lines that hold `cols` elements.
///
/// A product writes the same columns of many rows. With a power of two from one to the next, all of them would fall into
/// the same few sets of the cache.
fn odd_lines(cols: usize, line: usize) -> usize {
    (cols.div_ceil(line) | 1) * line
}

impl Activation {
    pub(crate) fn new(cols: usize, forms: Forms) -> Self {
        Self { cols, forms, ..Self::default() }
    }

    /// Allocates memory for `rows` rows, and for a tile more in the forms that products read: they read whole tiles of rows, and the
    /// last one may begin at any row. A tile of rows of logits would take several MiB.
    pub(crate) fn reserve(&mut self, rows: usize) {
        self.plain.reserve_zeroed(rows * plain_stride(self.cols));
        let rows = rows + TILE;
        if self.forms.quant {
            self.codes.reserve_zeroed(rows * 2 * self.cols);
            self.scales.reserve_zeroed(rows * (self.cols / GROUP));
            self.sums.reserve_zeroed(rows * (self.cols / GROUP));
            self.totals.reserve_zeroed(rows * (self.cols / GROUP));
            self.steps.reserve_zeroed(rows * (self.cols / GROUP));
        }
        if self.forms.words {
            self.words.reserve_zeroed(rows * self.cols);
        }
        if self.forms.crossed {
            self.crossed.reserve_zeroed(rows * self.cols);
        }
        if self.forms.bf16 {
            self.bf16.reserve_zeroed(rows * bf16_stride(self.cols));
        }
    }

    /// Returns a row in f32.
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.plain[row * plain_stride(self.cols)..][..self.cols]
    }

    /// Appends the first rows in f32 to `out`.
    pub(crate) fn append_rows(&self, count: usize, out: &mut Vec<f32>) {
        out.reserve(count * self.cols);
        (0..count).for_each(|row| out.extend_from_slice(self.row(row)));
    }

    /// Returns access for the threads of a region.
    pub(crate) fn shared(&mut self) -> Rows {
        Rows {
            cols: self.cols,
            forms: self.forms,
            plain: Shared::new(&mut self.plain),
            codes: Shared::new(&mut self.codes),
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
            totals: Shared::new(&mut self.totals),
            steps: Shared::new(&mut self.steps),
            words: Shared::new(&mut self.words),
            crossed: Shared::new(&mut self.crossed),
            bf16: Shared::new(&mut self.bf16),
        }
    }
}

/// The rows of an activation, shared by the threads of a region. Every method is safe only as long as the activation is
/// not moved and no thread writes elements that another one uses: between two barriers each element belongs to one
/// writer or to its readers.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) cols: usize,
    pub(crate) forms: Forms,
    plain: Shared<f32>,
    codes: Shared<i8>,
    scales: Shared<f32>,
    sums: Shared<f32>,
    totals: Shared<[i32; 2]>,
    steps: Shared<u8>,
    words: Shared<i16>,
    crossed: Shared<i16>,
    bf16: Shared<u16>,
}

/// Rows as integers.
#[derive(Clone, Copy)]
pub(crate) struct QuantRows<'a> {
    pub(crate) cols: usize,
    /// Whether only outlying steps have high parts.
    pub(crate) coarse: bool,
    codes: &'a [i8],
    scales: &'a [f32],
    sums: &'a [f32],
    totals: &'a [[i32; 2]],
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    steps: &'a [u8],
    #[cfg(target_arch = "x86_64")]
    words: &'a [i16],
    #[cfg(target_arch = "x86_64")]
    crossed: &'a [i16],
}

impl<'a> QuantRows<'a> {
    /// Returns one row.
    pub(crate) fn row(&self, row: usize) -> Quantised<'a> {
        let groups = self.cols / GROUP;
        let of = |values: &'a [f32]| &values[row * groups..][..groups];
        let codes = &self.codes[row * 2 * self.cols..][..2 * self.cols];
        let totals = &self.totals[row * groups..][..groups];
        Quantised { codes: codes.as_chunks().0, scales: of(self.scales), sums: of(self.sums), totals }
    }

    /// Returns codes, scales and sums from `row` to the end of the buffer.
    pub(crate) fn from(&self, row: usize) -> (&'a [i8], &'a [f32], &'a [f32]) {
        let at = row * (self.cols / GROUP);
        (&self.codes[row * 2 * self.cols..], &self.scales[at..], &self.sums[at..])
    }

    /// Returns `count` rows in 16 bits and their scales, from `row` on. They must be in this form.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn words(&self, (row, count): (usize, usize), words: WordOrder) -> (&'a [i16], &'a [f32]) {
        let words = match words {
            WordOrder::InOrder => self.words,
            WordOrder::Crossed => self.crossed,
        };
        let groups = self.cols / GROUP;
        (&words[row * self.cols..][..count * self.cols], &self.scales[row * groups..][..count * groups])
    }

    /// Returns the steps of groups that have high parts, as bits, from `row` on.
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    pub(crate) fn steps_from(&self, row: usize) -> &'a [u8] {
        &self.steps[row * (self.cols / GROUP)..]
    }

    /// Returns the totals of halves of groups, from `row` on.
    pub(crate) fn totals_from(&self, row: usize) -> &'a [[i32; 2]] {
        &self.totals[row * (self.cols / GROUP)..]
    }
}

/// A row as integers: [`QuantRow`] for reading.
#[derive(Clone, Copy)]
pub(crate) struct Quantised<'a> {
    /// Codes by group.
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

/// Sixteen columns of adjacent rows.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    elements: Shared<f32>,
    start: usize,
    stride: usize,
}

impl Column {
    /// Returns the elements of a row, which counts from that of the span.
    ///
    /// # Safety
    /// The conditions of [`Rows`] apply: no other code may use these elements while the result is in use.
    #[inline(always)]
    pub(crate) unsafe fn lanes<'a>(self, row: usize) -> &'a mut [f32; LANES] {
        // SAFETY: the caller guarantees this.
        unsafe { self.elements.array(self.start + row * self.stride) }
    }

    /// Prefetches the elements of some rows, which are to be written.
    pub(crate) fn prefetch(self, rows: usize) {
        (0..rows).for_each(|row| self.elements.prefetch(Level::Written, self.start + row * self.stride, LANES));
    }
}

impl Rows {
    /// Returns the span of a whole row.
    pub(crate) fn span(&self, row: usize) -> Span {
        Span { row, from: 0, len: self.cols }
    }

    /// # Safety
    /// The conditions of the type apply: no thread may write these elements while the result is in use.
    pub(crate) unsafe fn read<'a>(&self, span: Span) -> &'a [f32] {
        // SAFETY: the caller guarantees this.
        unsafe { self.plain.view(span.row * plain_stride(self.cols) + span.from, span.len) }
    }

    /// # Safety
    /// The conditions of the type apply: no other code may use these elements while the result is in use.
    pub(crate) unsafe fn write<'a>(&self, span: Span) -> &'a mut [f32] {
        // SAFETY: the caller guarantees this.
        unsafe { self.plain.part(span.row * plain_stride(self.cols) + span.from, span.len) }
    }

    /// Prefetches a span, which another thread may have written.
    pub(crate) fn prefetch(&self, span: Span) {
        self.plain.prefetch(Level::First, span.row * plain_stride(self.cols) + span.from, span.len);
    }

    /// Returns the column of sixteen elements in f32 that begins with a span, in this row and those that follow.
    pub(crate) fn column(&self, span: Span) -> Column {
        let stride = plain_stride(self.cols);
        Column { elements: self.plain, start: span.row * stride + span.from, stride }
    }

    /// Prefetches the other representations of a span, which are to be written.
    pub(crate) fn prefetch_forms(&self, Span { row, from, len }: Span) {
        if self.forms.quant {
            let (at, groups) = (row * (self.cols / GROUP) + from / GROUP, len / GROUP);
            self.codes.prefetch(Level::Written, 2 * (row * self.cols + from), 2 * len);
            self.scales.prefetch(Level::Written, at, groups);
            self.sums.prefetch(Level::Written, at, groups);
            self.totals.prefetch(Level::Written, at, groups);
            self.steps.prefetch(Level::Written, at, groups);
        }
        if self.forms.bf16 {
            self.bf16.prefetch(Level::Written, row * bf16_stride(self.cols) + from, len);
        }
    }

    /// Returns all rows as integers, including rows that do not exist.
    ///
    /// # Safety
    /// The conditions of the type apply: no thread may write this representation while the result is in use.
    pub(crate) unsafe fn quant<'a>(&self) -> QuantRows<'a> {
        // SAFETY: the caller guarantees this.
        unsafe {
            QuantRows {
                cols: self.cols,
                coarse: self.forms.coarse,
                codes: self.codes.all(),
                scales: self.scales.all(),
                sums: self.sums.all(),
                totals: self.totals.all(),
                #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
                steps: self.steps.all(),
                #[cfg(target_arch = "x86_64")]
                words: self.words.all(),
                #[cfg(target_arch = "x86_64")]
                crossed: self.crossed.all(),
            }
        }
    }

    /// Returns all rows as bf16, and the number of elements from one row to the next.
    ///
    /// # Safety
    /// The conditions of the type apply: no thread may write this representation while the result is in use.
    pub(crate) unsafe fn bf16<'a>(&self) -> (&'a [u16], usize) {
        // SAFETY: the caller guarantees this.
        (unsafe { self.bf16.all() }, bf16_stride(self.cols))
    }

    /// Copies a row of another activation, which has at least the same representations. `plain` is whether f32 is one of
    /// them.
    ///
    /// # Safety
    /// The conditions of the type apply: no thread may write the other row during the call, and no other thread may use
    /// this one.
    pub(crate) unsafe fn copy_row(&self, row: usize, from: &Self, source: usize, plain: bool) {
        fn copy<T: crate::memory::Plain>(into: Shared<T>, from: Shared<T>, [row, source]: [usize; 2], len: usize) {
            // SAFETY: the caller of `copy_row` guarantees this.
            unsafe { into.part(row * len, len).copy_from_slice(from.view(source * len, len)) };
        }
        let (rows, groups) = ([row, source], self.cols / GROUP);
        if plain {
            copy(self.plain, from.plain, rows, plain_stride(self.cols));
        }
        if self.forms.quant {
            copy(self.codes, from.codes, rows, 2 * self.cols);
            copy(self.scales, from.scales, rows, groups);
            copy(self.sums, from.sums, rows, groups);
            copy(self.totals, from.totals, rows, groups);
            copy(self.steps, from.steps, rows, groups);
        }
        if self.forms.words {
            copy(self.words, from.words, rows, self.cols);
        }
        if self.forms.crossed {
            copy(self.crossed, from.crossed, rows, self.cols);
        }
        if self.forms.bf16 {
            copy(self.bf16, from.bf16, rows, bf16_stride(self.cols));
        }
    }

    /// Converts elements written as f32 to the other representations. A span of a row with integers must consist of
    /// whole groups.
    ///
    /// # Safety
    /// The conditions of the type apply: no other thread may use these elements, in any representation, during the
    /// call.
    pub(crate) unsafe fn prepare(&self, isa: Isa, span: Span) {
        if self.forms.any() {
            // SAFETY: the caller guarantees this.
            unsafe { self.prepare_from(isa, self.read(span), span) };
        }
    }

    /// Converts elements that need not have been written as f32, `x`.
    ///
    /// # Safety
    /// The conditions of [`Rows::prepare`] apply.
    pub(crate) unsafe fn prepare_from(&self, isa: Isa, x: &[f32], span: Span) {
        if self.forms.quant {
            debug_assert!(span.from.is_multiple_of(GROUP) && span.len.is_multiple_of(GROUP));
            let at = span.row * (self.cols / GROUP) + span.from / GROUP;
            let groups = span.len / GROUP;
            // SAFETY: the caller guarantees this; groups belong to their elements.
            let out = unsafe {
                QuantRow {
                    codes: self.codes.part(2 * (span.row * self.cols + span.from), 2 * span.len),
                    scales: self.scales.part(at, groups),
                    sums: self.sums.part(at, groups),
                    totals: self.totals.part(at, groups),
                    steps: self.steps.part(at, groups),
                }
            };
            isa.quantise(x, self.forms.coarse, out);
            // SAFETY: as above.
            unsafe { self.join(isa, span) };
        }
        if self.forms.bf16 {
            // SAFETY: the caller guarantees this.
            let out = unsafe { self.bf16.part(span.row * bf16_stride(self.cols) + span.from, span.len) };
            isa.to_bf16(x, out);
        }
    }

    /// Creates the integers in 16 bits of a span, of whole groups, from the others.
    ///
    /// # Safety
    /// The conditions of [`Rows::prepare`] apply.
    unsafe fn join(&self, isa: Isa, span: Span) {
        let at = span.row * self.cols + span.from;
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = self.codes.view(2 * at, 2 * span.len);
            if self.forms.words {
                isa.join(codes, self.words.part(at, span.len));
            }
            if self.forms.crossed {
                isa.join_crossed(codes, self.crossed.part(at, span.len));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_no_product_reads_takes_the_memory_of_a_row() {
        let mut logits = Activation::new(49_152, Forms::default());
        logits.reserve(1);
        assert_eq!(logits.plain.len(), plain_stride(49_152));
        let mut read = Activation::new(64, Forms { quant: true, bf16: true, ..Forms::default() });
        read.reserve(1);
        assert_eq!((read.plain.len(), read.codes.len(), read.bf16.len()), (80, (1 + TILE) * 128, (1 + TILE) * 96));
    }
}
