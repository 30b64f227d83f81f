//! The builder of decoders and of encoders of texts.
//!
//! One residual stream `x[T,H]` runs through the program: each block reads it through a norm, and the block's last
//! `Linear` adds to it in place (the epilogue), so the stream is read and written once per block.

use octavo_ops::{
    Act, BufferId, Embed, EmbedIds, GatherColumns, Glu, HeadShape, InjectMode, InjectRows, KvGroup, KvPlace, KvScales,
    Linear, Logits, NormOp, Op, PagedAttention, Program, ProgramBuilder, ProgramKind, QkNorm, QkvPost, Residual, Rows,
    SegmentAttention, WeightError, WeightId, WeightPart, WeightSource,
};

use super::ModelError;
use super::experts::ExpertScratch;
use super::latent::LatentScratch;
use super::names::{LONG_ROPE_FACTORS, ROPE_FACTORS, Role, SHORT_ROPE_FACTORS};
use crate::checkpoint::{BY_GROUP, Checkpoint, Format, ORDER};
use crate::config::{
    AttentionConfig, InputConfig, LayerConfig, LearnedPositions, MlpConfig, ModelConfig, NormConfig, NormPlaces,
    QkNormWidth,
};

/// Buffers shared by all layers.
pub(super) struct Scratch {
    pub(super) normed: BufferId,
    /// Buffers of attention with a qkv projection, if a layer has it.
    attention: Option<AttentionScratch>,
    /// Buffers of latent attention, if a layer has it.
    pub(super) latent: Option<LatentScratch>,
    /// Buffers of the MLPs, if a layer has one.
    mlp: Option<MlpScratch>,
    pub(super) experts: Option<ExpertScratch>,
    /// Buffers of inputs in the order of a weight's columns, and their numbers of columns.
    ordered: Vec<(usize, BufferId)>,
}

/// Buffers of attention with a qkv projection.
#[derive(Clone, Copy)]
struct AttentionScratch {
    qkv: BufferId,
    q: BufferId,
    attended: BufferId,
}

impl AttentionScratch {
    /// Declares the buffers for the widest of the layers, if there are any.
    fn new(builder: &mut ProgramBuilder, layers: &[LayerConfig]) -> Option<Self> {
        let plain = layers.iter().map(|layer| &layer.attention).filter(|attention| attention.latent.is_none());
        let heads = plain.map(|attention| attention.heads);
        let qkv = heads.clone().map(HeadShape::qkv_cols).max()?;
        let q = heads.map(HeadShape::q_cols).max()?;
        let mut buffer = |name, cols| builder.buffer(name, Rows::Tokens, cols);
        Some(Self { qkv: buffer("qkv", qkv), q: buffer("q", q), attended: buffer("attended", q) })
    }
}

/// Buffers of an MLP of every token.
#[derive(Clone, Copy)]
pub(super) struct MlpScratch {
    /// Input of the activation: gate and up, or up alone.
    pub(super) gate_up: BufferId,
    pub(super) hidden: BufferId,
}

impl MlpScratch {
    /// Declares the buffers of MLPs with `inner` columns of the activation. `prefix` begins their names.
    pub(super) fn new(builder: &mut ProgramBuilder, prefix: &str, inner: usize, gated: bool) -> Self {
        let (name, cols) = if gated { ("gate_up", 2 * inner) } else { ("up", inner) };
        Self {
            gate_up: builder.buffer(format!("{prefix}{name}"), Rows::Tokens, cols),
            hidden: builder.buffer(format!("{prefix}hidden"), Rows::Tokens, inner),
        }
    }
}

/// The weight and the bias of a norm.
#[derive(Clone, Copy)]
pub(super) struct NormWeights {
    weight: WeightId,
    bias: Option<WeightId>,
}

/// A block of a layer: attention or an MLP.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) layer: usize,
    /// Residual stream `[T,H]`.
    pub(super) x: BufferId,
    norms: NormPlaces,
    /// Factor of what the block adds to the residual stream.
    pub(super) scale: f32,
}

impl Block {
    pub(super) fn label(self, part: &str) -> String {
        format!("layers.{}.{part}", self.layer)
    }
}

/// The last product of a block.
pub(super) struct Projection {
    pub(super) weight: WeightId,
    pub(super) bias: Option<WeightId>,
    pub(super) input: BufferId,
}

/// Emits the ops of a decoder or an encoder of texts and looks up its tensors.
pub(super) struct Decoder<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) builder: ProgramBuilder,
    pub(super) scratch: Scratch,
    /// GGUF's divisors of the rotary frequencies.
    pub(super) rope_factors: Option<Vec<f32>>,
    /// KV group and index within it, by layer.
    pub(super) kv: Vec<(usize, usize)>,
    embedding: Option<WeightId>,
    /// Number of parts of the media cache that the decoder takes: 0 if it takes no images.
    media_parts: usize,
    /// Whether the tokens of an image see each other in both directions.
    spans: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let (name, vocab_size) = (config.family.name(), config.vocab_size);
        let mut builder = match (&config.vectors, config.is_causal()) {
            (None, _) => ProgramBuilder::new(name, vocab_size),
            (Some(_), true) => ProgramBuilder::texts(name, vocab_size, ProgramKind::Embedder),
            (Some(_), false) => ProgramBuilder::texts(name, vocab_size, ProgramKind::Encoder),
        };
        let dense = config.layers.iter().find(|layer| layer.experts.is_none());
        let scratch = Scratch {
            normed: builder.buffer("normed", Rows::Tokens, config.hidden_size),
            attention: AttentionScratch::new(&mut builder, &config.layers),
            latent: LatentScratch::new(&mut builder, &config.layers),
            mlp: dense.map(|layer| MlpScratch::new(&mut builder, "", layer.mlp.intermediate_size, layer.mlp.gated)),
            experts: ExpertScratch::new(&mut builder, config),
            ordered: Vec::new(),
        };
        let kv = if config.is_causal() { kv_groups(&mut builder, checkpoint)? } else { Vec::new() };
        let rope_factors = rope_factors(checkpoint)?;
        Ok(Self { checkpoint, builder, scratch, rope_factors, kv, embedding: None, media_parts: 0, spans: false })
    }

    /// Starts a decoder that takes the outputs of the model's encoder.
    pub(super) fn with_images(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let vision = checkpoint.config().vision.as_ref();
        let media_parts = vision.map_or(0, |vision| 1 + vision.deepstack_layers.len());
        let spans = vision.is_some_and(|vision| vision.seen_whole);
        Ok(Self { media_parts, spans, ..Self::new(checkpoint)? })
    }

    /// Emits the whole decoder.
    pub(super) fn program(mut self) -> Result<Program, ModelError> {
        let x = self.embed()?;
        // The encoder's last output replaces the embeddings of images' tokens; each of its others is added after a layer.
        self.inject(0, InjectMode::Replace, x);
        for (layer, config) in self.config().layers.iter().enumerate() {
            let block = Block { layer, x, norms: config.attention_norms, scale: config.residual_scale };
            match &config.attention.latent {
                Some(latent) => self.latent_attention(block, &config.attention, latent)?,
                None => self.attention(block, &config.attention)?,
            }
            let block = Block { norms: config.mlp_norms, ..block };
            match &config.experts {
                Some(experts) => self.experts(block, experts, &config.mlp)?,
                None => self.mlp(block, &config.mlp)?,
            }
            self.inject(layer + 1, InjectMode::Add, x);
        }
        let fp8_inputs = self.checkpoint.has_fp8_inputs();
        let mut program = self.head(x)?;
        program.fp8_inputs = fp8_inputs;
        Ok(program)
    }

    fn inject(&mut self, part: usize, mode: InjectMode, out: BufferId) {
        if part < self.media_parts {
            let column = part * self.config().hidden_size;
            self.builder.push(Op::InjectRows(InjectRows { out, column, mode }));
        }
    }

    pub(super) fn config(&self) -> &'a ModelConfig {
        self.checkpoint.config()
    }

    /// Starts the residual stream with the embedding rows.
    fn embed(&mut self) -> Result<BufferId, ModelError> {
        let config = self.config();
        let table = self.matrix("embedding", config.hidden_size, &[(Role::Embedding, config.vocab_size)], 0)?;
        self.embedding = Some(table);
        let out = self.builder.buffer("x", Rows::Tokens, config.hidden_size);
        let embed = |builder: &mut ProgramBuilder, table, ids, scale| {
            let add = ids != EmbedIds::Tokens;
            builder.push(Op::Embed(Embed { table, ids, scale, add, out }));
        };
        embed(&mut self.builder, table, EmbedIds::Tokens, config.embedding_scale);
        let InputConfig { positions, token_types, norm } = config.input;
        if let Some(LearnedPositions { rows, offset }) = positions {
            let table = self.matrix("positions", config.hidden_size, &[(Role::Positions, rows)], 0)?;
            embed(&mut self.builder, table, EmbedIds::Positions { offset }, 1.0);
        }
        if token_types > 0 {
            let table = self.matrix("token_types", config.hidden_size, &[(Role::TokenTypes, token_types)], 0)?;
            embed(&mut self.builder, table, EmbedIds::Types, 1.0);
        }
        if norm {
            let weights = self.norm_weights("embedding_norm", Role::EmbeddingNorm, 0)?;
            self.norm(weights, out, None, out);
        }
        Ok(out)
    }

    /// Emits `x += output(attention(qkv(x)))`, with the norms of the block.
    fn attention(&mut self, block: Block, config: &AttentionConfig) -> Result<(), ModelError> {
        let hidden_size = self.config().hidden_size;
        let AttentionConfig { heads, window, scale, softcap, .. } = *config;
        let Some(AttentionScratch { qkv, q, attended }) = self.scratch.attention else {
            unreachable!("declared for a model with such attention")
        };
        let layer = block.layer;

        let input = self.before(block, "attention_norm", Role::AttentionNorm)?;
        let rows: &[_] = match self.config().family.names.fused {
            true => &[(Role::Qkv, heads.qkv_cols())],
            false => &[(Role::Q, heads.q_cols()), (Role::K, heads.kv_cols()), (Role::V, heads.kv_cols())],
        };
        let (weight, input) = self.matrix_of(&block.label("qkv"), input, rows, layer)?;
        let bias = self.bias_if(config.qkv_bias, &block.label("qkv_bias"), rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input, add: None, out: qkv }));

        let norm = config.qk_norm.map(|width| self.qk_norm(layer, heads, width)).transpose()?;
        let rope = config.rope.as_ref().map(|rope| rope.frequencies(self.rope_factors.as_deref()));
        let place = self.kv.get(layer).copied();
        let kv = place.map_or(KvPlace::Step, |(group, layer)| KvPlace::Cache { group, layer });
        self.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm, rope, kv }));
        let sinks =
            config.sinks.then(|| self.vector(&block.label("sinks"), Role::Sinks, layer, heads.q)).transpose()?;
        let out = attended;
        self.builder.push(match place {
            Some((group, layer)) => {
                let spans = self.spans;
                Op::PagedAttention(PagedAttention { q, out, heads, scale, window, spans, softcap, sinks, group, layer })
            }
            None => Op::SegmentAttention(SegmentAttention { q, out, heads, scale, window }),
        });

        let rows = [(Role::Output, hidden_size)];
        let (weight, input) = self.matrix_of(&block.label("output"), attended, &rows, layer)?;
        let bias = self.bias_if(config.output_bias, &block.label("output_bias"), &rows, layer)?;
        self.after(block, Projection { weight, bias, input }, "attention_post_norm", Role::AttentionPostNorm)
    }

    /// Emits `x += down(act(gate(x)) · up(x))`, or `x += down(act(up(x)))` without a gate, with the norms of the block.
    fn mlp(&mut self, block: Block, config: &MlpConfig) -> Result<(), ModelError> {
        let hidden_size = self.config().hidden_size;
        let MlpConfig { intermediate_size, activation, gated, bias } = *config;
        let Some(MlpScratch { gate_up, hidden }) = self.scratch.mlp else {
            unreachable!("declared for a model with an MLP")
        };
        let layer = block.layer;

        let input = self.before(block, "mlp_norm", Role::MlpNorm)?;
        let (name, rows): (_, &[_]) = match (gated, self.config().family.names.fused) {
            (false, _) => ("up", &[(Role::Up, intermediate_size)]),
            (true, true) => ("gate_up", &[(Role::GateUp, 2 * intermediate_size)]),
            (true, false) => ("gate_up", &[(Role::Gate, intermediate_size), (Role::Up, intermediate_size)]),
        };
        let (weight, input) = self.matrix_of(&block.label(name), input, rows, layer)?;
        let biases = self.bias_if(bias, &block.label(&format!("{name}_bias")), rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias: biases, scale: 1.0, input, add: None, out: gate_up }));
        self.builder.push(match gated {
            true => Op::Glu(Glu { kind: activation, input: gate_up, out: hidden }),
            false => Op::Act(Act { kind: activation, input: gate_up, out: hidden }),
        });

        let rows = [(Role::Down, hidden_size)];
        let (weight, input) = self.matrix_of(&block.label("down"), hidden, &rows, layer)?;
        let bias = self.bias_if(bias, &block.label("down_bias"), &rows, layer)?;
        self.after(block, Projection { weight, bias, input }, "mlp_post_norm", Role::MlpPostNorm)
    }

    /// Emits the norm before a block, if there is one. Returns the block's input.
    pub(super) fn before(&mut self, block: Block, label: &str, role: Role) -> Result<BufferId, ModelError> {
        if matches!(block.norms, NormPlaces::None | NormPlaces::After | NormPlaces::Sum) {
            return Ok(block.x);
        }
        let weights = self.norm_weights(&block.label(label), role, block.layer)?;
        self.norm(weights, block.x, None, self.scratch.normed);
        Ok(self.scratch.normed)
    }

    /// Emits the last product of a block, whose output is added to the residual stream, and the norm after it, if there
    /// is one.
    pub(super) fn after(&mut self, block: Block, last: Projection, label: &str, role: Role) -> Result<(), ModelError> {
        let Block { layer, x, norms, scale } = block;
        let Projection { weight, bias, input } = last;
        // The sum goes to the residual stream itself unless a norm follows.
        let normed = self.scratch.normed;
        let (added, out) = match norms {
            NormPlaces::None | NormPlaces::Before => (Some(x), x),
            NormPlaces::After | NormPlaces::Both => (None, normed),
            NormPlaces::Sum => (Some(x), normed),
        };
        self.builder.push(Op::Linear(Linear { weight, bias, scale, input, add: added, out }));
        if out == normed {
            let weights = self.norm_weights(&block.label(label), role, layer)?;
            let residual = if added.is_none() { Some(Residual::After(x)) } else { None };
            self.norm(weights, normed, residual, x);
        }
        Ok(())
    }

    /// Emits the end of the program: the vectors of a model that predicts no tokens. Of others, the final norm for pooled
    /// rows; final norm, logits and sampling for sampled rows.
    fn head(mut self, x: BufferId) -> Result<Program, ModelError> {
        let config = self.config();
        if let Some(vectors) = &config.vectors {
            self.vectors(x, vectors)?;
            return Ok(self.builder.finish()?);
        }
        let final_norm = self.norm_weights("final_norm", Role::FinalNorm, 0)?;
        let gathered = self.builder.buffer("x_pooled", Rows::Pooled, config.hidden_size);
        let embedding = self.builder.buffer("embedding", Rows::Pooled, config.hidden_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.norm(final_norm, gathered, None, embedding);
        let gathered = self.builder.buffer("x_sampled", Rows::Sampled, config.hidden_size);
        let normed = self.builder.buffer("normed_sampled", Rows::Sampled, config.hidden_size);
        let logits = self.builder.buffer("logits", Rows::Sampled, config.vocab_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.norm(final_norm, gathered, None, normed);
        let weight = match self.embedding {
            Some(table) if config.tie_word_embeddings => table,
            _ => self.matrix("head", config.hidden_size, &[(Role::Head, config.vocab_size)], 0)?,
        };
        let (scale, softcap) = (config.logits_scale, config.logits_softcap);
        self.builder.push(Op::Logits(Logits { weight, input: normed, out: logits, scale, softcap }));
        self.builder.push(Op::Sample { logits });
        Ok(self.builder.finish()?)
    }

    pub(super) fn norm(&mut self, weights: NormWeights, input: BufferId, add: Option<Residual>, out: BufferId) {
        let NormConfig { kind, eps, unit_offset, .. } = self.config().norm;
        let NormWeights { weight, bias } = weights;
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input, add, out }));
    }

    /// Declares the weight and the bias of a norm of the residual stream.
    pub(super) fn norm_weights(&mut self, label: &str, role: Role, layer: usize) -> Result<NormWeights, ModelError> {
        let (names, format) = (&self.config().family.names, self.checkpoint.format());
        let (weight, bias) = (names.weight(format, role, layer), names.bias(format, role, layer));
        self.norm_of(label, [weight, bias], self.config().norm.bias)
    }

    /// Declares the weight and the bias of a norm by the names of their tensors.
    pub(super) fn norm_of(
        &mut self,
        label: &str,
        [weight, bias]: [String; 2],
        has_bias: bool,
    ) -> Result<NormWeights, ModelError> {
        let cols = self.config().hidden_size;
        let mut vector = |label: &str, tensor| {
            let part = part(self.checkpoint, tensor, 1, &[cols])?;
            Ok::<_, ModelError>(self.builder.weight(label, cols, vec![part]))
        };
        let weight = vector(label, weight)?;
        let bias = has_bias.then(|| vector(&format!("{label}_bias"), bias)).transpose()?;
        Ok(NormWeights { weight, bias })
    }

    fn qk_norm(&mut self, layer: usize, heads: HeadShape, width: QkNormWidth) -> Result<QkNorm, ModelError> {
        let NormConfig { eps, unit_offset, .. } = self.config().norm;
        let (q, k) = match width {
            QkNormWidth::Head => (heads.dim, heads.dim),
            QkNormWidth::Whole => (heads.q_cols(), heads.kv_cols()),
        };
        let q = self.vector(&format!("layers.{layer}.q_norm"), Role::QNorm, layer, q)?;
        let k = self.vector(&format!("layers.{layer}.k_norm"), Role::KNorm, layer, k)?;
        Ok(QkNorm { q, k, eps, unit_offset })
    }

    /// Declares a weight `[sum of rows, cols]` with one tensor per part.
    pub(super) fn matrix(
        &mut self,
        label: &str,
        cols: usize,
        parts: &[(Role, usize)],
        layer: usize,
    ) -> Result<WeightId, ModelError> {
        let part_of =
            |&(role, rows): &(Role, usize)| part(self.checkpoint, self.weight_name(role, layer), rows, &[rows, cols]);
        let parts = parts.iter().map(part_of).collect::<Result<_, _>>()?;
        Ok(self.builder.weight(label, cols, parts))
    }

    /// Declares the weight of a product. If the columns of all its parts are kept in the same order of their groups, brings the
    /// input into this order. Returns the weight and its input.
    fn matrix_of(
        &mut self,
        label: &str,
        input: BufferId,
        parts: &[(Role, usize)],
        layer: usize,
    ) -> Result<(WeightId, BufferId), ModelError> {
        let cols = self.builder.buffer_cols(input);
        let names: Vec<_> = parts.iter().map(|&(role, _)| self.weight_name(role, layer)).collect();
        let orders = names.iter().map(|name| self.checkpoint.column_order(name));
        let orders = orders.collect::<Result<Vec<_>, _>>()?;
        let is_shared = orders.windows(2).all(|pair| pair[0] == pair[1]);
        let (Some(Some(_)), Some(name), true) = (orders.first(), names.first(), is_shared) else {
            return Ok((self.matrix(label, cols, parts, layer)?, input));
        };
        let order = part(self.checkpoint, format!("{name}{ORDER}"), 1, &[cols])?;
        let order = self.builder.weight(format!("{label}_order"), cols, vec![order]);
        let out = self.ordered(cols);
        self.builder.push(Op::GatherColumns(GatherColumns { order, input, out }));
        let by_group = |(name, &(_, rows)): (&String, &(Role, usize))| {
            part(self.checkpoint, format!("{name}{BY_GROUP}"), rows, &[rows, cols])
        };
        let parts = names.iter().zip(parts).map(by_group).collect::<Result<_, _>>()?;
        Ok((self.builder.weight(label, cols, parts), out))
    }

    /// Returns the buffer of inputs in another order, which all layers share.
    fn ordered(&mut self, cols: usize) -> BufferId {
        let known = self.scratch.ordered.iter().find(|(known, _)| *known == cols);
        known.map(|(_, buffer)| *buffer).unwrap_or_else(|| {
            let buffer = self.builder.buffer(format!("ordered_{cols}"), Rows::Tokens, cols);
            self.scratch.ordered.push((cols, buffer));
            buffer
        })
    }

    /// Declares a vector of `cols` elements as one row.
    pub(super) fn vector(
        &mut self,
        label: &str,
        role: Role,
        layer: usize,
        cols: usize,
    ) -> Result<WeightId, ModelError> {
        let part = part(self.checkpoint, self.weight_name(role, layer), 1, &[cols])?;
        Ok(self.builder.weight(label, cols, vec![part]))
    }

    /// Declares the biases of a (fused) weight, one element per row, if the model has them.
    pub(super) fn bias_if(
        &mut self,
        present: bool,
        label: &str,
        parts: &[(Role, usize)],
        layer: usize,
    ) -> Result<Option<WeightId>, ModelError> {
        if !present {
            return Ok(None);
        }
        let part_of = |&(role, rows): &(Role, usize)| part(self.checkpoint, self.bias_name(role, layer), rows, &[rows]);
        let parts = parts.iter().map(part_of).collect::<Result<_, _>>()?;
        Ok(Some(self.builder.weight(label, 1, parts)))
    }

    pub(super) fn weight_name(&self, role: Role, layer: usize) -> String {
        self.config().family.names.weight(self.checkpoint.format(), role, layer)
    }

    pub(super) fn bias_name(&self, role: Role, layer: usize) -> String {
        self.config().family.names.bias(self.checkpoint.format(), role, layer)
    }
}

/// Returns a tensor of the checkpoint as `rows` rows of a weight, or an error if it has another shape.
pub(super) fn part(
    checkpoint: &Checkpoint,
    tensor: String,
    rows: usize,
    expected: &[usize],
) -> Result<WeightPart, ModelError> {
    let (storage, found) = checkpoint.describe(&tensor, expected)?;
    if found != expected {
        return Err(ModelError::Shape { name: tensor, found, expected: expected.to_vec() });
    }
    Ok(WeightPart { tensor, rows, storage, slab: None })
}

/// Declares the KV groups: layers with the same window. Returns group and index within it, by layer.
///
/// The groups share blocks of one size. Layers with a window that are many times as many as the others, or as few, are
/// therefore divided into groups of the others' size.
fn kv_groups(builder: &mut ProgramBuilder, checkpoint: &Checkpoint) -> Result<Vec<(usize, usize)>, ModelError> {
    let layers = &checkpoint.config().layers;
    let mut counts: Vec<(Option<usize>, usize)> = Vec::new();
    for window in layers.iter().map(|layer| layer.attention.window) {
        match counts.iter_mut().find(|(known, _)| *known == window) {
            Some((_, count)) => *count += 1,
            None => counts.push((window, 1)),
        }
    }
    let size = layers_of_a_group(counts.iter().map(|(_, count)| *count));
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut place = Vec::with_capacity(layers.len());
    for (layer, &AttentionConfig { heads, window, .. }) in layers.iter().map(|layer| &layer.attention).enumerate() {
        let has_room = |group: &KvGroup| group.window == window && group.layers.len() < size;
        let group = groups.iter().position(has_room).unwrap_or_else(|| {
            groups.push(KvGroup { layers: Vec::new(), scales: Vec::new(), window });
            groups.len() - 1
        });
        place.push((group, groups[group].layers.len()));
        groups[group].layers.push(heads);
        groups[group].scales.push(checkpoint.kv_scales(layer, heads.values)?);
    }
    for mut group in groups {
        if group.scales.iter().all(|scales| *scales == KvScales::ONE) {
            group.scales.clear();
        }
        builder.kv_group(group);
    }
    Ok(place)
}

/// Returns the number of layers of a KV group, if there are these numbers of layers with each window. It makes the fewest
/// groups of which those of no window waste more than a sixth of the memory of its layers, and no larger ones than that
/// takes.
fn layers_of_a_group(counts: impl Iterator<Item = usize> + Clone) -> usize {
    let wastes = |count: usize, size: usize| 6 * (count.next_multiple_of(size) - count) > count;
    let fits = |&size: &usize| !counts.clone().any(|count| wastes(count, size));
    let largest = (1..=counts.clone().max().unwrap_or(1)).rev().find(fits).unwrap_or(1);
    let groups = |size: usize| counts.clone().map(|count| count.div_ceil(size)).sum::<usize>();
    (1..=largest).find(|&size| groups(size) == groups(largest)).unwrap_or(largest)
}

/// Reads the divisors of the rotary frequencies that a GGUF file has in place of a scaling scheme.
fn rope_factors(checkpoint: &Checkpoint) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(rope) = checkpoint.config().rope() else { return Ok(None) };
    let name = match rope.is_long() {
        None => ROPE_FACTORS,
        Some(true) => LONG_ROPE_FACTORS,
        Some(false) => SHORT_ROPE_FACTORS,
    };
    if checkpoint.format() != Format::Gguf || !checkpoint.has_tensor(name) {
        return Ok(None);
    }
    let tensor = checkpoint.tensor(name)?;
    let expected = vec![rope.rotary_dim / 2];
    if tensor.shape != expected {
        return Err(ModelError::Shape { name: name.into(), found: tensor.shape, expected });
    }
    let invalid = |reason: &str| WeightError::Invalid { name: name.into(), reason: reason.into() };
    if tensor.storage != octavo_ops::StorageType::F32 {
        return Err(invalid("it is not F32").into());
    }
    let words = tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let factors: Vec<f32> = words.collect();
    match factors.iter().all(|f| f.is_finite() && *f > 0.0) {
        true => Ok(Some(factors)),
        false => Err(invalid("its values must be above 0").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_groups_are_large_and_waste_little() {
        let of = |counts: &[usize]| layers_of_a_group(counts.iter().copied());
        assert_eq!([of(&[]), of(&[1]), of(&[28]), of(&[13, 13])], [1, 1, 28, 13]);
        // Gemma 3: 270M, 1B, 4B, 12B and 27B.
        let gemma = [[15, 3], [22, 4], [29, 5], [40, 8], [52, 10]];
        assert_eq!(gemma.map(|counts| of(&counts)), [3, 4, 5, 8, 11]);
        assert_eq!([of(&[3, 25]), of(&[1, 25])], [3, 1], "groups of the window alone would waste too much");
    }
}
