//! Parameters of the kernels for single rows: `cuda/rows.cu`. Matrices are 16-byte aligned; rows that are not a
//! multiple of 16 bytes are slower.

use super::{DevicePtr, RoundedRows, params};

params! {
    /// Computes `out[t] = table[ids[t]] · scale`, or adds that to `out[t]`. Grid: one CTA per token.
    EmbedParams {
        /// T `[tokens, cols]`.
        out: DevicePtr,
        /// T `[vocabulary, cols]`.
        table: DevicePtr,
        /// u32 `[tokens]`, each below the vocabulary size, or [`DRAWN_TOKEN`](super::DRAWN_TOKEN) | r for `drawn[r]`.
        ids: DevicePtr,
        /// u32: the tokens sampled by the preceding step, by row.
        drawn: DevicePtr,
        /// Number of rows of `out`.
        tokens: u32,
        /// Number of columns: the hidden size.
        cols: u32,
        /// Number of rows of `table`.
        vocabulary: u32,
        /// Factor of the row.
        scale: f32,
    }

    /// Computes `residual += input` if there is a residual, then `out = norm(residual or input)`; with
    /// `residual_after`, `out = residual + norm(input)`. Grid: one CTA per row.
    ///
    /// A sum before the norm is rounded to T, as if it had been stored and read again. Dynamic shared memory:
    /// [`NormParams::dynamic_shared`].
    NormParams {
        /// T `[rows, cols]`; may be `input`, and with `residual_after` also `residual`.
        out: DevicePtr,
        /// T `[rows, cols]`.
        input: DevicePtr,
        /// T `[rows, cols]`, updated in place before the norm, or added after it; null means none.
        residual: DevicePtr,
        /// f32 `[cols]`.
        weight: DevicePtr,
        /// f32 `[cols]`, layer norm only; null means none.
        bias: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
        /// Value added under the root.
        eps: f32,
        /// Value added to the weight: 1 for Gemma, else 0.
        weight_offset: f32,
        /// 1 adds the residual to the normalised row instead of adding the row to the residual.
        residual_after: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Does the same as [`NormParams`], whose number of columns is a multiple of 32, and rounds the output. The grid and the shared
    /// memory are the same.
    NormCodesParams {
        /// The output, rounded.
        rounded: RoundedRows,
        /// The norm.
        norm: NormParams,
    }

    /// Computes `out = act(gate) · up`; the clamped SwiGLU is `(u + 1) · g · sigmoid(alpha · g)`, with g the gate up to
    /// the limit and u the up within ± the limit. Grid: [`GluParams::grid`].
    GluParams {
        /// T `[rows, cols]`.
        out: DevicePtr,
        /// T `[rows, 2 · cols]`: gate in the first `cols` columns, up in the others.
        input: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns of `out`.
        cols: u32,
        /// Factor of the gate in the sigmoid; clamped SwiGLU only.
        alpha: f32,
        /// Limit of gate and up; clamped SwiGLU only.
        limit: f32,
    }

    /// Does the same as [`GluParams`], whose number of columns is a multiple of 32, and rounds the output. The grid is the same.
    GluCodesParams {
        /// The output, rounded.
        rounded: RoundedRows,
        /// The activation.
        glu: GluParams,
    }

    /// Computes `out = act(input)`. Grid: [`ActParams::grid`].
    ActParams {
        /// T `[rows, cols]`; may be `input`.
        out: DevicePtr,
        /// T `[rows, cols]`.
        input: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
    }

    /// Copies `out[i] = input[row_index[i]]` bit for bit. Grid: one CTA per row of `out`.
    GatherRowsParams {
        /// T `[count, cols]`.
        out: DevicePtr,
        /// T `[., cols]`.
        input: DevicePtr,
        /// u32 `[count]`.
        row_index: DevicePtr,
        /// Number of rows of `out`.
        count: u32,
        /// Number of columns.
        cols: u32,
    }

    /// Copies `out[., j] = input[., column_index[j]]` bit for bit. Grid: [`GatherColumnsParams::grid`].
    GatherColumnsParams {
        /// T `[rows, cols]`.
        out: DevicePtr,
        /// T `[rows, cols]`, other memory than `out`.
        input: DevicePtr,
        /// f32 `[cols]`: whole numbers below `cols`.
        column_index: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
    }

    /// Reduces rows to one: `out[e]` is the first of the rows `row_index[e] + 1 − lens[e] ..= row_index[e]`, or their
    /// mean, summed in f32 in their order. Grid: [`PoolRowsParams::grid`].
    PoolRowsParams {
        /// T `[count, cols]`.
        out: DevicePtr,
        /// T `[., cols]`.
        input: DevicePtr,
        /// u32 `[count]`: the last row of each reduction.
        row_index: DevicePtr,
        /// u32 `[count]`: the number of its rows, from 1 to `row_index[e] + 1`.
        lens: DevicePtr,
        /// Number of rows of `out`.
        count: u32,
        /// Number of columns.
        cols: u32,
    }

    /// Writes runs of adjacent entries of the block tables. Grid: [`TableRunsParams::grid`].
    TableRunsParams {
        /// u32: the block tables of all KV groups.
        tables: DevicePtr,
        /// u32 `[count, 3]`: first entry of a run, first one of its values, and their number.
        runs: DevicePtr,
        /// u32: new entries, run by run.
        values: DevicePtr,
        /// Number of runs.
        count: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Copies whole blocks of one KV group. No block that is written may be read. Grid: [`CopyBlocksParams::grid`].
    CopyBlocksParams {
        /// Cache of the group, from block 0.
        cache: DevicePtr,
        /// u32 `[count, 2]`: from, to.
        pairs: DevicePtr,
        /// Size of a block over all its layers in bytes, a multiple of 16.
        block_bytes: u64,
        /// Number of pairs.
        count: u32,
        /// Padding, 0.
        reserved: u32,
    }
}

impl EmbedParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, 1, 1]
    }
}

/// Maximum number of columns of a norm: its row is in shared memory, of which a V100 has the least.
pub const MAX_NORM_COLS: usize = 96 * 1024 / size_of::<f32>() - 64;

impl NormParams {
    /// Returns the dynamic shared memory in bytes of a launch on rows of `cols` columns, at most [`MAX_NORM_COLS`].
    pub fn dynamic_shared(cols: usize) -> usize {
        cols * size_of::<f32>()
    }

    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

/// Returns the grid of `rows` rows of `cols` columns that are divided among CTAs of `threads` threads.
fn row_parts(rows: u32, cols: u32, threads: u32) -> [u32; 3] {
    [rows, cols.div_ceil(8 * threads), 1]
}

impl GluParams {
    /// Returns the grid of the launch with `threads` threads per CTA.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        row_parts(self.rows, self.cols, threads)
    }
}

impl GatherColumnsParams {
    /// Returns the grid of the launch with `threads` threads per CTA.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        row_parts(self.rows, self.cols, threads)
    }
}

impl ActParams {
    /// Returns the grid of the launch with `threads` threads per CTA.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        row_parts(self.rows, self.cols, threads)
    }
}

impl GatherRowsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.count, 1, 1]
    }
}

impl PoolRowsParams {
    /// Returns the grid of the launch with `threads` threads per CTA.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        row_parts(self.count, self.cols, threads)
    }
}

impl TableRunsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.count, 1, 1]
    }
}

impl CopyBlocksParams {
    /// Returns the grid of the launch with `threads` threads per CTA.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        // The limit keeps it at 64 or below.
        let columns = self.block_bytes.div_ceil(16 * u64::from(threads)).min(64) as u32;
        [self.count, columns, 1]
    }
}
