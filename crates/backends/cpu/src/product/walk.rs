//! The loops over the rows and the panels of a piece of work, in the tiles of each kind of weight and instruction set.

use std::cell::RefCell;

use octavo_ops::StorageType;

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::output::Output;
#[cfg(target_arch = "x86_64")]
use super::pairs::{BLOCK_PANELS, PanelPair};
use super::{PIECE_PANELS, numbers, plain};
#[cfg(target_arch = "x86_64")]
use super::{amx, bf16, short, vnni, wide, wide_numbers, ymm};
use crate::activation::TILE;
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::memory::LINE;
use crate::memory::Lines;
use crate::rows::GROUP;
#[cfg(target_arch = "x86_64")]
use crate::tiles::{self, Strided, Tiles};
use crate::weights::{Codes, Layout, PANEL, PanelKind, Panels, Part, Scales, short as short_bf16};

/// Results of a panel for a tile of rows.
#[repr(align(64))]
pub(super) struct Tile(pub(super) [[f32; PANEL]; TILE]);

/// Panels with codes as bytes and scales as f32, which are multiplied with many tiles of rows.
#[derive(Default)]
struct Unpacked {
    groups: usize,
    /// Size of the codes of a group in bytes.
    group_codes: usize,
    /// Codes per panel and group, `[STEPS][PANEL][4]`. For AMX, 4-bit codes are stored twice: first times 16.
    codes: Lines<u8>,
    /// Sixteen scales and sixteen minima per panel and group.
    scales: Lines<f32>,
}

/// Size of the codes of a group of a panel in bytes.
pub(super) const GROUP_CODES: usize = GROUP * PANEL;

/// Number of scales and minima of a group of a panel.
pub(super) const GROUP_SCALES: usize = 2 * PANEL;

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
    /// Panels in bf16 of what is stored in fewer bits.
    static NUMBERS: RefCell<Lines<u8>> = RefCell::default();
}

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// Memory of a tile of many rows in 8 or 12 bits.
    static VNNI_TILE: RefCell<vnni::Tile> = RefCell::default();
    /// Memory of a tile of rows in 16 bits and of its results.
    static NUMBER_TILE: RefCell<wide_numbers::Tile> = RefCell::default();
    /// Memory of a tile of rows in bf16 with bf16 in twelve bits.
    static SHORT_TILE: RefCell<short::Tile> = RefCell::default();
    /// Memory of a tile of rows in bf16.
    static ROUNDED_TILE: RefCell<wide_numbers::RoundedTile> = RefCell::default();
}

pub(super) type Quant<'a> = crate::activation::QuantRows<'a>;
pub(super) type Range = std::ops::Range<usize>;

/// Multiplies any number of rows with panels of integers, two at a time.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the input must have room for whole tiles of rows.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn blocks(part: &Part, panels: Range, input: &Quant<'_>, rows: Range, output: &Output<'_>) {
    use vnni::{BLOCK_ROWS, TILE_ROWS};

    let layout = &part.layout;
    if layout.kind.words(Isa::Avx512, input.coarse).is_some() {
        // SAFETY: the caller guarantees this.
        return unsafe { number_blocks(part, panels, input, rows, output) };
    }
    if rows.len() <= BLOCK_ROWS {
        let mut results = [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];
        for pair in PanelPair::all(panels, output) {
            let weights = pair.weights(|panel| part.panel(panel));
            for first in rows.clone().step_by(BLOCK_ROWS) {
                let some = (first, (rows.end - first).min(BLOCK_ROWS));
                // SAFETY: the caller guarantees this; the panels have this layout.
                unsafe { vnni::packed(weights, layout, input, some, first == rows.start, &mut results) };
                pair.store(first, 0..some.1, &mut results);
            }
        }
        return;
    }
    VNNI_TILE.with_borrow_mut(|tile| {
        for pair in PanelPair::all(panels, output) {
            for first in rows.clone().step_by(TILE_ROWS) {
                let some = (first, (rows.end - first).min(TILE_ROWS));
                // SAFETY: the caller guarantees this.
                unsafe { vnni::multiply_tile(part, &pair, input, some, first == rows.start, tile) };
            }
        }
    });
}

/// Multiplies any number of rows with panels of integers, which are unpacked group by group for each tile of rows.
///
/// # Safety
/// AVX2, and AVX-VNNI if it is chosen, must be available.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn ymm_tiles(
    isa: Isa,
    part: &Part,
    panels: Range,
    input: Quant<'_>,
    rows: Range,
    output: &Output<'_>,
) {
    let layout = &part.layout;
    let mut tile = [[0.0; PANEL]; ymm::TILE_ROWS];
    for first in rows.clone().step_by(ymm::TILE_ROWS) {
        let count = (rows.end - first).min(ymm::TILE_ROWS);
        let tile_rows = ymm::TileRows::new(isa, layout, input, (first, count));
        for panel in panels.clone() {
            let ahead = if first == rows.start { layout.bytes } else { 0 };
            let results = &mut tile[..count];
            output.prefetch(first..first + count, panel..panel + 1);
            // SAFETY: the caller guarantees this; the panel has this layout.
            unsafe {
                if isa == Isa::AvxVnni {
                    ymm::multiply_vnni(part.panel(panel), layout, &tile_rows, ahead, results);
                } else {
                    ymm::multiply(part.panel(panel), layout, &tile_rows, ahead, results);
                }
            }
            output.store(first, panel, results);
        }
    }
}

/// Multiplies any number of rows with panels of integers.
pub(super) fn quant(isa: Isa, part: &Part, panels: Range, input: &Quant<'_>, rows: Range, output: &Output<'_>) {
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
                output.store(first, panel, tile);
            }
        }
    });
}

/// Multiplies any number of rows with panels of integers whose groups have a scale for each half.
pub(super) fn quant_halves(part: &Part, panels: Range, input: &Quant<'_>, rows: Range, output: &Output<'_>) {
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
            output.store(first, panel, tile);
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
fn unpack(isa: Isa, panel: &[u8], layout: &Layout, codes: &mut [u8], scales: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: the instruction set is available.
        return unsafe { vnni::unpack(panel, layout, codes, scales) };
    }
    let _ = isa;
    plain::unpack(panel, layout, codes, scales);
}

/// Calls a function with panels in bf16 of what is stored in fewer bits.
pub(super) fn with_unpacked(isa: Isa, part: &Part, panels: Range, multiply: impl FnOnce(Panels<'_>)) {
    let Some(layout) = Layout::new(StorageType::BF16, part.layout.cols) else {
        unreachable!("a panel in fewer bits is smaller, but has been multiplied")
    };
    NUMBERS.with_borrow_mut(|unpacked| {
        unpacked.reserve_zeroed(panels.len() * layout.bytes);
        for (panel, out) in panels.clone().zip(unpacked.chunks_exact_mut(layout.bytes)) {
            match part.layout.kind {
                PanelKind::Short => short_bf16::unpack(&part.layout, part.panel(panel), out),
                _ => numbers::unpack(isa, part.panel(panel), &part.layout, out),
            }
        }
        multiply(Panels { layout, first: panels.start, bytes: unpacked });
    });
}

/// Multiplies any number of rows with panels of packed numbers or NVFP4, in blocks of a few rows and two panels each.
///
/// # Safety
/// AVX-512 with VNNI must be available.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn number_blocks(part: &Part, panels: Range, input: &Quant<'_>, rows: Range, output: &Output<'_>) {
    use wide_numbers::{TILE_ROWS, TileRows};

    let layout = &part.layout;
    NUMBER_TILE.with_borrow_mut(|tile| {
        for first in rows.clone().step_by(TILE_ROWS) {
            let count = (rows.end - first).min(TILE_ROWS);
            // SAFETY: the caller guarantees this.
            let tile_rows = unsafe { TileRows::new(layout, input, (first, count), &mut tile.blocks) };
            for pair in PanelPair::all(panels.clone(), output) {
                let weights = pair.weights(|panel| part.panel(panel));
                pair.prefetch(first..first + count);
                // SAFETY: the caller guarantees this; the panels have this layout.
                unsafe { wide_numbers::multiply(weights, &tile_rows, first == rows.start, &mut tile.results) };
                pair.store(first, 0..count, &mut tile.results);
            }
        }
    });
}

/// Calls a function with each pair of panels, each tile of rows in bf16 and whether it is the first one, and stores the results.
#[cfg(target_arch = "x86_64")]
fn tiles_of_bf16<U>(
    panels: Range,
    (input, stride): (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
    tile: &mut bf16::Tile<U>,
    multiply: impl Fn(&PanelPair<'_>, bf16::Rows<'_>, bool, &mut bf16::Tile<U>),
) {
    for pair in PanelPair::all(panels, output) {
        for first in rows.clone().step_by(bf16::TILE_ROWS) {
            let count = (rows.end - first).min(bf16::TILE_ROWS);
            pair.prefetch(first..first + count);
            let some = bf16::Rows { elements: &input[first * stride..], stride, count };
            multiply(&pair, some, first == rows.start, tile);
            pair.store(first, 0..count, &mut tile.results);
        }
    }
}

/// Multiplies rows in bf16 with panels of packed numbers, in blocks of a few rows and two panels each.
///
/// # Safety
/// AVX-512 with BF16 must be available, and the input must have room for whole tiles of rows.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn rounded_blocks(
    part: &Part,
    panels: Range,
    input: (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
) {
    ROUNDED_TILE.with_borrow_mut(|tile| {
        tiles_of_bf16(panels, input, rows, output, tile, |pair, some, ahead, tile| {
            let weights = pair.weights(|panel| part.panel(panel));
            // SAFETY: the caller guarantees this; the panels have this layout.
            unsafe { wide_numbers::multiply_rounded(weights, &part.layout, some, ahead, tile) };
        });
    });
}

/// Multiplies rows in bf16 with panels of bf16, in blocks of a few rows and panels each.
///
/// # Safety
/// AVX-512 with BF16 must be available.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn bf16_blocks(
    from: Panels<'_>,
    panels: Range,
    (input, stride): (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
) {
    use bf16::BLOCK_ROWS;

    let cols = from.layout.cols;
    assert!(cols <= stride);
    let mut results = [[[0.0; PANEL]; BLOCK_ROWS]; BLOCK_PANELS];
    for pair in PanelPair::all(panels, output) {
        let weights = pair.weights(|panel| from.panel(panel)).map(|panel| bf16::Stored::new(panel, cols));
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let count = (rows.end - first).min(BLOCK_ROWS);
            pair.prefetch(first..first + count);
            // SAFETY: the caller guarantees this.
            unsafe {
                let rest = &input[first * stride..];
                bf16::multiply(weights, cols, (rest, stride), count, first == rows.start, &mut results);
            }
            pair.store(first, 0..count, &mut results);
        }
    }
}

/// Multiplies any number of rows in bf16 with panels of bf16 in twelve bits.
///
/// # Safety
/// AVX-512 with BF16 must be available, and the input must have room for whole tiles of rows.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn short_blocks(
    part: &Part,
    panels: Range,
    input: (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
) {
    SHORT_TILE.with_borrow_mut(|tile| {
        tiles_of_bf16(panels, input, rows, output, tile, |pair, some, ahead, tile| {
            let weights = pair.weights(|panel| part.panel(panel));
            // SAFETY: the caller guarantees this; the panels have this layout.
            unsafe { short::multiply(weights, &part.layout, some, ahead, tile) };
        });
    });
}

/// Multiplies rows in bf16 with panels of bf16.
#[cfg(target_arch = "x86_64")]
pub(super) fn bf16_tiles(
    from: Panels<'_>,
    panels: Range,
    (input, stride): (&[u16], usize),
    rows: Range,
    output: &Output<'_>,
) {
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
            output.store(first, panel, &mut tile.0[..count]);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn bf16_tiles(_: Panels<'_>, _: Range, _: (&[u16], usize), _: Range, _: &Output<'_>) {
    unreachable!("AMX is available on x86-64 only");
}

/// Multiplies rows in f32 with panels that are not integers.
pub(super) fn dense<'a>(
    isa: Isa,
    from: Panels<'_>,
    panels: Range,
    input: impl Fn(usize) -> &'a [f32],
    rows: Range,
    output: &Output<'_>,
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
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx2 {
                    // SAFETY: the instruction set is available; panels hold as many inputs as the rows.
                    unsafe { ymm::dense(kind, panel, &x[..count], results) };
                    continue;
                }
                plain::multiply_dense(kind, panel, &x[..count], results);
            }
        }
        for (panel, results) in panels.clone().zip(&mut results) {
            output.store(first, panel, &mut results[..count]);
        }
    }
}
