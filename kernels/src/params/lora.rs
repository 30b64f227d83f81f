//! Parameters of the kernels for adapters: `cuda/lora.cu`. K = inputs, N = outputs; T is the element type of activations.

use super::{DevicePtr, params};

params! {
    /// The matrices of an adapter for a part of a weight.
    LoraPart {
        /// Offset in bytes of T `[rank, K]`; of a table of embeddings T `[K, rank]`.
        a: u64,
        /// Offset in bytes of T `[rank, columns]`, the transposed B, rows padded to a multiple of [`LORA_OUTPUTS`].
        b: u64,
        /// Rank; 0 if the adapter has no matrices for the part.
        rank: u32,
        /// Factor of `A x`.
        scaling: f32,
        /// First column of the output.
        first: u32,
        /// Number of columns of the output.
        columns: u32,
    }

    /// Computes `out[r] += scale · scaling · B (A input[r])` for the rows with adapters, in two launches: `lora_shrink` with
    /// [`LoraParams::shrink_grid`], unless the inputs are rows of a table, and `lora_expand` with
    /// [`LoraParams::expand_grid`].
    LoraParams {
        /// O `[., N]`, rows `out_stride` apart; O is T, or f32 for the logits.
        out: DevicePtr,
        /// T `[., K]`.
        input: DevicePtr,
        /// f32 `[most tiles, splits, parts · rank, LORA_ROWS]`: sums of `A x`.
        partial: DevicePtr,
        /// The matrices of all adapters.
        matrices: DevicePtr,
        /// [`LoraPart`] `[slots, part_stride]`, from the site's first part on.
        parts_of: DevicePtr,
        /// u32: the number of tiles, then for each its slot, its expert (0 if there are none), its first place in `rows` and its
        /// number of rows, at most [`LORA_ROWS`].
        tiles: DevicePtr,
        /// u32: rows with adapters, tile by tile.
        rows: DevicePtr,
        /// u32: ids of tokens by row, for a table of embeddings; as in [`EmbedParams`](super::EmbedParams).
        ids: DevicePtr,
        /// u32: the tokens sampled by the preceding step, by row.
        drawn: DevicePtr,
        /// K, a multiple of 8; the number of rows of a table.
        k: u32,
        /// Number of elements from one row of `out` to the next.
        out_stride: u32,
        /// Number of parts of the site's weight, or of each of its experts, whose parts follow each other.
        parts: u32,
        /// Number of parts of all sites.
        part_stride: u32,
        /// Largest rank of an adapter in a slot, at most [`LORA_MAX_RANK`].
        rank: u32,
        /// Number of partial sums of a column of A: [`lora_splits`] of K, or 1 for their sum. The bits are the same.
        splits: u32,
        /// Factor of the product.
        scale: f32,
        /// Number of rows that read one row of the input: 1, or the experts of a token.
        share: u32,
    }

    /// Divides the pairs of tokens with adapters and their experts into tiles of one adapter and one expert. Grid: one CTA.
    LoraPairsParams {
        /// u32 `[tokens, chosen]`.
        picked: DevicePtr,
        /// u32: tiles of the tokens that have adapters, as in [`LoraParams`].
        adapted_tiles: DevicePtr,
        /// u32: these tokens, tile by tile.
        adapted_rows: DevicePtr,
        /// u32 `[experts, slots]`, overwritten.
        counts: DevicePtr,
        /// u32: tiles of the pairs, as in [`LoraParams`].
        tiles: DevicePtr,
        /// u32: the pairs, tile by tile.
        rows: DevicePtr,
        /// Number of experts of a token.
        chosen: u32,
        /// Number of experts.
        experts: u32,
        /// Number of slots.
        slots: u32,
        /// Padding, 0.
        reserved: u32,
    }
}

/// Number of words that describe a tile.
pub const LORA_TILE_WORDS: u32 = 4;

/// Number of threads of the CTA that divides pairs.
pub const LORA_PAIRS_THREADS: u32 = 256;

/// Number of rows of a tile.
pub const LORA_ROWS: u32 = 8;

/// Number of columns of A that a warp multiplies.
pub const LORA_COLUMNS: u32 = 4;

/// Number of adjacent outputs of a thread.
pub const LORA_OUTPUTS: u32 = 4;

/// Number of inputs of a partial sum.
pub const LORA_PIECE: u32 = 512;

/// Largest rank.
pub const LORA_MAX_RANK: u32 = 256;

/// Returns the number of partial sums of `k` inputs.
pub const fn lora_splits(k: u32) -> u32 {
    k.div_ceil(LORA_PIECE)
}

impl LoraParams {
    /// Returns the grid of `lora_shrink` for at most so many tiles, with `threads` threads per CTA.
    pub const fn shrink_grid(&self, tiles: u32, threads: u32) -> [u32; 3] {
        [tiles, self.parts * self.rank.div_ceil(LORA_COLUMNS * (threads / 32)), self.splits]
    }

    /// Returns the grid of `lora_expand` for at most so many tiles, with `threads` threads per CTA. `columns` are the
    /// numbers of columns of the parts.
    pub fn expand_grid(&self, tiles: u32, threads: u32, columns: impl IntoIterator<Item = u32>) -> [u32; 3] {
        [tiles, columns.into_iter().map(|columns| columns.div_ceil(LORA_OUTPUTS * threads)).sum(), 1]
    }
}
