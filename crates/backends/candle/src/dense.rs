//! The ops whose rows depend neither on each other nor on the KV cache, as functions of tensors.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use octavo_ops::{GluKind, NormKind};

/// Number of rows of every matrix product. candle uses another order of sums for other shapes, so a row's bits would
/// depend on the number of rows computed with it; one fixed shape avoids that. With eight rows, a decode of one row
/// costs no more than reading the weight, and a prefill is within a factor of two of larger tiles.
pub(crate) const TILE: usize = 8;

/// Computes `x · Wᵀ` for `x[rows, K]` and `W[N, K]`, in tiles of [`TILE`] rows, the last padded with zeros.
///
/// The product is computed as `(W · xᵀ)ᵀ`, because candle multiplies several times faster when the large operand is on
/// the left.
pub(crate) fn matmul(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (rows, _) = x.dims2()?;
    let padded = rows.next_multiple_of(TILE);
    let x = x.pad_with_zeros(0, 0, padded - rows)?;
    let tile = |start| weight.matmul(&x.narrow(0, start, TILE)?.t()?.contiguous()?);
    let tiles: Result<Vec<_>> = (0..padded).step_by(TILE).map(tile).collect();
    Tensor::cat(&tiles?, 1)?.narrow(1, 0, rows)?.t()?.contiguous()
}

/// Returns the rows of a table by id.
pub(crate) fn embed(table: &Tensor, ids: &[u32], scale: f32) -> Result<Tensor> {
    scaled(gather(table, ids)?, scale)
}

/// Computes `scale · x`.
pub(crate) fn scaled(x: Tensor, scale: f32) -> Result<Tensor> {
    if scale == 1.0 { Ok(x) } else { x.affine(f64::from(scale), 0.0) }
}

/// Returns the rows of `x` by index.
pub(crate) fn gather(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::new(rows, &Device::Cpu)?, 0)
}

/// Returns the columns of `x` by their indices in f32.
pub(crate) fn gather_columns(x: &Tensor, columns: &Tensor) -> Result<Tensor> {
    x.index_select(&columns.flatten_all()?.to_dtype(DType::U32)?, 1)
}

/// Parameters of a normalisation.
pub(crate) struct Norm<'a> {
    pub(crate) kind: NormKind,
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) eps: f32,
    pub(crate) unit_offset: bool,
}

impl Norm<'_> {
    /// Normalises along the last dimension.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let x = match self.kind {
            NormKind::Rms => x.clone(),
            NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
        };
        let root = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.eps))?.sqrt()?;
        let weight = self.weight.flatten_all()?;
        let weight = if self.unit_offset { (weight + 1.0)? } else { weight };
        let y = x.broadcast_div(&root)?.broadcast_mul(&weight)?;
        match self.bias {
            Some(bias) => y.broadcast_add(&bias.flatten_all()?),
            None => Ok(y),
        }
    }
}

/// Computes `act(gate) · up` for `gate_up[rows, 2I]`.
pub(crate) fn glu(gate_up: &Tensor, kind: GluKind) -> Result<Tensor> {
    let inner = gate_up.dim(D::Minus1)? / 2;
    let gate = gate_up.narrow(D::Minus1, 0, inner)?;
    let up = gate_up.narrow(D::Minus1, inner, inner)?;
    match kind {
        GluKind::ClampedSwiglu { alpha, limit } => {
            let [alpha, limit] = [alpha, limit].map(f64::from);
            let gate = gate.minimum(limit)?;
            let open = sigmoid(&gate.affine(alpha, 0.0)?)?;
            (up.clamp(-limit, limit)? + 1.0)? * (gate * open)?
        }
        _ => act(&gate, kind)? * up,
    }
}

/// Computes `1 / (1 + exp(−x))`.
pub(crate) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    ((x.neg()?.exp()? + 1.0)?).recip()
}

/// Computes `act(x)`.
pub(crate) fn act(x: &Tensor, kind: GluKind) -> Result<Tensor> {
    match kind {
        GluKind::Silu => x.silu(),
        GluKind::Gelu => x.gelu_erf(),
        GluKind::GeluTanh => x.gelu(),
        GluKind::Tanh => x.tanh(),
        GluKind::ClampedSwiglu { .. } => bail!("a clamped SwiGLU needs a gate"),
    }
}

/// Computes `cap · tanh(x / cap)`.
pub(crate) fn softcap(x: &Tensor, cap: f32) -> Result<Tensor> {
    (x / f64::from(cap))?.tanh()? * f64::from(cap)
}
