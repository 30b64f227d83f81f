//! Matrix products: every row of an activation times every panel of a weight.
//!
//! The order of a row's sums is the same whatever kernel runs: integer products are exact within a group, and every kernel
//! adds the groups in order, scale first, then minimum. For bf16, f16 and f32 weights an instruction set has one kernel,
//! whose rows do not see each other.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod plain;
#[cfg(target_arch = "x86_64")]
mod read;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(target_arch = "x86_64")]
mod wide;

use std::cell::RefCell;

use crate::activation::{Rows, Span, TILE};
use crate::isa::{Isa, per_isa};
use crate::memory::{LINE, Lines, Shared};
use crate::rows::GROUP;
#[cfg(target_arch = "x86_64")]
use crate::tiles::{self, Strided, Tiles};
use crate::weights::{Codes, Kind, Layout, Matrix, PANEL, Part, STEPS};

/// Panels of a piece of work: enough that drawing pieces costs nothing, few enough that threads end together.
const PIECE_PANELS: usize = 4;

/// The same where there are few rows, and a piece is little work.
const SKINNY_PANELS: usize = 2;

/// Rows of a piece of work. A piece unpacks its panels anew.
const PIECE_ROWS: usize = 256;

/// Up to so many rows, AMX leaves the work to VNNI, and pieces are small.
const SKINNY_ROWS: usize = 4;

/// Up to so many rows, VNNI multiplies weights as they are stored, without unpacking them first.
#[cfg(target_arch = "x86_64")]
const PACKED_ROWS: usize = 32;

/// A product to be done by the threads of a region.
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) input: Rows,
    pub(crate) rows: usize,
    pub(crate) out: Rows,
    pub(crate) epilogue: Epilogue<'a>,
    /// Where the largest result of each row in each chunk goes, by row: [`chunks`] of them. −∞ where there is none above it.
    pub(crate) largest: Option<Shared<f32>>,
}

/// What happens to a result before it is stored, in this order.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) add: Option<Rows>,
}

/// Results of a panel for a tile of rows.
#[repr(align(64))]
pub(super) struct Tile([[f32; PANEL]; TILE]);

/// Some panels, their codes as bytes and their scales as f32: what tiles of rows are multiplied with again and again.
#[derive(Default)]
pub(super) struct Unpacked {
    groups: usize,
    /// Bytes of the codes of a group.
    group_codes: usize,
    /// Per panel and group, `[STEPS][PANEL][4]`; twice for AMX, where codes have 4 bits: times 16 first.
    codes: Lines<u8>,
    /// Per panel and group, sixteen scales and sixteen minima.
    scales: Lines<f32>,
}

/// Bytes of the codes of a group of a panel.
const GROUP_CODES: usize = GROUP * PANEL;

/// Scales and minima of a group of a panel.
const GROUP_SCALES: usize = 2 * PANEL;

impl Unpacked {
    fn reserve(&mut self, groups: usize, group_codes: usize) {
        (self.groups, self.group_codes) = (groups, group_codes);
        self.codes.reserve_zeroed(PIECE_PANELS * groups * group_codes);
        self.scales.reserve_zeroed(PIECE_PANELS * groups * GROUP_SCALES);
    }

    fn panel(&self, slot: usize) -> (&[u8], &[f32]) {
        let (codes, scales) = (self.groups * self.group_codes, self.groups * GROUP_SCALES);
        (&self.codes[slot * codes..][..codes], &self.scales[slot * scales..][..scales])
    }

    fn panel_mut(&mut self, slot: usize) -> (&mut [u8], &mut [f32]) {
        let (codes, scales) = (self.groups * self.group_codes, self.groups * GROUP_SCALES);
        (&mut self.codes[slot * codes..][..codes], &mut self.scales[slot * scales..][..scales])
    }
}

thread_local! {
    static UNPACKED: RefCell<Unpacked> = RefCell::default();
}

/// Panels of a piece, where there are so many rows.
fn piece_panels(rows: usize) -> usize {
    if rows <= SKINNY_ROWS { SKINNY_PANELS } else { PIECE_PANELS }
}

/// Chunks of columns that the product of so many rows is cut into.
pub(crate) fn chunks(matrix: &Matrix, rows: usize) -> usize {
    matrix.parts.iter().map(|part| part.panels().div_ceil(piece_panels(rows))).sum()
}

/// The part and its panels that are a chunk.
fn chunk(matrix: &Matrix, rows: usize, mut index: usize) -> (&Part, Range) {
    let each = piece_panels(rows);
    for part in &matrix.parts {
        let chunks = part.panels().div_ceil(each);
        if index < chunks {
            return (part, index * each..((index + 1) * each).min(part.panels()));
        }
        index -= chunks;
    }
    unreachable!("the caller counts the chunks")
}

/// The columns of a chunk.
pub(crate) fn chunk_columns(matrix: &Matrix, rows: usize, index: usize) -> Range {
    let (part, panels) = chunk(matrix, rows, index);
    part.first + panels.start * PANEL..part.first + (panels.end * PANEL).min(part.rows)
}

impl Product<'_> {
    fn is_skinny(&self) -> bool {
        self.rows <= SKINNY_ROWS
    }

    /// Pieces of work.
    pub(crate) fn pieces(&self) -> usize {
        chunks(self.matrix, self.rows) * self.rows.div_ceil(PIECE_ROWS)
    }

    /// Does one of them.
    ///
    /// # Safety
    /// The activations must stay where they are, each piece must be done by one thread only, nobody may write the input or
    /// use the output meanwhile.
    pub(crate) unsafe fn run(&self, isa: Isa, piece: usize) {
        let blocks = self.rows.div_ceil(PIECE_ROWS);
        let (index, block) = (piece / blocks, piece % blocks);
        let first = block * PIECE_ROWS;
        let rows = first..(first + PIECE_ROWS).min(self.rows);
        let (part, panels) = chunk(self.matrix, self.rows, index);
        // SAFETY: as the caller promises.
        unsafe { self.run_panels(isa, part, panels, rows.clone()) };
        let Some(largest) = self.largest else { return };
        let columns = chunk_columns(self.matrix, self.rows, index);
        let chunks = chunks(self.matrix, self.rows);
        for row in rows {
            // SAFETY: as the caller promises; this piece has just written the columns, and nobody else writes its place.
            unsafe {
                let results = self.out.read(Span { row, from: columns.start, len: columns.len() });
                isa.largest(results, &mut largest.part(row * chunks + index, 1)[0]);
            }
        }
    }

    /// # Safety
    /// As for `run`.
    unsafe fn run_panels(&self, isa: Isa, part: &Part, panels: std::ops::Range<usize>, rows: std::ops::Range<usize>) {
        let mut store = |first: usize, panel: usize, tile: &mut [[f32; PANEL]]| {
            // SAFETY: as the caller promises.
            unsafe { self.store(isa, part, panel, first, tile) }
        };
        match part.layout.kind {
            Kind::Quant(..) => {
                // SAFETY: as the caller promises.
                let input = unsafe { self.input.quant() };
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx512 && (isa != Isa::Amx || self.is_skinny() || part.layout.kind.has_halves()) {
                    // SAFETY: the instruction set is available; the input has room for whole tiles of rows.
                    return unsafe { blocks(part, panels, &input, rows, &mut store) };
                }
                if part.layout.kind.has_halves() {
                    return quant_halves(isa, part, panels, &input, rows, &mut store);
                }
                quant(isa, part, panels, &input, rows, &mut store);
            }
            Kind::Bf16 if isa == Isa::Amx => {
                // SAFETY: as the caller promises.
                let (input, stride) = unsafe { self.input.bf16() };
                bf16_tiles(part, panels, (input, stride), rows, &mut store);
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Bf16 if isa == Isa::Avx512Bf16 => {
                // SAFETY: as the caller promises; the instruction set is available.
                unsafe { bf16_blocks(part, panels, self.input.bf16(), rows, &mut store) };
            }
            _ => {
                // SAFETY: as the caller promises.
                let input = unsafe { self.input.read_rows(0, self.rows) };
                dense(isa, part, panels, (input, self.input.cols), rows, &mut store);
            }
        }
    }

    /// Stores the results of a panel for the rows from `first` on.
    ///
    /// # Safety
    /// As for `run`.
    unsafe fn store(&self, isa: Isa, part: &Part, panel: usize, first: usize, tile: &mut [[f32; PANEL]]) {
        let from = part.first + panel * PANEL;
        let len = part.rows_of(panel);
        let Epilogue { bias, scale, softcap, add } = self.epilogue;
        let bias = bias.map(|bias| &bias[from..from + len]);
        for (row, result) in (first..).zip(tile) {
            let span = Span { row, from, len };
            if let Some(bias) = bias {
                add_lanes(result, bias);
            }
            if let Some(scale) = scale {
                result.iter_mut().for_each(|x| *x *= scale);
            }
            if let Some(cap) = softcap {
                isa.softcap(result, cap);
            }
            if let Some(add) = add {
                // SAFETY: the same columns of a buffer that nobody else writes; it may be the output, which is not held yet.
                add_lanes(result, unsafe { add.read(span) });
            }
            // SAFETY: the columns of a panel belong to its piece.
            put_lanes(unsafe { self.out.write(span) }, result);
        }
    }
}

/// Adds to the lanes that exist. All of them is the common case, and then a few instructions.
fn add_lanes(result: &mut [f32; PANEL], x: &[f32]) {
    match x.first_chunk::<PANEL>() {
        Some(x) => result.iter_mut().zip(x).for_each(|(result, x)| *result += x),
        None => result.iter_mut().zip(x).for_each(|(result, x)| *result += x),
    }
}

/// Stores the lanes that exist. One by one where some do not: two copies would become one call for any length.
fn put_lanes(out: &mut [f32], result: &[f32; PANEL]) {
    match out.first_chunk_mut::<PANEL>() {
        Some(out) => *out = *result,
        None => out.iter_mut().zip(result).for_each(|(out, result)| *out = *result),
    }
}

per_isa! {
    plain;
    /// A tile of rows, from `first` on, times an unpacked panel.
    fn multiply_integers(codes: &[u8], scales: &[f32], input: &Quant<'_>, first: usize, tile: &mut [[f32; PANEL]]);

    /// A tile of rows, from `first` on, times a panel whose groups have a scale for each half.
    fn multiply_halves(panel: &[u8], layout: &Layout, input: &Quant<'_>, first: usize, tile: &mut [[f32; PANEL]]);

    /// Some rows times a panel of f32, f16 or bf16.
    fn multiply_dense(kind: Kind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]);
}

type Store<'s> = &'s mut dyn FnMut(usize, usize, &mut [[f32; PANEL]]);
type Quant<'a> = crate::activation::QuantRows<'a>;
type Range = std::ops::Range<usize>;

/// Any number of rows times some panels of integers, in blocks of a few rows and panels each.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the input must have room for whole tiles of rows.
#[cfg(target_arch = "x86_64")]
unsafe fn blocks(part: &Part, panels: Range, input: &Quant<'_>, rows: Range, store: Store<'_>) {
    use vnni::{BLOCK_PANELS, BLOCK_ROWS};

    let layout = &part.layout;
    let mut results: vnni::Results = [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];
    UNPACKED.with_borrow_mut(|unpacked| {
        let unpacks = rows.len() > PACKED_ROWS && !layout.kind.has_halves();
        if unpacks {
            unpacked.reserve(layout.groups(), GROUP_CODES);
        }
        for from in panels.clone().step_by(BLOCK_PANELS) {
            let pair = from..(from + BLOCK_PANELS).min(panels.end);
            // A panel that does not exist repeats the last one; its results are not used.
            let panel = |slot: usize| part.panel((from + slot).min(pair.end - 1));
            if unpacks {
                for slot in 0..pair.len() {
                    let (codes, scales) = unpacked.panel_mut(slot);
                    unpack(Isa::Avx512, panel(slot), layout, codes, scales);
                }
            }
            for first in rows.clone().step_by(BLOCK_ROWS) {
                let count = (rows.end - first).min(BLOCK_ROWS);
                // SAFETY: as the caller promises; the panels are of this layout.
                unsafe {
                    if unpacks {
                        let panels = std::array::from_fn(|slot| unpacked.panel(slot.min(pair.len() - 1)));
                        let narrow = matches!(layout.kind, Kind::Quant(Codes::Four, _));
                        vnni::unpacked(panels, narrow, input, first, &mut results);
                    } else {
                        let panels = std::array::from_fn(panel);
                        let ahead = if first == rows.start { BLOCK_PANELS } else { 0 };
                        vnni::packed(panels, layout, input, (first, count), ahead, &mut results);
                    }
                }
                for (panel, results) in pair.clone().zip(&mut results) {
                    store(first, panel, &mut results[..count]);
                }
            }
        }
    });
}

/// Any number of rows times some panels of integers.
fn quant(isa: Isa, part: &Part, panels: Range, input: &Quant<'_>, rows: Range, store: Store<'_>) {
    UNPACKED.with_borrow_mut(|unpacked| {
        let doubled = isa == Isa::Amx && matches!(part.layout.kind, Kind::Quant(Codes::Four, _));
        unpacked.reserve(part.layout.groups(), if doubled { 2 * GROUP_CODES } else { GROUP_CODES });
        for (slot, panel) in panels.clone().enumerate() {
            let (codes, scales) = unpacked.panel_mut(slot);
            unpack(isa, part.panel(panel), &part.layout, codes, scales);
        }
        #[cfg(target_arch = "x86_64")]
        let _tiles = (isa == Isa::Amx).then(|| amx::tiles(doubled, rows.len()));
        let mut tile = Tile([[0.0; PANEL]; TILE]);
        for first in rows.clone().step_by(TILE) {
            let tile = &mut tile.0[..(rows.end - first).min(TILE)];
            for (slot, panel) in panels.clone().enumerate() {
                multiply(isa, unpacked.panel(slot), input, first, tile);
                store(first, panel, tile);
            }
        }
    });
}

/// Any number of rows times some panels of integers whose groups have a scale for each half.
fn quant_halves(isa: Isa, part: &Part, panels: Range, input: &Quant<'_>, rows: Range, store: Store<'_>) {
    let mut tile = Tile([[0.0; PANEL]; TILE]);
    for first in rows.clone().step_by(TILE) {
        let tile = &mut tile.0[..(rows.end - first).min(TILE)];
        for panel in panels.clone() {
            isa.multiply_halves(part.panel(panel), &part.layout, input, first, tile);
            store(first, panel, tile);
        }
    }
}

/// A tile of rows times an unpacked panel. On AMX the tiles must be set up.
fn multiply(isa: Isa, (codes, scales): (&[u8], &[f32]), input: &Quant<'_>, first: usize, tile: &mut [[f32; PANEL]]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction set is available and its tiles are set up; the rows of whole tiles have room.
        Isa::Amx => unsafe { amx::integers(codes, scales, input, first, tile) },
        _ => isa.multiply_integers(codes, scales, input, first, tile),
    }
}

/// Codes to bytes, scales to f32.
pub(crate) fn unpack(isa: Isa, panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: the instruction set is available.
        return unsafe { vnni::unpack(panel, layout, codes, scales) };
    }
    let _ = isa;
    plain::unpack(panel, layout, codes, scales);
}

/// Rows in bf16 times panels of bf16, in blocks of a few rows and panels each.
///
/// # Safety
/// AVX-512 with BF16 must be available.
#[cfg(target_arch = "x86_64")]
unsafe fn bf16_blocks(part: &Part, panels: Range, (input, stride): (&[u16], usize), rows: Range, store: Store<'_>) {
    use bf16::{BLOCK_PANELS, BLOCK_ROWS};

    let cols = part.layout.cols;
    assert!(cols <= stride);
    let mut results: bf16::Results = [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];
    for from in panels.clone().step_by(BLOCK_PANELS) {
        let some = from..(from + BLOCK_PANELS).min(panels.end);
        // Panels that do not exist repeat the last one; their results are not used.
        let weights = std::array::from_fn(|slot| part.panel((from + slot).min(some.end - 1)));
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let count = (rows.end - first).min(BLOCK_ROWS);
            // SAFETY: as the caller promises.
            unsafe {
                let rest = &input[first * stride..];
                bf16::multiply(weights, cols, (rest, stride), count, first == rows.start, &mut results);
            }
            for (panel, results) in some.clone().zip(&mut results) {
                store(first, panel, &mut results[..count]);
            }
        }
    }
}

/// Rows in bf16 times panels of bf16.
#[cfg(target_arch = "x86_64")]
fn bf16_tiles(part: &Part, panels: Range, (input, stride): (&[u16], usize), rows: Range, store: Store<'_>) {
    let cols = part.layout.cols;
    assert!(cols <= stride);
    let _tiles = Tiles::bf16(TILE.min(rows.len()));
    // Panels that do not exist repeat the last one; their results are not used.
    let weights = std::array::from_fn(|slot| part.panel((panels.start + slot).min(panels.end - 1)).as_ptr());
    let mut results = [const { Tile([[0.0; PANEL]; TILE]) }; PIECE_PANELS];
    for first in rows.clone().step_by(TILE) {
        let a = Strided { start: input[first * stride..][..TILE * stride].as_ptr(), stride: 2 * stride };
        let out = Strided { start: results.as_mut_ptr().cast(), stride: LINE };
        // SAFETY: the instruction set is available and its tiles are set up; sixteen rows are there, panels hold whole
        // tiles, and so do the results.
        unsafe { tiles::dot(a, weights, cols / GROUP, out, size_of::<Tile>()) };
        let count = (rows.end - first).min(TILE);
        for (panel, tile) in panels.clone().zip(&mut results) {
            store(first, panel, &mut tile.0[..count]);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_tiles(_: &Part, _: Range, _: (&[u16], usize), _: Range, _: Store<'_>) {
    unreachable!("AMX is available on x86-64 only");
}

/// Rows in f32 times panels that are no integers.
fn dense(isa: Isa, part: &Part, panels: Range, (input, cols): (&[f32], usize), rows: Range, store: Store<'_>) {
    const ROWS: usize = 4;
    let mut results = [[[0.0; PANEL]; ROWS]; PIECE_PANELS];
    for first in rows.clone().step_by(ROWS) {
        let count = (rows.end - first).min(ROWS);
        let x: [&[f32]; ROWS] = std::array::from_fn(|i| &input[(first + i.min(count - 1)) * cols..][..cols]);
        let weights: [&[u8]; PIECE_PANELS] =
            std::array::from_fn(|i| part.panel((panels.start + i).min(panels.end - 1)));
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            // SAFETY: the instruction set is available.
            unsafe { wide::dense(part.layout.kind, &weights, &x[..count], &mut results) };
        }
        if isa < Isa::Avx512 || cfg!(not(target_arch = "x86_64")) {
            for (results, panel) in results.iter_mut().zip(&weights[..panels.len()]) {
                isa.multiply_dense(part.layout.kind, panel, &x[..count], results);
            }
        }
        for (panel, results) in panels.clone().zip(&mut results) {
            store(first, panel, &mut results[..count]);
        }
    }
}

/// One row of a matrix, in f32.
pub(crate) fn read_row(isa: Isa, matrix: &Matrix, row: usize, out: &mut [f32]) {
    let part = matrix.part_of(row);
    let (panel, lane) = ((row - part.first) / PANEL, (row - part.first) % PANEL);
    let panel = part.panel(panel);
    if !matches!(part.layout.kind, Kind::Quant(..)) {
        return plain::read_dense(part.layout.kind, panel, lane, out);
    }
    if part.layout.kind.has_halves() {
        return plain::read_halves(panel, &part.layout, lane, out);
    }
    UNPACKED.with_borrow_mut(|unpacked| {
        unpacked.reserve(part.layout.groups(), GROUP_CODES);
        let (codes, scales) = unpacked.panel_mut(0);
        unpack(isa, panel, &part.layout, codes, scales);
        let groups = codes.as_chunks::<GROUP_CODES>().0.iter().zip(scales.as_chunks::<GROUP_SCALES>().0);
        for (out, (codes, scales)) in out.as_chunks_mut::<GROUP>().0.iter_mut().zip(groups) {
            let (scale, min) = (scales[lane], scales[PANEL + lane]);
            for step in 0..STEPS {
                for i in 0..4 {
                    out[step * 4 + i] = scale * f32::from(codes[(step * PANEL + lane) * 4 + i]) + min;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
