//! Kernels that work row by row: `cuda/rows.cu`. Matrices are 16-byte aligned; rows that are no multiple of 16 bytes are slower.

use super::{DevicePtr, params};

params! {
    /// `out[t] = table[ids[t]] · scale`. Grid: a CTA a token.
    EmbedParams {
        /// T `[tokens, cols]`.
        out: DevicePtr,
        /// T `[vocabulary, cols]`.
        table: DevicePtr,
        /// u32 `[tokens]`, each below the vocabulary, or [`DRAWN_TOKEN`](super::DRAWN_TOKEN) | r for `drawn[r]`.
        ids: DevicePtr,
        /// u32: the tokens that the step before drew, by row.
        drawn: DevicePtr,
        /// Rows of `out`.
        tokens: u32,
        /// Columns: the hidden size.
        cols: u32,
        /// Rows of `table`.
        vocabulary: u32,
        /// Factor on the row.
        scale: f32,
    }

    /// `residual += input` where there is a residual, then `out = norm(residual or input)`. Grid: a CTA a row.
    ///
    /// The sum is rounded to T before it is normalised, as if it had been stored and read again. Dynamic shared memory:
    /// [`NormParams::dynamic_shared`].
    NormParams {
        /// T `[rows, cols]`; may be `input`.
        out: DevicePtr,
        /// T `[rows, cols]`.
        input: DevicePtr,
        /// T `[rows, cols]`, updated in place; null: none.
        residual: DevicePtr,
        /// f32 `[cols]`.
        weight: DevicePtr,
        /// f32 `[cols]`, layer norm only; null: none.
        bias: DevicePtr,
        /// Rows.
        rows: u32,
        /// Columns.
        cols: u32,
        /// Added under the root.
        eps: f32,
        /// Added to the weight: 1 for Gemma, else 0.
        weight_offset: f32,
    }

    /// `out = act(gate) · up`. Grid: [`GluParams::grid`].
    GluParams {
        /// T `[rows, cols]`.
        out: DevicePtr,
        /// T `[rows, 2 · cols]`: gate in the first `cols` columns, up in the others.
        input: DevicePtr,
        /// Rows.
        rows: u32,
        /// Columns of `out`.
        cols: u32,
    }

    /// `out[i] = input[row_index[i]]`, bit for bit. Grid: a CTA a row of `out`.
    GatherRowsParams {
        /// T `[count, cols]`.
        out: DevicePtr,
        /// T `[., cols]`.
        input: DevicePtr,
        /// u32 `[count]`.
        row_index: DevicePtr,
        /// Rows of `out`.
        count: u32,
        /// Columns.
        cols: u32,
    }

    /// Copies whole blocks of one KV group; no block that is written is read. Grid:
    /// [`CopyBlocksParams::grid`].
    CopyBlocksParams {
        /// The group's cache, from block 0.
        cache: DevicePtr,
        /// u32 `[count, 2]`: from, to.
        pairs: DevicePtr,
        /// Bytes of a block over all its layers, a multiple of 16.
        block_bytes: u64,
        /// Pairs.
        count: u32,
        /// 0.
        reserved: u32,
    }
}

impl EmbedParams {
    /// CTAs of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, 1, 1]
    }
}

/// The most columns that a norm takes: its row lies in shared memory, of which a V100 has least.
pub const MAX_NORM_COLS: usize = 96 * 1024 / size_of::<f32>() - 64;

impl NormParams {
    /// Bytes of dynamic shared memory of a launch on rows of `cols` columns, at most [`MAX_NORM_COLS`].
    pub fn dynamic_shared(cols: usize) -> usize {
        cols * size_of::<f32>()
    }

    /// CTAs of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl GluParams {
    /// CTAs of the launch of `threads` threads each.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        [self.rows, self.cols.div_ceil(8 * threads), 1]
    }
}

impl GatherRowsParams {
    /// CTAs of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.count, 1, 1]
    }
}

impl CopyBlocksParams {
    /// CTAs of the launch of `threads` threads each.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        // The bound keeps it below 64.
        let columns = self.block_bytes.div_ceil(16 * u64::from(threads)).min(64) as u32;
        [self.count, columns, 1]
    }
}
