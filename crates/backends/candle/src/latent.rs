//! Latent attention: the products of each head, and the queries and rows of the cache.

use candle_core::{D, Result, Tensor};
use octavo_ops::{LatentPost, NormKind};

use crate::dense::{self, Norm};
use crate::rotary::rotate;

/// Computes the product of each head of `input[T, H·I]` with its rows of `weight[H·N, K]`: `[T, cols]`, with zeros in the
/// columns that hold no result.
pub(crate) fn head_linear(input: &Tensor, weight: &Tensor, heads: usize, cols: usize) -> Result<Tensor> {
    let (rows, inputs) = (weight.dim(0)? / heads, weight.dim(1)?);
    let (width, out_width) = (input.dim(1)? / heads, cols / heads);
    let product = |head: usize| {
        let x = input.narrow(1, head * width, inputs)?.contiguous()?;
        let y = dense::matmul(&x, &weight.narrow(0, head * rows, rows)?)?;
        y.pad_with_zeros(1, 0, out_width - rows)
    };
    Tensor::cat(&(0..heads).map(product).collect::<Result<Vec<_>>>()?, 1)
}

/// Returns the queries `[T, Hq·(R+P)]` and the rows of the cache `[T, R+P]`.
pub(crate) fn latent_post(
    op: &LatentPost,
    [q, kv, out]: [&Tensor; 3],
    norm: &Tensor,
    positions: &[u32],
) -> Result<(Tensor, Tensor)> {
    let (tokens, heads) = (q.dim(0)?, op.heads.q);
    let (rank, rotated) = (op.rank(), op.rotated());
    let q = q.reshape((tokens, heads, q.dim(1)? / heads))?;
    let content = q.dim(2)? - rotated;
    let turned = rotate(&q.narrow(D::Minus1, content, rotated)?.contiguous()?, &op.rope, positions)?;
    let absorbed = out.reshape((tokens, heads, op.heads.dim))?.narrow(D::Minus1, 0, rank)?;
    let queries = Tensor::cat(&[absorbed, turned], D::Minus1)?.flatten_from(1)?;

    let norm = Norm { kind: NormKind::Rms, weight: norm, bias: None, eps: op.eps, unit_offset: false };
    let latent = norm.apply(&kv.narrow(1, 0, rank)?.contiguous()?)?;
    let key = kv.narrow(1, rank, rotated)?.contiguous()?.reshape((tokens, 1, rotated))?;
    let key = rotate(&key, &op.rope, positions)?.flatten_from(1)?;
    Ok((queries.contiguous()?, Tensor::cat(&[latent, key], 1)?))
}
