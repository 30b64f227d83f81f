//! Lowering and launches of the ops of mixtures of experts.

use octavo_kernels::manifest::{self, ExpertProduct, ExpertTiles, GemmTile};
use octavo_kernels::params::{
    EXPERT_ROWS, ExpertLinearParams, ExpertSumParams, GateRowsParams, MAX_EXPERTS, RouteParams, SortExpertsParams,
    expert_tiles,
};
use octavo_ops::{
    BackendError, BufferId, Element, ExpertLinear, ExpertSum, GateRows, GroupScore, Op, Program, Route, RouteScores,
    Rows,
};

use crate::arena::{Plan, Region};
use crate::build::{Instances, KernelId};
use crate::forward::{Machine, Step, some};
use crate::launcher::Launcher;
use crate::linear::Setting;
use crate::lora::LoraStage;
use crate::lower::{Lowering, Stage};
use crate::unsupported;
use crate::weights::Part;

/// Experts of the tokens of a step. A pair `t · k + j` is the j-th expert of token t.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutingRegions {
    /// Experts by pair.
    picked: Region,
    /// Their weights.
    weights: Region,
    /// The pairs by expert.
    order: Region,
    /// Tiles of pairs of one expert.
    tiles: Region,
}

impl RoutingRegions {
    /// Allocates room for steps of `tokens` tokens.
    pub(crate) fn new(program: &Program, buffer: usize, tokens: u64, plan: &mut Plan) -> Self {
        let experts = program.ops.iter().find_map(|op| match op {
            Op::Route(op) if op.out.0 == buffer => Some(program.weights[op.weight.0].rows),
            _ => None,
        });
        let pairs = tokens.saturating_mul(program.buffers[buffer].cols as u64);
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX / 2);
        // Larger tiles are fewer.
        let tiles = expert_tiles(narrow(pairs), narrow(experts.unwrap_or(0) as u64), EXPERT_ROWS);
        let mut words = |count: u64| plan.take(count.saturating_mul(size_of::<u32>() as u64));
        let [picked, weights, order] = [(); 3].map(|()| words(pairs));
        Self { picked, weights, order, tiles: words(1 + 3 * u64::from(tiles)) }
    }
}

/// Returns whether a buffer has experts.
pub(crate) fn is_routing(program: &Program, buffer: usize) -> bool {
    program.buffers[buffer].element == Element::Routing
}

/// How the pairs of experts are divided into tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    pub(crate) experts: u32,
    /// Whether there are products on tensor cores.
    tensor_cores: bool,
    /// Whether one kernel computes any number of pairs, so that a pair's bits do not depend on it.
    batch_invariant: bool,
}

impl Tiling {
    pub(crate) fn new(experts: u32, setting: &Setting) -> Self {
        let gemm = manifest::expert_gemm(setting.chip, None, setting.dtype, GemmTile::Small);
        Self { experts, tensor_cores: gemm.is_some(), batch_invariant: setting.batch_invariant }
    }

    /// Returns the tiles of so many pairs.
    pub(crate) fn tiles(self, pairs: u32) -> ExpertTiles {
        match ExpertTiles::for_pairs(pairs, self.experts) {
            _ if !self.tensor_cores => ExpertTiles::Few,
            ExpertTiles::Few if self.batch_invariant => ExpertTiles::Gemm(GemmTile::Small),
            tiles => tiles,
        }
    }
}

/// A product with a part of the weights of experts or heads.
#[derive(Clone, Debug)]
pub(crate) struct ExpertPart {
    /// Parameters except the tiles and, for heads, the tokens.
    params: ExpertLinearParams,
    few: ExpertKernel,
    small: ExpertKernel,
    large: ExpertKernel,
}

/// A kernel of such a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertKernel {
    pub(crate) id: KernelId,
    /// Numbers of pairs and of outputs of a CTA.
    pub(crate) cta: [u32; 2],
}

impl ExpertPart {
    /// Chooses kernels.
    pub(crate) fn new(part: &Part, params: ExpertLinearParams, setting: &Setting, instances: &mut Instances) -> Self {
        let Setting { chip, dtype, batch_invariant, .. } = *setting;
        let format = part.quant.map(|(format, _)| format);
        let mut kernel = |gemm: Option<GemmTile>| {
            let gemm = gemm.and_then(|tile| manifest::expert_gemm(chip, format, dtype, tile));
            let ExpertProduct { instance, cta } = gemm.unwrap_or_else(|| manifest::expert_gemv(format, dtype));
            ExpertKernel { id: instances.id(instance), cta }
        };
        // The kernels of quantised weights have other sums for other tiles.
        let one_for_all = batch_invariant && format.is_some();
        let large = if one_for_all { GemmTile::Small } else { GemmTile::Large };
        Self { params, few: kernel(None), small: kernel(Some(GemmTile::Small)), large: kernel(Some(large)) }
    }

    /// Returns whether the weight is quantised.
    pub(crate) const fn is_quantised(&self) -> bool {
        self.params.quant.codes != 0
    }

    /// Returns the kernel for tiles of pairs, and the parameters.
    pub(crate) fn for_tiles(&self, tiles: ExpertTiles) -> (ExpertKernel, ExpertLinearParams) {
        let kernel = match tiles {
            ExpertTiles::Few => self.few,
            ExpertTiles::Gemm(GemmTile::Small) => self.small,
            ExpertTiles::Gemm(GemmTile::Large) => self.large,
        };
        (kernel, ExpertLinearParams { tile_rows: tiles.rows(), ..self.params })
    }
}

/// The choice of experts.
#[derive(Clone, Debug)]
pub(crate) struct RouteStage {
    route: KernelId,
    params: RouteParams,
    sort: KernelId,
    sorted: SortExpertsParams,
    tiling: Tiling,
    routing: BufferId,
    /// Adds to the logits, and the kernel that divides pairs for adapters.
    lora: Option<(LoraStage, KernelId)>,
}

/// An op of a mixture of experts with its kernels and all parameters that are constant.
#[derive(Clone, Debug)]
pub(crate) enum ExpertStage {
    Route(Box<RouteStage>),
    /// A product for each part of the experts' weights.
    Linear {
        parts: Vec<ExpertPart>,
        chosen: u32,
        tiling: Tiling,
    },
    Sum {
        kernel: KernelId,
        params: ExpertSumParams,
    },
    Gate {
        kernel: KernelId,
        params: GateRowsParams,
        rows: Rows,
    },
}

impl Lowering<'_> {
    fn routing(&self, id: BufferId) -> RoutingRegions {
        let known = self.layout.routings.iter().find(|(buffer, _)| *buffer == id);
        known.map(|(_, regions)| *regions).unwrap_or_else(|| unreachable!("a program checks its routings"))
    }

    pub(crate) fn route(&mut self, op: &Route) -> Result<Stage, BackendError> {
        let experts = self.program.weights[op.weight.0].rows;
        if experts > MAX_EXPERTS {
            return Err(unsupported(format!("{experts} experts; it supports {MAX_EXPERTS}")));
        }
        let at = self.routing(op.out);
        let picked = self.arena.at(at.picked);
        let params = RouteParams {
            input: self.buffer(op.input),
            weight: self.vector(op.weight),
            bias: op.bias.map_or(0, |id| self.vector(id)),
            correction: op.correction.map_or(0, |id| self.vector(id)),
            deltas: 0,
            picked,
            weights: self.arena.at(at.weights),
            tokens: 0,
            cols: self.cols(op.input),
            experts: experts as u32,
            chosen: self.cols(op.out),
            sigmoid: u32::from(op.scores == RouteScores::Sigmoid),
            groups: op.groups.map_or(0, |groups| groups.count as u32),
            kept_groups: op.groups.map_or(0, |groups| groups.kept as u32),
            best_two: u32::from(op.groups.is_some_and(|groups| groups.score == GroupScore::BestTwo)),
            normalise: u32::from(op.normalise),
            scale: op.scale,
        };
        let (order, tiles) = (self.arena.at(at.order), self.arena.at(at.tiles));
        let sorted =
            SortExpertsParams { picked, order, tiles, experts: experts as u32, ..SortExpertsParams::default() };
        let tiling = Tiling::new(experts as u32, &self.setting);
        let route = self.instances.id(manifest::route(self.setting.dtype));
        let sort = self.instances.id(manifest::sort_experts());
        let lora = self.router_lora(op).map(|stage| (stage, self.instances.id(manifest::lora_pairs())));
        let stage = RouteStage { route, params, sort, sorted, tiling, routing: op.out, lora };
        Ok(Stage::Experts(ExpertStage::Route(Box::new(stage))))
    }

    pub(crate) fn expert_linear(&mut self, op: &ExpertLinear) -> Stage {
        let (at, chosen, stride) = (self.routing(op.routing), self.cols(op.routing), self.cols(op.out));
        let mut column = 0;
        let mut parts = Vec::new();
        for part in self.matrix(op.weight).to_vec() {
            let n = (part.rows / op.experts) as u32;
            let params = ExpertLinearParams {
                quant: part.planes(self.arena),
                weight: self.arena.at(part.region),
                input: self.buffer(op.input),
                out: self.buffer(op.out),
                bias: op.bias.map_or(0, |id| self.vector(id)),
                order: self.arena.at(at.order),
                tiles: self.arena.at(at.tiles),
                n,
                k: self.cols(op.input),
                share: if self.rows(op.input) == Rows::Tokens { chosen } else { 1 },
                column,
                out_stride: stride,
                input_stride: self.cols(op.input),
                ..ExpertLinearParams::default()
            };
            parts.push(ExpertPart::new(&part, params, &self.setting, &mut self.instances));
            column += n;
        }
        let tiling = Tiling::new(op.experts as u32, &self.setting);
        Stage::Experts(ExpertStage::Linear { parts, chosen, tiling })
    }

    pub(crate) fn expert_sum(&mut self, op: &ExpertSum) -> Stage {
        let params = ExpertSumParams {
            out: self.buffer(op.out),
            input: self.buffer(op.input),
            weights: self.arena.at(self.routing(op.routing).weights),
            add: op.add.map_or(0, |id| self.buffer(id)),
            tokens: 0,
            cols: self.cols(op.out),
            chosen: self.cols(op.routing),
            scale: op.scale,
        };
        let kernel = self.instances.id(manifest::expert_sum(self.setting.dtype));
        Stage::Experts(ExpertStage::Sum { kernel, params })
    }

    pub(crate) fn gate_rows(&mut self, op: &GateRows) -> Stage {
        let (out, gate) = (self.buffer(op.out), self.buffer(op.gate));
        let params = GateRowsParams { out, gate, rows: 0, cols: self.cols(op.out) };
        let kernel = self.instances.id(manifest::gate_rows(self.setting.dtype));
        Stage::Experts(ExpertStage::Gate { kernel, params, rows: self.rows(op.out) })
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches an op of a mixture of experts, unless it has no rows.
    pub(crate) fn experts(&self, stage: &ExpertStage, step: &Step<'_>) -> Result<(), BackendError> {
        let tokens = step.rows(Rows::Tokens);
        match stage {
            ExpertStage::Route(stage) => some(tokens, || self.route(stage, step)),
            ExpertStage::Linear { parts, chosen, tiling } => some(tokens, || {
                let pairs = tokens * chosen;
                let tiles = tiling.tiles(pairs);
                parts.iter().try_for_each(|part| {
                    let (ExpertKernel { id, cta }, params) = part.for_tiles(tiles);
                    self.launch(id, params.grid(pairs, tiling.experts, cta), &params)
                })
            }),
            ExpertStage::Sum { kernel, params } => {
                let params = ExpertSumParams { tokens, ..*params };
                some(tokens, || self.launch(*kernel, params.grid(), &params))
            }
            ExpertStage::Gate { kernel, params, rows } => {
                let params = GateRowsParams { rows: step.rows(*rows), ..*params };
                some(params.rows, || self.launch(*kernel, params.grid(), &params))
            }
        }
    }

    /// Chooses the experts of each token and orders the pairs.
    fn route(&self, stage: &RouteStage, step: &Step<'_>) -> Result<(), BackendError> {
        let tokens = step.rows(Rows::Tokens);
        let deltas = match &stage.lora {
            Some((lora, _)) => self.router_lora(lora, step)?,
            None => 0,
        };
        let params = RouteParams { tokens, deltas, ..stage.params };
        self.launch(stage.route, params.grid(), &params)?;
        let pairs = tokens * params.chosen;
        let sorted = SortExpertsParams { pairs, tile_rows: stage.tiling.tiles(pairs).rows(), ..stage.sorted };
        self.launch(stage.sort, [1; 3], &sorted)?;
        match &stage.lora {
            Some((_, pairs)) => self.lora_pairs(*pairs, (stage.routing, params.picked), step),
            None => Ok(()),
        }
    }
}
