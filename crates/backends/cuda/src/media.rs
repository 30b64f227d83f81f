//! The media cache: rows of encoder outputs, in the element type.

use std::sync::Arc;

use octavo_ops::BackendError;

use crate::arena::{Arena, Plan};
use crate::driver::Gpu;
use crate::failed;

/// Zero or more rows.
#[derive(Default)]
pub(crate) struct MediaCache {
    memory: Option<Arena>,
    count: usize,
    columns: u32,
    row_bytes: u64,
}

/// The rows for kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MediaRows {
    /// Address of row 0.
    pub(crate) address: u64,
    /// Number of columns.
    pub(crate) columns: u32,
}

impl MediaCache {
    /// Allocates zeroed rows of `columns` columns in `row_bytes` bytes.
    pub(crate) fn new(gpu: &Arc<Gpu>, count: usize, columns: usize, row_bytes: u64) -> Result<Self, BackendError> {
        let count = if columns == 0 { 0 } else { count };
        let mut plan = Plan::default();
        let region = plan.take(row_bytes.saturating_mul(count as u64));
        let memory = Arena::new(gpu, plan.bytes(), "the media cache")?;
        gpu.zero(memory.at(region), region.bytes)?;
        gpu.synchronize()?;
        Ok(Self { memory: Some(memory), count, columns: columns as u32, row_bytes })
    }

    pub(crate) fn rows(&self) -> MediaRows {
        MediaRows { address: self.memory.as_ref().map_or(0, Arena::start), columns: self.columns }
    }

    /// Returns the number of rows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns rows one after the other; a word holds two elements of 16 bits.
    pub(crate) fn read(&self, gpu: &Gpu, rows: &[u32]) -> Result<Vec<u32>, BackendError> {
        if let Some(row) = rows.iter().find(|row| **row as usize >= self.count) {
            return Err(failed(format!("there is no row {row} in a media cache of {} rows", self.count)));
        }
        // The number of columns is a multiple of 8, so words are whole.
        let words = self.row_bytes as usize / size_of::<u32>();
        let mut found = vec![0; rows.len() * words];
        for (&row, found) in rows.iter().zip(found.chunks_exact_mut(words.max(1))) {
            gpu.download(found, self.rows().address + u64::from(row) * self.row_bytes)?;
        }
        Ok(found)
    }
}
