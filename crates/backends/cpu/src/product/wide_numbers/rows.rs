//! A tile of rows in 16 bits.

use std::arch::x86_64::*;

use super::{BLOCK_ROWS, TILE_ROWS, block_rows};
use crate::activation::join;
use crate::memory::Lines;
use crate::product::walk::Quant;
use crate::rows::GROUP;

/// A tile of rows in 16 bits, in blocks of [`block_rows`] rows each. A block has its rows' words group by group, so that all of a
/// group are beside each other. What it has for rows that do not exist is left over from others.
#[derive(Default)]
pub(in super::super) struct TileRows {
    groups: usize,
    count: usize,
    words: Lines<i16>,
    scales: Lines<f32>,
}

impl TileRows {
    /// Reads `count` rows from `first` on, at most [`TILE_ROWS`].
    ///
    /// # Safety
    /// AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(in super::super) unsafe fn read(&mut self, input: &Quant<'_>, (first, count): (usize, usize)) {
        assert!(count <= TILE_ROWS);
        let (cols, groups) = (input.cols, input.cols / GROUP);
        (self.groups, self.count) = (groups, count);
        self.words.reserve_zeroed(TILE_ROWS * cols);
        self.scales.reserve_zeroed(TILE_ROWS * groups);
        for block in (0..count).step_by(BLOCK_ROWS) {
            let rows = block_rows(count - block);
            for row in 0..rows.min(count - block) {
                let from = input.row(first + block + row);
                let words = self.words[block * cols..].as_chunks_mut().0.iter_mut().skip(row).step_by(rows);
                from.codes.iter().zip(words).for_each(|(codes, words)| join(codes, words));
                let scales = self.scales[block * groups..].iter_mut().skip(row).step_by(rows);
                from.scales.iter().zip(scales).for_each(|(from, scale)| *scale = *from);
            }
        }
    }

    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns a group of the block from a row on, which has so many rows.
    pub(super) fn block(&self, first: usize, rows: usize, group: usize) -> Block {
        let at = first * self.groups + group * rows;
        Block { words: self.words.as_ptr().wrapping_add(at * GROUP), scales: self.scales.as_ptr().wrapping_add(at) }
    }
}

/// A group of a block of rows.
#[derive(Clone, Copy)]
pub(super) struct Block {
    words: *const i16,
    scales: *const f32,
}

impl Block {
    /// Broadcasts a pair of inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn pair(self, row: usize, pair: usize) -> __m512i {
        // SAFETY: the caller guarantees that the row has it.
        unsafe { _mm512_set1_epi32(self.words.add(row * GROUP).cast::<i32>().add(pair).read_unaligned()) }
    }

    /// Broadcasts the scale of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn scale(self, row: usize) -> __m512 {
        // SAFETY: the caller guarantees that there is the row.
        _mm512_set1_ps(unsafe { self.scales.add(row).read() })
    }
}
