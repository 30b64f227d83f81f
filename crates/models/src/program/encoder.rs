//! Parts shared by encoders of images.
//!
//! As in decoders, one residual stream runs through the program, here `x[T,H]` over the patches.

use octavo_ops::{
    Act, BufferId, EmbedTaps, GluKind, KvPlace, Linear, MergeKind, MergeRows, NormKind, NormOp, Op, Program,
    ProgramBuilder, QkvPost, Rope, Rows, SegmentAttention, WeightId,
};

use super::ModelError;
use super::decoder::part;
use super::names::EncoderNames;
use crate::checkpoint::Checkpoint;
use crate::config::VisionConfig;

/// Buffers shared by all layers.
struct Scratch {
    normed: BufferId,
    qkv: BufferId,
    q: BufferId,
    attended: BufferId,
    hidden: BufferId,
}

/// Emits the ops of an encoder and looks up its tensors. Names of tensors lack `.weight` and `.bias`.
pub(crate) struct Encoder<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a VisionConfig,
    names: &'static EncoderNames,
    pub(crate) builder: ProgramBuilder,
    scratch: Scratch,
    rope: Option<Rope>,
}

impl<'a> Encoder<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        config: &'a VisionConfig,
        names: &'static EncoderNames,
        rope: Option<Rope>,
    ) -> Self {
        let name = format!("{} encoder", checkpoint.config().family.name());
        let mut builder = ProgramBuilder::encoder(name, config.merged_patches());
        let heads = config.head_shape();
        let mut buffer = |name, cols| builder.buffer(name, Rows::Tokens, cols);
        let scratch = Scratch {
            normed: buffer("normed", config.hidden_size),
            qkv: buffer("qkv", heads.qkv_cols()),
            q: buffer("q", heads.q_cols()),
            attended: buffer("attended", heads.q_cols()),
            hidden: buffer("hidden", config.intermediate_size),
        };
        Self { checkpoint, config, names, builder, scratch, rope }
    }

    /// Starts the residual stream with the projected patches and their learned positions.
    pub(crate) fn patches(&mut self) -> Result<BufferId, ModelError> {
        let tensor = self.names.patches;
        let VisionConfig { channels, temporal_patch_size, patch_size, hidden_size, .. } = *self.config;
        let cols = self.config.patch_elements();
        let patches = self.builder.buffer("patches", Rows::Tokens, cols);
        let x = self.builder.buffer("x", Rows::Tokens, hidden_size);
        self.builder.push(Op::Patches { out: patches });
        // The order of a patch is that of the convolution's inputs.
        let shape = match temporal_patch_size {
            1 => vec![hidden_size, channels, patch_size, patch_size],
            frames => vec![hidden_size, channels, frames, patch_size, patch_size],
        };
        let part = part(self.checkpoint, format!("{tensor}.weight"), hidden_size, &shape)?;
        let weight = self.builder.weight("patches", cols, vec![part]);
        let bias = Some(self.bias("patches_bias", tensor, hidden_size)?);
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input: patches, add: None, out: x }));
        let positions = self.config.table_side * self.config.table_side;
        let table = self.matrix("positions", self.names.positions, positions, hidden_size)?;
        self.builder.push(Op::EmbedTaps(EmbedTaps { table, out: x }));
        Ok(x)
    }

    /// Declares a matrix `[rows, cols]`.
    fn matrix(&mut self, label: &str, tensor: &str, rows: usize, cols: usize) -> Result<WeightId, ModelError> {
        let part = part(self.checkpoint, format!("{tensor}.weight"), rows, &[rows, cols])?;
        Ok(self.builder.weight(label, cols, vec![part]))
    }

    fn bias(&mut self, label: &str, tensor: &str, rows: usize) -> Result<WeightId, ModelError> {
        let part = part(self.checkpoint, format!("{tensor}.bias"), rows, &[rows])?;
        Ok(self.builder.weight(label, 1, vec![part]))
    }

    /// Emits a product without a bias.
    pub(crate) fn product(
        &mut self,
        label: &str,
        tensor: &str,
        input: BufferId,
        out: BufferId,
    ) -> Result<(), ModelError> {
        let (rows, cols) = (self.builder.buffer_cols(out), self.builder.buffer_cols(input));
        let weight = self.matrix(label, tensor, rows, cols)?;
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out }));
        Ok(())
    }

    /// Emits a product with a bias.
    pub(crate) fn linear(
        &mut self,
        label: &str,
        tensor: &str,
        input: BufferId,
        add: Option<BufferId>,
        out: BufferId,
    ) -> Result<(), ModelError> {
        self.fused(label, &[tensor.to_owned()], input, add, out)
    }

    /// Emits a product with a bias, whose rows are those of several tensors of the same size.
    fn fused(
        &mut self,
        label: &str,
        tensors: &[String],
        input: BufferId,
        add: Option<BufferId>,
        out: BufferId,
    ) -> Result<(), ModelError> {
        let cols = self.builder.buffer_cols(input);
        let rows = self.builder.buffer_cols(out) / tensors.len();
        let part_of = |kind: &str, shape: &[usize]| -> Result<Vec<_>, ModelError> {
            tensors.iter().map(|tensor| part(self.checkpoint, format!("{tensor}.{kind}"), rows, shape)).collect()
        };
        let (weights, biases) = (part_of("weight", &[rows, cols])?, part_of("bias", &[rows])?);
        let weight = self.builder.weight(label, cols, weights);
        let bias = Some(self.builder.weight(format!("{label}_bias"), 1, biases));
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input, add, out }));
        Ok(())
    }

    /// Emits a layer norm.
    pub(crate) fn norm(&mut self, label: &str, tensor: &str, input: BufferId, out: BufferId) -> Result<(), ModelError> {
        let cols = self.builder.buffer_cols(input);
        let vector = |name: String| part(self.checkpoint, name, 1, &[cols]);
        let (weight, bias) = (vector(format!("{tensor}.weight"))?, vector(format!("{tensor}.bias"))?);
        let weight = self.builder.weight(label, cols, vec![weight]);
        let bias = Some(self.builder.weight(format!("{label}_bias"), cols, vec![bias]));
        let (kind, eps, unit_offset, add) = (NormKind::Layer, self.config.norm_eps, false, None);
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input, add, out }));
        Ok(())
    }

    /// Emits an RMS norm without a bias. `unit_offset` says whether its factor is `1 + weight`.
    pub(crate) fn rms_norm(
        &mut self,
        label: &str,
        tensor: &str,
        unit_offset: bool,
        x: BufferId,
    ) -> Result<(), ModelError> {
        let cols = self.builder.buffer_cols(x);
        let weight = part(self.checkpoint, format!("{tensor}.weight"), 1, &[cols])?;
        let weight = self.builder.weight(label, cols, vec![weight]);
        let (kind, bias, eps, add) = (NormKind::Rms, None, self.config.norm_eps, None);
        self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input: x, add, out: x }));
        Ok(())
    }

    /// Emits the merge of the patches of a square.
    pub(crate) fn merge(&mut self, kind: MergeKind, input: BufferId, out: BufferId) {
        self.builder.push(Op::MergeRows(MergeRows { input, out, kind }));
    }

    pub(crate) fn act(&mut self, kind: GluKind, x: BufferId) {
        self.builder.push(Op::Act(Act { kind, input: x, out: x }));
    }

    /// Emits `x += proj(attention(qkv(norm(x))))`.
    pub(crate) fn attention(&mut self, layer: usize, x: BufferId) -> Result<(), ModelError> {
        let Scratch { normed, qkv, q, attended, .. } = self.scratch;
        let (heads, names) = (self.config.head_shape(), self.names);
        let label = |part: &str| format!("layers.{layer}.{part}");
        self.norm(&label("attention_norm"), &of_layer(names.attention_norm, layer), x, normed)?;
        let tensors: Vec<_> = names.qkv.iter().map(|stem| of_layer(stem, layer)).collect();
        self.fused(&label("qkv"), &tensors, normed, None, qkv)?;
        let rope = self.rope.clone();
        let kv = KvPlace::Step;
        self.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm: None, rope, kv }));
        let scale = (heads.dim as f32).sqrt().recip();
        self.builder.push(Op::SegmentAttention(SegmentAttention { q, out: attended, heads, scale, window: None }));
        self.linear(&label("output"), &of_layer(names.output, layer), attended, Some(x), x)
    }

    /// Emits `x += down(act(up(norm(x))))`.
    pub(crate) fn mlp(&mut self, layer: usize, x: BufferId) -> Result<(), ModelError> {
        let Scratch { normed, hidden, .. } = self.scratch;
        let names = self.names;
        let label = |part: &str| format!("layers.{layer}.{part}");
        self.norm(&label("mlp_norm"), &of_layer(names.mlp_norm, layer), x, normed)?;
        self.linear(&label("up"), &of_layer(names.up, layer), normed, None, hidden)?;
        self.act(self.config.activation, hidden);
        self.linear(&label("down"), &of_layer(names.down, layer), hidden, Some(x), x)
    }

    /// Returns the buffer of normed rows, which the layers do not need once they have run.
    pub(crate) fn normed(&self) -> BufferId {
        self.scratch.normed
    }

    pub(crate) fn finish(self) -> Result<Program, ModelError> {
        Ok(self.builder.finish()?)
    }
}

/// Puts the number of a layer into a name.
fn of_layer(stem: &str, layer: usize) -> String {
    stem.replace("{}", &layer.to_string())
}
