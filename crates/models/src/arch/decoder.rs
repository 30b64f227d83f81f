//! Parts shared by all decoders.
//!
//! One residual stream `x[T,H]` runs through the program: each block reads it through a norm, and the block's last
//! `Linear` adds to it in place (the epilogue), so the stream is read and written once per block.

use octavo_ops::{
    BufferId, Glu, HeadShape, InjectMode, InjectRows, KvGroup, KvPlace, Linear, Logits, NormKind, NormOp, Op,
    PagedAttention, Program, ProgramBuilder, QkNorm, QkvPost, Rope, Rows, WeightError, WeightId, WeightPart,
    WeightSource,
};

use super::ModelError;
use super::names::{self, ROPE_FACTORS, Role};
use crate::checkpoint::{Checkpoint, Format};
use crate::config::ModelConfig;

/// Optional parts of an attention block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    /// Whether q, k and v have biases.
    pub(super) qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub(super) output_bias: bool,
    /// Whether q and k have an RMS norm per head.
    pub(super) qk_norm: bool,
}

/// Buffers shared by all layers.
struct Scratch {
    normed: BufferId,
    qkv: BufferId,
    q: BufferId,
    attended: BufferId,
    gate_up: BufferId,
    hidden: BufferId,
}

/// Emits a decoder's ops and looks up its tensors.
pub(super) struct Decoder<'a> {
    checkpoint: &'a Checkpoint,
    builder: ProgramBuilder,
    scratch: Scratch,
    rope: Rope,
    /// KV group and index within it, by layer.
    kv: Vec<(usize, usize)>,
    embedding: Option<WeightId>,
    /// Number of parts of the media cache that the decoder takes: 0 if it takes no images.
    media_parts: usize,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let heads = config.head_shape();
        let mut builder = ProgramBuilder::new(config.architecture.name(), config.vocab_size);
        let mut buffer = |name, cols| builder.buffer(name, Rows::Tokens, cols);
        let scratch = Scratch {
            normed: buffer("normed", config.hidden_size),
            qkv: buffer("qkv", heads.qkv_cols()),
            q: buffer("q", heads.q_cols()),
            attended: buffer("attended", heads.q_cols()),
            gate_up: buffer("gate_up", 2 * config.intermediate_size),
            hidden: buffer("hidden", config.intermediate_size),
        };
        let kv = kv_groups(&mut builder, heads, &config.windows);
        let rope = config.rope.frequencies(rope_factors(checkpoint)?.as_deref());
        Ok(Self { checkpoint, builder, scratch, rope, kv, embedding: None, media_parts: 0 })
    }

    /// Starts a decoder that takes the outputs of the model's encoder.
    pub(super) fn with_images(checkpoint: &'a Checkpoint) -> Result<Self, ModelError> {
        let vision = checkpoint.config().vision.as_ref();
        let media_parts = vision.map_or(0, |vision| 1 + vision.deepstack_layers.len());
        Ok(Self { media_parts, ..Self::new(checkpoint)? })
    }

    /// Replaces the embeddings of images' tokens by the encoder's last layer, if the decoder takes images.
    pub(super) fn inject_images(&mut self, x: BufferId) {
        self.inject(0, InjectMode::Replace, x);
    }

    /// Adds the encoder output that belongs to a decoder layer, if there is one, after that layer.
    pub(super) fn inject_deepstack(&mut self, layer: usize, x: BufferId) {
        self.inject(layer + 1, InjectMode::Add, x);
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

    /// Starts the residual stream with the embedding rows times `scale`.
    pub(super) fn embed(&mut self, scale: f32) -> Result<BufferId, ModelError> {
        let config = self.config();
        let table = self.matrix("embedding", config.hidden_size, &[(Role::Embedding, config.vocab_size)], 0)?;
        self.embedding = Some(table);
        let out = self.builder.buffer("x", Rows::Tokens, config.hidden_size);
        self.builder.push(Op::Embed { table, scale, out });
        Ok(out)
    }

    /// Emits `x += output(attention(qkv(norm(x))))`.
    pub(super) fn attention(&mut self, layer: usize, x: BufferId, parts: Attention) -> Result<(), ModelError> {
        let config = self.config();
        let heads = config.head_shape();
        let Scratch { normed, qkv, q, attended, .. } = self.scratch;
        let label = |part: &str| format!("layers.{layer}.{part}");

        self.norm(&label("attention_norm"), Role::AttentionNorm, layer, x, normed)?;
        let rows = [(Role::Q, heads.q_cols()), (Role::K, heads.kv_cols()), (Role::V, heads.kv_cols())];
        let weight = self.matrix(&label("qkv"), config.hidden_size, &rows, layer)?;
        let bias = self.bias_if(parts.qkv_bias, &label("qkv_bias"), &rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, input: normed, add: None, out: qkv }));

        let norm = if parts.qk_norm { Some(self.qk_norm(layer)?) } else { None };
        let (group, index) = self.kv[layer];
        let rope = Some(self.rope.clone());
        self.builder.push(Op::QkvPost(QkvPost {
            input: qkv,
            out: q,
            heads,
            norm,
            rope,
            kv: KvPlace::Cache { group, layer: index },
        }));
        self.builder.push(Op::PagedAttention(PagedAttention {
            q,
            out: attended,
            heads,
            scale: (heads.dim as f32).sqrt().recip(),
            window: config.windows[layer],
            softcap: None,
            group,
            layer: index,
        }));

        let rows = [(Role::Output, config.hidden_size)];
        let weight = self.matrix(&label("output"), heads.q_cols(), &rows, layer)?;
        let bias = self.bias_if(parts.output_bias, &label("output_bias"), &rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, input: attended, add: Some(x), out: x }));
        Ok(())
    }

    /// Emits `x += down(act(gate(norm(x))) · up(norm(x)))`.
    pub(super) fn gated_mlp(&mut self, layer: usize, x: BufferId) -> Result<(), ModelError> {
        let config = self.config();
        let Scratch { normed, gate_up, hidden, .. } = self.scratch;
        let label = |part: &str| format!("layers.{layer}.{part}");

        self.norm(&label("mlp_norm"), Role::MlpNorm, layer, x, normed)?;
        let rows = [(Role::Gate, config.intermediate_size), (Role::Up, config.intermediate_size)];
        let weight = self.matrix(&label("gate_up"), config.hidden_size, &rows, layer)?;
        let bias = self.bias_if(config.mlp_bias, &label("gate_up_bias"), &rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, input: normed, add: None, out: gate_up }));
        self.builder.push(Op::Glu(Glu { kind: config.activation, input: gate_up, out: hidden }));

        let rows = [(Role::Down, config.hidden_size)];
        let weight = self.matrix(&label("down"), config.intermediate_size, &rows, layer)?;
        let bias = self.bias_if(config.mlp_bias, &label("down_bias"), &rows, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias, input: hidden, add: Some(x), out: x }));
        Ok(())
    }

    /// Emits the end of the program: the final norm for pooled rows; final norm, logits and sampling for sampled rows.
    pub(super) fn head(mut self, x: BufferId) -> Result<Program, ModelError> {
        let config = self.config();
        let final_norm = self.vector("final_norm", Role::FinalNorm, 0, config.hidden_size)?;
        let gathered = self.builder.buffer("x_pooled", Rows::Pooled, config.hidden_size);
        let embedding = self.builder.buffer("embedding", Rows::Pooled, config.hidden_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.rms_norm(final_norm, gathered, embedding);
        let gathered = self.builder.buffer("x_sampled", Rows::Sampled, config.hidden_size);
        let normed = self.builder.buffer("normed_sampled", Rows::Sampled, config.hidden_size);
        let logits = self.builder.buffer("logits", Rows::Sampled, config.vocab_size);
        self.builder.push(Op::GatherRows { input: x, out: gathered });
        self.rms_norm(final_norm, gathered, normed);
        let weight = match self.embedding {
            Some(table) if config.tie_word_embeddings => table,
            _ => self.matrix("head", config.hidden_size, &[(Role::Head, config.vocab_size)], 0)?,
        };
        self.builder.push(Op::Logits(Logits { weight, input: normed, out: logits, scale: 1.0, softcap: None }));
        self.builder.push(Op::Sample { logits });
        Ok(self.builder.finish()?)
    }

    fn norm(
        &mut self,
        label: &str,
        role: Role,
        layer: usize,
        input: BufferId,
        out: BufferId,
    ) -> Result<(), ModelError> {
        let weight = self.vector(label, role, layer, self.config().hidden_size)?;
        self.rms_norm(weight, input, out);
        Ok(())
    }

    fn rms_norm(&mut self, weight: WeightId, input: BufferId, out: BufferId) {
        let (kind, eps) = (NormKind::Rms, self.config().norm_eps);
        let (bias, unit_offset, add) = (None, false, None);
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input, add, out }));
    }

    fn qk_norm(&mut self, layer: usize) -> Result<QkNorm, ModelError> {
        let (dim, eps) = (self.config().head_dim, self.config().norm_eps);
        let q = self.vector(&format!("layers.{layer}.q_norm"), Role::QNorm, layer, dim)?;
        let k = self.vector(&format!("layers.{layer}.k_norm"), Role::KNorm, layer, dim)?;
        Ok(QkNorm { q, k, eps, unit_offset: false })
    }

    /// Declares a weight `[sum of rows, cols]` with one tensor per part.
    fn matrix(
        &mut self,
        label: &str,
        cols: usize,
        parts: &[(Role, usize)],
        layer: usize,
    ) -> Result<WeightId, ModelError> {
        let part = |&(role, rows): &(Role, usize)| {
            self.part(names::weight(self.checkpoint.format(), role, layer), rows, &[rows, cols])
        };
        let parts = parts.iter().map(part).collect::<Result<_, _>>()?;
        Ok(self.builder.weight(label, cols, parts))
    }

    /// Declares a vector of `cols` elements as one row.
    fn vector(&mut self, label: &str, role: Role, layer: usize, cols: usize) -> Result<WeightId, ModelError> {
        let part = self.part(names::weight(self.checkpoint.format(), role, layer), 1, &[cols])?;
        Ok(self.builder.weight(label, cols, vec![part]))
    }

    /// Declares the biases of a (fused) weight, one element per row, if the model has them.
    fn bias_if(
        &mut self,
        present: bool,
        label: &str,
        parts: &[(Role, usize)],
        layer: usize,
    ) -> Result<Option<WeightId>, ModelError> {
        if !present {
            return Ok(None);
        }
        let part = |&(role, rows): &(Role, usize)| {
            self.part(names::bias(self.checkpoint.format(), role, layer), rows, &[rows])
        };
        let parts = parts.iter().map(part).collect::<Result<_, _>>()?;
        Ok(Some(self.builder.weight(label, 1, parts)))
    }

    /// Returns a tensor of the checkpoint as `rows` rows of a weight, or an error if it has another shape.
    fn part(&self, tensor: String, rows: usize, expected: &[usize]) -> Result<WeightPart, ModelError> {
        let tensor = match tensor.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", names::decoder_prefix(self.config().architecture)),
            None => tensor,
        };
        part(self.checkpoint, tensor, rows, expected)
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
    Ok(WeightPart { tensor, rows, storage })
}

/// Declares one KV group for each distinct window. Returns group and index within it, by layer.
fn kv_groups(builder: &mut ProgramBuilder, heads: HeadShape, windows: &[Option<usize>]) -> Vec<(usize, usize)> {
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut place = Vec::with_capacity(windows.len());
    for &window in windows {
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

/// Reads the divisors of the rotary frequencies that a GGUF file of a Llama 3.x model has instead of a scaling scheme.
fn rope_factors(checkpoint: &Checkpoint) -> Result<Option<Vec<f32>>, ModelError> {
    if checkpoint.format() != Format::Gguf || !checkpoint.has_tensor(ROPE_FACTORS) {
        return Ok(None);
    }
    let tensor = checkpoint.tensor(ROPE_FACTORS)?;
    let expected = vec![checkpoint.config().rope.rotary_dim / 2];
    if tensor.shape != expected {
        return Err(ModelError::Shape { name: ROPE_FACTORS.into(), found: tensor.shape, expected });
    }
    let invalid = |reason: &str| WeightError::Invalid { name: ROPE_FACTORS.into(), reason: reason.into() };
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
