//! The part of a decoder that is latent attention, in its absorbed form.

use octavo_ops::{
    BufferId, HeadLinear, LatentPost, Linear, NormKind, NormOp, Op, PagedAttention, ProgramBuilder, Rows, Slab,
};

use super::ModelError;
use super::decoder::{Block, Decoder, Projection};
use super::experts::slab_part;
use super::names::Role;
use crate::config::{AttentionConfig, LatentConfig, LayerConfig};

/// Buffers shared by all latent attention.
#[derive(Clone, Copy)]
pub(super) struct LatentScratch {
    /// Low-rank form of the queries.
    q_low: Option<BufferId>,
    q: BufferId,
    kv: BufferId,
    /// Queries with the latent's projection absorbed.
    absorbed: BufferId,
    attended: BufferId,
    values: BufferId,
}

impl LatentScratch {
    /// Declares the buffers for the first of the layers with latent attention, which are alike.
    pub(super) fn new(builder: &mut ProgramBuilder, layers: &[LayerConfig]) -> Option<Self> {
        let of = |layer: &LayerConfig| Some((layer.attention.heads, layer.attention.latent?));
        let (heads, latent) = layers.iter().find_map(of)?;
        let mut buffer = |name, cols| builder.buffer(name, Rows::Tokens, cols);
        Some(Self {
            q_low: latent.query_rank.map(|rank| buffer("q_low", rank)),
            q: buffer("q", heads.q * latent.query_dim()),
            kv: buffer("kv", heads.kv_cols()),
            absorbed: buffer("absorbed", heads.q_cols()),
            attended: buffer("attended", heads.out_cols()),
            values: buffer("values", heads.q * latent.value),
        })
    }
}

/// The matrices of the heads of a layer, each `[rows, cols]`.
struct HeadWeights<'a> {
    label: &'a str,
    role: Role,
    rows: usize,
    cols: usize,
}

impl Decoder<'_> {
    /// Emits `x += output(values(attention(queries(x))))`, with the norms of the block.
    pub(super) fn latent_attention(
        &mut self,
        block: Block,
        config: &AttentionConfig,
        latent: &LatentConfig,
    ) -> Result<(), ModelError> {
        let Some(scratch) = self.scratch.latent else { unreachable!("declared for a model with latent attention") };
        let LatentScratch { q, kv, absorbed, attended, values, .. } = scratch;
        let AttentionConfig { heads, window, scale, softcap, .. } = *config;
        let LatentConfig { rank, content, value, norm_eps: eps, .. } = *latent;
        let (hidden_size, layer) = (self.config().hidden_size, block.layer);

        let input = self.before(block, "attention_norm", Role::AttentionNorm)?;
        self.queries(block, config, latent, input)?;
        let weight = self.matrix(&block.label("latent"), hidden_size, &[(Role::Latent, heads.kv_cols())], layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out: kv }));

        let weights = HeadWeights { label: "latent_key", role: Role::LatentKey, rows: rank, cols: content };
        self.head_linear(block, heads.q, &weights, q, absorbed)?;
        let norm = self.vector(&block.label("latent_norm"), Role::LatentNorm, layer, rank)?;
        let (group, index) = self.kv[layer];
        let Some(rope) = &config.rope else { unreachable!("checked with the configuration") };
        let rope = rope.frequencies(self.rope_factors.as_deref());
        let post = LatentPost { q, kv, out: absorbed, heads, norm, eps, rope, group, layer: index };
        self.builder.push(Op::LatentPost(post));
        let sinks = None;
        let attention = PagedAttention {
            q: absorbed,
            out: attended,
            heads,
            scale,
            window,
            spans: false,
            softcap,
            sinks,
            group,
            layer: index,
        };
        self.builder.push(Op::PagedAttention(attention));
        let weights = HeadWeights { label: "latent_value", role: Role::LatentValue, rows: value, cols: rank };
        self.head_linear(block, heads.q, &weights, attended, values)?;

        let rows = [(Role::Output, hidden_size)];
        let weight = self.matrix(&block.label("output"), heads.q * value, &rows, layer)?;
        let last = Projection { weight, bias: None, input: values };
        self.after(block, last, "attention_post_norm", Role::AttentionPostNorm)
    }

    /// Emits the queries, before the latent's projection is absorbed.
    fn queries(
        &mut self,
        block: Block,
        config: &AttentionConfig,
        latent: &LatentConfig,
        mut input: BufferId,
    ) -> Result<(), ModelError> {
        let Some(scratch) = self.scratch.latent else { unreachable!("declared for a model with latent attention") };
        let cols = config.heads.q * latent.query_dim();
        let (mut from, mut role) = (self.config().hidden_size, Role::Q);
        if let Some((rank, out)) = latent.query_rank.zip(scratch.q_low) {
            let weight = self.matrix(&block.label("q_low"), from, &[(Role::QLow, rank)], block.layer)?;
            self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out }));
            let weight = self.vector(&block.label("q_low_norm"), Role::QLowNorm, block.layer, rank)?;
            let (kind, bias, eps, unit_offset) = (NormKind::Rms, None, latent.norm_eps, false);
            self.builder.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input: out, add: None, out }));
            (input, from, role) = (out, rank, Role::QHigh);
        }
        let weight = self.matrix(&block.label("q"), from, &[(role, cols)], block.layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out: scratch.q }));
        Ok(())
    }

    /// Emits the product of each head with its own matrix.
    fn head_linear(
        &mut self,
        block: Block,
        heads: usize,
        weights: &HeadWeights<'_>,
        input: BufferId,
        out: BufferId,
    ) -> Result<(), ModelError> {
        let &HeadWeights { label, role, rows, cols } = weights;
        let name = self.weight_name(role, block.layer);
        let part = |index| slab_part(self, &name, &[rows, cols], Slab { index, count: heads });
        let parts = (0..heads).map(part).collect::<Result<_, _>>()?;
        let weight = self.builder.weight(block.label(label), cols, parts);
        self.builder.push(Op::HeadLinear(HeadLinear { weight, heads, input, out }));
        Ok(())
    }
}
