//! Parameters of the kernels for images: `cuda/images.cu`.

use super::{DevicePtr, params};

params! {
    /// Computes `out[t, c] = (bytes[t, c] − shift) / divisor` with the numbers of the column's channel. Grid: one CTA per
    /// row.
    PatchesParams {
        /// T `[rows, cols]`.
        out: DevicePtr,
        /// u8 `[rows, cols]`, the channels of a patch one after the other.
        bytes: DevicePtr,
        /// f32 `[cols / channel_cols, 2]`: shift and divisor of each channel.
        channels: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
        /// Number of columns of a channel.
        channel_cols: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Computes `out[t] += Σ tap_weights[t, i] · table[tap_rows[t, i]]`, rounded once. Grid: one CTA per row.
    EmbedTapsParams {
        /// T `[rows, cols]`, updated in place.
        out: DevicePtr,
        /// T `[positions, cols]`.
        table: DevicePtr,
        /// u32 `[rows, 4]`, each below the number of positions.
        tap_rows: DevicePtr,
        /// f32 `[rows, 4]`.
        tap_weights: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
    }

    /// Computes `out[r, c] = Σ input[r · merge + i, c] / merge` over i, rounded once. Grid: one CTA per row of the output.
    MeanRowsParams {
        /// T `[rows, cols]`.
        out: DevicePtr,
        /// T `[rows · merge, cols]`.
        input: DevicePtr,
        /// Number of rows of the output.
        rows: u32,
        /// Number of columns.
        cols: u32,
        /// Number of consecutive rows whose mean is a row of the output.
        merge: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Moves rows to or from columns of the media cache: row `row_index[i]` belongs to row `media_index[i]` of the cache.
    /// Grid: one CTA per row that is moved.
    MediaRowsParams {
        /// T `[., cols]`.
        rows: DevicePtr,
        /// T `[., media_cols]`: the media cache.
        media: DevicePtr,
        /// u32 `[count]`, each row once; null means the rows in order.
        row_index: DevicePtr,
        /// u32 `[count]`; each row once if it is written.
        media_index: DevicePtr,
        /// Number of rows that are moved.
        count: u32,
        /// Number of columns that are moved.
        cols: u32,
        /// Number of columns of the media cache.
        media_cols: u32,
        /// First column of the media cache.
        column: u32,
    }
}

impl PatchesParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl EmbedTapsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl MeanRowsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl MediaRowsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.count, 1, 1]
    }
}
