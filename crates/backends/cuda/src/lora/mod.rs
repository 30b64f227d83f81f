//! Adapters: what sequences add to the products of a step.
//!
//! A step without adapters launches nothing for them: decode steps are recorded with and without. Otherwise each site of
//! the program is two launches, whatever the number of adapters and experts, which read the slot and the expert of each tile
//! of rows on the device. After experts have been chosen, one more launch divides the pairs of tokens and experts into tiles.

mod memory;
mod tiles;

use octavo_kernels::manifest::{self, Dtype, Instance};
use octavo_kernels::params::{LoraPairsParams, LoraParams};
use octavo_ops::{BackendError, BufferId, Lora, LoraInput, Route, Rows, SiteId, SiteKind};

use crate::build::KernelId;
use crate::forward::{Machine, Step};
use crate::launcher::Launcher;
use crate::layout::{is_logits, logits_stride};
use crate::lower::{Lowering, Stage};
pub(crate) use memory::{AdapterPlan, Adapters, routed_tiles, splits};
pub(crate) use tiles::{Adapted, AdaptedRows, most_tiles};

/// A `Lora` with its kernels and all parameters that are constant.
#[derive(Clone, Debug)]
pub(crate) struct LoraStage {
    /// Multiplies with the matrices A; `None` if they are tables.
    shrink: Option<KernelId>,
    expand: KernelId,
    params: LoraParams,
    /// Number of columns of each part.
    columns: Vec<u32>,
    site: SiteId,
    rows: LoraRows,
}

/// The rows to which adapters add.
#[derive(Clone, Copy, Debug)]
enum LoraRows {
    /// Rows of the step (0), or those that reach the head (1).
    Listed(usize),
    /// Rows of tokens and experts.
    Routed(BufferId),
}

impl Lowering<'_> {
    pub(crate) fn lora(&mut self, op: &Lora) -> Stage {
        let dtype = self.setting.dtype;
        let (out, out_stride) = match is_logits(self.program, op.out.0) {
            true => (Dtype::F32, logits_stride(self.program.vocab_size) as u32),
            false => (dtype, self.cols(op.out)),
        };
        let kind = usize::from(self.rows(op.out) == Rows::Sampled);
        let params = LoraParams {
            out: self.buffer(op.out),
            drawn: self.arena.at(self.layout.sampling.output),
            out_stride,
            scale: op.scale,
            share: 1,
            ..LoraParams::default()
        };
        Stage::Lora(match op.input {
            LoraInput::Rows(input) => {
                let params = LoraParams { input: self.buffer(input), ..params };
                self.lora_stage(op.site, manifest::lora_expand(dtype, out), params, LoraRows::Listed(kind))
            }
            LoraInput::Tokens => {
                self.lora_stage(op.site, manifest::lora_expand_table(dtype), params, LoraRows::Listed(kind))
            }
            LoraInput::Experts { input, routing } => {
                let share = if self.rows(input) == Rows::Tokens { self.cols(routing) } else { 1 };
                let params = LoraParams { input: self.buffer(input), share, ..params };
                self.lora_stage(op.site, manifest::lora_expand(dtype, out), params, LoraRows::Routed(routing))
            }
        })
    }

    /// Returns the stage that adds to the logits of a router, if adapters may. The memory of what is added is theirs.
    pub(crate) fn router_lora(&mut self, op: &Route) -> Option<LoraStage> {
        let out_stride = self.program.weights[op.weight.0].rows as u32;
        let params =
            LoraParams { input: self.buffer(op.input), out_stride, scale: 1.0, share: 1, ..LoraParams::default() };
        let expand = manifest::lora_expand(self.setting.dtype, Dtype::F32);
        Some(self.lora_stage(op.site?, expand, params, LoraRows::Listed(0)))
    }

    fn lora_stage(&mut self, site: SiteId, expand: Instance, params: LoraParams, rows: LoraRows) -> LoraStage {
        let (mut sizes, each) = (self.program.site_parts(site), self.program.parts_each(site));
        sizes.truncate(each);
        let k = sizes.first().map_or(0, |[_, k]| *k as u32);
        let is_table = self.program.sites[site.0].kind == SiteKind::Embedding;
        LoraStage {
            shrink: (!is_table).then(|| self.instances.id(manifest::lora_shrink(self.setting.dtype))),
            expand: self.instances.id(expand),
            params: LoraParams { k, parts: each as u32, ..params },
            columns: sizes.iter().map(|[rows, _]| *rows as u32).collect(),
            site,
            rows,
        }
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches what adapters add at a site, unless no row of the step has one.
    pub(crate) fn lora(&self, stage: &LoraStage, step: &Step<'_>) -> Result<(), BackendError> {
        self.lora_with(stage, &stage.params, step)
    }

    fn lora_with(&self, stage: &LoraStage, params: &LoraParams, step: &Step<'_>) -> Result<(), BackendError> {
        let Some(adapters) = step.adapters else { return Ok(()) };
        let (tiles, tiles_at, rows_at) = match stage.rows {
            LoraRows::Listed(kind) => {
                let at = step.shape.adapted_tiles(kind);
                (step.shape.adapted[kind].tiles as u32, step.at(at), step.at(step.shape.adapted_rows(kind)))
            }
            LoraRows::Routed(routing) => adapters.routed_tiles(routing, step.shape.adapted[0].rows),
        };
        if tiles == 0 {
            return Ok(());
        }
        let filled = adapters.fill(params, stage.site, tiles);
        let ids = step.at(step.shape.token_ids());
        let params = LoraParams { tiles: tiles_at, rows: rows_at, ids, ..filled };
        if let Some(shrink) = stage.shrink {
            let threads = self.launcher.threads(shrink);
            self.launch(shrink, params.shrink_grid(tiles, threads), &params)?;
        }
        let threads = self.launcher.threads(stage.expand);
        self.launch(stage.expand, params.expand_grid(tiles, threads, stage.columns.iter().copied()), &params)
    }

    /// Launches what adapters add to the logits of a router. Returns its address; 0 if no row of the step has an adapter.
    pub(crate) fn router_lora(&self, stage: &LoraStage, step: &Step<'_>) -> Result<u64, BackendError> {
        match step.adapters {
            Some(adapters) if step.shape.adapted[0].tiles > 0 => {
                let out = adapters.deltas();
                self.lora_with(stage, &LoraParams { out, ..stage.params }, step)?;
                Ok(out)
            }
            _ => Ok(0),
        }
    }

    /// Divides the pairs of tokens with adapters and their experts, unless there are none.
    pub(crate) fn lora_pairs(
        &self,
        kernel: KernelId,
        (routing, picked): (BufferId, u64),
        step: &Step<'_>,
    ) -> Result<(), BackendError> {
        let adapters = step.adapters.filter(|_| step.shape.adapted[0].tiles > 0);
        let Some(params) = adapters.and_then(|adapters| adapters.pairs(routing)) else { return Ok(()) };
        let adapted_tiles = step.at(step.shape.adapted_tiles(0));
        let adapted_rows = step.at(step.shape.adapted_rows(0));
        self.launch(kernel, [1; 3], &LoraPairsParams { picked, adapted_tiles, adapted_rows, ..params })
    }
}
