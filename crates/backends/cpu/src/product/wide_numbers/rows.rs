//! A tile of rows in 16 bits.

use std::arch::x86_64::*;

use super::{BLOCK_ROWS, FEW_ROWS, TILE_ROWS, block_rows};
use crate::isa::Isa;
use crate::memory::Lines;
use crate::product::walk::Quant;
use crate::rows::GROUP;
use crate::weights::Layout;

/// A tile of rows in 16 bits. A few rows are where they were quantised. More are in blocks of [`block_rows`] rows each: a block has its
/// rows' words group by group, so that all of a group are beside each other. What it has for rows that do not exist is left over
/// from others.
pub(in super::super) struct TileRows<'a> {
    pub(super) layout: &'a Layout,
    pub(super) count: usize,
    words: &'a [i16],
    scales: &'a [f32],
}

/// Memory of the blocks of a tile.
#[derive(Default)]
pub(in super::super) struct Blocks {
    words: Lines<i16>,
    scales: Lines<f32>,
}

impl<'a> TileRows<'a> {
    /// Prepares `count` rows from `first` on, at most [`TILE_ROWS`], for panels of a layout.
    ///
    /// # Safety
    /// AVX-512 must be available.
    #[target_feature(enable = "avx512f")]
    pub(in super::super) unsafe fn new(
        layout: &'a Layout,
        input: &Quant<'a>,
        (first, count): (usize, usize),
        blocks: &'a mut Blocks,
    ) -> Self {
        assert!(count <= TILE_ROWS && input.cols == layout.cols);
        let Some(order) = layout.kind.words(Isa::Avx512, input.coarse) else {
            unreachable!("only panels that are multiplied in 16 bits have such rows")
        };
        let (words, scales) = if count <= FEW_ROWS {
            input.words((first, block_rows(count)), order)
        } else {
            blocks.fill(input.words((first, count), order), (count, layout.groups()))
        };
        Self { layout, count, words, scales }
    }

    /// Returns a group of the first of a few rows.
    pub(super) fn few(&self, group: usize) -> Block<true> {
        self.at(group)
    }

    /// Returns a group of the block from a row on, which has so many rows.
    pub(super) fn block(&self, first: usize, rows: usize, group: usize) -> Block<false> {
        self.at(first * self.layout.groups() + group * rows)
    }

    fn at<const FEW: bool>(&self, index: usize) -> Block<FEW> {
        let (words, scales) =
            (self.words.as_ptr().wrapping_add(index * GROUP), self.scales.as_ptr().wrapping_add(index));
        Block { words, scales, groups: self.layout.groups() }
    }
}

impl Blocks {
    /// Copies rows of so many groups in 16 bits, and their scales.
    #[target_feature(enable = "avx512f")]
    fn fill(&mut self, (from, from_scales): (&[i16], &[f32]), (count, groups): (usize, usize)) -> (&[i16], &[f32]) {
        self.words.reserve_zeroed(TILE_ROWS * groups * GROUP);
        self.scales.reserve_zeroed(TILE_ROWS * groups);
        let words = self.words.as_chunks_mut::<GROUP>().0;
        for block in (0..count).step_by(BLOCK_ROWS) {
            let rows = block_rows(count - block);
            for row in 0..rows.min(count - block) {
                let from = from.as_chunks().0[(block + row) * groups..][..groups].iter();
                let words = words[block * groups..].iter_mut().skip(row).step_by(rows);
                from.zip(words).for_each(|(from, words)| *words = *from);
                let scales = self.scales[block * groups..].iter_mut().skip(row).step_by(rows);
                from_scales[(block + row) * groups..][..groups]
                    .iter()
                    .zip(scales)
                    .for_each(|(from, scale)| *scale = *from);
            }
        }
        (&self.words, &self.scales)
    }
}

/// A group of a block of rows: of a few rows, or of rows whose groups are beside each other.
#[derive(Clone, Copy)]
pub(super) struct Block<const FEW: bool> {
    words: *const i16,
    scales: *const f32,
    groups: usize,
}

impl<const FEW: bool> Block<FEW> {
    /// Returns the number of groups from a row to the next.
    #[inline(always)]
    fn stride(self) -> usize {
        if FEW { self.groups } else { 1 }
    }

    /// Broadcasts a pair of inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn pair(self, row: usize, pair: usize) -> __m512i {
        let words = self.words.wrapping_add(row * self.stride() * GROUP).cast::<i32>();
        // SAFETY: the caller guarantees that the row has it.
        unsafe { _mm512_set1_epi32(words.add(pair).read_unaligned()) }
    }

    /// Broadcasts the scale of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn scale(self, row: usize) -> __m512 {
        // SAFETY: the caller guarantees that there is the row.
        _mm512_set1_ps(unsafe { self.scales.add(row * self.stride()).read() })
    }
}
