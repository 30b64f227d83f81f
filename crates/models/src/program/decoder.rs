//! The builder of decoders.
//!
//! One residual stream `x[T,H]` runs through the program: each block reads it through a norm, and the block's last
//! `Linear` adds to it in place (the epilogue), so the stream is read and written once per block.

use octavo_ops::{
    BufferId, Glu, HeadShape, InjectMode, InjectRows, KvGroup, KvPlace, Linear, Logits, NormKind, NormOp, Op,
    PagedAttention, Program, ProgramBuilder, QkNorm, QkvPost, Residual, Rows, WeightError, WeightId, WeightPart,
    WeightSource,
};

use super::ModelError;
use super::experts::ExpertScratch;
use super::names::{LONG_ROPE_FACTORS, ROPE_FACTORS, Role, SHORT_ROPE_FACTORS};
use crate::checkpoint::{Checkpoint, Format};
use crate::config::{AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, NormPlaces, QkNormWidth};

/// Buffers shared by all layers.
pub(super) struct Scratch {
    normed: BufferId,
    qkv: BufferId,
    q: BufferId,
    attended: BufferId,
    /// Buffers of the MLPs, if a layer has one.
    mlp: Option<MlpScratch>,
    pub(super) experts: Option<ExpertScratch>,
}

/// Buffers of a gated MLP of every token.
#[derive(Clone, Copy)]
pub(super) struct MlpScratch {
    pub(super) gate_up: BufferId,
    pub(super) hidden: BufferId,
}

impl MlpScratch {
    /// Declares the buffers of MLPs with `inner` columns of the gate. `prefix` begins their names.
    pub(super) fn new(builder: &mut ProgramBuilder, prefix: &str, inner: usize) -> Self {
        Self {
            gate_up: builder.buffer(format!("{prefix}gate_up"), Rows::Tokens, 2 * inner),
            hidden: builder.buffer(format!("{prefix}hidden"), Rows::Tokens, inner),
        }
    }
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
struct Projection {
    weight: WeightId,
    bias: Option<WeightId>,
    input: BufferId,
}

/// Emits a decoder's ops and looks up its tensors.
pub(super) struct Decoder<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) builder: ProgramBuilder,
    pub(super) scratch: Scratch,
    /// GGUF's divisors of the rotary frequencies.
    rope_factors: Option<Vec<f32>>,
    /// KV group and index within it, by layer.
    kv: Vec<(usize, usize)>,
    embedding: Option<WeightId>,
    /// Number of parts of the media cache that the decoder takes: 0 if it takes no images.
    media_parts: usize,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let mut builder = ProgramBuilder::new(config.family.name(), config.vocab_size);
        let widest = |cols: fn(&LayerConfig) -> usize| config.layers.iter().map(cols).max().unwrap_or(0);
        let mut buffer = |name, cols| builder.buffer(name, Rows::Tokens, cols);
        let dense = config.layers.iter().find(|layer| layer.experts.is_none());
        let scratch = Scratch {
            normed: buffer("normed", config.hidden_size),
            qkv: buffer("qkv", widest(|layer| layer.attention.heads.qkv_cols())),
            q: buffer("q", widest(|layer| layer.attention.heads.q_cols())),
            attended: buffer("attended", widest(|layer| layer.attention.heads.q_cols())),
            mlp: dense.map(|layer| MlpScratch::new(&mut builder, "", layer.mlp.intermediate_size)),
            experts: ExpertScratch::new(&mut builder, config),
        };
        let kv = kv_groups(&mut builder, &config.layers);
        let rope_factors = rope_factors(checkpoint)?;
        Ok(Self { checkpoint, builder, scratch, rope_factors, kv, embedding: None, media_parts: 0 })
    }

    /// Starts a decoder that takes the outputs of the model's encoder.
    pub(super) fn with_images(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let vision = checkpoint.config().vision.as_ref();
        let media_parts = vision.map_or(0, |vision| 1 + vision.deepstack_layers.len());
        Ok(Self { media_parts, ..Self::new(checkpoint)? })
    }

    /// Emits the whole decoder.
    pub(super) fn program(mut self) -> Result<Program, ModelError> {
        let x = self.embed()?;
        // The encoder's last output replaces the embeddings of images' tokens; each of its others is added after a layer.
        self.inject(0, InjectMode::Replace, x);
        for (layer, config) in self.config().layers.iter().enumerate() {
            let block = Block { layer, x, norms: config.norms, scale: config.residual_scale };
            self.attention(block, &config.attention)?;
            match &config.experts {
                Some(experts) => self.experts(block, experts, &config.mlp)?,
                None => self.gated_mlp(block, &config.mlp)?,
            }
            self.inject(layer + 1, InjectMode::Add, x);
        }
        self.head(x)
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
        self.builder.push(Op::Embed { table, scale: config.embedding_scale, out });
        Ok(out)
    }

    /// Emits `x += output(attention(qkv(x)))`, with the norms of the block.
    fn attention(&mut self, block: Block, config: &AttentionConfig) -> Result<(), ModelError> {
        let hidden_size = self.config().hidden_size;
        let AttentionConfig { heads, window, scale, softcap, .. } = *config;
        let Scratch { qkv, q, attended, .. } = self.scratch;
        let layer = block.layer;

        let input = self.before(block, "attention_norm", Role::AttentionNorm)?;
        let rows: &[_] = match self.config().family.names.fused {
            true => &[(Role::Qkv, heads.qkv_cols())],
            false => &[(Role::Q, heads.q_cols()), (Role::K, heads.kv_cols()), (Role::V, heads.kv_cols())],
        };
        let weight = self.matrix(&block.label("qkv"), hidden_size, rows, layer)?;
        let bias = self.bias_if(config.qkv_bias, &block.label("qkv_bias"), rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input, add: None, out: qkv }));

        let norm = config.qk_norm.map(|width| self.qk_norm(layer, heads, width)).transpose()?;
        let (group, index) = self.kv[layer];
        let rope = config.rotary.then(|| config.rope.frequencies(self.rope_factors.as_deref()));
        let kv = KvPlace::Cache { group, layer: index };
        self.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm, rope, kv }));
        let sinks =
            config.sinks.then(|| self.vector(&block.label("sinks"), Role::Sinks, layer, heads.q)).transpose()?;
        let attention = PagedAttention { q, out: attended, heads, scale, window, softcap, sinks, group, layer: index };
        self.builder.push(Op::PagedAttention(attention));

        let rows = [(Role::Output, hidden_size)];
        let weight = self.matrix(&block.label("output"), heads.q_cols(), &rows, layer)?;
        let bias = self.bias_if(config.output_bias, &block.label("output_bias"), &rows, layer)?;
        self.after(block, Projection { weight, bias, input: attended }, "attention_post_norm", Role::AttentionPostNorm)
    }

    /// Emits `x += down(act(gate(x)) · up(x))`, with the norms of the block.
    fn gated_mlp(&mut self, block: Block, config: &MlpConfig) -> Result<(), ModelError> {
        let hidden_size = self.config().hidden_size;
        let MlpConfig { intermediate_size, activation, bias } = *config;
        let Some(MlpScratch { gate_up, hidden }) = self.scratch.mlp else {
            unreachable!("declared for a model with an MLP")
        };
        let layer = block.layer;

        let input = self.before(block, "mlp_norm", Role::MlpNorm)?;
        let rows: &[_] = match self.config().family.names.fused {
            true => &[(Role::GateUp, 2 * intermediate_size)],
            false => &[(Role::Gate, intermediate_size), (Role::Up, intermediate_size)],
        };
        let weight = self.matrix(&block.label("gate_up"), hidden_size, rows, layer)?;
        let biases = self.bias_if(bias, &block.label("gate_up_bias"), rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias: biases, scale: 1.0, input, add: None, out: gate_up }));
        self.builder.push(Op::Glu(Glu { kind: activation, input: gate_up, out: hidden }));

        let rows = [(Role::Down, hidden_size)];
        let weight = self.matrix(&block.label("down"), intermediate_size, &rows, layer)?;
        let bias = self.bias_if(bias, &block.label("down_bias"), &rows, layer)?;
        self.after(block, Projection { weight, bias, input: hidden }, "mlp_post_norm", Role::MlpPostNorm)
    }

    /// Emits the norm before a block, if there is one. Returns the block's input.
    pub(super) fn before(&mut self, block: Block, label: &str, role: Role) -> Result<BufferId, ModelError> {
        if block.norms == NormPlaces::After {
            return Ok(block.x);
        }
        let weight = self.vector(&block.label(label), role, block.layer, self.config().hidden_size)?;
        self.rms_norm(weight, block.x, None, self.scratch.normed);
        Ok(self.scratch.normed)
    }

    /// Emits the last product of a block, whose output is added to the residual stream, and the norm after it, if there
    /// is one.
    fn after(&mut self, block: Block, last: Projection, label: &str, role: Role) -> Result<(), ModelError> {
        let Block { layer, x, norms, scale } = block;
        let Projection { weight, bias, input } = last;
        if norms == NormPlaces::Before {
            self.builder.push(Op::Linear(Linear { weight, bias, scale, input, add: Some(x), out: x }));
            return Ok(());
        }
        let out = self.scratch.normed;
        self.builder.push(Op::Linear(Linear { weight, bias, scale, input, add: None, out }));
        let weight = self.vector(&block.label(label), role, layer, self.config().hidden_size)?;
        self.rms_norm(weight, out, Some(Residual::After(x)), x);
        Ok(())
    }

    /// Emits the end of the program: the final norm for pooled rows; final norm, logits and sampling for sampled rows.
    fn head(mut self, x: BufferId) -> Result<Program, ModelError> {
        let config = self.config();
        let final_norm = self.vector("final_norm", Role::FinalNorm, 0, config.hidden_size)?;
        let gathered = self.builder.buffer("x_pooled", Rows::Pooled, config.hidden_size);
        let embedding = self.builder.buffer("embedding", Rows::Pooled, config.hidden_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.rms_norm(final_norm, gathered, None, embedding);
        let gathered = self.builder.buffer("x_sampled", Rows::Sampled, config.hidden_size);
        let normed = self.builder.buffer("normed_sampled", Rows::Sampled, config.hidden_size);
        let logits = self.builder.buffer("logits", Rows::Sampled, config.vocab_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.rms_norm(final_norm, gathered, None, normed);
        let weight = match self.embedding {
            Some(table) if config.tie_word_embeddings => table,
            _ => self.matrix("head", config.hidden_size, &[(Role::Head, config.vocab_size)], 0)?,
        };
        let (scale, softcap) = (config.logits_scale, config.logits_softcap);
        self.builder.push(Op::Logits(Logits { weight, input: normed, out: logits, scale, softcap }));
        self.builder.push(Op::Sample { logits });
        Ok(self.builder.finish()?)
    }

    fn rms_norm(&mut self, weight: WeightId, input: BufferId, add: Option<Residual>, out: BufferId) {
        let NormConfig { eps, unit_offset } = self.config().norm;
        let (kind, bias) = (NormKind::Rms, None);
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input, add, out }));
    }

    fn qk_norm(&mut self, layer: usize, heads: HeadShape, width: QkNormWidth) -> Result<QkNorm, ModelError> {
        let NormConfig { eps, unit_offset } = self.config().norm;
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

/// Declares one KV group for each distinct window. Returns group and index within it, by layer.
fn kv_groups(builder: &mut ProgramBuilder, layers: &[LayerConfig]) -> Vec<(usize, usize)> {
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut place = Vec::with_capacity(layers.len());
    for &AttentionConfig { heads, window, .. } in layers.iter().map(|layer| &layer.attention) {
        let group = groups.iter().position(|g| g.window == window).unwrap_or_else(|| {
            groups.push(KvGroup { layers: Vec::new(), window });
            groups.len() - 1
        });
        place.push((group, groups[group].layers.len()));
        groups[group].layers.push(heads);
    }
    for group in groups {
        builder.kv_group(group);
    }
    place
}

/// Reads the divisors of the rotary frequencies that a GGUF file has in place of a scaling scheme.
fn rope_factors(checkpoint: &Checkpoint) -> Result<Option<Vec<f32>>, ModelError> {
    let rope = &checkpoint.config().layers[0].attention.rope;
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
