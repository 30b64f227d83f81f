//! The launches of a step.

use std::collections::HashMap;

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::{
    AttentionParams, DequantizeParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluParams, NormParams,
    PagedDecodeParams, Params, QkvPostParams, RoundedRows,
};
use octavo_ops::{BackendError, EmbedIds, Rows};

use crate::arena::Arena;
use crate::build::KernelId;
use crate::experts::ExpertStage;
use crate::float8::Scaling;
use crate::fuse::Fusion;
use crate::launcher::{Device, Launcher};
use crate::layout::Layout;
use crate::linear::ProductPart;
use crate::lora::Adapters;
use crate::lower::{Attention, CacheLayer, Stage};
use crate::media::MediaRows;
use crate::rounded::Prepared;
use crate::step::StepShape;
use crate::tables::TablesAt;

/// A program that is ready to launch.
pub(crate) struct Machine<L = Device> {
    pub(crate) launcher: L,
    pub(crate) stages: Vec<Stage>,
    /// Stages that may run as one, by the index of the first.
    pub(crate) fusions: Vec<Option<Fusion>>,
    pub(crate) scratch: Scratch,
    /// Element type of activations.
    pub(crate) dtype: Dtype,
    /// Size of an element in bytes.
    pub(crate) element: u64,
    /// Size of an element of the KV cache in bytes.
    pub(crate) kv_element: u64,
}

/// Scratch memory shared by products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    /// Dequantised values of a weight.
    pub(crate) values: u64,
    /// Rounded activations and their scales.
    pub(crate) rounded: RoundedRows,
    /// Those of gated activations.
    pub(crate) gated: RoundedRows,
    /// Sums of the parts of products whose inputs are divided, and the tickets of their tiles.
    pub(crate) parts: (u64, u64),
}

impl Scratch {
    /// Returns the addresses of a layout's regions.
    pub(crate) fn new(arena: &Arena, layout: &Layout) -> Self {
        let rows = |(codes, scales)| RoundedRows { codes: arena.at(codes), scales: arena.at(scales) };
        Self {
            values: arena.at(layout.values),
            rounded: rows(layout.rounded),
            gated: rows(layout.gated),
            parts: (arena.at(layout.workspace), arena.at(layout.part_tickets)),
        }
    }
}

/// Blocks of a KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cache {
    /// Address of block 0.
    pub(crate) address: u64,
    /// Number of elements in a block, over all layers.
    pub(crate) block_elements: u64,
    /// Number of blocks, including the null block.
    pub(crate) blocks: usize,
}

/// The arrays of a step on the device, and its caches.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub(crate) shape: StepShape,
    /// Address of the step's block.
    pub(crate) address: u64,
    /// Block tables, which stay from step to step.
    pub(crate) tables: TablesAt,
    /// Caches by KV group.
    pub(crate) caches: &'a [Cache],
    /// The media cache.
    pub(crate) media: MediaRows,
    /// Address of an encoder's patches.
    pub(crate) patches: u64,
    /// Slots of adapters, if there are any.
    pub(crate) adapters: Option<&'a Adapters>,
}

impl Step<'_> {
    /// Returns the address of an array by its first word.
    pub(crate) fn at(&self, word: usize) -> u64 {
        self.address + (word * size_of::<u32>()) as u64
    }

    pub(crate) fn rows(&self, rows: Rows) -> u32 {
        let rows = match rows {
            Rows::Tokens => self.shape.tokens,
            Rows::Routed(experts) => self.shape.tokens * experts,
            Rows::Sampled => self.shape.sampled,
            Rows::Pooled => self.shape.pooled,
            Rows::Merged => self.shape.merged,
        };
        rows as u32
    }

    /// Returns the address of the rows of a table that tokens read.
    fn ids(&self, ids: EmbedIds) -> u64 {
        self.at(match ids {
            EmbedIds::Tokens => self.shape.token_ids(),
            EmbedIds::Positions { .. } => self.shape.positions(),
            EmbedIds::Types => self.shape.token_types(),
        })
    }

    fn row_index(&self, rows: Rows) -> u64 {
        match rows {
            Rows::Pooled => self.at(self.shape.pooled_rows()),
            Rows::Tokens | Rows::Sampled | Rows::Merged | Rows::Routed(_) => self.at(self.shape.sampled_rows()),
        }
    }
}

impl Machine {
    /// Lets cuBLASLt plan every product of steps with at most the given number of rows of each kind. `scalings` are those of
    /// FP8 weights, by the address of the scales.
    pub(crate) fn plan_products(&mut self, most: impl Fn(Rows) -> usize, scalings: &HashMap<u64, Scaling>) {
        let Some(library) = &mut self.launcher.cublaslt else { return };
        for stage in &mut self.stages {
            let Stage::Product { product, rows: of } = stage else { continue };
            let most = most(*of) as u32;
            product.parts.iter_mut().for_each(|part| part.plan(library, &self.scratch, most, scalings));
        }
        let (products, refused) = library.counts();
        if refused > 0 {
            tracing::warn!("products: cuBLASLt does not do {refused} of {products}, which our own kernels do");
        }
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches a kernel with its maximum of shared memory.
    pub(crate) fn launch<P: Params + 'static>(
        &self,
        id: KernelId,
        grid: [u32; 3],
        params: &P,
    ) -> Result<(), BackendError> {
        self.launcher.launch(id, grid, None, params)
    }

    /// Returns for each matrix of FP8 weights whose inputs may be rounded to FP8 whether those of the given number of rows of each
    /// kind are.
    pub(crate) fn fp8_products(&self, most: impl Fn(Rows) -> usize) -> Vec<bool> {
        let of_stage = |stage: &Stage| match stage {
            Stage::Product { product, rows } => {
                let most = most(*rows) as u32;
                let rounds = |part: &ProductPart| part.rounds_to_fp8(&self.launcher, most, &self.scratch);
                product.parts.iter().filter_map(rounds).collect()
            }
            _ => Vec::new(),
        };
        self.stages.iter().flat_map(of_stage).collect()
    }

    /// Returns the number of quantised weights of experts, counting their parts.
    pub(crate) fn quantised_experts(&self) -> usize {
        let of_stage = |stage: &Stage| match stage {
            Stage::Experts(ExpertStage::Linear { parts, .. }) => {
                parts.iter().filter(|part| part.is_quantised()).count()
            }
            _ => 0,
        };
        self.stages.iter().map(of_stage).sum()
    }

    /// Launches one op, unless it has no rows.
    pub(crate) fn stage(&self, stage: &Stage, step: &Step<'_>) -> Result<(), BackendError> {
        let tokens = step.shape.tokens as u32;
        match stage {
            Stage::Embed { kernel, params, ids } => {
                let ids = step.ids(*ids);
                let params = EmbedParams { ids, tokens, ..*params };
                some(tokens, || self.launch(*kernel, params.grid(), &params))
            }
            Stage::EmbedQuantised { kernel, params } => {
                let row_ids = step.at(step.shape.token_ids());
                let params = DequantizeParams { row_ids, rows: tokens, ..*params };
                some(tokens, || self.launch(*kernel, params.grid(self.launcher.threads(*kernel)), &params))
            }
            Stage::Norm { kernel, params, rows } => {
                let params = NormParams { rows: step.rows(*rows), ..*params };
                let shared = NormParams::dynamic_shared(params.cols as usize) as u32;
                some(params.rows, || self.launcher.launch(*kernel, params.grid(), Some(shared), &params))
            }
            Stage::Product { product, rows } => {
                let rows = step.rows(*rows);
                some(rows, || self.product(product, rows, &step.shape))
            }
            Stage::QkvPost { kernel, params, cache } => some(tokens, || {
                let params = self.qkv_params(params, *cache, step);
                self.launch(*kernel, params.grid(), &params)
            }),
            Stage::Attention { attention, cache } => some(tokens, || self.attention(attention, *cache, step)),
            Stage::Glu { kernel, params, rows } => {
                let params = GluParams { rows: step.rows(*rows), ..*params };
                let threads = self.launcher.threads(*kernel);
                some(params.rows, || self.launch(*kernel, params.grid(threads), &params))
            }
            Stage::Gather { kernel, params, rows } => {
                let params = GatherRowsParams { row_index: step.row_index(*rows), count: step.rows(*rows), ..*params };
                some(params.count, || self.launch(*kernel, params.grid(), &params))
            }
            Stage::GatherColumns { kernel, params, rows } => {
                let params = GatherColumnsParams { rows: step.rows(*rows), ..*params };
                let threads = self.launcher.threads(*kernel);
                some(params.rows, || self.launch(*kernel, params.grid(threads), &params))
            }
            Stage::Pool { kernel, params } => self.pool_rows(*kernel, params, step),
            Stage::Image(stage) => self.image(stage, step),
            Stage::Rounded(stage) => self.rounded(stage, step),
            Stage::Experts(stage) => self.experts(stage, step),
            Stage::Latent(stage) => self.latent(stage, step),
            Stage::Lora(stage) => self.lora(stage, step),
        }
    }

    /// Returns the addresses of a layer's keys and values in block 0, and the number of elements in a block.
    pub(crate) fn cache(&self, layer: CacheLayer, step: &Step<'_>) -> (u64, u64, u64) {
        let Cache { address, block_elements, .. } = step.caches[layer.group];
        (address + layer.keys * self.kv_element, address + layer.values * self.kv_element, block_elements)
    }

    /// Returns the parameters of what follows the projection of q, k and v in a step.
    pub(crate) fn qkv_params(&self, params: &QkvPostParams, layer: CacheLayer, step: &Step<'_>) -> QkvPostParams {
        let (k_cache, v_cache, block_stride) = self.cache(layer, step);
        QkvPostParams {
            k_cache,
            v_cache,
            block_stride,
            positions: step.at(step.shape.positions()),
            position_stride: step.shape.position_stride() as u32,
            slots: step.at(step.shape.slots(layer.group)),
            tokens: step.shape.tokens as u32,
            ..*params
        }
    }

    /// Returns the parameters of attention in a step, with the plan at a word of its block.
    fn attention_params(
        &self,
        params: &AttentionParams,
        layer: CacheLayer,
        step: &Step<'_>,
        plan: usize,
    ) -> AttentionParams {
        let (k_cache, v_cache, block_stride) = self.cache(layer, step);
        let shape = &step.shape;
        AttentionParams {
            k_cache,
            v_cache,
            block_stride,
            block_table: step.tables.group(layer.group),
            seats: step.at(shape.seats()),
            query_start: step.at(shape.query_start()),
            seq_lens: step.at(shape.seq_lens()),
            seen_ends: if shape.spanned > 0 { step.at(shape.seen_ends()) } else { 0 },
            plan: step.at(plan),
            table_stride: step.tables.stride as u32,
            sequences: shape.sequences as u32,
            ..*params
        }
    }

    /// Returns the parameters of decode attention in a step. `codes` are those of the output.
    pub(crate) fn decode_params(
        &self,
        params: &PagedDecodeParams,
        codes: Option<Prepared>,
        layer: CacheLayer,
        step: &Step<'_>,
    ) -> PagedDecodeParams {
        let shape = &step.shape;
        let attention = self.attention_params(&params.attention, layer, step, shape.decode_plan());
        let codes = codes.filter(|codes| codes.is_written(shape.tokens as u32, shape));
        let rounded = codes.map_or_else(RoundedRows::default, |codes| codes.at);
        PagedDecodeParams { attention, rounded, ..*params }
    }

    fn attention(&self, attention: &Attention, layer: CacheLayer, step: &Step<'_>) -> Result<(), BackendError> {
        let shape = &step.shape;
        let fill = |params, plan| self.attention_params(params, layer, step, plan);
        match attention {
            Attention::Plain { kernel, params } => {
                let params = AttentionParams { plan: 0, ..fill(params, 0) };
                self.launch(*kernel, params.plain_grid(shape.tokens as u32), &params)
            }
            Attention::Tiled { prefill, params } => {
                let params = fill(params, shape.prefill_plan());
                self.launch(prefill.kernel, (prefill.grid)(&params, prefill.tile, shape.tiles as u32), &params)
            }
            Attention::Planned { decode, tile, prefill, params, codes } => {
                if shape.splits > 0 {
                    let params = self.decode_params(params, *codes, layer, step);
                    let grid = tile.grid(&params, self.launcher.processors(), shape.splits as u32);
                    self.launch(*decode, grid, &params)?;
                }
                if shape.tiles > 0 {
                    let params = fill(&params.attention, shape.prefill_plan());
                    self.launch(prefill.kernel, (prefill.grid)(&params, prefill.tile, shape.tiles as u32), &params)?;
                }
                Ok(())
            }
        }
    }
}

/// Launches if there are rows, because a grid without thread blocks is an error.
pub(crate) fn some(rows: u32, launch: impl FnOnce() -> Result<(), BackendError>) -> Result<(), BackendError> {
    if rows == 0 { Ok(()) } else { launch() }
}
