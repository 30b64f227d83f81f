//! Random models.

use std::borrow::Cow;
use std::collections::HashMap;

use super::{TestRng, TinyExperts, TinyLatent};
use crate::{
    BufferId, Embed, EmbedIds, GatherColumns, Glu, GluKind, HeadShape, InjectMode, InjectRows, KvGroup, KvPlace,
    KvScales, Linear, Logits, NormKind, NormOp, Op, PagedAttention, Program, ProgramBuilder, ProgramError, QkNorm,
    QkvPost, Residual, Rope, Rows, StorageType, TensorData, WeightError, WeightId, WeightPart, WeightSource,
};

/// Range over which q and k are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormWidth {
    /// Each head separately.
    Head,
    /// The whole row.
    Row,
}

/// Places of the norms of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before each block, fused with the addition of the block before it (Llama).
    Pre,
    /// After each block, before its output is added (OLMo 2).
    Post,
    /// Before and after each block (Gemma).
    Sandwich,
}

/// Factors of a random model, all 1 by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Factor of embeddings.
    pub embedding: f32,
    /// Factor of attention scores, beside 1/√D.
    pub attention: f32,
    /// Factor of the output of each block.
    pub residual: f32,
    /// Factor of logits.
    pub logits: f32,
}

impl Default for Scales {
    fn default() -> Self {
        Self { embedding: 1.0, attention: 1.0, residual: 1.0, logits: 1.0 }
    }
}

/// Shape of a random decoder. Every field is a feature that some architecture has.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyModel {
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Number of columns of the gated activation.
    pub inner: usize,
    /// Head shape of every layer.
    pub heads: HeadShape,
    /// KV group of each layer. The length is the number of layers.
    pub layers: Vec<usize>,
    /// Window of each KV group.
    pub windows: Vec<Option<usize>>,
    /// Latent attention in the place of that with a qkv projection. The head shape and the rotary embedding are then
    /// those of [`TinyLatent::model`].
    pub latent: Option<TinyLatent>,
    /// Rotary embedding.
    pub rope: Option<Rope>,
    /// Norm of q and k.
    pub qk_norm: Option<QkNormWidth>,
    /// Kind of every norm.
    pub norm: NormKind,
    /// Places of the norms of a layer.
    pub placement: NormPlacement,
    /// Whether norms multiply by `1 + w`.
    pub unit_offset: bool,
    /// Whether the projections have biases.
    pub biases: bool,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// Activation.
    pub glu: GluKind,
    /// Experts in the place of the MLP of every layer.
    pub experts: Option<TinyExperts>,
    /// Whether attention has sinks.
    pub sinks: bool,
    /// Whether the tokens of a span see each other, in the spans of [`PagedBatches`](super::PagedBatches).
    pub spans: bool,
    /// Cap of attention scores.
    pub attention_softcap: Option<f32>,
    /// Cap of logits.
    pub logits_softcap: Option<f32>,
    /// Factors.
    pub scales: Scales,
    /// Scales of the keys and values of every layer.
    pub kv_scales: KvScales,
    /// Number of parts of H columns of the media cache that the model takes: the first replaces embeddings, each other
    /// one is added after a layer. There are at most as many layers as these.
    pub media: usize,
    /// Whether the projections have their columns in another order than their inputs.
    pub ordered: bool,
    /// Storage type of matrices whose rows are whole blocks of it. All other weights are F32. The model has a reference
    /// only with F32.
    pub storage: StorageType,
    /// Random seed of the weights.
    pub seed: u64,
}

impl Default for TinyModel {
    /// Returns a two-layer Llama.
    fn default() -> Self {
        let rope = Rope {
            style: crate::RopeStyle::NeoX,
            inv_freq: vec![1.0, 0.1, 0.01, 0.001],
            magnitude: 1.0,
            streams: vec![],
        };
        Self {
            vocab_size: 50,
            hidden: 24,
            inner: 40,
            heads: HeadShape::new(4, 2, 8),
            layers: vec![0, 0],
            windows: vec![None],
            latent: None,
            rope: Some(rope),
            qk_norm: None,
            norm: NormKind::Rms,
            placement: NormPlacement::Pre,
            unit_offset: false,
            biases: false,
            tied: true,
            glu: GluKind::Silu,
            experts: None,
            sinks: false,
            spans: false,
            attention_softcap: None,
            logits_softcap: None,
            scales: Scales::default(),
            kv_scales: KvScales::ONE,
            media: 0,
            ordered: false,
            storage: StorageType::F32,
            seed: 1,
        }
    }
}

impl TinyModel {
    /// Returns a model whose shapes fit every storage type: rows of whole super-blocks, in odd numbers.
    pub fn of_blocks(storage: StorageType) -> Self {
        let heads = HeadShape::new(4, 2, 64);
        Self { vocab_size: 333, hidden: 256, inner: 512, heads, storage, ..Self::default() }
    }

    /// Returns the program and its weights.
    pub fn build(&self) -> Result<(Program, MemoryWeights), ProgramError> {
        Build::new(self).finish()
    }
}

/// Tensors of a checkpoint in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryWeights {
    /// Tensors by name.
    pub tensors: HashMap<String, TensorData<'static>>,
}

impl MemoryWeights {
    /// Adds an F32 tensor.
    pub fn insert(&mut self, name: &str, shape: Vec<usize>, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensors.insert(name.into(), TensorData { storage: StorageType::F32, shape, bytes: Cow::Owned(bytes) });
    }
}

impl WeightSource for MemoryWeights {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        let tensor = self.tensors.get(name).ok_or_else(|| WeightError::Missing(name.into()))?;
        Ok(TensorData { bytes: Cow::Borrowed(&tensor.bytes), shape: tensor.shape.clone(), ..*tensor })
    }
}

pub(super) struct Build<'a> {
    pub(super) model: &'a TinyModel,
    pub(super) builder: ProgramBuilder,
    pub(super) weights: MemoryWeights,
    rng: TestRng,
}

impl<'a> Build<'a> {
    fn new(model: &'a TinyModel) -> Self {
        Self::with(model, ProgramBuilder::new("tiny", model.vocab_size))
    }

    /// Starts any program with the sizes and options of a model.
    pub(super) fn with(model: &'a TinyModel, builder: ProgramBuilder) -> Self {
        Self { model, builder, weights: MemoryWeights::default(), rng: TestRng(model.seed) }
    }

    fn finish(mut self) -> Result<(Program, MemoryWeights), ProgramError> {
        let m = self.model;
        for (group, &window) in m.windows.iter().enumerate() {
            let count = m.layers.iter().filter(|g| **g == group).count();
            self.builder.kv_group(KvGroup { layers: vec![m.heads; count], scales: vec![m.kv_scales; count], window });
        }
        let x = self.builder.buffer("x", Rows::Tokens, m.hidden);
        let y = self.builder.buffer("y", Rows::Tokens, m.hidden);
        let table = self.matrix("embed", &[m.vocab_size], m.hidden, 1.0);
        self.builder.push(Op::Embed(Embed {
            table,
            ids: EmbedIds::Tokens,
            scale: m.scales.embedding,
            add: false,
            out: x,
        }));
        self.inject(0, InjectMode::Replace, x);
        for (index, &group) in m.layers.iter().enumerate() {
            let input = self.block_input(&format!("{index}.in"), x, y, index > 0);
            match &m.latent {
                Some(latent) => self.latent_attention(index, group, latent, input, y),
                None => self.attention(index, group, input, y),
            }
            self.block_output(&format!("{index}.attended"), y, x);
            let input = self.block_input(&format!("{index}.mid"), x, y, true);
            match &m.experts {
                Some(experts) => self.experts(index, experts, input, y),
                None => self.feed_forward(index, input, y),
            }
            self.block_output(&format!("{index}.fed"), y, x);
            self.inject(index + 1, InjectMode::Add, x);
        }
        self.head(x, y, table);
        self.done()
    }

    /// Returns the program and its weights.
    pub(super) fn done(self) -> Result<(Program, MemoryWeights), ProgramError> {
        Ok((self.builder.finish()?, self.weights))
    }

    /// Appends the injection of a part of the media cache, if the model takes it.
    fn inject(&mut self, part: usize, mode: InjectMode, out: BufferId) {
        if part < self.model.media {
            self.builder.push(Op::InjectRows(InjectRows { out, column: part * self.model.hidden, mode }));
        }
    }

    /// Appends the norm before a block, whose input it returns. `x` is the residual stream; `y` has the output of the
    /// block before it, if `follows`.
    fn block_input(&mut self, name: &str, x: BufferId, y: BufferId, follows: bool) -> BufferId {
        match self.model.placement {
            NormPlacement::Pre if follows => self.norm(name, y, Some(Residual::Before(x)), y),
            NormPlacement::Pre | NormPlacement::Sandwich => self.norm(name, x, None, y),
            NormPlacement::Post => return x,
        }
        y
    }

    /// Appends the norm after a block, if the model has one. It adds the block's output `y` to the residual stream.
    fn block_output(&mut self, name: &str, y: BufferId, x: BufferId) {
        if self.model.placement != NormPlacement::Pre {
            self.norm(name, y, Some(Residual::After(x)), x);
        }
    }

    /// Appends the attention of a layer.
    fn attention(&mut self, index: usize, group: usize, x: BufferId, y: BufferId) {
        let m = self.model;
        let heads = m.heads;
        let layer = self.layer_of(index, group);
        let qkv = self.builder.buffer(format!("qkv.{index}"), Rows::Tokens, heads.qkv_cols());
        let q = self.builder.buffer(format!("q.{index}"), Rows::Tokens, heads.q_cols());
        let parts = [heads.q_cols(), heads.kv_cols(), heads.kv_cols()];
        let input = self.in_order(&format!("{index}.qkv"), x);
        self.linear(&format!("{index}.qkv"), &parts, input, None, qkv);
        let norm = m.qk_norm.map(|width| {
            let [q, k] = match width {
                QkNormWidth::Head => [heads.dim; 2],
                QkNormWidth::Row => [heads.q_cols(), heads.kv_cols()],
            };
            let [q, k] = [("q_norm", q), ("k_norm", k)].map(|(name, n)| self.vector(&format!("{index}.{name}"), n));
            QkNorm { q, k, eps: 1e-6, unit_offset: m.unit_offset }
        });
        let rope = m.rope.clone();
        let kv = KvPlace::Cache { group, layer };
        self.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm, rope, kv }));
        let o = self.attend(index, group, q);
        self.block_end(&format!("{index}.out"), o, None, y);
    }

    /// Returns the index of a layer within its KV group.
    pub(super) fn layer_of(&self, index: usize, group: usize) -> usize {
        self.model.layers[..index].iter().filter(|g| **g == group).count()
    }

    /// Appends the attention of queries to the cache. Returns its output.
    pub(super) fn attend(&mut self, index: usize, group: usize, q: BufferId) -> BufferId {
        let m = self.model;
        let (heads, layer) = (m.heads, self.layer_of(index, group));
        let out = self.builder.buffer(format!("o.{index}"), Rows::Tokens, heads.out_cols());
        let sinks = m.sinks.then(|| self.vector_within(&format!("{index}.sinks"), heads.q, 0.0, 2.0));
        self.builder.push(Op::PagedAttention(PagedAttention {
            q,
            out,
            heads,
            scale: m.scales.attention / (heads.dim as f32).sqrt(),
            window: m.windows[group],
            spans: m.spans,
            softcap: m.attention_softcap,
            sinks,
            group,
            layer,
        }));
        out
    }

    fn feed_forward(&mut self, index: usize, x: BufferId, y: BufferId) {
        let m = self.model;
        let gate_up = self.builder.buffer(format!("gate_up.{index}"), Rows::Tokens, 2 * m.inner);
        let h = self.builder.buffer(format!("h.{index}"), Rows::Tokens, m.inner);
        self.linear(&format!("{index}.gate_up"), &[m.inner, m.inner], x, None, gate_up);
        self.builder.push(Op::Glu(Glu { kind: m.glu, input: gate_up, out: h }));
        self.block_end(&format!("{index}.down"), h, None, y);
    }

    fn head(&mut self, x: BufferId, y: BufferId, table: WeightId) {
        let m = self.model;
        if m.placement != NormPlacement::Pre {
            // The sum leaves the residual stream, so that this form is tested too.
            self.norm("sum", y, Some(Residual::After(x)), y);
        }
        // The last addition uses a product's epilogue, so that this form is tested too.
        self.block_end("last", y, Some(x), x);
        let norm = self.norm_weights("final", m.hidden);
        let pooled = self.builder.buffer("pooled", Rows::Pooled, m.hidden);
        self.builder.push(Op::GatherRows { input: x, out: pooled });
        self.push_norm(norm, pooled, None, pooled);
        let last = self.builder.buffer("last", Rows::Sampled, m.hidden);
        let logits = self.builder.buffer("logits", Rows::Sampled, m.vocab_size);
        self.builder.push(Op::GatherRows { input: x, out: last });
        self.push_norm(norm, last, None, last);
        let weight = if m.tied { table } else { self.matrix("head", &[m.vocab_size], m.hidden, 1.0) };
        let (scale, softcap) = (m.scales.logits, m.logits_softcap);
        self.builder.push(Op::Logits(Logits { weight, input: last, out: logits, scale, softcap }));
        self.builder.push(Op::Sample { logits });
    }

    pub(super) fn norm(&mut self, name: &str, input: BufferId, add: Option<Residual>, out: BufferId) {
        let weights = self.norm_weights(name, self.cols(input));
        self.push_norm(weights, input, add, out);
    }

    /// Declares the weight and bias of a norm.
    fn norm_weights(&mut self, name: &str, cols: usize) -> (WeightId, Option<WeightId>) {
        let weight = self.vector(&format!("{name}.norm"), cols);
        let bias = match self.model.norm {
            NormKind::Layer => Some(self.vector(&format!("{name}.norm.bias"), cols)),
            NormKind::Rms => None,
        };
        (weight, bias)
    }

    fn push_norm(
        &mut self,
        (weight, bias): (WeightId, Option<WeightId>),
        input: BufferId,
        add: Option<Residual>,
        out: BufferId,
    ) {
        let (kind, unit_offset) = (self.model.norm, self.model.unit_offset);
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps: 1e-5, unit_offset, input, add, out }));
    }

    pub(super) fn linear(
        &mut self,
        name: &str,
        parts: &[usize],
        input: BufferId,
        add: Option<BufferId>,
        out: BufferId,
    ) {
        let (weight, bias) = self.product_weights(name, parts, self.cols(input));
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input, add, out }));
    }

    /// Emits the last product of a block, whose output the model scales.
    pub(super) fn block_end(&mut self, name: &str, input: BufferId, add: Option<BufferId>, out: BufferId) {
        let input = self.in_order(name, input);
        let (weight, bias) = self.product_weights(name, &[self.model.hidden], self.cols(input));
        let scale = self.model.scales.residual;
        self.builder.push(Op::Linear(Linear { weight, bias, scale, input, add, out }));
    }

    /// Brings a buffer of all tokens into the order of the columns of a product, if the model has one.
    fn in_order(&mut self, name: &str, input: BufferId) -> BufferId {
        if !self.model.ordered {
            return input;
        }
        let (name, cols) = (format!("{name}.order"), self.cols(input));
        let mut columns: Vec<f32> = (0..cols).map(|column| column as f32).collect();
        (1..cols).for_each(|at| columns.swap(at, self.rng.below(at + 1)));
        self.weights.insert(&name, vec![cols], &columns);
        let part = WeightPart { tensor: name.clone(), rows: 1, storage: StorageType::F32, slab: None };
        let order = self.builder.weight(&name, cols, vec![part]);
        let out = self.builder.buffer(name, Rows::Tokens, cols);
        self.builder.push(Op::GatherColumns(GatherColumns { order, input, out }));
        out
    }

    /// Declares the weight and bias of a product.
    fn product_weights(&mut self, name: &str, parts: &[usize], cols: usize) -> (WeightId, Option<WeightId>) {
        let weight = self.matrix(name, parts, cols, 1.5);
        // A fused bias has one column and the parts of its weight.
        let bias = self.model.biases.then(|| self.matrix(&format!("{name}.bias"), parts, 1, 0.3));
        (weight, bias)
    }

    pub(super) fn cols(&self, id: BufferId) -> usize {
        self.builder.buffer_cols(id)
    }

    /// Declares a weight of row parts with elements within `gain / sqrt(cols)`.
    pub(super) fn matrix(&mut self, name: &str, parts: &[usize], cols: usize, gain: f32) -> WeightId {
        let parts = self.parts(name, parts, cols, gain);
        self.builder.weight(name, cols, parts)
    }

    /// Generates the parts of such a weight.
    pub(super) fn parts(&mut self, name: &str, parts: &[usize], cols: usize, gain: f32) -> Vec<WeightPart> {
        let scale = gain / (cols as f32).sqrt();
        let fits = cols > 1 && self.model.storage.bytes_for(cols).is_some();
        let storage = if fits { self.model.storage } else { StorageType::F32 };
        let parts = parts.iter().enumerate().map(|(i, &rows)| {
            let tensor = format!("{name}.{i}");
            let shape = if cols == 1 { vec![rows] } else { vec![rows, cols] };
            let bytes = Cow::Owned(random_blocks(storage, rows * cols, scale, &mut self.rng));
            self.weights.tensors.insert(tensor.clone(), TensorData { storage, shape, bytes });
            WeightPart { tensor, rows, storage, slab: None }
        });
        parts.collect()
    }

    /// Declares a vector of elements around 1.
    pub(super) fn vector(&mut self, name: &str, len: usize) -> WeightId {
        self.vector_within(name, len, 1.0, 0.3)
    }

    /// Declares a vector of elements around `centre`, at most `spread` away from it.
    pub(super) fn vector_within(&mut self, name: &str, len: usize, centre: f32, spread: f32) -> WeightId {
        let values: Vec<f32> = (0..len).map(|_| centre + spread * self.rng.signed()).collect();
        self.weights.insert(name, vec![len], &values);
        let part = WeightPart { tensor: name.into(), rows: 1, storage: StorageType::F32, slab: None };
        self.builder.weight(name, len, vec![part])
    }
}

/// Generates random elements in whole blocks of a storage type, most of them within `scale` of zero.
///
/// # Panics
/// Panics if the elements do not fill whole blocks.
pub fn random_blocks(storage: StorageType, elements: usize, scale: f32, rng: &mut TestRng) -> Vec<u8> {
    let len = storage.bytes_for(elements).expect("whole blocks");
    let element = |rng: &mut TestRng| rng.signed() * scale;
    match storage {
        StorageType::F32 => (0..elements).flat_map(|_| element(rng).to_le_bytes()).collect(),
        StorageType::BF16 => {
            (0..elements).flat_map(|_| ((element(rng).to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        StorageType::F16 => (0..elements).flat_map(|_| half_bits(element(rng)).to_le_bytes()).collect(),
        quantised => {
            let mut bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
            for block in bytes.chunks_mut(quantised.block_bytes()) {
                for (at, share) in scales_of(quantised) {
                    let value = half_bits(scale * share * (0.75 + 0.25 * rng.signed()));
                    block[*at..*at + 2].copy_from_slice(&value.to_le_bytes());
                }
                set_other_scale(quantised, block, scale, rng);
            }
            if quantised == StorageType::F8E4M3 {
                share_scales(&mut bytes, quantised.block_bytes());
            }
            bytes
        }
    }
}

/// Gives four blocks at a time the same scale: those of checkpoints in FP8 are of 128 inputs or more.
fn share_scales(blocks: &mut [u8], bytes: usize) {
    for blocks in blocks.chunks_mut(4 * bytes) {
        let (first, others) = blocks.split_at_mut(bytes);
        others.chunks_mut(bytes).for_each(|block| block[..4].copy_from_slice(&first[..4]));
    }
}

/// Writes the scale of a block whose scale is no f16, and the zero point of one that has any.
fn set_other_scale(storage: StorageType, block: &mut [u8], scale: f32, rng: &mut TestRng) {
    let mut put = |block: &mut [u8], share: f32| {
        let value = scale * share * (0.75 + 0.25 * rng.signed());
        block[..4].copy_from_slice(&value.to_le_bytes());
    };
    match storage {
        // The largest code is 6.
        StorageType::Mxfp4 => block[0] = (127.0 + (scale / 6.0).log2().floor()) as u8 - rng.below(3) as u8,
        StorageType::Nvfp4 => {
            // The largest scale is 448. All blocks of a matrix have the same factor.
            block[..4].copy_from_slice(&(scale / (6.0 * 448.0)).to_le_bytes());
            block[4..6].iter_mut().for_each(|code| *code = 0x60 + *code % 0x1f);
        }
        StorageType::Int4 => block[2] %= 16,
        StorageType::Int8 => put(block, 1.0 / 128.0),
        StorageType::Nf4 | StorageType::Fp4 => put(block, 1.0),
        StorageType::F8E4M3 => {
            put(block, 1.0 / 448.0);
            // The codes 0x7f and 0xff are not numbers.
            block[4..].iter_mut().for_each(|code| *code -= u8::from(*code & 0x7f == 0x7f));
        }
        _ => {}
    }
}

/// Returns the offsets of a block's f16 scales and minima, and the factor of the elements' size that keeps each small
/// enough.
const fn scales_of(storage: StorageType) -> &'static [(usize, f32)] {
    match storage {
        StorageType::F32 | StorageType::F16 | StorageType::BF16 | StorageType::Mxfp4 | StorageType::Nvfp4 => &[],
        StorageType::Int8 | StorageType::F8E4M3 | StorageType::Nf4 | StorageType::Fp4 => &[],
        StorageType::Int4 => &[(0, 1.0 / 16.0)],
        StorageType::Iq4Nl => &[(0, 1.0 / 128.0)],
        StorageType::Iq4Xs => &[(0, 1.0 / 4096.0)],
        StorageType::Q4_0 => &[(0, 1.0 / 8.0)],
        StorageType::Q4_1 => &[(0, 1.0 / 8.0), (2, -1.0)],
        StorageType::Q5_0 => &[(0, 1.0 / 16.0)],
        StorageType::Q5_1 => &[(0, 1.0 / 16.0), (2, -1.0)],
        StorageType::Q8_0 => &[(0, 1.0 / 128.0)],
        StorageType::Q2K => &[(80, 1.0 / 16.0), (82, 1.0 / 16.0)],
        StorageType::Q3K => &[(108, 1.0 / 96.0)],
        StorageType::Q4K => &[(0, 1.0 / 320.0), (2, 1.0 / 64.0)],
        StorageType::Q5K => &[(0, 1.0 / 640.0), (2, 1.0 / 64.0)],
        StorageType::Q6K => &[(208, 1.0 / 2048.0)],
    }
}

/// Returns the bits of a number truncated to f16, or 0 if it is too small for a normal f16.
fn half_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, exponent) = ((bits >> 16 & 0x8000) as u16, (bits >> 23 & 0xff) as i32 - 127 + 15);
    if exponent <= 0 { sign } else { sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16 }
}
