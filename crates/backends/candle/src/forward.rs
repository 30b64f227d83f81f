//! One forward pass: runs the program's ops in order, each as a few tensor calls.

use candle_core::{Device, Result, Tensor, bail};
use octavo_ops::{
    BackendError, BufferId, Linear, Logits, NormKind, NormOp, Op, PagedAttention, Program, QkNorm, QkvPost, Rows,
    StepBatch, WeightId,
};

use crate::attention::Attention;
use crate::dense::{self, Norm};
use crate::failed;
use crate::kv::KvCache;
use crate::rotary::rotate;

/// State of one forward pass.
pub(crate) struct Forward<'a> {
    program: &'a Program,
    weights: &'a [Tensor],
    kv: &'a mut [KvCache],
    batch: &'a StepBatch,
    /// Buffers by [`BufferId`]; `None` until an op writes it.
    buffers: Vec<Option<Tensor>>,
    /// Sequence of each row of the step.
    sequences: Vec<usize>,
}

impl<'a> Forward<'a> {
    /// Checks the batch, so that a defect of the caller is an error and not a write to another sequence's block.
    pub(crate) fn new(
        program: &'a Program,
        weights: &'a [Tensor],
        kv: &'a mut [KvCache],
        batch: &'a StepBatch,
    ) -> std::result::Result<Self, BackendError> {
        let memory: Vec<_> = kv.iter().map(|cache| (cache.block_size(), cache.blocks())).collect();
        batch.check(program, &memory, 0).map_err(|reason| failed(format!("the batch is malformed: {reason}")))?;
        let sequences = (0..batch.sequences()).flat_map(|s| batch.query_range(s).map(move |_| s)).collect();
        Ok(Self { program, weights, kv, batch, buffers: vec![None; program.buffers.len()], sequences })
    }

    /// Runs the forward part. Returns the logits `[R,V]` if a row is sampled, and the hidden states `[E,H]` if any are
    /// returned.
    pub(crate) fn run(&mut self) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ops = self.program.forward_ops();
        for op in ops {
            self.step(op)?;
        }
        let logits = ops.iter().rev().flat_map(Op::outputs).find(|id| self.program.buffers[id.0].rows == Rows::Sampled);
        let mut take = |id: Option<BufferId>| id.and_then(|id| self.buffers[id.0].take());
        Ok((take(logits), take(self.program.embedding())))
    }

    /// Runs one op, unless it has no rows.
    fn step(&mut self, op: &Op) -> Result<()> {
        let Some(&out) = op.outputs().first() else { bail!("{} is no part of the forward pass", op.name()) };
        let rows = match self.program.buffers[out.0].rows {
            Rows::Tokens => self.batch.tokens(),
            Rows::Sampled => self.batch.sampled_rows.len(),
            Rows::Pooled => self.batch.pooled_rows.len(),
        };
        if rows == 0 {
            return Ok(());
        }
        let value = match op {
            Op::Embed { table, scale, .. } => dense::embed(self.weight(*table), &self.batch.token_ids, *scale)?,
            Op::Norm(op) => self.norm(op)?,
            Op::Linear(op) => self.linear(op)?,
            Op::QkvPost(op) => self.qkv_post(op)?,
            Op::PagedAttention(op) => self.attention(op)?,
            Op::Glu(op) => dense::glu(self.buffer(op.input)?, op.kind)?,
            Op::GatherRows { input, out } => dense::gather(self.buffer(*input)?, self.gathered(*out))?,
            Op::Logits(op) => self.logits(op)?,
            Op::Sample { .. } => bail!("Sample is no part of the forward pass"),
        };
        self.buffers[out.0] = Some(value);
        Ok(())
    }

    /// Returns the rows of `[T]` that a buffer contains.
    fn gathered(&self, out: BufferId) -> &'a [u32] {
        match self.program.buffers[out.0].rows {
            Rows::Pooled => &self.batch.pooled_rows,
            Rows::Tokens | Rows::Sampled => &self.batch.sampled_rows,
        }
    }

    fn weight(&self, id: WeightId) -> &'a Tensor {
        &self.weights[id.0]
    }

    fn buffer(&self, id: BufferId) -> Result<&Tensor> {
        match &self.buffers[id.0] {
            Some(tensor) => Ok(tensor),
            None => bail!("buffer '{}' is read before it is written", self.program.buffers[id.0].name),
        }
    }

    fn norm(&mut self, op: &NormOp) -> Result<Tensor> {
        let mut x = self.buffer(op.input)?.clone();
        if let Some(residual) = op.add {
            x = (self.buffer(residual)? + x)?;
            self.buffers[residual.0] = Some(x.clone());
        }
        let norm = Norm {
            kind: op.kind,
            weight: self.weight(op.weight),
            bias: op.bias.map(|id| self.weight(id)),
            eps: op.eps,
            unit_offset: op.unit_offset,
        };
        norm.apply(&x)
    }

    fn linear(&self, op: &Linear) -> Result<Tensor> {
        let mut y = dense::matmul(self.buffer(op.input)?, self.weight(op.weight))?;
        if let Some(bias) = op.bias {
            y = y.broadcast_add(&self.weight(bias).flatten_all()?)?;
        }
        if let Some(add) = op.add {
            y = (y + self.buffer(add)?)?;
        }
        Ok(y)
    }

    fn logits(&self, op: &Logits) -> Result<Tensor> {
        let mut y = dense::matmul(self.buffer(op.input)?, self.weight(op.weight))?;
        if op.scale != 1.0 {
            y = y.affine(f64::from(op.scale), 0.0)?;
        }
        op.softcap.map_or(Ok(y.clone()), |cap| dense::softcap(&y, cap))
    }

    fn qkv_post(&mut self, op: &QkvPost) -> Result<Tensor> {
        let qkv = self.buffer(op.input)?;
        let (q_cols, kv_cols) = (op.heads.q_cols(), op.heads.kv_cols());
        let mut q = qkv.narrow(1, 0, q_cols)?;
        let mut k = qkv.narrow(1, q_cols, kv_cols)?;
        let v = qkv.narrow(1, q_cols + kv_cols, kv_cols)?;
        if let Some(norm) = &op.norm {
            q = self.qk_norm(&q, norm, norm.q)?;
            k = self.qk_norm(&k, norm, norm.k)?;
        }
        if let Some(rope) = &op.rope {
            let turn = |x: &Tensor, heads: usize| -> Result<Tensor> {
                let x = x.reshape((self.batch.tokens(), heads, op.heads.dim))?;
                rotate(&x, rope, &self.batch.positions)?.flatten_from(1)
            };
            q = turn(&q, op.heads.q)?;
            k = turn(&k, op.heads.kv)?;
        }
        let (k, v) = (k.flatten_all()?.to_vec1()?, v.flatten_all()?.to_vec1()?);
        let rows = k.chunks_exact(kv_cols).zip(v.chunks_exact(kv_cols));
        for (&slot, (k, v)) in self.batch.slot_mapping[op.group].iter().zip(rows) {
            self.kv[op.group].write(op.layer, slot, k, v);
        }
        q.contiguous()
    }

    /// Computes the RMS norm of `x[T, heads·D]` over each head or over the whole row, depending on the width of the
    /// weight.
    fn qk_norm(&self, x: &Tensor, norm: &QkNorm, weight: WeightId) -> Result<Tensor> {
        let weight = self.weight(weight);
        let (tokens, cols) = x.dims2()?;
        let width = weight.elem_count();
        let norm = Norm { kind: NormKind::Rms, weight, bias: None, eps: norm.eps, unit_offset: norm.unit_offset };
        norm.apply(&x.reshape((tokens, cols / width, width))?)?.flatten_from(1)
    }

    fn attention(&self, op: &PagedAttention) -> Result<Tensor> {
        let q: Vec<f32> = self.buffer(op.q)?.flatten_all()?.to_vec1()?;
        let attention = Attention {
            cache: &self.kv[op.group],
            layer: op.layer,
            tables: &self.batch.block_tables[op.group],
            heads: op.heads,
            scale: op.scale,
            window: op.window,
            softcap: op.softcap,
        };
        let out = attention.run(&q, self.batch, &self.sequences);
        Tensor::from_vec(out, (self.batch.tokens(), op.heads.q_cols()), &Device::Cpu)
    }
}
