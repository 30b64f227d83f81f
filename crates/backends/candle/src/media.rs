//! The media cache, and the ops of encoders that read the batch.

use candle_core::{Device, Result, Tensor};
use octavo_ops::{BackendError, EncodeBatch, InjectMode, InjectRows, InjectedRow};

use crate::failed;
use crate::kv::zeroed;

/// Rows of encoder outputs.
#[derive(Default)]
pub(crate) struct MediaCache {
    columns: usize,
    values: Vec<f32>,
}

impl MediaCache {
    /// Allocates zeroed rows.
    pub(crate) fn new(rows: usize, columns: usize) -> std::result::Result<Self, BackendError> {
        let elements = rows.saturating_mul(columns);
        Ok(Self { columns, values: zeroed(elements, "the media cache")? })
    }

    pub(crate) fn rows(&self) -> usize {
        self.values.len().checked_div(self.columns).unwrap_or(0)
    }

    pub(crate) fn row(&self, row: u32) -> std::result::Result<&[f32], BackendError> {
        let rows = self.rows();
        if row as usize >= rows {
            return Err(failed(format!("there is no row {row} in a media cache of {rows} rows")));
        }
        Ok(&self.values[row as usize * self.columns..][..self.columns])
    }

    /// Writes rows from a column on.
    pub(crate) fn store(&mut self, values: &Tensor, column: usize, rows: &[u32]) -> Result<()> {
        let (_, cols) = values.dims2()?;
        let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
        for (values, &row) in values.chunks_exact(cols).zip(rows) {
            self.values[row as usize * self.columns + column..][..cols].copy_from_slice(values);
        }
        Ok(())
    }

    /// Returns the rows of `x` with those of the cache in place or added.
    pub(crate) fn inject(&self, x: &Tensor, op: &InjectRows, rows: &[InjectedRow]) -> Result<Tensor> {
        let shape = x.dims2()?;
        let mut values: Vec<f32> = x.flatten_all()?.to_vec1()?;
        for injected in rows {
            let row = &mut values[injected.row as usize * shape.1..][..shape.1];
            let kept = &self.values[injected.media as usize * self.columns + op.column..][..shape.1];
            match op.mode {
                InjectMode::Replace => row.copy_from_slice(kept),
                InjectMode::Add => row.iter_mut().zip(kept).for_each(|(x, kept)| *x += kept),
            }
        }
        Tensor::from_vec(values, shape, &Device::Cpu)
    }
}

/// Returns the normalised patches `[T, cols]`.
pub(crate) fn patches(batch: &EncodeBatch, cols: usize) -> Result<Tensor> {
    let each = cols / batch.channels.len();
    let value = |(at, &byte): (usize, &u8)| {
        let channel = batch.channels[at % cols / each];
        (f32::from(byte) - channel.shift) / channel.divisor
    };
    let values: Vec<f32> = batch.patches.iter().enumerate().map(value).collect();
    Tensor::from_vec(values, (batch.rows.tokens(), cols), &Device::Cpu)
}

/// Returns `x` plus the weighted rows of the table.
pub(crate) fn embed_taps(x: &Tensor, table: &Tensor, batch: &EncodeBatch) -> Result<Tensor> {
    let shape = x.dims2()?;
    let mut values: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let table: Vec<f32> = table.flatten_all()?.to_vec1()?;
    for (row, taps) in values.chunks_exact_mut(shape.1).zip(&batch.taps) {
        for tap in taps {
            let weights = &table[tap.row as usize * shape.1..][..shape.1];
            row.iter_mut().zip(weights).for_each(|(x, weight)| *x += tap.weight * weight);
        }
    }
    Tensor::from_vec(values, shape, &Device::Cpu)
}
