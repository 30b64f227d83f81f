//! The part of a decoder that is a mixture of experts.

use octavo_ops::{
    BufferId, ExpertLinear, ExpertSum, GateRows, Glu, Linear, Op, ProgramBuilder, Route, Rows, Slab, WeightId,
    WeightPart,
};

use super::ModelError;
use super::decoder::{Block, Decoder, MlpScratch, part};
use super::names::{EXPERT, Role};
use crate::config::{ExpertsConfig, LayerConfig, MlpConfig, ModelConfig};

/// Buffers shared by all mixtures of experts.
#[derive(Clone, Copy)]
pub(super) struct ExpertScratch {
    routing: BufferId,
    gate_up: BufferId,
    hidden: BufferId,
    out: BufferId,
    shared: Option<SharedScratch>,
}

/// Buffers of the expert of all tokens.
#[derive(Clone, Copy)]
struct SharedScratch {
    mlp: MlpScratch,
    /// Gate of its output.
    gate: Option<BufferId>,
}

impl ExpertScratch {
    /// Declares the buffers, if a layer of the model has experts.
    pub(super) fn new(builder: &mut ProgramBuilder, config: &ModelConfig) -> Option<Self> {
        let experts = config.experts()?;
        let with_experts = |layer: &&LayerConfig| layer.experts.is_some();
        let inner = config.layers.iter().filter(with_experts).map(|layer| layer.mlp.intermediate_size).max()?;
        let rows = Rows::Routed(experts.chosen);
        Some(Self {
            routing: builder.routing("routing", experts.chosen),
            gate_up: builder.buffer("expert_gate_up", rows, 2 * inner),
            hidden: builder.buffer("expert_hidden", rows, inner),
            out: builder.buffer("expert_out", rows, config.hidden_size),
            shared: experts.shared.map(|shared| SharedScratch {
                mlp: MlpScratch::new(builder, "shared_", shared.intermediate_size, true),
                gate: shared.gated.then(|| builder.buffer("shared_gate", Rows::Tokens, 1)),
            }),
        })
    }
}

/// The weights of all experts of a layer, each with the same parts.
struct ExpertWeights<'a> {
    label: &'a str,
    cols: usize,
    /// Parts of an expert and their rows.
    parts: &'a [(Role, usize)],
    bias: bool,
}

impl Decoder<'_> {
    /// Emits `x += Σ weight · expert(x)` over the chosen experts, and the shared expert.
    pub(super) fn experts(&mut self, block: Block, config: &ExpertsConfig, mlp: &MlpConfig) -> Result<(), ModelError> {
        let Some(scratch) = self.scratch.experts else { unreachable!("declared for a model with experts") };
        let ExpertScratch { routing, gate_up, hidden, out, shared } = scratch;
        let (hidden_size, inner, count) = (self.config().hidden_size, mlp.intermediate_size, config.count);
        let input = self.before(block, "mlp_norm", Role::MlpNorm)?;
        self.route(block, config, input, routing)?;

        let fused = self.config().family.names.fuses_experts(self.checkpoint.format());
        let parts: &[_] = match fused {
            true => &[(Role::ExpertGateUp, 2 * inner)],
            false => &[(Role::ExpertGate, inner), (Role::ExpertUp, inner)],
        };
        let weights = ExpertWeights { label: "expert_gate_up", cols: hidden_size, parts, bias: mlp.bias };
        let (weight, bias) = self.expert_weights(block, count, &weights)?;
        self.builder.push(Op::ExpertLinear(ExpertLinear {
            weight,
            bias,
            experts: count,
            input,
            routing,
            out: gate_up,
        }));
        self.builder.push(Op::Glu(Glu { kind: mlp.activation, input: gate_up, out: hidden }));
        let parts = &[(Role::ExpertDown, hidden_size)];
        let weights = ExpertWeights { label: "expert_down", cols: inner, parts, bias: mlp.bias };
        let (weight, bias) = self.expert_weights(block, count, &weights)?;
        self.builder.push(Op::ExpertLinear(ExpertLinear { weight, bias, experts: count, input: hidden, routing, out }));
        let Block { x, scale, .. } = block;
        self.builder.push(Op::ExpertSum(ExpertSum { input: out, routing, scale, add: Some(x), out: x }));
        match config.shared.zip(shared) {
            Some((shared, scratch)) => {
                let mlp = MlpConfig { intermediate_size: shared.intermediate_size, ..*mlp };
                self.shared_expert(block, &mlp, input, scratch)
            }
            None => Ok(()),
        }
    }

    fn route(
        &mut self,
        block: Block,
        config: &ExpertsConfig,
        input: BufferId,
        out: BufferId,
    ) -> Result<(), ModelError> {
        let ExpertsConfig { count, scores, groups, normalise, scale, .. } = *config;
        let rows = [(Role::Router, count)];
        let weight = self.matrix(&block.label("router"), self.config().hidden_size, &rows, block.layer)?;
        let bias = self.bias_if(config.router_bias, &block.label("router_bias"), &rows, block.layer)?;
        let correction = match config.correction {
            true => Some(self.vector(&block.label("router_correction"), Role::RouterCorrection, block.layer, count)?),
            false => None,
        };
        let route = Route { weight, bias, site: None, correction, scores, groups, normalise, scale, input, out };
        self.builder.push(Op::Route(route));
        Ok(())
    }

    /// Emits `x += gate(x) · mlp(x)` of the expert of all tokens.
    fn shared_expert(
        &mut self,
        block: Block,
        config: &MlpConfig,
        input: BufferId,
        scratch: SharedScratch,
    ) -> Result<(), ModelError> {
        let (hidden_size, inner, layer) = (self.config().hidden_size, config.intermediate_size, block.layer);
        let MlpScratch { gate_up, hidden } = scratch.mlp;
        let parts = [(Role::SharedGate, inner), (Role::SharedUp, inner)];
        let weight = self.matrix(&block.label("shared_gate_up"), hidden_size, &parts, layer)?;
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out: gate_up }));
        self.builder.push(Op::Glu(Glu { kind: config.activation, input: gate_up, out: hidden }));
        if let Some(gate) = scratch.gate {
            let weight = self.matrix(&block.label("shared_router"), hidden_size, &[(Role::SharedRouter, 1)], layer)?;
            self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out: gate }));
            // The product that follows is linear, so its input may take the gate.
            self.builder.push(Op::GateRows(GateRows { gate, out: hidden }));
        }
        let weight = self.matrix(&block.label("shared_down"), inner, &[(Role::SharedDown, hidden_size)], layer)?;
        let Block { x, scale, .. } = block;
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale, input: hidden, add: Some(x), out: x }));
        Ok(())
    }

    /// Declares the weight and the bias of all experts.
    fn expert_weights(
        &mut self,
        block: Block,
        count: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(WeightId, Option<WeightId>), ModelError> {
        let &ExpertWeights { label, cols, parts, bias } = weights;
        let declare = |decoder: &mut Self, label: String, cols: usize, name: fn(&Self, Role, usize) -> String| {
            let mut all = Vec::with_capacity(count * parts.len());
            for index in 0..count {
                for &(role, rows) in parts {
                    let shape: &[usize] = if cols == 1 { &[rows] } else { &[rows, cols] };
                    let name = name(decoder, role, block.layer);
                    all.push(slab_part(decoder, &name, shape, Slab { index, count })?);
                }
            }
            Ok::<_, ModelError>(decoder.builder.weight(label, cols, all))
        };
        let weight = declare(self, block.label(label), cols, Self::weight_name)?;
        let bias = match bias {
            true => Some(declare(self, block.label(&format!("{label}_bias")), 1, Self::bias_name)?),
            false => None,
        };
        Ok((weight, bias))
    }
}

/// Returns a part of one expert or head: a tensor of its own, or a slab of a tensor of all of them.
pub(super) fn slab_part(
    decoder: &Decoder<'_>,
    name: &str,
    shape: &[usize],
    slab: Slab,
) -> Result<WeightPart, ModelError> {
    let (checkpoint, rows) = (decoder.checkpoint, shape[0]);
    if name.contains(EXPERT) {
        return part(checkpoint, name.replace(EXPERT, &slab.index.to_string()), rows, shape);
    }
    let whole: Vec<usize> = std::iter::once(slab.count).chain(shape.iter().copied()).collect();
    Ok(WeightPart { slab: Some(slab), ..part(checkpoint, name.to_owned(), rows, &whole)? })
}
