//! Lowering and launches of the ops of latent attention, except attention itself.

use octavo_kernels::manifest::{self, Dtype};
use octavo_kernels::params::{ExpertLinearParams, LatentPostParams, MAX_LATENT_ROTATED};
use octavo_ops::{BackendError, HeadLinear, LatentPost, RopeStyle, Rows};

use crate::build::KernelId;
use crate::experts::{ExpertKernel, ExpertPart, Tiling};
use crate::forward::{Machine, Step, some};
use crate::launcher::Launcher;
use crate::lower::{CacheLayer, Lowering, Stage};
use crate::unsupported;

/// An op of latent attention with its kernels and all parameters that are constant.
#[derive(Clone, Debug)]
pub(crate) enum LatentStage {
    /// A product for each part of the heads' matrices, by the kernels for experts: each head is the expert of a pair of
    /// every token.
    Heads { parts: Vec<ExpertPart>, tiling: Tiling },
    /// Completes the queries and writes the cache.
    Post { kernel: KernelId, params: LatentPostParams, cache: CacheLayer },
}

impl Lowering<'_> {
    pub(crate) fn head_linear(&mut self, op: &HeadLinear) -> Result<Stage, BackendError> {
        let heads = op.heads as u32;
        let (input_stride, out_stride) = (self.cols(op.input) / heads, self.cols(op.out) / heads);
        // The kernels load 16 bytes at a time.
        let wide = if self.setting.dtype == Dtype::F32 { 4 } else { 8 };
        if !input_stride.is_multiple_of(wide) {
            return Err(unsupported(format!("heads of {input_stride} elements, no multiple of {wide}")));
        }
        let (mut column, mut parts) = (0, Vec::new());
        for part in self.matrix(op.weight).to_vec() {
            let n = (part.rows / op.heads) as u32;
            let params = ExpertLinearParams {
                quant: part.planes(self.arena),
                weight: self.arena.at(part.region),
                input: self.buffer(op.input),
                out: self.buffer(op.out),
                n,
                k: self.program.weights[op.weight.0].cols as u32,
                share: 1,
                column,
                input_stride,
                out_stride,
                heads,
                ..ExpertLinearParams::default()
            };
            parts.push(ExpertPart::new(&part, params, &self.setting, &mut self.instances));
            column += n;
        }
        Ok(Stage::Latent(LatentStage::Heads { parts, tiling: Tiling::new(heads, &self.setting) }))
    }

    pub(crate) fn latent_post(&mut self, op: &LatentPost) -> Result<Stage, BackendError> {
        if op.rotated() > MAX_LATENT_ROTATED {
            return Err(unsupported(format!("latent attention with {} rotated elements", op.rotated())));
        }
        let (cosine, sine, streams) = self.rope_tables(&op.rope);
        let params = LatentPostParams {
            out: self.buffer(op.out),
            q: self.buffer(op.q),
            kv: self.buffer(op.kv),
            weight: self.vector(op.norm),
            cosine,
            sine,
            streams,
            q_heads: op.heads.q as u32,
            q_size: self.cols(op.q) / op.heads.q as u32,
            rank: op.rank() as u32,
            rotary_dim: op.rotated() as u32,
            rope_interleaved: u32::from(op.rope.style == RopeStyle::GptJ),
            eps: op.eps,
            scale: self.kv_scales(op.group, op.layer).key,
            ..LatentPostParams::default()
        };
        let kernel = self.instances.id(manifest::latent_post(self.setting.attention()));
        let cache = self.cache_layer(op.group, op.layer);
        Ok(Stage::Latent(LatentStage::Post { kernel, params, cache }))
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches an op of latent attention, unless it has no rows.
    pub(crate) fn latent(&self, stage: &LatentStage, step: &Step<'_>) -> Result<(), BackendError> {
        let tokens = step.rows(Rows::Tokens);
        some(tokens, || match stage {
            LatentStage::Heads { parts, tiling } => {
                let tiles = tiling.tiles(tokens * tiling.experts);
                parts.iter().try_for_each(|part| {
                    let (ExpertKernel { id, cta }, params) = part.for_tiles(tiles);
                    let params = ExpertLinearParams { tokens, ..params };
                    self.launch(id, params.head_grid(cta), &params)
                })
            }
            LatentStage::Post { kernel, params, cache } => {
                let (rows, _, block_stride) = self.cache(*cache, step);
                let params = LatentPostParams {
                    cache: rows,
                    block_stride,
                    positions: step.at(step.shape.positions()),
                    position_stride: step.shape.position_stride() as u32,
                    slots: step.at(step.shape.slots(cache.group)),
                    tokens,
                    ..*params
                };
                self.launch(*kernel, params.grid(), &params)
            }
        })
    }
}
