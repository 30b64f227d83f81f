//! Lowering of a program's ops to launches.

use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Dtype};
use octavo_kernels::params::{
    AttentionParams, DequantizeParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluParams, KV_BLOCK,
    LinearParams, MAX_NORM_COLS, NormParams, PagedDecodeParams, PoolRowsParams, QkvPostParams, RoundedRows,
};
use octavo_kernels::plan::{DecodeTile, PrefillTile};
use octavo_ops::{
    BackendError, BufferId, Embed, EmbedIds, GluKind, HeadShape, KvPlace, KvScales, Linear, Logits, NormKind, NormOp,
    Op, PagedAttention, Program, QkvPost, Residual, Rope, RopeStyle, Rows, Values, WeightId,
};

use crate::arena::Arena;
use crate::build::{Instances, KernelId};
use crate::experts::ExpertStage;
use crate::forward::Scratch;
use crate::images::ImageStage;
use crate::latent::LatentStage;
use crate::layout::{Layout, kv_groups, logits_stride};
use crate::linear::{Product, ProductPart, Setting, Wanted};
use crate::lora::LoraStage;
use crate::rounded::{Prepared, RoundedStage};
use crate::unsupported;
use crate::weights::{Part, Placed};

/// An op with its kernels and all parameters that are constant.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    Embed { kernel: KernelId, params: EmbedParams, ids: EmbedIds },
    EmbedQuantised { kernel: KernelId, params: DequantizeParams },
    Norm { kernel: KernelId, params: NormParams, rows: Rows },
    Product { product: Product, rows: Rows },
    QkvPost { kernel: KernelId, params: QkvPostParams, cache: CacheLayer },
    Attention { attention: Attention, cache: CacheLayer },
    Glu { kernel: KernelId, params: GluParams, rows: Rows },
    Gather { kernel: KernelId, params: GatherRowsParams, rows: Rows },
    GatherColumns { kernel: KernelId, params: GatherColumnsParams, rows: Rows },
    Pool { kernel: KernelId, params: PoolRowsParams },
    Rounded(Box<RoundedStage>),
    Image(ImageStage),
    Experts(ExpertStage),
    Latent(LatentStage),
    Lora(LoraStage),
}

impl Stage {
    /// Returns attention of the stage, if that is what it is.
    pub(crate) fn attention(&self) -> Option<&Attention> {
        match self {
            Self::Attention { attention, .. } => Some(attention),
            _ => None,
        }
    }
}

/// A layer of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheLayer {
    pub(crate) group: usize,
    /// Offset in elements from a block's start to the layer's keys, and to its values, which may be the same.
    pub(crate) keys: u64,
    pub(crate) values: u64,
}

/// The kernel of prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefill {
    pub(crate) kernel: KernelId,
    pub(crate) tile: PrefillTile,
    pub(crate) grid: PrefillGrid,
}

/// Returns the grid of prefill for a number of tiles in the plan.
type PrefillGrid = fn(&AttentionParams, PrefillTile, u32) -> [u32; 3];

/// Kernels of a layer's attention.
#[derive(Clone, Debug)]
pub(crate) enum Attention {
    /// One kernel for all sequences, which reads every key in one order.
    Plain { kernel: KernelId, params: AttentionParams },
    /// One kernel for the sequences that decode, and one for those that prefill.
    Planned {
        decode: KernelId,
        tile: DecodeTile,
        prefill: Prefill,
        params: PagedDecodeParams,
        /// Codes of the output that decode writes.
        codes: Option<Prepared>,
    },
    /// The kernel for prefill, for all sequences: those of an encoder, and those whose results must not depend on the step.
    Tiled { prefill: Prefill, params: AttentionParams },
}

/// Returns the number of elements in a block of a KV group, over all layers.
pub(crate) fn block_elements(group: &octavo_ops::KvGroup) -> u64 {
    (group.elements_per_token() * KV_BLOCK) as u64
}

/// Lowers the ops of a program.
pub(crate) struct Lowering<'a> {
    pub(crate) program: &'a Program,
    pub(crate) layout: &'a Layout,
    pub(crate) arena: &'a Arena,
    pub(crate) setting: Setting,
    pub(crate) instances: Instances,
}

impl Lowering<'_> {
    /// Returns the stages of the forward part.
    pub(crate) fn stages(&mut self) -> Result<Vec<Stage>, BackendError> {
        let mut stages: Vec<_> =
            self.program.forward_ops().iter().map(|op| self.stage(op)).collect::<Result<_, _>>()?;
        self.join_rounding(&mut stages, &Scratch::new(self.arena, self.layout));
        Ok(stages)
    }

    fn stage(&mut self, op: &Op) -> Result<Stage, BackendError> {
        let dtype = self.setting.dtype;
        Ok(match op {
            Op::Embed(op) => self.embed(op)?,
            Op::Norm(op) => self.norm(op)?,
            Op::Linear(op) => self.linear(op)?,
            Op::QkvPost(op) => self.qkv_post(op),
            Op::HeadLinear(op) => self.head_linear(op)?,
            Op::LatentPost(op) => self.latent_post(op)?,
            Op::PagedAttention(op) => self.attention(op),
            Op::Glu(op) => {
                let kernel = self.instances.id(manifest::glu(dtype, activation(op.kind)));
                let (cols, out, input) = (self.cols(op.out), self.buffer(op.out), self.buffer(op.input));
                let (alpha, limit) = match op.kind {
                    GluKind::ClampedSwiglu { alpha, limit } => (alpha, limit),
                    GluKind::Silu | GluKind::Gelu | GluKind::GeluTanh | GluKind::Tanh => (0.0, 0.0),
                };
                let params = GluParams { out, input, rows: 0, cols, alpha, limit };
                Stage::Glu { kernel, params, rows: self.rows(op.out) }
            }
            Op::GatherRows { input, out } => {
                let kernel = self.instances.id(manifest::gather_rows(dtype));
                let (cols, rows) = (self.cols(*out), self.rows(*out));
                let (out, input) = (self.buffer(*out), self.buffer(*input));
                Stage::Gather { kernel, params: GatherRowsParams { out, input, row_index: 0, count: 0, cols }, rows }
            }
            Op::GatherColumns(op) => {
                let kernel = self.instances.id(manifest::gather_columns(dtype));
                let (out, input, column_index) = (self.buffer(op.out), self.buffer(op.input), self.vector(op.order));
                let params = GatherColumnsParams { out, input, column_index, rows: 0, cols: self.cols(op.out) };
                Stage::GatherColumns { kernel, params, rows: self.rows(op.out) }
            }
            Op::PoolRows(op) => self.pool_rows(op),
            Op::Logits(op) => self.logits(op)?,
            Op::Patches { out } => self.patches(*out),
            Op::EmbedTaps(op) => self.embed_taps(op)?,
            Op::SegmentAttention(op) => self.segment_attention(op),
            Op::Act(op) => self.act(op),
            Op::MergeRows(op) => self.merge(op),
            Op::StoreRows { input, column } => self.store(*input, *column),
            Op::InjectRows(op) => self.inject(op),
            Op::GateRows(op) => self.gate_rows(op),
            Op::Route(op) => self.route(op)?,
            Op::ExpertLinear(op) => self.expert_linear(op),
            Op::ExpertSum(op) => self.expert_sum(op),
            Op::Lora(op) => self.lora(op),
            Op::Sample { .. } => return Err(unsupported("sampling inside the forward pass")),
        })
    }

    pub(crate) fn buffer(&self, id: BufferId) -> u64 {
        self.arena.at(self.layout.buffers[id.0])
    }

    pub(crate) fn cols(&self, id: BufferId) -> u32 {
        self.program.buffers[id.0].cols as u32
    }

    pub(crate) fn rows(&self, id: BufferId) -> Rows {
        self.program.buffers[id.0].rows
    }

    /// Returns the address of a vector in f32.
    pub(crate) fn vector(&self, id: WeightId) -> u64 {
        match &self.layout.weights[id.0] {
            Placed::Vector(region) | Placed::Bias(region, _) => self.arena.at(*region),
            Placed::Matrix(_) | Placed::Experts(_) => unreachable!("placed by its use"),
        }
    }

    pub(crate) fn matrix(&self, id: WeightId) -> &[Part] {
        match &self.layout.weights[id.0] {
            Placed::Matrix(parts) | Placed::Experts(parts) => parts,
            Placed::Vector(_) | Placed::Bias(..) => unreachable!("placed by its use"),
        }
    }

    fn embed(&mut self, op: &Embed) -> Result<Stage, BackendError> {
        let (dtype, cols, out) = (self.setting.dtype, self.cols(op.out), self.buffer(op.out));
        let Embed { ids, scale, add, .. } = *op;
        let [part] = self.matrix(op.table) else {
            return Err(unsupported("an embedding table of parts that are stored in different ways"));
        };
        let (address, planes, quant) = (self.arena.at(part.region), part.planes(self.arena), part.quant);
        let (drawn, rows) = (self.arena.at(self.layout.sampling.output), part.rows as u32);
        Ok(match quant {
            None => {
                let instance = if add { manifest::embed_add(dtype) } else { manifest::embed(dtype) };
                let kernel = self.instances.id(instance);
                // The rows of positions may begin after others. If the table ends before them, no position is accepted.
                let first = match ids {
                    EmbedIds::Positions { offset } => u32::try_from(offset).unwrap_or(rows).min(rows),
                    EmbedIds::Tokens | EmbedIds::Types => 0,
                };
                let table = address + u64::from(first) * u64::from(cols) * dtype.bytes() as u64;
                let vocabulary = rows - first;
                let params = EmbedParams { out, table, ids: 0, drawn, tokens: 0, cols, vocabulary, scale };
                Stage::Embed { kernel, params, ids }
            }
            Some(_) if add || ids != EmbedIds::Tokens => {
                return Err(unsupported("a quantised table of positions or token types"));
            }
            Some((format, _)) => {
                let kernel = self.instances.id(manifest::dequantize(format, dtype));
                let params =
                    DequantizeParams { weight: planes, row_ids: 0, drawn, out, rows: 0, k: cols, n: rows, scale };
                Stage::EmbedQuantised { kernel, params }
            }
        })
    }

    fn norm(&mut self, op: &NormOp) -> Result<Stage, BackendError> {
        if self.cols(op.out) as usize > MAX_NORM_COLS {
            return Err(unsupported(format!("a norm over {} columns", self.cols(op.out))));
        }
        let kernel =
            self.instances.id(norm_instance(self.setting.dtype, norm_mean(op.kind), self.cols(op.out) as usize));
        let params = NormParams {
            out: self.buffer(op.out),
            input: self.buffer(op.input),
            residual: op.add.map_or(0, |residual| self.buffer(residual.buffer())),
            weight: self.vector(op.weight),
            bias: op.bias.map_or(0, |id| self.vector(id)),
            rows: 0,
            cols: self.cols(op.out),
            eps: op.eps,
            weight_offset: offset(op.unit_offset),
            residual_after: u32::from(matches!(op.add, Some(Residual::After(_)))),
            reserved: 0,
        };
        Ok(Stage::Norm { kernel, params, rows: self.rows(op.out) })
    }

    fn linear(&mut self, op: &Linear) -> Result<Stage, BackendError> {
        if op.input == op.out {
            return Err(unsupported("a product whose output is its input"));
        }
        let bias = op.bias.map(|id| match &self.layout.weights[id.0] {
            Placed::Bias(wide, narrow) => (self.arena.at(*wide), self.arena.at(*narrow)),
            Placed::Vector(_) | Placed::Matrix(_) | Placed::Experts(_) => unreachable!("placed by its use"),
        });
        let params = LinearParams {
            input: self.buffer(op.input),
            add: op.add.map_or(0, |id| self.buffer(id)),
            out: self.buffer(op.out),
            k: self.cols(op.input),
            out_stride: self.cols(op.out),
            scale: op.scale,
            ..LinearParams::default()
        };
        let product = self.product(op.weight, &params, bias, self.setting.dtype);
        Ok(Stage::Product { product, rows: self.rows(op.out) })
    }

    fn logits(&mut self, op: &Logits) -> Result<Stage, BackendError> {
        let params = LinearParams {
            input: self.buffer(op.input),
            out: self.buffer(op.out),
            k: self.cols(op.input),
            out_stride: logits_stride(self.program.vocab_size) as u32,
            scale: op.scale,
            softcap: op.softcap.unwrap_or(0.0),
            ..LinearParams::default()
        };
        let product = self.product(op.weight, &params, None, Dtype::F32);
        Ok(Stage::Product { product, rows: self.rows(op.out) })
    }

    /// Lowers a product part by part. `bias` is in f32, and in the element type.
    fn product(&mut self, weight: WeightId, params: &LinearParams, bias: Option<(u64, u64)>, out: Dtype) -> Product {
        let (mut parts, mut column) = (Vec::new(), 0);
        for part in self.matrix(weight).to_vec() {
            let beside = |address: u64, size: usize| match address {
                0 => 0,
                start => start + column * size as u64,
            };
            let (wide, narrow) = bias.unwrap_or((0, 0));
            let wanted = Wanted {
                params: LinearParams {
                    weight: self.arena.at(part.region),
                    bias: beside(wide, size_of::<f32>()),
                    add: beside(params.add, out.bytes()),
                    out: beside(params.out, out.bytes()),
                    n: part.rows as u32,
                    ..*params
                },
                narrow_bias: beside(narrow, self.setting.dtype.bytes()),
                out,
                quant: part.quant.map(|(format, _)| (format, part.planes(self.arena))),
                scales: part.scales.map(|region| self.arena.at(region)),
            };
            parts.push(ProductPart::new(&wanted, &self.setting, &mut self.instances));
            column += part.rows as u64;
        }
        Product::new(parts, &mut self.instances)
    }

    /// Returns the layer of the memory of the step for heads of a shape.
    pub(crate) fn step_layer(&self, heads: &HeadShape) -> CacheLayer {
        let layers = self.program.step_kv().layers;
        self.cache_layer(0, layers.iter().position(|layer| layer == heads).unwrap_or(0))
    }

    pub(crate) fn cache_layer(&self, group: usize, layer: usize) -> CacheLayer {
        let groups = kv_groups(self.program);
        let layers = &groups[group].layers;
        let before: usize = layers[..layer].iter().map(|heads| heads.cache_cols()).sum();
        let keys = (KV_BLOCK * before) as u64;
        let values = match layers[layer].values {
            Values::Own => keys + (KV_BLOCK * layers[layer].kv_cols()) as u64,
            Values::Prefix(_) => keys,
        };
        CacheLayer { group, keys, values }
    }

    /// Returns the scales of a layer's keys and values, which only a cache in e4m3 has.
    pub(crate) fn kv_scales(&self, group: usize, layer: usize) -> KvScales {
        match self.setting.cache {
            CacheType::Activation => KvScales::ONE,
            CacheType::E4m3 => self.program.kv_groups[group].scales(layer),
        }
    }

    /// Returns the addresses of the cosines and sines of a rotary embedding, and of the streams of its pairs.
    pub(crate) fn rope_tables(&self, rope: &Rope) -> (u64, u64, u64) {
        let known = self.layout.ropes.iter().find(|known| known.rope == *rope);
        known.map_or((0, 0, 0), |known| {
            let streams = known.streams.map_or(0, |region| self.arena.at(region));
            (self.arena.at(known.cosine), self.arena.at(known.sine), streams)
        })
    }

    fn qkv_post(&mut self, op: &QkvPost) -> Stage {
        let (cache, scales) = match op.kv {
            KvPlace::Cache { group, layer } => (self.cache_layer(group, layer), self.kv_scales(group, layer)),
            KvPlace::Step => (self.step_layer(&op.heads), KvScales::ONE),
        };
        let kernel = self.instances.id(manifest::qkv_post(self.setting.attention()));
        let (cosine, sine, streams) = op.rope.as_ref().map_or((0, 0, 0), |rope| self.rope_tables(rope));
        let is_whole = |norm: &octavo_ops::QkNorm| self.program.weights[norm.q.0].elements() != op.heads.dim;
        let norm = op.norm.as_ref();
        let params = QkvPostParams {
            q: self.buffer(op.out),
            qkv: self.buffer(op.input),
            q_weight: norm.map_or(0, |norm| self.vector(norm.q)),
            k_weight: norm.map_or(0, |norm| self.vector(norm.k)),
            cosine,
            sine,
            streams,
            q_heads: op.heads.q as u32,
            kv_heads: op.heads.kv as u32,
            head_size: op.heads.dim as u32,
            rotary_dim: op.rope.as_ref().map_or(0, |rope| rope.rotary_dim() as u32),
            rope_interleaved: op.rope.as_ref().map_or(0, |rope| u32::from(rope.style == RopeStyle::GptJ)),
            norm_whole_row: norm.map_or(0, |norm| u32::from(is_whole(norm))),
            eps: norm.map_or(0.0, |norm| norm.eps),
            weight_offset: norm.map_or(0.0, |norm| offset(norm.unit_offset)),
            k_scale: scales.key,
            v_scale: scales.value,
            ..QkvPostParams::default()
        };
        Stage::QkvPost { kernel, params, cache }
    }

    /// Returns the parameters of attention that every kind has.
    pub(crate) fn attention_params(&self, q: BufferId, out: BufferId, heads: HeadShape) -> AttentionParams {
        AttentionParams {
            out: self.buffer(out),
            q: self.buffer(q),
            q_heads: heads.q as u32,
            kv_heads: heads.kv as u32,
            head_size: heads.dim as u32,
            value_size: heads.value_dim() as u32,
            value_scale: 1.0,
            tile_heads: self.prefill_tile().heads,
            ..AttentionParams::default()
        }
    }

    fn attention(&mut self, op: &PagedAttention) -> Stage {
        let (types, scales) = (self.setting.attention(), self.kv_scales(op.group, op.layer));
        let params = AttentionParams {
            window: op.window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
            scale: op.scale * scales.key,
            value_scale: scales.value,
            softcap: op.softcap.unwrap_or(0.0),
            sinks: op.sinks.map_or(0, |id| self.vector(id)),
            ..self.attention_params(op.q, op.out, op.heads)
        };
        let attention = match self.prefill(types, op.heads).zip(self.decode(op.heads)) {
            None => {
                let kernel = self.instances.id(manifest::paged_attention(types, op.heads.dim));
                Attention::Plain { kernel, params }
            }
            // Decode adds up in another order than prefill.
            Some((prefill, _)) if self.setting.batch_invariant => Attention::Tiled { prefill, params },
            Some((prefill, decode)) => {
                let (sums, partial, tickets) = (self.layout.partial.1, self.layout.partial.0, self.layout.partial.2);
                Attention::Planned {
                    decode: self.instances.id(decode.instance),
                    tile: decode.tile,
                    prefill,
                    params: PagedDecodeParams {
                        partial_out: self.arena.at(partial),
                        partial_sums: self.arena.at(sums),
                        tickets: self.arena.at(tickets),
                        attention: params,
                        rounded: RoundedRows::default(),
                    },
                    codes: None,
                }
            }
        };
        Stage::Attention { attention, cache: self.cache_layer(op.group, op.layer) }
    }

    /// Returns the kernel of prefill for these heads, if there is one.
    pub(crate) fn prefill(&mut self, types: AttentionTypes, heads: HeadShape) -> Option<Prefill> {
        let chip = self.setting.chip;
        let (instance, grid) = match heads.values {
            Values::Own => {
                let grid: PrefillGrid = AttentionParams::prefill_grid;
                (manifest::paged_prefill(chip, types, heads.dim)?, grid)
            }
            Values::Prefix(rank) => {
                let grid: PrefillGrid = AttentionParams::latent_prefill_grid;
                (manifest::latent_prefill(chip, types, (rank, heads.dim))?, grid)
            }
        };
        Some(Prefill { kernel: self.instances.id(instance), tile: self.prefill_tile(), grid })
    }

    /// Returns the kernel of decode for these heads, if there is one.
    fn decode(&self, heads: HeadShape) -> Option<manifest::DecodeKernel> {
        let (chip, types) = (self.setting.chip, self.setting.attention());
        match heads.values {
            Values::Own => manifest::paged_decode(chip, types, heads.dim, heads.q / heads.kv),
            Values::Prefix(rank) => manifest::latent_decode(chip, types, (rank, heads.dim)),
        }
    }

    /// Returns the tile of prefill of all layers.
    pub(crate) fn prefill_tile(&self) -> PrefillTile {
        let group = |op: &Op| {
            let heads = match op {
                Op::PagedAttention(op) => op.heads,
                Op::SegmentAttention(op) => op.heads,
                _ => return None,
            };
            // The rows of latent attention are not divided among tiles by heads.
            Some(if heads.values == Values::Own { heads.q / heads.kv } else { 1 })
        };
        manifest::prefill_tile(self.setting.chip, self.program.forward_ops().iter().filter_map(group))
    }
}

/// Returns the kernels' name of an activation.
pub(crate) const fn activation(kind: GluKind) -> manifest::Activation {
    match kind {
        GluKind::Silu => manifest::Activation::Silu,
        GluKind::Gelu => manifest::Activation::Gelu,
        GluKind::GeluTanh => manifest::Activation::GeluTanh,
        GluKind::Tanh => manifest::Activation::Tanh,
        GluKind::ClampedSwiglu { .. } => manifest::Activation::ClampedSwiglu,
    }
}

/// Returns the kernels' name of a norm.
pub(crate) const fn norm_mean(kind: NormKind) -> manifest::NormMean {
    match kind {
        NormKind::Rms => manifest::NormMean::Rms,
        NormKind::Layer => manifest::NormMean::Layer,
    }
}

/// Returns a norm's kernel for rows of `cols` columns.
pub(crate) fn norm_instance(dtype: Dtype, mean: manifest::NormMean, cols: usize) -> manifest::Instance {
    for_cols(manifest::norm(dtype, mean), cols)
}

/// Returns the instance of a norm for rows of `cols` columns, which determine the shared memory. A device need not have the amount
/// for the longest rows.
pub(crate) fn for_cols(norm: manifest::Instance, cols: usize) -> manifest::Instance {
    manifest::Instance { dynamic_shared: NormParams::dynamic_shared(cols), ..norm }
}

/// Returns whether an op reads what a buffer has before them, rather than what one of them has written.
pub(crate) fn is_read<'a>(ops: impl IntoIterator<Item = &'a Op>, buffer: BufferId) -> bool {
    let mut ops = ops.into_iter();
    let next = ops.find(|op| op.inputs().contains(&buffer) || op.outputs().contains(&buffer));
    next.is_some_and(|op| op.inputs().contains(&buffer))
}

/// Returns the offset added to a norm's weight.
fn offset(unit_offset: bool) -> f32 {
    if unit_offset { 1.0 } else { 0.0 }
}
