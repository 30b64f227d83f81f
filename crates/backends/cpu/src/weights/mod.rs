//! Weights as the kernels want them.
//!
//! A weight is cut into **panels** of sixteen output rows. What a kernel reads of a panel lies in the order in which it is
//! read: one register holds four consecutive inputs of all sixteen rows (integers), or two (bf16), or one (f16, f32). The
//! same bytes feed the vector products and, row for row, the tiles of AMX.

mod blocks;
mod layout;
mod load;

use octavo_ops::StorageType;

use blocks::{Group, GroupScale};
pub(crate) use layout::{Codes, HALVES_OFFSET, Kind, Layout, STEPS, Scales};
pub(crate) use load::{load, load_vector};

use crate::memory::Lines;

/// Output rows of a panel: the f32 lanes of a register of AVX-512.
pub(crate) const PANEL: usize = 16;

/// A loaded weight.
pub(crate) struct Matrix {
    /// In row order; the parts of a fused weight need not be stored alike.
    pub(crate) parts: Vec<Part>,
}

/// Consecutive rows that are stored alike.
pub(crate) struct Part {
    /// The first, counted in the matrix.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) layout: Layout,
    /// Panel after panel; the last one's missing rows are zeros.
    data: Lines<u8>,
}

impl Matrix {
    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.data.len() as u64).sum()
    }

    /// The part that holds a row.
    pub(crate) fn part_of(&self, row: usize) -> &Part {
        let after = self.parts.partition_point(|part| part.first <= row);
        &self.parts[after - 1]
    }
}

impl Part {
    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// One panel's bytes.
    pub(crate) fn panel(&self, index: usize) -> &[u8] {
        &self.data[index * self.layout.bytes..][..self.layout.bytes]
    }

    /// Rows of a panel that exist: all, but for the last.
    pub(crate) fn rows_of(&self, panel: usize) -> usize {
        (self.rows - panel * PANEL).min(PANEL)
    }
}

/// How a storage type is kept here: its own, or the nearest of those that there are kernels for.
pub(crate) fn kept_as(storage: StorageType) -> StorageType {
    match storage {
        // Sixteen weights have a minimum of their own: 8 bits a weight hold all that it tells apart.
        StorageType::Q2K => StorageType::Q8_0,
        // The same scales and fewer bits: nothing is lost.
        StorageType::Q3K => StorageType::Q6K,
        other => other,
    }
}
