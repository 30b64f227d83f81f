//! Weights in the layout of the kernels.
//!
//! A weight is divided into **panels** of sixteen output rows. The data of a panel is stored in the order in which a
//! kernel reads it: one register holds four consecutive inputs of all sixteen rows (integers), or two (bf16), or one
//! (f16, f32). The same bytes serve the vector products and, row for row, the AMX tiles.

mod arena;
mod blocks;
mod layout;
mod load;
pub(crate) mod short;

use octavo_ops::StorageType;

pub(crate) use arena::Arena;
use arena::Room;
pub(crate) use blocks::{E2M1_CODES, E2M1_OFFSET, IQ4_CODES, IQ4_OFFSET};
use blocks::{Group, GroupScale};
#[cfg(target_arch = "x86_64")]
pub(crate) use layout::SUPER;
pub(crate) use layout::{
    Codes, E4M3_OVER_F16, HALVES_OFFSET, Layout, Numbers, PanelKind, STEPS, Scales, WordOrder, nibble_at,
};
pub(crate) use load::{Target, bytes_of, load, load_exactly, load_experts, load_vector};

/// Number of output rows in a panel: the f32 lanes of an AVX-512 register.
pub(crate) const PANEL: usize = 16;

/// A loaded weight.
pub(crate) struct Matrix {
    /// Parts in row order. The parts of a fused weight may have different layouts.
    pub(crate) parts: Vec<Part>,
}

/// Consecutive rows with the same layout.
pub(crate) struct Part {
    /// Index of the first row in the matrix.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) layout: Layout,
    /// Contiguous panels. Missing rows of the last one are zeros.
    data: Room,
}

impl Matrix {
    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Returns the size in memory in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.data.len() as u64).sum()
    }

    /// Returns the part that contains a row.
    pub(crate) fn part_of(&self, row: usize) -> &Part {
        let after = self.parts.partition_point(|part| part.first <= row);
        &self.parts[after - 1]
    }
}

#[cfg(test)]
thread_local! {
    /// Addresses of the parts that the thread has read.
    pub(crate) static PARTS_READ: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Contiguous panels.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) layout: Layout,
    /// Index of the first panel.
    pub(crate) first: usize,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Panels<'a> {
    /// Returns the bytes of one panel.
    pub(crate) fn panel(&self, index: usize) -> &'a [u8] {
        &self.bytes[(index - self.first) * self.layout.bytes..][..self.layout.bytes]
    }
}

impl Part {
    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Returns the bytes of one panel.
    pub(crate) fn panel(&self, index: usize) -> &[u8] {
        self.stored().panel(index)
    }

    /// Returns all panels.
    pub(crate) fn stored(&self) -> Panels<'_> {
        #[cfg(test)]
        PARTS_READ.with_borrow_mut(|read| read.push(self.data.as_ptr() as usize));
        Panels { layout: self.layout, first: 0, bytes: &self.data }
    }

    /// Returns the number of existing rows in a panel: all, except in the last.
    pub(crate) fn rows_of(&self, panel: usize) -> usize {
        (self.rows - panel * PANEL).min(PANEL)
    }
}

/// Type in which weights of floating-point numbers are kept in memory. Quantised weights, norms, biases and routers are
/// not affected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// The type in the checkpoint.
    #[default]
    AsStored,
    /// Sixteen bits: f32 is kept as bf16, and the others as they are stored.
    Halves,
    /// f32.
    F32,
    /// f16; what is too large becomes infinite.
    F16,
    /// bf16.
    Bf16,
}

/// Returns the storage type in which weights of a storage type are kept: the same, the nearest one with kernels, or for
/// floating-point numbers the one of `dtype`.
pub(crate) fn kept_as(storage: StorageType, dtype: WeightDtype) -> StorageType {
    match storage {
        StorageType::F32 | StorageType::F16 | StorageType::BF16 => match dtype {
            WeightDtype::Halves if storage == StorageType::F32 => StorageType::BF16,
            WeightDtype::AsStored | WeightDtype::Halves => storage,
            WeightDtype::F32 => StorageType::F32,
            WeightDtype::F16 => StorageType::F16,
            WeightDtype::Bf16 => StorageType::BF16,
        },
        // Sixteen weights have a separate minimum; 8 bits per weight represent all its values.
        StorageType::Q2K => StorageType::Q8_0,
        // The target has the same scales and more bits, so nothing is lost.
        StorageType::Q3K => StorageType::Q6K,
        // They are multiplied as bf16 or as integers of 16 bits, so that another type has to be kept.
        StorageType::F8E4M3 | StorageType::Nf4 | StorageType::Fp4 => match dtype {
            WeightDtype::F32 => StorageType::F32,
            WeightDtype::F16 => StorageType::F16,
            WeightDtype::AsStored | WeightDtype::Halves | WeightDtype::Bf16 => storage,
        },
        other => other,
    }
}
