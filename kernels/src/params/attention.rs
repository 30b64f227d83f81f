//! Parameters of the attention kernels: `cuda/qkv_post.cu`, `cuda/latent_post.cu`, `cuda/attention_*.cu`.
//!
//! The cache of a KV group is `[block][layer][k or v][KV_BLOCK][kv_heads][head_size]` of C, which is T or e4m3. Kernels get the addresses
//! of their layer's keys and values in block 0, and the number of elements to those of the next block. A layer of latent
//! attention has one row for keys and values: `[KV_BLOCK][head_size]`.

use super::{DevicePtr, RoundedRows, params};
use crate::plan::PrefillTile;

params! {
    /// Splits q, k, v; normalises and rotates q and k; writes q to its buffer, k and v to the cache. Each warp
    /// processes a head of a token. Grid: [`QkvPostParams::grid`].
    QkvPostParams {
        /// T `[tokens, q_heads · head_size]`.
        q: DevicePtr,
        /// C: the layer's keys in block 0, `[KV_BLOCK, kv_heads, head_size]`.
        k_cache: DevicePtr,
        /// C: the layer's values in block 0.
        v_cache: DevicePtr,
        /// T `[tokens, (q_heads + 2 · kv_heads) · head_size]`: q, then k, then v.
        qkv: DevicePtr,
        /// f32 `[head_size]`, or `[q_heads · head_size]` with `norm_whole_row`; null means no norm of q.
        q_weight: DevicePtr,
        /// f32 `[head_size]`, or `[kv_heads · head_size]` with `norm_whole_row`; null means no norm of k.
        k_weight: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, including the magnitude; null means no rotary embedding.
        cosine: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, including the magnitude.
        sine: DevicePtr,
        /// u32 `[streams, position_stride]`: rows of `cosine` and `sine`.
        positions: DevicePtr,
        /// u32 `[rotary_dim / 2]`: stream of positions that rotates a pair; null means the first for all.
        streams: DevicePtr,
        /// u32 `[tokens]`: block · KV_BLOCK + offset, or [`NO_SLOT`](super::NO_SLOT).
        slots: DevicePtr,
        /// Number of elements between the same layer of two blocks.
        block_stride: u64,
        /// Number of rows of `qkv`.
        tokens: u32,
        /// Number of query heads.
        q_heads: u32,
        /// Number of KV heads.
        kv_heads: u32,
        /// Number of elements of a head, at most [`MAX_HEAD_SIZE`].
        head_size: u32,
        /// Number of leading elements of a head that are rotated; even.
        rotary_dim: u32,
        /// 0 means pairs (i, i + rotary_dim / 2), NeoX. 1 means pairs (2i, 2i + 1), GPT-J.
        rope_interleaved: u32,
        /// 0 normalises each head separately, 1 the whole row of q and of k.
        norm_whole_row: u32,
        /// Number of elements from one stream of positions to the next.
        position_stride: u32,
        /// Value added under the root.
        eps: f32,
        /// Value added to the weights: 1 for Gemma, else 0.
        weight_offset: f32,
        /// Divisor of the keys of a cache in e4m3.
        k_scale: f32,
        /// Divisor of the values of a cache in e4m3.
        v_scale: f32,
    }

    /// Normalises the latent, rotates the queries and the key of all heads, writes the row to the cache. Grid:
    /// [`LatentPostParams::grid`].
    LatentPostParams {
        /// T `[tokens, q_heads · (rank + rotary_dim)]`, of which the last `rotary_dim` of a head are written.
        out: DevicePtr,
        /// C: the layer's rows in block 0, `[KV_BLOCK, rank + rotary_dim]`.
        cache: DevicePtr,
        /// T `[tokens, q_heads · q_size]`, of which the last `rotary_dim` of a head are read.
        q: DevicePtr,
        /// T `[tokens, rank + rotary_dim]`.
        kv: DevicePtr,
        /// f32 `[rank]`.
        weight: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, including the magnitude.
        cosine: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, including the magnitude.
        sine: DevicePtr,
        /// u32 `[streams, position_stride]`: rows of `cosine` and `sine`.
        positions: DevicePtr,
        /// u32 `[rotary_dim / 2]`: stream of positions that rotates a pair; null means the first for all.
        streams: DevicePtr,
        /// u32 `[tokens]`: block · KV_BLOCK + offset, or [`NO_SLOT`](super::NO_SLOT).
        slots: DevicePtr,
        /// Number of elements between the same layer of two blocks.
        block_stride: u64,
        /// Number of rows of `q`.
        tokens: u32,
        /// Number of query heads.
        q_heads: u32,
        /// Number of elements of a head of `q`.
        q_size: u32,
        /// Number of elements of the latent.
        rank: u32,
        /// Number of elements that are rotated; even, at most [`MAX_LATENT_ROTATED`]. With `rank`, at most
        /// [`MAX_LATENT_SIZE`].
        rotary_dim: u32,
        /// 0 means pairs (i, i + rotary_dim / 2), NeoX. 1 means pairs (2i, 2i + 1), GPT-J.
        rope_interleaved: u32,
        /// Number of elements from one stream of positions to the next.
        position_stride: u32,
        /// Value added under the root.
        eps: f32,
        /// Divisor of the rows of a cache in e4m3.
        scale: f32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Attention over a paged cache: with `end = p + 1 + lookahead`, the query at position p sees the keys `end − window ..
    /// end` that exist. Attention is causal if the lookahead is 0. The last query of sequence s is at position `seq_lens[s] − 1`. Decode ([`PagedDecodeParams`]) processes the sequences of
    /// one query and prefill those of more, according to the plan; the plain kernel processes all.
    AttentionParams {
        /// T `[tokens, q_heads · value_size]`.
        out: DevicePtr,
        /// T `[tokens, q_heads · head_size]`.
        q: DevicePtr,
        /// C: the layer's keys in block 0, `[KV_BLOCK, kv_heads, head_size]`.
        k_cache: DevicePtr,
        /// C: the layer's values in block 0; `k_cache` if they are the first elements of the keys.
        v_cache: DevicePtr,
        /// u32 `[seats, table_stride]`.
        block_table: DevicePtr,
        /// u32 `[sequences]`: row of each sequence in `block_table`; null means its own index.
        seats: DevicePtr,
        /// u32 `[sequences + 1]`.
        query_start: DevicePtr,
        /// u32 `[sequences]`: number of tokens whose keys exist, including those of this step; with 0, the output is 0.
        seq_lens: DevicePtr,
        /// u32 `[tokens]`: place after the last key that a query sees, at most the sequence's length, in ascending order
        /// within a sequence; null means its own place. Decode does not read it, and there must be no lookahead.
        seen_ends: DevicePtr,
        /// u32, 16-byte aligned: a [`DecodePlan`](crate::plan::DecodePlan) or a
        /// [`PrefillPlan`](crate::plan::PrefillPlan). The plain kernel does not read it.
        plan: DevicePtr,
        /// f32 `[q_heads]`: a score of each head, neither scaled nor capped, which takes part in the softmax and whose
        /// share is dropped; null means none.
        sinks: DevicePtr,
        /// Number of elements between the same layer of two blocks.
        block_stride: u64,
        /// Number of entries in a row of `block_table`.
        table_stride: u32,
        /// Number of sequences.
        sequences: u32,
        /// Number of query heads.
        q_heads: u32,
        /// Number of KV heads. Query head h reads KV head `h / (q_heads / kv_heads)`.
        kv_heads: u32,
        /// Number of elements of a head, at most [`MAX_HEAD_SIZE`], or [`MAX_LATENT_SIZE`] for latent attention; that of
        /// the instance if it is specific to one.
        head_size: u32,
        /// Number of tokens that a query sees, including its own and later ones; 0 means all.
        window: u32,
        /// Factor of the scores. It includes the scale of the keys of a cache in e4m3.
        scale: f32,
        /// Cap of the scores: `cap · tanh(score / cap)` before the softmax; 0 means none.
        softcap: f32,
        /// Number of tokens after its own that a query sees; `u32::MAX` means all. Decode reads 0.
        lookahead: u32,
        /// Number of elements of a value: `head_size`, or less if values are the first elements of the keys.
        value_size: u32,
        /// Factor of the output: the scale of the values of a cache in e4m3, else 1.
        value_scale: f32,
        /// Number of adjacent query heads in a tile of prefill, a divisor of `q_heads / kv_heads`:
        /// [`PrefillTile::heads`].
        tile_heads: u32,
    }

    /// Parameters of decode attention. The keys of a sequence are divided into the plan's splits, and the CTA that
    /// finishes last merges them in order. Grid: [`DecodeTile::grid`](crate::plan::DecodeTile::grid).
    PagedDecodeParams {
        /// f32 `[splits, q_heads, value_size]`, for the plan's number of splits.
        partial_out: DevicePtr,
        /// f32 `[splits, q_heads, 2]`.
        partial_sums: DevicePtr,
        /// u32 `[sequences, kv_heads · head tiles]`, zero before the first launch, and left zero.
        tickets: DevicePtr,
        /// The output, rounded, with a `value_size` that is a multiple of 32; null means that it is not rounded. Latent attention
        /// does not round.
        rounded: RoundedRows,
        /// Parameters of all attention kernels.
        attention: AttentionParams,
    }

    /// Parameters of decode attention that completes the heads of q, k and v itself. It reads q, and the key and the value of a query's
    /// own token, from the output of the projection, and writes the latter to the cache. Grid: that of [`PagedDecodeParams`].
    FusedDecodeParams {
        /// What [`QkvPostParams`] alone would do; `q` is not written.
        post: QkvPostParams,
        /// What [`PagedDecodeParams`] alone would do; the `q` of attention is not read.
        decode: PagedDecodeParams,
    }
}

/// Maximum head size of the kernels.
pub const MAX_HEAD_SIZE: usize = 256;

/// Maximum size of a row of the cache of latent attention.
pub const MAX_LATENT_SIZE: usize = 640;

/// Maximum number of elements of a head of latent attention that are rotated.
pub const MAX_LATENT_ROTATED: usize = MAX_LATENT_SIZE / LATENT_POST_HEADS as usize;

/// Number of rows of q, each a query head of a token, that a CTA of latent attention processes.
pub const LATENT_ROWS: u32 = 16;

/// Number of heads that a CTA of `LatentPost` processes: its warps.
const LATENT_POST_HEADS: u32 = 4;

/// Maximum length of a split of decode attention, in tokens.
pub const MAX_SPLIT_TOKENS: u32 = 2048;

/// Number of heads that a CTA of `QkvPost` processes: its warps.
pub const QKV_POST_HEADS: u32 = 4;

impl QkvPostParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, (self.q_heads + 2 * self.kv_heads).div_ceil(QKV_POST_HEADS), 1]
    }
}

impl LatentPostParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, 1 + self.q_heads.div_ceil(LATENT_POST_HEADS), 1]
    }
}

impl AttentionParams {
    /// Returns the grid of the plain kernel for this number of tokens.
    pub fn plain_grid(&self, tokens: u32) -> [u32; 3] {
        [tokens, self.q_heads, 1]
    }

    /// Returns the grid of prefill for this number of tiles in its plan.
    pub fn prefill_grid(&self, tile: PrefillTile, tiles: u32) -> [u32; 3] {
        debug_assert_eq!(tile.heads, self.tile_heads);
        [tiles, self.q_heads / tile.heads, 1]
    }

    /// Returns the grid of prefill of latent attention for this number of tiles in its plan.
    pub fn latent_prefill_grid(&self, tile: PrefillTile, tiles: u32) -> [u32; 3] {
        [tiles, (tile.queries * self.q_heads).div_ceil(LATENT_ROWS), 1]
    }
}

impl PagedDecodeParams {
    /// Returns the second dimension of the grid: the number of KV heads times the number of tiles of `head_tile` query
    /// heads that cover the query heads of each.
    pub fn rows(&self, head_tile: u32) -> u32 {
        let heads = self.attention.q_heads / self.attention.kv_heads;
        self.attention.kv_heads * heads.div_ceil(head_tile)
    }
}
