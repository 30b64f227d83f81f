//! Integer products with AVX2, and with AVX-VNNI where the processor has it.
//!
//! One register holds eight output rows, so nothing is added across lanes: four inputs of a row are broadcast to all of them.
//! A few rows are multiplied with codes as they are read. For more rows, a group of a panel is unpacked in the first-level
//! cache first: to words, whose products need fewer additions than those of bytes, unless rows have only eight bits. All sums
//! within a group are exact, so that a row's bits are those of every other kernel.

mod bytes;
mod dense;
mod integers;
mod numbers;
mod nvfp4;
mod read;
mod scaling;
mod tile;
mod words;

use std::arch::x86_64::*;

use super::levels::{Fp4, Nf4};
use super::walk::Quant;
use crate::isa::Isa;
use crate::rows::GROUP;
use crate::weights::{Codes, Layout, Numbers, PANEL, PanelKind, STEPS, Scales, WordOrder};
use bytes::{Bytes, InBytes, Vnni};
pub(super) use dense::dense;
use integers::Integers;
use numbers::{F8, Indices, NumberPanel};
use nvfp4::PairPanel;
pub(super) use read::Ahead;
use read::{E2m1, Eight, Five, Four, Iq4, Nvfp4, Six};
use tile::{Group, Panel};
use words::{Avx2, AvxVnni, InWords};

/// Number of output rows in a register, of which a panel needs two.
const LANES: usize = 8;

/// Size of a group of a row in bytes: high and low parts, or integers of 16 bits.
const ROW_BYTES: usize = 2 * GROUP;

/// Broadcasts a word of a row.
#[inline(always)]
unsafe fn four(row: *const u8, word: usize) -> __m256i {
    // SAFETY: the caller guarantees that the row has it, and the instruction set.
    unsafe { _mm256_set1_epi32(row.cast::<i32>().add(word).read_unaligned()) }
}

/// Number of rows of a tile, for which a group is unpacked once.
pub(super) const TILE_ROWS: usize = 32;

/// Rows of a tile for one panel after the other.
pub(super) struct TileRows<'a> {
    input: Quant<'a>,
    first: usize,
    count: usize,
    /// The rows in 16 bits, if panels are multiplied as such.
    words: Option<&'a [i16]>,
}

/// Returns how panels of this layout are multiplied with so many rows in 16 bits, if they are. Codes that can be multiplied in bytes
/// are, if the rows are so few that unpacking takes longer than multiplying.
fn words(isa: Isa, layout: &Layout, rows: usize, coarse: bool) -> Option<WordOrder> {
    let kind = layout.kind;
    let in_bytes = match kind {
        PanelKind::Quant(_, Scales::Pair) => isa == Isa::AvxVnni,
        PanelKind::Quant(codes, _) => !matches!(codes, Codes::Six | Codes::Eight | Codes::Iq4),
        _ => false,
    };
    kind.words(isa, coarse).filter(|_| rows > bytes::ROWS || !in_bytes)
}

impl TileRows<'_> {
    /// Returns the first group of all rows.
    fn first_group(&self) -> Group {
        let (codes, scales, sums) = self.input.from(self.first);
        let codes = self.words.map_or(codes.as_ptr().cast(), |words| words.as_ptr().cast());
        Group {
            codes,
            scales: scales.as_ptr(),
            sums: sums.as_ptr(),
            totals: self.input.totals_from(self.first).as_ptr(),
            steps: self.input.steps_from(self.first).as_ptr(),
            groups: self.input.cols / GROUP,
        }
    }
}

impl<'a> TileRows<'a> {
    /// Prepares `count` rows from `first` on, at most [`TILE_ROWS`].
    pub(super) fn new(isa: Isa, layout: &Layout, input: Quant<'a>, (first, count): (usize, usize)) -> Self {
        assert!(count <= TILE_ROWS && input.cols == layout.cols);
        let words = words(isa, layout, count, input.coarse).map(|words| input.words((first, count), words).0);
        Self { input, first, count, words }
    }
}

/// Multiplies the rows of a tile with a panel in its stored layout. `ahead` prefetches the panel at that distance in
/// bytes, unless it is 0.
///
/// # Safety
/// AVX2, FMA and F16C must be available, and the panel must have this layout.
pub(super) unsafe fn multiply(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    /// A function for each kind of panel: the compiler takes minutes for one with the loops of all kinds.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn of_kind<P: Panel, const ROWS: usize>(
        panel: &P,
        rows: &TileRows<'_>,
        ahead: usize,
        results: &mut [[f32; PANEL]],
    ) {
        // SAFETY: the caller guarantees this.
        unsafe { tile::multiply::<P, ROWS>(panel, rows, ahead, results) }
    }
    macro_rules! tile {
        ($codes:ty, $pause:literal) => {
            if rows.words.is_some() {
                tile!($codes)
            } else if rows.input.coarse {
                let panel = Integers::<$codes, InBytes<Bytes<$pause, true>>>::new(panel, layout);
                of_kind::<_, { bytes::coarse_rows($pause) }>(&panel, rows, ahead, results)
            } else {
                tile!(bytes, Integers::<$codes, InBytes<Bytes<$pause, false>>>::new(panel, layout))
            }
        };
        ($codes:ty) => {
            tile!(words, Integers::<$codes, InWords>::new(panel, layout))
        };
        (numbers, $kind:ty) => {{
            assert!(rows.words.is_some());
            tile!(words, NumberPanel::<$kind, Avx2>::new(panel, layout))
        }};
        ($way:ident, $panel:expr) => {
            of_kind::<_, { $way::ROWS }>(&$panel, rows, ahead, results)
        };
    }
    assert!(panel.len() >= layout.bytes);
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Quant(Codes::Four, _) => tile!(Four, 8),
            PanelKind::Quant(Codes::Five, _) => tile!(Five, 4),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => {
                assert!(rows.words.is_some());
                tile!(words, PairPanel::<Avx2>::new(panel, layout))
            }
            PanelKind::Quant(Codes::E2m1, _) => tile!(E2m1, 4),
            PanelKind::Quant(Codes::Iq4, _) => tile!(Iq4),
            PanelKind::Quant(Codes::Six, _) => tile!(Six),
            PanelKind::Quant(Codes::Eight, _) => tile!(Eight),
            PanelKind::Packed(Numbers::F8) => tile!(numbers, F8),
            PanelKind::Packed(Numbers::Nf4) => tile!(numbers, Indices<Nf4>),
            PanelKind::Packed(Numbers::Fp4) => tile!(numbers, Indices<Fp4>),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    }
}

/// [`multiply`] with AVX-VNNI.
///
/// # Safety
/// AVX2, FMA, F16C and AVX-VNNI must be available, and the panel must have this layout.
pub(super) unsafe fn multiply_vnni(
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    #[inline(never)]
    unsafe fn of_kind<P: Panel, const ROWS: usize>(
        panel: &P,
        rows: &TileRows<'_>,
        ahead: usize,
        results: &mut [[f32; PANEL]],
    ) {
        // SAFETY: the caller guarantees this.
        unsafe { tile::multiply::<P, ROWS>(panel, rows, ahead, results) }
    }
    macro_rules! tile {
        ($codes:ty) => {
            if rows.input.coarse {
                let panel = Integers::<$codes, InBytes<Vnni<true>>>::new(panel, layout);
                of_kind::<_, { bytes::coarse_rows(STEPS) }>(&panel, rows, ahead, results)
            } else {
                tile!(bytes, Integers::<$codes, InBytes<Vnni<false>>>::new(panel, layout))
            }
        };
        (numbers, $kind:ty) => {{
            assert!(rows.words.is_some());
            tile!(words, NumberPanel::<$kind, AvxVnni>::new(panel, layout))
        }};
        ($way:ident, $panel:expr) => {
            of_kind::<_, { $way::ROWS }>(&$panel, rows, ahead, results)
        };
    }
    assert!(panel.len() >= layout.bytes);
    // SAFETY: the caller guarantees this.
    unsafe {
        match layout.kind {
            PanelKind::Quant(Codes::Four, _) => tile!(Four),
            PanelKind::Quant(Codes::Five, _) => tile!(Five),
            PanelKind::Quant(Codes::E2m1, Scales::Pair) if rows.words.is_some() => {
                tile!(words, PairPanel::<AvxVnni>::new(panel, layout))
            }
            PanelKind::Quant(Codes::E2m1, Scales::Pair) => tile!(Nvfp4),
            PanelKind::Quant(Codes::E2m1, _) => tile!(E2m1),
            PanelKind::Quant(Codes::Iq4, _) => tile!(Iq4),
            PanelKind::Quant(Codes::Six, _) => tile!(Six),
            PanelKind::Quant(Codes::Eight, _) => tile!(Eight),
            PanelKind::Packed(Numbers::F8) => tile!(numbers, F8),
            PanelKind::Packed(Numbers::Nf4) => tile!(numbers, Indices<Nf4>),
            PanelKind::Packed(Numbers::Fp4) => tile!(numbers, Indices<Fp4>),
            other => unreachable!("{other:?} is no kind of integers"),
        }
    }
}
