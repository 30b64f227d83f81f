//! Adapters: what sequences add to the products of a step.
//!
//! A step without adapters launches nothing for them: decode steps are recorded with and without. Otherwise each site of
//! the program is two launches, whatever the number of adapters, which read the slot of each tile of rows on the device.

mod memory;
mod tiles;

use octavo_kernels::manifest::{self, Dtype};
use octavo_kernels::params::LoraParams;
use octavo_ops::{AdapterSource, BackendError, Lora, LoraInput, Program, Rows, SiteId, SiteKind};

use crate::build::KernelId;
use crate::forward::{Machine, Step};
use crate::layout::{is_logits, logits_stride};
use crate::lower::{Lowering, Stage};
use crate::unsupported;
pub(crate) use memory::{AdapterPlan, Adapters};
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
    rows: Rows,
}

/// Returns whether adapters may change the weight of a site here.
pub(crate) fn serves(program: &Program, site: SiteId) -> bool {
    !matches!(program.sites[site.0].kind, SiteKind::Experts(_) | SiteKind::Router)
}

/// Checks that an adapter, which fits the program, changes only weights of sites that are served here.
pub(crate) fn check_served(program: &Program, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
    let others = (0..program.sites.len()).map(SiteId).filter(|site| !serves(program, *site));
    let changes = |site: SiteId| (0..program.site_parts(site).len()).any(|part| adapter.matrices(site, part).is_some());
    match others.into_iter().any(changes) {
        true => Err(unsupported("adapters of experts and routers")),
        false => Ok(()),
    }
}

impl Lowering<'_> {
    pub(crate) fn lora(&mut self, op: &Lora) -> Stage {
        let dtype = self.setting.dtype;
        let sizes = self.program.site_parts(op.site);
        let (out, out_stride) = match is_logits(self.program, op.out.0) {
            true => (Dtype::F32, logits_stride(self.program.vocab_size) as u32),
            false => (dtype, self.cols(op.out)),
        };
        let (input, shrink, expand) = match op.input {
            LoraInput::Rows(input) => {
                let shrink = self.instances.id(manifest::lora_shrink(dtype));
                (self.buffer(input), Some(shrink), manifest::lora_expand(dtype, out))
            }
            LoraInput::Tokens => (0, None, manifest::lora_expand_table(dtype)),
            LoraInput::Experts { .. } => unreachable!("left out"),
        };
        let params = LoraParams {
            out: self.buffer(op.out),
            input,
            drawn: self.arena.at(self.layout.sampling.output),
            k: sizes.first().map_or(0, |[_, k]| *k as u32),
            out_stride,
            parts: sizes.len() as u32,
            scale: op.scale,
            ..LoraParams::default()
        };
        Stage::Lora(LoraStage {
            shrink,
            expand: self.instances.id(expand),
            params,
            columns: sizes.iter().map(|[rows, _]| *rows as u32).collect(),
            site: op.site,
            rows: self.rows(op.out),
        })
    }
}

impl Machine {
    /// Launches what adapters add at a site, unless no row of the step has one.
    pub(crate) fn lora(&self, stage: &LoraStage, step: &Step<'_>) -> Result<(), BackendError> {
        let Some(adapters) = step.adapters else { return Ok(()) };
        let kind = usize::from(stage.rows == Rows::Sampled);
        let tiles = step.shape.adapted[kind].tiles as u32;
        if tiles == 0 {
            return Ok(());
        }
        let params = LoraParams {
            tiles: step.at(step.shape.adapted_tiles(kind)),
            rows: step.at(step.shape.adapted_rows(kind)),
            ids: step.at(step.shape.token_ids()),
            ..adapters.fill(&stage.params, stage.site, tiles)
        };
        if let Some(shrink) = stage.shrink {
            let threads = self.kernels.get(shrink).threads;
            self.launch(shrink, params.shrink_grid(tiles, threads), &params)?;
        }
        let threads = self.kernels.get(stage.expand).threads;
        self.launch(stage.expand, params.expand_grid(tiles, threads, stage.columns.iter().copied()), &params)
    }
}
