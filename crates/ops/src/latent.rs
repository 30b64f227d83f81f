//! The ops of multi-head latent attention (DeepSeek-V2 and V3), in its absorbed form.
//!
//! The cache has one row `[latent R | rotated key P]` per token and layer, which all query heads share. The latent is
//! the content part of the keys, and the values. [`HeadLinear`] maps the content part of each query head to R columns,
//! [`LatentPost`] completes the queries and writes the row, [`PagedAttention`](crate::PagedAttention) attends over the
//! rows, and another [`HeadLinear`] maps the attended latent of each head to its values.

use crate::attention::Rope;
use crate::program::{BufferId, HeadShape, WeightId};

/// `input[T,H·I] → out[T,H·O]`: a matrix `[N,K]` for each of H heads. The first N of a head's O columns are the product of
/// its matrix and the first K of its I columns. The other columns of the output hold no result.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadLinear {
    /// Weight `[H·N,K]`, one head after the other. Each head has the same number of parts, of the same sizes.
    pub weight: WeightId,
    /// Number of heads H.
    pub heads: usize,
    /// Input `[T,H·I]`, I ≥ K.
    pub input: BufferId,
    /// Output `[T,H·O]`, O ≥ N.
    pub out: BufferId,
}

/// `q[T,Hq·(C+P)], kv[T,R+P] → out[T,Hq·(R+P)]`: completes the queries, and writes keys and values to the paged cache.
///
/// The last P columns of each head of `q` are rotated and replace those of the head in `out`, whose first R columns stay
/// as they are. A row of the cache is the RMS norm of the first R columns of `kv`, and then the rotated other ones.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentPost {
    /// Queries `[T,Hq·(C+P)]`, C columns of content and P that are rotated for each head.
    pub q: BufferId,
    /// Latent and rotary key `[T,R+P]`.
    pub kv: BufferId,
    /// Absorbed queries `[T,Hq·(R+P)]`, read and written.
    pub out: BufferId,
    /// One KV head of R + P elements, of which the first R are the values.
    pub heads: HeadShape,
    /// Weight `[R]` of the latent's norm.
    pub norm: WeightId,
    /// Value added under the root.
    pub eps: f32,
    /// Rotary embedding of P elements.
    pub rope: Rope,
    /// KV group of the layer.
    pub group: usize,
    /// Index of the layer within the group.
    pub layer: usize,
}

impl LatentPost {
    /// Returns R, the number of elements of the latent.
    pub const fn rank(&self) -> usize {
        self.heads.value_dim()
    }

    /// Returns P, the number of elements that are rotated.
    pub const fn rotated(&self) -> usize {
        self.heads.dim - self.heads.value_dim()
    }
}
