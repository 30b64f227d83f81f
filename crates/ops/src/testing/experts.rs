//! Mixtures of experts in random models, and their meaning in f64.

use std::borrow::Cow;

use proptest::prelude::*;

use super::TinyModel;
use super::math::{Rows as Values, dot};
use super::model::Build;
use super::suite::models;
use crate::experts::LEAST_SUM;
use crate::{
    BufferId, ExpertGroups, ExpertLinear, ExpertSum, GateRows, Glu, GroupScore, Linear, Op, Route, RouteScores, Rows,
    Slab, StorageType, TensorData, WeightId, WeightPart,
};

/// A mixture of experts in the place of the MLP of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyExperts {
    /// Number of experts E.
    pub count: usize,
    /// Number of experts of a token k.
    pub chosen: usize,
    /// Scores of the router.
    pub scores: RouteScores,
    /// Restriction to groups.
    pub groups: Option<ExpertGroups>,
    /// Whether the choice has a correction.
    pub correction: bool,
    /// Whether the weights of the chosen experts are normalised.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether the experts are slabs of one tensor.
    pub slabs: bool,
    /// Whether there is a shared expert, with a gate.
    pub shared: bool,
}

impl Default for TinyExperts {
    /// Returns the experts of Mixtral.
    fn default() -> Self {
        Self {
            count: 5,
            chosen: 2,
            scores: RouteScores::Softmax,
            groups: None,
            correction: false,
            normalise: true,
            scale: 1.0,
            slabs: false,
            shared: false,
        }
    }
}

impl Build<'_> {
    /// Appends the mixture of experts of a layer: `y = experts(x)`.
    pub(super) fn experts(&mut self, index: usize, experts: &TinyExperts, x: BufferId, y: BufferId) {
        let TinyExperts { count, chosen, .. } = *experts;
        let (hidden, inner, kind) = (self.model.hidden, self.model.inner, self.model.glu);
        let routing = self.builder.routing(format!("routing.{index}"), chosen);
        let rows = Rows::Routed(chosen);
        let gate_up = self.builder.buffer(format!("experts.gate_up.{index}"), rows, 2 * inner);
        let acted = self.builder.buffer(format!("experts.h.{index}"), rows, inner);
        let out = self.builder.buffer(format!("experts.out.{index}"), rows, hidden);

        // Wide, so that the scores of experts are far apart.
        let weight = self.matrix(&format!("{index}.router"), &[count], hidden, 6.0);
        let bias = self.model.biases.then(|| self.matrix(&format!("{index}.router.bias"), &[count], 1, 0.3));
        let correction =
            experts.correction.then(|| self.vector_within(&format!("{index}.correction"), count, -0.5, 0.5));
        let TinyExperts { scores, groups, normalise, scale, .. } = *experts;
        self.builder.push(Op::Route(Route {
            weight,
            bias,
            site: None,
            correction,
            scores,
            groups,
            normalise,
            scale,
            input: x,
            out: routing,
        }));
        let product = |build: &mut Self, name: &str, parts: &[usize], input, out| {
            let (weight, bias) = build.expert_weights(&format!("{index}.experts.{name}"), parts, experts, input);
            build.builder.push(Op::ExpertLinear(ExpertLinear { weight, bias, experts: count, input, routing, out }));
        };
        product(self, "gate_up", &[inner, inner], x, gate_up);
        self.builder.push(Op::Glu(Glu { kind, input: gate_up, out: acted }));
        product(self, "down", &[hidden], acted, out);
        let shared = experts.shared.then(|| self.shared_expert(index, x));
        let scale = self.model.scales.residual;
        self.builder.push(Op::ExpertSum(ExpertSum { input: out, routing, scale, add: shared, out: y }));
    }

    /// Appends an expert of all tokens, whose output it returns.
    fn shared_expert(&mut self, index: usize, x: BufferId) -> BufferId {
        let (hidden, inner, kind) = (self.model.hidden, self.model.inner, self.model.glu);
        let mut buffer = |name: &str, cols| self.builder.buffer(format!("shared.{name}.{index}"), Rows::Tokens, cols);
        let (gate, gate_up) = (buffer("gate", 1), buffer("gate_up", 2 * inner));
        let (acted, out) = (buffer("h", inner), buffer("out", hidden));
        self.linear(&format!("{index}.shared.gate"), &[1], x, None, gate);
        self.linear(&format!("{index}.shared.gate_up"), &[inner, inner], x, None, gate_up);
        self.builder.push(Op::Glu(Glu { kind, input: gate_up, out: acted }));
        self.builder.push(Op::GateRows(GateRows { gate, out: acted }));
        let weight = self.matrix(&format!("{index}.shared.down"), &[hidden], inner, 1.5);
        self.builder.push(Op::Linear(Linear { weight, bias: None, scale: 1.0, input: acted, add: None, out }));
        out
    }

    /// Declares the weights and biases of all experts, with the same parts for each.
    fn expert_weights(
        &mut self,
        name: &str,
        parts: &[usize],
        experts: &TinyExperts,
        input: BufferId,
    ) -> (WeightId, Option<WeightId>) {
        let weight = self.expert_weight(name, parts, experts, self.cols(input), 1.5);
        let bias = self.model.biases.then(|| self.expert_weight(&format!("{name}.bias"), parts, experts, 1, 0.3));
        (weight, bias)
    }

    /// Declares a weight of all experts, with elements within `gain / sqrt(cols)`.
    fn expert_weight(
        &mut self,
        name: &str,
        parts: &[usize],
        experts: &TinyExperts,
        cols: usize,
        gain: f32,
    ) -> WeightId {
        let mut all = self.parts(name, &parts.repeat(experts.count), cols, gain);
        if experts.slabs {
            all = (0..all.len()).map(|index| self.slab(&all, index, parts.len())).collect();
        }
        self.builder.weight(name, cols, all)
    }

    /// Moves a part to the end of a tensor that has this part of all experts.
    fn slab(&mut self, all: &[WeightPart], index: usize, parts: usize) -> WeightPart {
        let (part, count) = (&all[index], all.len() / parts);
        let Some(data) = self.weights.tensors.remove(&part.tensor) else { return part.clone() };
        let tensor = format!("{}.all", all[index % parts].tensor);
        let empty = || {
            let shape = std::iter::once(count).chain(data.shape.iter().copied()).collect();
            TensorData { storage: data.storage, shape, bytes: Cow::default() }
        };
        let joined = self.weights.tensors.entry(tensor.clone()).or_insert_with(empty);
        joined.bytes.to_mut().extend_from_slice(&data.bytes);
        WeightPart { tensor, slab: Some(Slab { index: index / parts, count }), ..part.clone() }
    }
}

/// Returns the pairs of expert and weight of a token, one after the other, and the smallest difference between what was
/// chosen and what was not.
pub(super) fn route(op: &Route, logits: &[f64], correction: &[f64], chosen: usize) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = match op.scores {
        RouteScores::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        RouteScores::Softmax => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
    };
    let rank = |expert: usize| scores[expert] + correction.get(expert).copied().unwrap_or(0.0);
    let (mut experts, mut gap): (Vec<usize>, f64) = ((0..scores.len()).collect(), f64::INFINITY);
    if let Some(groups) = op.groups {
        let size = scores.len() / groups.count;
        let value = |group: usize| {
            let mut ranks: Vec<f64> = (group * size..(group + 1) * size).map(rank).collect();
            ranks.sort_by(|a, b| b.total_cmp(a));
            let counted = if groups.score == GroupScore::Best { 1 } else { 2 };
            ranks.iter().take(counted).sum::<f64>()
        };
        let (kept, difference) = largest((0..groups.count).collect(), value, groups.kept);
        gap = difference;
        experts.retain(|expert| kept.contains(&(expert / size)));
    }
    let (mut experts, difference) = largest(experts, rank, chosen);
    experts.sort_unstable();
    let sum: f64 = experts.iter().map(|&expert| scores[expert]).sum();
    let factor = f64::from(op.scale) / if op.normalise { sum + f64::from(LEAST_SUM) } else { 1.0 };
    (experts.iter().flat_map(|&expert| [expert as f64, scores[expert] * factor]).collect(), gap.min(difference))
}

/// Returns the `count` items with the largest values, and the difference between the last of them and the next one.
fn largest(mut items: Vec<usize>, value: impl Fn(usize) -> f64, count: usize) -> (Vec<usize>, f64) {
    items.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
    let gap = items.get(count).map_or(f64::INFINITY, |&next| value(items[count - 1]) - value(next));
    items.truncate(count);
    (items, gap)
}

/// Returns the rows of [`ExpertLinear`], token by token. `weight` has the rows of all experts.
pub(super) fn expert_linear(
    op: &ExpertLinear,
    input: &Values,
    routing: &Values,
    weight: &Values,
    bias: &[f64],
) -> Values {
    let width = weight.len() / op.experts;
    let chosen = routing.first().map_or(1, |row| row.len() / 2);
    let by_token = input.len() == routing.len();
    let mut rows = Values::new();
    for (token, pairs) in routing.iter().enumerate() {
        for (j, pair) in pairs.chunks(2).enumerate() {
            let input = &input[if by_token { token } else { token * chosen + j }];
            let first = pair[0] as usize * width;
            let value = |row: usize| dot(input, &weight[row]) + bias.get(row).copied().unwrap_or(0.0);
            rows.push((first..first + width).map(value).collect());
        }
    }
    rows
}

/// Returns the rows of [`ExpertSum`] without what it adds.
pub(super) fn expert_sum(op: &ExpertSum, input: &Values, routing: &Values) -> Values {
    let sum = |(token, pairs): (usize, &Vec<f64>)| {
        let rows = input.chunks(pairs.len() / 2).nth(token).unwrap_or_default();
        let weighted = |col: usize| pairs.chunks(2).zip(rows).map(|(pair, row)| pair[1] * row[col]).sum::<f64>();
        let cols = rows.first().map_or(0, Vec::len);
        (0..cols).map(|col| f64::from(op.scale) * weighted(col)).collect()
    };
    routing.iter().enumerate().map(sum).collect()
}

/// Returns a model whose experts have rows of whole super-blocks, of which each token uses so many of five.
pub fn experts_of_blocks(storage: StorageType, chosen: usize) -> TinyModel {
    TinyModel { experts: Some(TinyExperts { chosen, ..TinyExperts::default() }), ..TinyModel::of_blocks(storage) }
}

/// Generates models with mixtures of experts of every kind.
pub fn models_with_experts() -> impl Strategy<Value = TinyModel> {
    let scores = prop_oneof![Just(RouteScores::Softmax), Just(RouteScores::Sigmoid)];
    let sizes = (1usize..5, 1usize..5, 0usize..64, 0usize..64);
    let groups = proptest::option::of(prop_oneof![Just(GroupScore::Best), Just(GroupScore::BestTwo)]);
    let flags = proptest::array::uniform4(any::<bool>());
    let experts = (sizes, scores, groups, flags, 0.3f32..3.0);
    (models(), experts).prop_map(|(model, ((count, size, kept, chosen), scores, groups, flags, scale))| {
        let [correction, normalise, slabs, shared] = flags;
        let kept = 1 + kept % count;
        let eligible = if groups.is_some() { kept * size } else { count * size };
        let experts = TinyExperts {
            count: count * size,
            chosen: 1 + chosen % eligible,
            scores,
            groups: groups.map(|score| ExpertGroups { count, kept, score }),
            correction,
            normalise,
            scale,
            slabs,
            shared,
        };
        TinyModel { experts: Some(experts), ..model }
    })
}
