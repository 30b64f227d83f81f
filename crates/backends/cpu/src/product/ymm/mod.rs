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
use crate::activation::{TILE, join};
use crate::memory::Lines;
use crate::rows::GROUP;
use crate::weights::{Codes, Layout, Numbers, PANEL, PanelKind, Scales};
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

/// Rows of a tile for one panel after the other.
pub(super) struct TileRows<'a> {
    input: Quant<'a>,
    first: usize,
    count: usize,
    /// The rows in 16 bits, if panels are multiplied as such.
    words: Option<&'a [i16]>,
}

/// Returns whether codes of this layout are multiplied with so many rows in 16 bits. Codes that can be multiplied in bytes are, if
/// the rows are so few that unpacking takes longer than multiplying, or if rows have eight bits. With AVX-VNNI, only the
/// values of tables are multiplied in 16 bits, those of NVFP4 for more rows only.
fn needs_words(vnni: bool, layout: &Layout, rows: usize, coarse: bool) -> bool {
    match layout.kind {
        PanelKind::Packed(_) => true,
        PanelKind::Quant(_, Scales::Pair) => !vnni || rows > bytes::ROWS,
        PanelKind::Quant(Codes::Six | Codes::Eight | Codes::Iq4, _) => !vnni,
        _ => !vnni && !coarse && rows > bytes::ROWS,
    }
}

impl TileRows<'_> {
    /// Returns the first group of all rows.
    fn first_group(&self) -> Group {
        let (codes, scales, sums) = self.input.from(self.first);
        let codes = self.words.map_or(codes.as_ptr().cast(), |words| words.as_ptr().cast());
        let totals = self.input.totals_from(self.first).as_ptr();
        Group { codes, scales: scales.as_ptr(), sums: sums.as_ptr(), totals, groups: self.input.cols / GROUP }
    }
}

impl<'a> TileRows<'a> {
    /// Prepares `count` rows from `first` on, at most [`TILE`].
    pub(super) fn new(
        vnni: bool,
        layout: &Layout,
        input: Quant<'a>,
        (first, count): (usize, usize),
        scratch: &'a mut Lines<i16>,
    ) -> Self {
        assert!(count <= TILE && input.cols == layout.cols);
        let words = needs_words(vnni, layout, count, input.coarse).then(|| {
            let order = matches!(layout.kind, PanelKind::Quant(_, Scales::Pair)).then_some(&nvfp4::ORDER);
            scratch.reserve_zeroed(TILE * input.cols);
            for (row, words) in (first..first + count).zip(scratch.chunks_exact_mut(input.cols)) {
                // SAFETY: AVX2 is available wherever these kernels are chosen.
                unsafe { join_in_order(order, input.row(row).codes, words.as_chunks_mut().0) };
            }
            &scratch[..count * input.cols]
        });
        Self { input, first, count, words }
    }
}

/// Order of a row's inputs in 16 bits: indices of each sixteen.
type Order = [u8; 16];

/// Joins the parts of a row's codes to 16 bits, in an order if there is one.
///
/// # Safety
/// AVX2 must be available.
#[target_feature(enable = "avx2")]
unsafe fn join_in_order(order: Option<&Order>, codes: &[[i8; ROW_BYTES]], words: &mut [[i16; GROUP]]) {
    for (codes, words) in codes.iter().zip(words) {
        let mut codes = *codes;
        if let Some(order) = order {
            for codes in codes.as_chunks_mut::<16>().0 {
                // SAFETY: both have sixteen bytes.
                unsafe {
                    let order = _mm_loadu_si128(order.as_ptr().cast());
                    let ordered = _mm_shuffle_epi8(_mm_loadu_si128(codes.as_ptr().cast()), order);
                    _mm_storeu_si128(codes.as_mut_ptr().cast(), ordered);
                }
            }
        }
        join(&codes, words);
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
                tile!(bytes, Integers::<$codes, InBytes<Bytes<$pause, true>>>::new(panel, layout))
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
                tile!(bytes, Integers::<$codes, InBytes<Vnni<true>>>::new(panel, layout))
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
