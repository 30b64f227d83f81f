//! The attention family: `cuda/qkv_post.cu`, `cuda/attention_*.cu`.
//!
//! The cache of a KV group is `[block][layer][k or v][KV_BLOCK][kv_heads][head_size]` of T. Kernels are given where their layer's
//! keys and values of block 0 begin, and how many elements further those of the next block do.

use super::{DevicePtr, params};

params! {
    /// Splits q, k, v; normalises and rotates q and k; writes q to its buffer, k and v to the cache. A warp a head of a
    /// token. Grid: [`QkvPostParams::grid`].
    QkvPostParams {
        /// T `[tokens, q_heads · head_size]`.
        q: DevicePtr,
        /// T: the layer's keys in block 0, `[KV_BLOCK, kv_heads, head_size]`.
        k_cache: DevicePtr,
        /// T: likewise its values.
        v_cache: DevicePtr,
        /// T `[tokens, (q_heads + 2 · kv_heads) · head_size]`: q, then k, then v.
        qkv: DevicePtr,
        /// f32 `[head_size]`, or `[q_heads · head_size]` with `norm_whole_row`; null: no norm of q.
        q_weight: DevicePtr,
        /// f32 `[head_size]`, or `[kv_heads · head_size]` with `norm_whole_row`; null: no norm of k.
        k_weight: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, magnitude included; null: no rotary embedding.
        cosine: DevicePtr,
        /// f32 `[positions, rotary_dim / 2]`, magnitude included.
        sine: DevicePtr,
        /// u32 `[streams, position_stride]`: rows of `cosine` and `sine`.
        positions: DevicePtr,
        /// u32 `[rotary_dim / 2]`: which of the streams of positions turns a pair; null: the first turns all.
        streams: DevicePtr,
        /// u32 `[tokens]`: block · KV_BLOCK + offset, or [`NO_SLOT`](super::NO_SLOT).
        slots: DevicePtr,
        /// Elements between the same layer of two blocks.
        block_stride: u64,
        /// Rows of `qkv`.
        tokens: u32,
        /// Query heads.
        q_heads: u32,
        /// KV heads.
        kv_heads: u32,
        /// Elements of a head, at most [`MAX_HEAD_SIZE`].
        head_size: u32,
        /// Leading elements of a head that are rotated, even.
        rotary_dim: u32,
        /// 0: pairs (i, i + rotary_dim / 2), NeoX. 1: pairs (2i, 2i + 1), GPT-J.
        rope_interleaved: u32,
        /// 0: each head is normalised by itself. 1: the whole row of q, and of k.
        norm_whole_row: u32,
        /// Elements from one stream of positions to the next.
        position_stride: u32,
        /// Added under the root.
        eps: f32,
        /// Added to the weights: 1 for Gemma, else 0.
        weight_offset: f32,
    }

    /// Attention over a paged cache, causal: the query at position p sees keys `max(0, p + 1 − window) ..= p`. The last query of
    /// sequence s is at position `seq_lens[s] − 1`. Decode ([`PagedDecodeParams`]) takes the sequences of one query,
    /// prefill those of more, each what the plan names; the plain kernel takes all.
    AttentionParams {
        /// T `[tokens, q_heads · head_size]`.
        out: DevicePtr,
        /// T `[tokens, q_heads · head_size]`.
        q: DevicePtr,
        /// T: the layer's keys in block 0, `[KV_BLOCK, kv_heads, head_size]`.
        k_cache: DevicePtr,
        /// T: likewise its values.
        v_cache: DevicePtr,
        /// u32 `[sequences, table_stride]`.
        block_table: DevicePtr,
        /// u32 `[sequences + 1]`.
        query_start: DevicePtr,
        /// u32 `[sequences]`: tokens whose keys exist, those of this step included; 0: the output is 0.
        seq_lens: DevicePtr,
        /// u32, 16-byte aligned: a [`DecodePlan`](crate::plan::DecodePlan) or a [`PrefillPlan`](crate::plan::PrefillPlan); not
        /// read by the plain kernel.
        plan: DevicePtr,
        /// Elements between the same layer of two blocks.
        block_stride: u64,
        /// Entries of a row of `block_table`.
        table_stride: u32,
        /// Sequences.
        sequences: u32,
        /// Query heads.
        q_heads: u32,
        /// KV heads; query head h reads KV head `h / (q_heads / kv_heads)`.
        kv_heads: u32,
        /// Elements of a head, at most [`MAX_HEAD_SIZE`]; that of the instance, where it is for one.
        head_size: u32,
        /// Tokens that a query sees, itself included; 0: all.
        window: u32,
        /// Factor on the scores.
        scale: f32,
        /// `cap · tanh(score / cap)` before the softmax; 0: none.
        softcap: f32,
    }

    /// Decode attention: a sequence's keys are cut into the plan's splits; the CTA that finishes last merges them in their
    /// order. Grid: [`PagedDecodeParams::grid`].
    PagedDecodeParams {
        /// f32 `[splits, q_heads, head_size]`, for as many splits as the plan has.
        partial_out: DevicePtr,
        /// f32 `[splits, q_heads, 2]`.
        partial_sums: DevicePtr,
        /// u32 `[sequences, kv_heads · head tiles]`, zero before the first launch, and left zero.
        tickets: DevicePtr,
        /// What all attention kernels have.
        attention: AttentionParams,
    }
}

/// The largest head that a kernel takes.
pub const MAX_HEAD_SIZE: usize = 256;

/// The largest split of decode attention, in tokens.
pub const MAX_SPLIT_TOKENS: u32 = 2048;

/// Heads that a CTA of `QkvPost` works on: its warps.
pub const QKV_POST_HEADS: u32 = 4;

impl QkvPostParams {
    /// CTAs of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, (self.q_heads + 2 * self.kv_heads).div_ceil(QKV_POST_HEADS), 1]
    }
}

impl AttentionParams {
    /// CTAs of a launch of the plain kernel for that many tokens.
    pub fn plain_grid(&self, tokens: u32) -> [u32; 3] {
        [tokens, self.q_heads, 1]
    }

    /// CTAs of a launch of prefill for that many tiles of its plan.
    pub fn prefill_grid(&self, tiles: u32) -> [u32; 3] {
        [tiles, self.q_heads, 1]
    }
}

impl PagedDecodeParams {
    /// KV heads, each as often as an instance of `head_tile` query heads needs to cover its query heads: the second number of
    /// the grid.
    pub fn rows(&self, head_tile: u32) -> u32 {
        let heads = self.attention.q_heads / self.attention.kv_heads;
        self.attention.kv_heads * heads.div_ceil(head_tile)
    }

    /// CTAs of the launch, for an instance that takes `head_tile` query heads at once. `columns` CTAs share the plan's splits, as
    /// [`decode_columns`](crate::plan::decode_columns) gives them; the result does not depend on it.
    pub fn grid(&self, head_tile: u32, columns: u32) -> [u32; 3] {
        [columns, self.rows(head_tile), 1]
    }
}
