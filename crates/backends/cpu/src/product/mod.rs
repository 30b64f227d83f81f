//! Matrix products: every row of an activation with every panel of a weight.
//!
//! The order of a row's sums does not depend on the kernel: integer products are exact within a group, and every kernel
//! adds the groups in order, scale first, then minimum. For bf16, f16 and f32 weights each instruction set has one
//! kernel, which computes rows independently.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
mod numbers;
mod plain;
#[cfg(target_arch = "x86_64")]
mod read;
#[cfg(target_arch = "x86_64")]
mod vnni;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod ymm;

use std::cell::RefCell;

use octavo_ops::StorageType;

use crate::activation::{Rows, Span, TILE};
use crate::isa::{Isa, per_isa};
#[cfg(target_arch = "x86_64")]
use crate::memory::LINE;
use crate::memory::{Lines, Shared};
use crate::rows::GROUP;
#[cfg(target_arch = "x86_64")]
use crate::tiles::{self, Strided, Tiles};
#[cfg(target_arch = "x86_64")]
use crate::weights::Numbers;
use crate::weights::{Codes, Layout, Matrix, PANEL, PanelKind, Panels, Part, Scales};

/// Number of panels in a piece of work: large enough that taking pieces costs nothing, small enough that threads finish
/// together.
const PIECE_PANELS: usize = 4;

/// Number of panels with few rows, for which a piece is little work.
const SKINNY_PANELS: usize = 2;

/// Number of rows in a piece of work. Every piece unpacks its panels again.
const PIECE_ROWS: usize = 256;

/// Number of rows up to which VNNI is used instead of AMX, and pieces are small.
const SKINNY_ROWS: usize = 4;

/// Number of rows up to which VNNI multiplies weights in their stored layout, without unpacking them first.
#[cfg(target_arch = "x86_64")]
const PACKED_ROWS: usize = 32;

/// A product computed by the threads of a region.
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
}

/// Place of the first result of a product whose output is a part of a buffer.
#[derive(Clone, Copy, Default)]
pub(crate) struct Origin {
    /// Row of the input whose result is the first row of the output.
    pub(crate) row: usize,
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

/// Results of a panel for a tile of rows.
#[repr(align(64))]
pub(super) struct Tile([[f32; PANEL]; TILE]);

/// Panels with codes as bytes and scales as f32, which are multiplied with many tiles of rows.
#[derive(Default)]
pub(super) struct Unpacked {
    groups: usize,
    /// Size of the codes of a group in bytes.
    group_codes: usize,
    /// Codes per panel and group, `[STEPS][PANEL][4]`. For AMX, 4-bit codes are stored twice: first times 16.
    codes: Lines<u8>,
    /// Sixteen scales and sixteen minima per panel and group.
    scales: Lines<f32>,
}

/// Size of the codes of a group of a panel in bytes.
const GROUP_CODES: usize = GROUP * PANEL;

/// Number of scales and minima of a group of a panel.
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
    /// Panels of packed numbers as bf16.
    static NUMBERS: RefCell<Lines<u8>> = RefCell::default();
}

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// Rows of a tile in 16 bits.
    static WORDS: RefCell<Lines<i16>> = RefCell::default();
}

/// Returns the number of panels in a piece for this number of rows.
fn piece_panels(rows: usize) -> usize {
    if rows <= SKINNY_ROWS { SKINNY_PANELS } else { PIECE_PANELS }
}

/// Returns the number of chunks of columns into which the product of `rows` rows is divided. For the product of each row
/// with one of several matrices, it is the mean number of rows of a matrix.
pub(crate) fn chunks(matrix: &Matrix, rows: usize) -> usize {
    matrix.parts.iter().map(|part| part.panels().div_ceil(piece_panels(rows))).sum()
}

/// Returns the part and the panels of a chunk.
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

/// Returns the columns of a chunk.
pub(crate) fn chunk_columns(matrix: &Matrix, rows: usize, index: usize) -> Range {
    let (part, panels) = chunk(matrix, rows, index);
    part.first + panels.start * PANEL..part.first + (panels.end * PANEL).min(part.rows)
}

impl<'a> Product<'a> {
    /// Returns a product of no rows, without an epilogue.
    pub(crate) fn new(matrix: &'a Matrix, input: Rows, out: Rows) -> Self {
        let (epilogue, origin) = (Epilogue::default(), Origin::default());
        Self { matrix, input, rows: 0, out, epilogue, largest: None, origin }
    }

    /// Returns the number of pieces of work.
    pub(crate) fn pieces(&self) -> usize {
        chunks(self.matrix, self.rows) * self.rows.div_ceil(PIECE_ROWS)
    }

    /// Computes one piece.
    ///
    /// # Safety
    /// The activations must not be moved, and each piece must be computed by one thread only. During the call, no other
    /// thread may write the input or use the piece's output.
    pub(crate) unsafe fn run(&self, isa: Isa, piece: usize) {
        let blocks = self.rows.div_ceil(PIECE_ROWS);
        let (index, block) = (piece / blocks, piece % blocks);
        let first = block * PIECE_ROWS;
        let rows = first..(first + PIECE_ROWS).min(self.rows);
        let (part, panels) = chunk(self.matrix, self.rows, index);
        // SAFETY: the caller guarantees this.
        unsafe { self.run_panels(isa, part, panels, rows.clone()) };
        let Some(largest) = self.largest else { return };
        let columns = chunk_columns(self.matrix, self.rows, index);
        let chunks = chunks(self.matrix, self.rows);
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
        let mut store = |first: usize, panel: usize, tile: &mut [[f32; PANEL]]| {
            // SAFETY: the caller guarantees this.
            unsafe { self.store(isa, part, panel, first, tile) }
        };
        match part.layout.kind {
            PanelKind::Quant(..) => {
                // SAFETY: the caller guarantees this.
                let input = unsafe { self.input.quant() };
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx512 && (isa != Isa::Amx || rows.len() <= SKINNY_ROWS || part.layout.kind.has_halves())
                {
                    // SAFETY: the instruction set is available; the input has room for whole tiles of rows.
                    return unsafe { blocks(part, panels, &input, rows, &mut store) };
                }
                #[cfg(target_arch = "x86_64")]
                if matches!(isa, Isa::Avx2 | Isa::AvxVnni) {
                    // SAFETY: the instruction set is available.
                    return unsafe { ymm_tiles(isa, part, panels, input, rows, &mut store) };
                }
                #[cfg(target_arch = "aarch64")]
                if isa >= Isa::Neon {
                    // SAFETY: the instruction set is available.
                    return unsafe { neon::integers(isa, part, panels, input, rows, &mut store) };
                }
                if part.layout.kind.has_halves() {
                    return quant_halves(part, panels, &input, rows, &mut store);
                }
                quant(isa, part, panels, &input, rows, &mut store);
            }
            #[cfg(target_arch = "x86_64")]
            PanelKind::Packed(_) if isa == Isa::Avx512Bf16 && rows.len() <= bf16::BLOCK_ROWS => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe { packed_blocks(part, panels, self.input.bf16(), rows, &mut store) };
            }
            #[cfg(target_arch = "x86_64")]
            kind @ PanelKind::Packed(_) if matches!(isa, Isa::Avx2 | Isa::AvxVnni) => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe {
                    match kind.takes_integers(isa) {
                        true => ymm_tiles(isa, part, panels, self.input.quant(), rows, &mut store),
                        false => {
                            let input = |row: usize| self.input.read(self.input.span(row));
                            ymm::numbers::tiles_of_f8(isa, part, panels, input, rows, &mut store);
                        }
                    }
                }
            }
            // SAFETY: the caller guarantees this.
            PanelKind::Packed(_) => with_numbers(isa, part, panels.clone(), |weights| unsafe {
                self.run_numbers(isa, weights, panels, rows, &mut store);
            }),
            // SAFETY: the caller guarantees this.
            PanelKind::Bf16 | PanelKind::F16 | PanelKind::F32 => unsafe {
                self.run_numbers(isa, part.stored(), panels, rows, &mut store);
            },
        }
    }

    /// Multiplies with panels that are not integers.
    ///
    /// # Safety
    /// The conditions of `run` apply.
    unsafe fn run_numbers(&self, isa: Isa, weights: Panels<'_>, panels: Range, rows: Range, store: Store<'_>) {
        match weights.layout.kind {
            PanelKind::Bf16 if isa == Isa::Amx => {
                // SAFETY: the caller guarantees this.
                let (input, stride) = unsafe { self.input.bf16() };
                bf16_tiles(weights, panels, (input, stride), rows, store);
            }
            #[cfg(target_arch = "x86_64")]
            PanelKind::Bf16 if isa == Isa::Avx512Bf16 => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe {
                    let cols = weights.layout.cols;
                    let panel = |panel| bf16::Stored::new(weights.panel(panel), cols);
                    bf16_blocks(panel, cols, panels, self.input.bf16(), rows, store);
                }
            }
            #[cfg(target_arch = "aarch64")]
            PanelKind::Bf16 if isa == Isa::I8mmBf16 => {
                // SAFETY: the caller guarantees this; the instruction set is available.
                unsafe { neon::bf16_rows(weights, panels, self.input.bf16(), rows, store) };
            }
            _ => {
                // SAFETY: the caller guarantees this.
                let input = |row: usize| unsafe { self.input.read(self.input.span(row)) };
                dense(isa, weights, panels, input, rows, store);
            }
        }
    }

    /// Stores the results of a panel for the rows from `first` on.
    ///
    /// # Safety
    /// The conditions of `run` apply.
    unsafe fn store(&self, isa: Isa, part: &Part, panel: usize, first: usize, tile: &mut [[f32; PANEL]]) {
        let from = part.first + panel * PANEL;
        let len = part.rows_of(panel);
        let Epilogue { bias, scale, softcap, add } = self.epilogue;
        let bias = bias.map(|bias| &bias[from..from + len]);
        for (row, result) in (first..).zip(tile) {
            let span = Span { row: row - self.origin.row, from: self.origin.column + from, len };
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
                // SAFETY: no other thread writes these columns of the buffer. It may be the output, to which no
                // reference exists yet.
                add_lanes(result, unsafe { add.read(span) });
            }
            // SAFETY: the columns of a panel belong to its piece.
            put_lanes(unsafe { self.out.write(span) }, result);
        }
    }
}

/// Adds to the lanes that exist. Usually all do, and this takes a few instructions.
fn add_lanes(result: &mut [f32; PANEL], x: &[f32]) {
    match x.first_chunk::<PANEL>() {
        Some(x) => result.iter_mut().zip(x).for_each(|(result, x)| *result += x),
        None => result.iter_mut().zip(x).for_each(|(result, x)| *result += x),
    }
}

/// Stores the lanes that exist, one by one if some do not: the compiler would merge two copies into one call for any
/// length.
fn put_lanes(out: &mut [f32], result: &[f32; PANEL]) {
    match out.first_chunk_mut::<PANEL>() {
        Some(out) => *out = *result,
        None => out.iter_mut().zip(result).for_each(|(out, result)| *out = *result),
    }
}

per_isa! {
    plain;
    /// Multiplies rows with a panel of f32, f16 or bf16.
    fn multiply_dense(kind: PanelKind, panel: &[u8], x: &[&[f32]], results: &mut [[f32; PANEL]]);
}

type Store<'s> = &'s mut dyn FnMut(usize, usize, &mut [[f32; PANEL]]);
type Quant<'a> = crate::activation::QuantRows<'a>;
type Range = std::ops::Range<usize>;

/// Multiplies any number of rows with panels of integers, in blocks of a few rows and panels each.
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
                // SAFETY: the caller guarantees this; the panels have this layout.
                unsafe {
                    if unpacks {
                        let panels = std::array::from_fn(|slot| unpacked.panel(slot.min(pair.len() - 1)));
                        let narrow = matches!(layout.kind, PanelKind::Quant(Codes::Four, _));
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

/// Multiplies any number of rows with panels of integers, which are unpacked group by group for each tile of rows.
///
/// # Safety
/// AVX2, and AVX-VNNI if it is chosen, must be available.
#[cfg(target_arch = "x86_64")]
unsafe fn ymm_tiles(isa: Isa, part: &Part, panels: Range, input: Quant<'_>, rows: Range, store: Store<'_>) {
    let layout = &part.layout;
    let vnni = isa == Isa::AvxVnni;
    let mut tile = Tile([[0.0; PANEL]; TILE]);
    WORDS.with_borrow_mut(|words| {
        for first in rows.clone().step_by(TILE) {
            let count = (rows.end - first).min(TILE);
            let tile_rows = ymm::TileRows::new(vnni, layout, input, (first, count), words);
            for panel in panels.clone() {
                let ahead = if first == rows.start { layout.bytes } else { 0 };
                let results = &mut tile.0[..count];
                // SAFETY: the caller guarantees this; the panel has this layout.
                unsafe {
                    if vnni {
                        ymm::multiply_vnni(part.panel(panel), layout, &tile_rows, ahead, results);
                    } else {
                        ymm::multiply(part.panel(panel), layout, &tile_rows, ahead, results);
                    }
                }
                store(first, panel, results);
            }
        }
    });
}

/// Multiplies any number of rows with panels of integers.
fn quant(isa: Isa, part: &Part, panels: Range, input: &Quant<'_>, rows: Range, store: Store<'_>) {
    UNPACKED.with_borrow_mut(|unpacked| {
        let doubled = isa == Isa::Amx && matches!(part.layout.kind, PanelKind::Quant(Codes::Four, _));
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

/// Multiplies any number of rows with panels of integers whose groups have a scale for each half.
fn quant_halves(part: &Part, panels: Range, input: &Quant<'_>, rows: Range, store: Store<'_>) {
    let mut tile = Tile([[0.0; PANEL]; TILE]);
    for first in rows.clone().step_by(TILE) {
        let tile = &mut tile.0[..(rows.end - first).min(TILE)];
        for panel in panels.clone() {
            match part.layout.kind {
                PanelKind::Quant(_, Scales::Pair) => {
                    plain::multiply_pairs(part.panel(panel), &part.layout, input, first, tile);
                }
                _ => plain::multiply_halves(part.panel(panel), &part.layout, input, first, tile),
            }
            store(first, panel, tile);
        }
    }
}

/// Multiplies a tile of rows with an unpacked panel. On AMX the tiles must be set up.
fn multiply(isa: Isa, (codes, scales): (&[u8], &[f32]), input: &Quant<'_>, first: usize, tile: &mut [[f32; PANEL]]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction set is available and its tiles are set up; there is room for whole tiles of rows.
        Isa::Amx => unsafe { amx::integers(codes, scales, input, first, tile) },
        _ => plain::multiply_integers(codes, scales, input, first, tile),
    }
}

/// Converts codes to bytes and scales to f32.
pub(crate) fn unpack(isa: Isa, panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: the instruction set is available.
        return unsafe { vnni::unpack(panel, layout, codes, scales) };
    }
    let _ = isa;
    plain::unpack(panel, layout, codes, scales);
}

/// Calls a function with panels of packed numbers as bf16.
fn with_numbers(isa: Isa, part: &Part, panels: Range, multiply: impl FnOnce(Panels<'_>)) {
    let Some(layout) = Layout::new(StorageType::BF16, part.layout.cols) else {
        unreachable!("a panel of packed numbers is smaller, but has been multiplied")
    };
    NUMBERS.with_borrow_mut(|unpacked| {
        unpacked.reserve_zeroed(panels.len() * layout.bytes);
        for (panel, out) in panels.clone().zip(unpacked.chunks_exact_mut(layout.bytes)) {
            numbers::unpack(isa, part.panel(panel), &part.layout, out);
        }
        multiply(Panels { layout, first: panels.start, bytes: unpacked });
    });
}

/// Multiplies a few rows in bf16 with panels of packed numbers, as they are read.
///
/// # Safety
/// AVX-512 with BF16 must be available.
#[cfg(target_arch = "x86_64")]
unsafe fn packed_blocks(part: &Part, panels: Range, input: (&[u16], usize), rows: Range, store: Store<'_>) {
    use numbers::wide;

    let Part { layout, .. } = part;
    let PanelKind::Packed(kind) = layout.kind else { unreachable!("chosen by the kind") };
    let cols = layout.cols;
    // SAFETY: the caller guarantees this; the panels have this layout.
    unsafe {
        match kind {
            Numbers::F8 => {
                let weights = |panel| wide::Panel::<wide::F8>::new(part.panel(panel), layout);
                bf16_blocks(weights, cols, panels, input, rows, store);
            }
            Numbers::Nf4 => {
                let weights = |panel| wide::Panel::<wide::Nf4>::new(part.panel(panel), layout);
                bf16_blocks(weights, cols, panels, input, rows, store);
            }
            Numbers::Fp4 => {
                let weights = |panel| wide::Panel::<wide::Fp4>::new(part.panel(panel), layout);
                bf16_blocks(weights, cols, panels, input, rows, store);
            }
        }
    }
}

/// Multiplies rows in bf16 with panels of `cols` inputs, in blocks of a few rows and panels each.
///
/// # Safety
/// AVX-512 with BF16 must be available, and the panels must have these inputs.
#[cfg(target_arch = "x86_64")]
unsafe fn bf16_blocks<W: bf16::Weights>(
    weights: impl Fn(usize) -> W,
    cols: usize,
    panels: Range,
    (input, stride): (&[u16], usize),
    rows: Range,
    store: Store<'_>,
) {
    use bf16::{BLOCK_PANELS, BLOCK_ROWS};

    assert!(cols <= stride);
    let mut results: bf16::Results = [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];
    for start in panels.clone().step_by(BLOCK_PANELS) {
        let some = start..(start + BLOCK_PANELS).min(panels.end);
        // Panels that do not exist repeat the last one; their results are not used.
        let weights = std::array::from_fn(|slot| weights((start + slot).min(some.end - 1)));
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let count = (rows.end - first).min(BLOCK_ROWS);
            // SAFETY: the caller guarantees this.
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

/// Multiplies rows in bf16 with panels of bf16.
#[cfg(target_arch = "x86_64")]
fn bf16_tiles(from: Panels<'_>, panels: Range, (input, stride): (&[u16], usize), rows: Range, store: Store<'_>) {
    let cols = from.layout.cols;
    assert!(cols <= stride);
    let _tiles = Tiles::bf16(TILE.min(rows.len()));
    // Panels that do not exist repeat the last one; their results are not used.
    let weights = std::array::from_fn(|slot| from.panel((panels.start + slot).min(panels.end - 1)).as_ptr());
    let mut results = [const { Tile([[0.0; PANEL]; TILE]) }; PIECE_PANELS];
    for first in rows.clone().step_by(TILE) {
        let a = Strided { start: input[first * stride..][..TILE * stride].as_ptr(), stride: 2 * stride };
        let out = Strided { start: results.as_mut_ptr().cast(), stride: LINE };
        // SAFETY: the instruction set is available and its tiles are set up; sixteen rows exist, and panels and results
        // hold whole tiles.
        unsafe { tiles::dot(a, weights, cols / GROUP, out, size_of::<Tile>()) };
        let count = (rows.end - first).min(TILE);
        for (panel, tile) in panels.clone().zip(&mut results) {
            store(first, panel, &mut tile.0[..count]);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_tiles(_: Panels<'_>, _: Range, _: (&[u16], usize), _: Range, _: Store<'_>) {
    unreachable!("AMX is available on x86-64 only");
}

/// Multiplies rows in f32 with panels that are not integers.
fn dense<'a>(
    isa: Isa,
    from: Panels<'_>,
    panels: Range,
    input: impl Fn(usize) -> &'a [f32],
    rows: Range,
    store: Store<'_>,
) {
    const ROWS: usize = 4;
    let kind = from.layout.kind;
    let mut results = [[[0.0; PANEL]; ROWS]; PIECE_PANELS];
    for first in rows.clone().step_by(ROWS) {
        let count = (rows.end - first).min(ROWS);
        let x: [&[f32]; ROWS] = std::array::from_fn(|i| input(first + i.min(count - 1)));
        let weights: [&[u8]; PIECE_PANELS] =
            std::array::from_fn(|i| from.panel((panels.start + i).min(panels.end - 1)));
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            // SAFETY: the instruction set is available.
            unsafe { wide::dense(kind, &weights, &x[..count], &mut results) };
        }
        if isa < Isa::Avx512 || cfg!(not(target_arch = "x86_64")) {
            for (results, panel) in results.iter_mut().zip(&weights[..panels.len()]) {
                #[cfg(target_arch = "aarch64")]
                if isa >= Isa::Neon {
                    // SAFETY: the instruction set is available; panels hold as many inputs as the rows.
                    unsafe { neon::dense(kind, panel, &x[..count], results) };
                    continue;
                }
                isa.multiply_dense(kind, panel, &x[..count], results);
            }
        }
        for (panel, results) in panels.clone().zip(&mut results) {
            store(first, panel, &mut results[..count]);
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
        PanelKind::Packed(_) => numbers::read(panel, &part.layout, lane, out),
        kind @ (PanelKind::Bf16 | PanelKind::F16 | PanelKind::F32) => plain::read_dense(kind, panel, lane, out),
    }
}

#[cfg(test)]
mod tests;
