//! One forward pass: runs the program's ops in order, each as a few tensor calls.

use candle_core::{Device, Result, Tensor, bail};
use octavo_ops::{
    BackendError, BufferId, Embed, EmbedIds, EncodeBatch, HeadLinear, HeadShape, KvPlace, LatentPost, Limits, Linear,
    Logits, Lora, LoraInput, MergeKind, MergeRows, NormKind, NormOp, Op, PoolKind, PoolRows, Program, ProgramKind,
    QkNorm, QkvPost, Residual, Route, Rows, Sight, SiteId, StepBatch, WeightId,
};

use crate::attention::Attention;
use crate::dense::{self, Norm};
use crate::experts::Routing;
use crate::failed;
use crate::kv::{Half, KvCache};
use crate::latent;
use crate::lora::{self, Adapter, OutputRow, Outputs};
use crate::media::{self, MediaCache};
use crate::rotary::rotate;

/// State of one forward pass.
pub(crate) struct Forward<'a> {
    program: &'a Program,
    weights: &'a [Tensor],
    kv: &'a mut KvCache,
    media: &'a mut MediaCache,
    batch: &'a StepBatch,
    /// Adapters by slot.
    adapters: &'a [Option<Adapter>],
    /// The batch of an encoder.
    images: Option<&'a EncodeBatch>,
    /// Head shape of each layer in the memory of the step.
    step_layers: Vec<HeadShape>,
    /// Buffers by [`BufferId`]; `None` until an op writes it.
    buffers: Vec<Option<Tensor>>,
    /// Experts of each token, by [`BufferId`].
    routings: Vec<Routing>,
    /// Sequence of each row of the step.
    sequences: Vec<usize>,
}

impl<'a> Forward<'a> {
    /// Checks the batch of a decoder, so that a defect of the caller is an error and not a write to another sequence's
    /// block.
    pub(crate) fn new(
        program: &'a Program,
        weights: &'a [Tensor],
        kv: &'a mut KvCache,
        media: &'a mut MediaCache,
        (batch, adapters): (&'a StepBatch, &'a [Option<Adapter>]),
    ) -> std::result::Result<Self, BackendError> {
        let memory = (kv.block_size(), kv.blocks());
        let limits = Limits { kv: memory, drawn: 0, media_rows: media.rows(), adapters: adapters.len() };
        batch.check(program, limits).map_err(malformed)?;
        debug_assert_ne!(program.kind(), ProgramKind::Encoder, "an encoder's rows have blocks of their own");
        Ok(Self { adapters, ..Self::over(program, weights, kv, media, (batch, None)) })
    }

    /// Creates the pass of an encoder, whose batch has been checked. `batch` has its rows over the blocks of `kv`.
    pub(crate) fn over(
        program: &'a Program,
        weights: &'a [Tensor],
        kv: &'a mut KvCache,
        media: &'a mut MediaCache,
        (batch, images): (&'a StepBatch, Option<&'a EncodeBatch>),
    ) -> Self {
        let sequences = (0..batch.sequences()).flat_map(|s| batch.query_range(s).map(move |_| s)).collect();
        let step_layers = program.step_kv().layers;
        let buffers = vec![None; program.buffers.len()];
        let routings = vec![Routing::default(); program.buffers.len()];
        Self { program, weights, kv, media, batch, adapters: &[], images, step_layers, buffers, routings, sequences }
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
        if let Op::StoreRows { input, column } = op {
            return self.store(*input, *column);
        }
        let Some(&out) = op.outputs().first() else { bail!("{} is no part of the forward pass", op.name()) };
        let rows = self.count(out);
        if rows == 0 {
            return Ok(());
        }
        if let Op::Route(op) = op {
            return self.route(op);
        }
        let value = match op {
            Op::Embed(op) => self.embed(op)?,
            Op::Patches { out } => media::patches(self.images()?, self.program.buffers[out.0].cols)?,
            Op::EmbedTaps(op) => media::embed_taps(self.buffer(op.out)?, self.weight(op.table), self.images()?)?,
            Op::InjectRows(op) => self.media.inject(self.buffer(op.out)?, op, &self.batch.injected)?,
            Op::MergeRows(op) => self.merge_rows(op, rows)?,
            Op::StoreRows { .. } | Op::Route(_) => bail!("{} writes no numbers", op.name()),
            Op::Norm(op) => self.norm(op)?,
            Op::Linear(op) => self.linear(op)?,
            Op::Lora(op) => self.lora(op)?,
            Op::QkvPost(op) => self.qkv_post(op)?,
            Op::HeadLinear(op) => self.head_linear(op)?,
            Op::LatentPost(op) => self.latent_post(op)?,
            Op::PagedAttention(op) => self.attention(
                op.q,
                Attention {
                    cache: &*self.kv,
                    place: (op.group, op.layer),
                    tables: self.batch.tables(op.group),
                    heads: op.heads,
                    scale: op.scale,
                    sight: op.sight(),
                    window: op.window,
                    softcap: op.softcap,
                    sinks: op.sinks.map(|id| self.weight(id).flatten_all()?.to_vec1()).transpose()?,
                },
            )?,
            Op::SegmentAttention(op) => {
                let place = self.place(KvPlace::Step, op.heads);
                self.attention(
                    op.q,
                    Attention {
                        cache: &*self.kv,
                        place,
                        tables: self.batch.tables(place.0),
                        heads: op.heads,
                        scale: op.scale,
                        sight: Sight::Both,
                        window: op.window,
                        softcap: None,
                        sinks: None,
                    },
                )?
            }
            Op::Act(op) => dense::act(self.buffer(op.input)?, op.kind)?,
            Op::GateRows(op) => {
                let gate = dense::sigmoid(self.buffer(op.gate)?)?;
                self.buffer(op.out)?.broadcast_mul(&gate)?
            }
            Op::ExpertLinear(op) => {
                let (routing, weight) = (&self.routings[op.routing.0], self.weight(op.weight));
                let bias = op.bias.map(|id| self.weight(id));
                routing.products(self.buffer(op.input)?, op.experts, weight, bias)?
            }
            Op::ExpertSum(op) => {
                let sum = self.routings[op.routing.0].sum(self.buffer(op.input)?)?;
                let sum = dense::scaled(sum, op.scale)?;
                op.add.map_or(Ok(sum.clone()), |add| sum + self.buffer(add)?)?
            }
            Op::Glu(op) => dense::glu(self.buffer(op.input)?, op.kind)?,
            Op::GatherRows { input, out } => dense::gather(self.buffer(*input)?, self.gathered(*out))?,
            Op::GatherColumns(op) => dense::gather_columns(self.buffer(op.input)?, self.weight(op.order))?,
            Op::PoolRows(op) => self.pool_rows(op)?,
            Op::Logits(op) => self.logits(op)?,
            Op::Sample { .. } => bail!("Sample is no part of the forward pass"),
        };
        self.buffers[out.0] = Some(value);
        Ok(())
    }

    fn merge_rows(&self, op: &MergeRows, rows: usize) -> Result<Tensor> {
        let input = self.buffer(op.input)?;
        match op.kind {
            MergeKind::Concatenated => input.reshape((rows, input.elem_count() / rows)),
            MergeKind::Mean => input.reshape((rows, self.program.merge(), input.dim(1)?))?.mean(1),
        }
    }

    /// Returns the number of rows of a buffer in this step.
    fn count(&self, buffer: BufferId) -> usize {
        match self.program.buffers[buffer.0].rows {
            Rows::Tokens => self.batch.tokens(),
            Rows::Sampled => self.batch.sampled_rows.len(),
            Rows::Pooled => self.batch.pooled_rows.len(),
            Rows::Merged => self.batch.tokens() / self.program.merge(),
            Rows::Routed(experts) => self.batch.tokens() * experts,
        }
    }

    fn embed(&self, op: &Embed) -> Result<Tensor> {
        let StepBatch { token_ids, positions, token_types, .. } = self.batch;
        let moved: Vec<u32>;
        let ids = match op.ids {
            EmbedIds::Tokens => token_ids,
            EmbedIds::Positions { offset } => {
                moved = positions[..self.batch.tokens()].iter().map(|place| place + offset as u32).collect();
                &moved
            }
            EmbedIds::Types => token_types,
        };
        let rows = dense::embed(self.weight(op.table), ids, op.scale)?;
        if op.add { self.buffer(op.out)? + rows } else { Ok(rows) }
    }

    /// Reduces the rows of each sequence one by one, so that the sums do not depend on the sequences beside it.
    fn pool_rows(&self, op: &PoolRows) -> Result<Tensor> {
        let input = self.buffer(op.input)?;
        let StepBatch { pooled_rows, pooled_lens, .. } = self.batch;
        let reduce = |(&last, &len): (&u32, &u32)| {
            let first = (last + 1 - len) as usize;
            let mut sum = input.narrow(0, first, 1)?;
            if op.kind == PoolKind::Mean {
                for row in first + 1..=last as usize {
                    sum = (sum + input.narrow(0, row, 1)?)?;
                }
                sum = (sum / f64::from(len))?;
            }
            Ok(sum)
        };
        Tensor::cat(&pooled_rows.iter().zip(pooled_lens).map(reduce).collect::<Result<Vec<_>>>()?, 0)
    }

    fn images(&self) -> Result<&'a EncodeBatch> {
        match self.images {
            Some(images) => Ok(images),
            None => bail!("a decoder has no images"),
        }
    }

    fn store(&mut self, input: BufferId, column: usize) -> Result<()> {
        let images = self.images()?;
        if images.store_rows.is_empty() {
            return Ok(());
        }
        let values = self.buffer(input)?.clone();
        self.media.store(&values, column, &images.store_rows)
    }

    /// Returns the KV group and layer of a place for keys and values.
    fn place(&self, kv: KvPlace, heads: HeadShape) -> (usize, usize) {
        match kv {
            KvPlace::Cache { group, layer } => (group, layer),
            KvPlace::Step => (0, self.step_layers.iter().position(|known| *known == heads).unwrap_or(0)),
        }
    }

    /// Returns the rows of `[T]` that a buffer contains.
    fn gathered(&self, out: BufferId) -> &'a [u32] {
        match self.program.buffers[out.0].rows {
            Rows::Pooled => &self.batch.pooled_rows,
            Rows::Tokens | Rows::Sampled | Rows::Merged | Rows::Routed(_) => &self.batch.sampled_rows,
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
        if let Some(Residual::Before(residual)) = op.add {
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
        match op.add {
            Some(Residual::After(residual)) => norm.apply(&x)? + self.buffer(residual)?,
            _ => norm.apply(&x),
        }
    }

    fn route(&mut self, op: &Route) -> Result<()> {
        let mut logits = dense::matmul(self.buffer(op.input)?, self.weight(op.weight))?;
        if let Some(bias) = op.bias {
            logits = logits.broadcast_add(&self.weight(bias).flatten_all()?)?;
        }
        if let Some(site) = op.site {
            let input = lora::Input::Rows(self.buffer(op.input)?.to_vec2()?);
            logits = self.added((site, 1.0), &input, &logits, self.adapted_rows(Rows::Tokens))?;
        }
        let correction = op.correction.map(|id| self.weight(id).flatten_all()?.to_vec1()).transpose()?;
        let chosen = self.program.buffers[op.out.0].cols;
        self.routings[op.out.0] = Routing::choose(op, &logits, &correction.unwrap_or_default(), chosen)?;
        Ok(())
    }

    fn linear(&self, op: &Linear) -> Result<Tensor> {
        let mut y = dense::matmul(self.buffer(op.input)?, self.weight(op.weight))?;
        if let Some(bias) = op.bias {
            y = y.broadcast_add(&self.weight(bias).flatten_all()?)?;
        }
        y = dense::scaled(y, op.scale)?;
        if let Some(add) = op.add {
            y = (y + self.buffer(add)?)?;
        }
        Ok(y)
    }

    fn lora(&self, op: &Lora) -> Result<Tensor> {
        let out = self.buffer(op.out)?;
        let input = match op.input {
            LoraInput::Rows(input) => lora::Input::Rows(self.buffer(input)?.to_vec2()?),
            LoraInput::Tokens => lora::Input::Tokens(&self.batch.token_ids),
            LoraInput::Experts { input, routing } => return self.expert_lora(op, (input, routing), out),
        };
        let rows = self.program.buffers[op.out.0].rows;
        self.added((op.site, op.scale), &input, out, self.adapted_rows(rows))
    }

    /// Returns the rows of products without experts, with 1 + the slots of their adapters.
    fn adapted_rows(&self, rows: Rows) -> impl Iterator<Item = (u32, OutputRow)> {
        self.batch.adapted(rows).map(|(row, adapter)| {
            let row = row as usize;
            (adapter, OutputRow { row, source: row, expert: 0 })
        })
    }

    fn expert_lora(&self, op: &Lora, (input, routing): (BufferId, BufferId), out: &Tensor) -> Result<Tensor> {
        let by_token = self.program.buffers[input.0].rows == Rows::Tokens;
        let input = lora::Input::Rows(self.buffer(input)?.to_vec2()?);
        let routing = &self.routings[routing.0];
        let rows = self.batch.adapted(Rows::Tokens).flat_map(|(token, adapter)| {
            let token = token as usize;
            routing.rows_of(token).map(move |(row, expert)| {
                (adapter, OutputRow { row, source: if by_token { token } else { row }, expert })
            })
        });
        self.added((op.site, op.scale), &input, out, rows)
    }

    /// Returns the outputs of a product with what the adapters of some rows add to them.
    fn added(
        &self,
        (site, scale): (SiteId, f32),
        input: &lora::Input<'_>,
        out: &Tensor,
        rows: impl Iterator<Item = (u32, OutputRow)>,
    ) -> Result<Tensor> {
        let (columns, each) = (self.program.site_outputs(site), self.program.parts_each(site));
        let mut outputs = Outputs { site, columns: &columns, each, scale, rows: out.to_vec2()? };
        for (adapter, row) in rows {
            if let Some(adapter) = &self.adapters[adapter as usize - 1] {
                outputs.add(adapter, input, row);
            }
        }
        outputs.tensor()
    }

    fn logits(&self, op: &Logits) -> Result<Tensor> {
        let y = dense::matmul(self.buffer(op.input)?, self.weight(op.weight))?;
        let y = dense::scaled(y, op.scale)?;
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
        let place = self.place(op.kv, op.heads);
        for (&slot, (k, v)) in self.batch.slot_mapping[place.0].iter().zip(rows) {
            self.kv.write(place, Half::Key, slot, k);
            self.kv.write(place, Half::Value, slot, v);
        }
        q.contiguous()
    }

    fn head_linear(&self, op: &HeadLinear) -> Result<Tensor> {
        let cols = self.program.buffers[op.out.0].cols;
        latent::head_linear(self.buffer(op.input)?, self.weight(op.weight), op.heads, cols)
    }

    fn latent_post(&mut self, op: &LatentPost) -> Result<Tensor> {
        let [q, kv, out] = [self.buffer(op.q)?, self.buffer(op.kv)?, self.buffer(op.out)?];
        let (queries, rows) = latent::latent_post(op, [q, kv, out], self.weight(op.norm), &self.batch.positions)?;
        let rows: Vec<f32> = rows.flatten_all()?.to_vec1()?;
        for (&slot, row) in self.batch.slot_mapping[op.group].iter().zip(rows.chunks_exact(op.heads.dim)) {
            self.kv.write((op.group, op.layer), Half::Key, slot, row);
        }
        Ok(queries)
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

    fn attention(&self, q: BufferId, attention: Attention<'_>) -> Result<Tensor> {
        let q: Vec<f32> = self.buffer(q)?.flatten_all()?.to_vec1()?;
        let cols = attention.heads.out_cols();
        let out = attention.run(&q, self.batch, &self.sequences);
        Tensor::from_vec(out, (self.batch.tokens(), cols), &Device::Cpu)
    }
}

/// Returns the error of a batch with a defect.
pub(crate) fn malformed(reason: &'static str) -> BackendError {
    failed(format!("the batch is malformed: {reason}"))
}
