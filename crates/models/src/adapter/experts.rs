//! Adapters of mixtures of experts.
//!
//! PEFT adapts either the modules of each expert, or parameters that have the matrices of all experts of a layer
//! (`target_parameters`). Versions of transformers and families of models have several names for the same modules.

use std::collections::HashMap;

use super::config::AdapterConfig;
use super::{Delta, MAX_RANK};
use crate::checkpoint::Format;
use crate::config::{ExpertsConfig, LayerConfig, ModelConfig};
use crate::program::names::{EXPERT, Names, Role};

/// Ending of the canonical name of a module that has the parameters of all experts.
const EXPERTS: &str = ".mlp.experts";

/// Ending of the names of modules within others that adapt another parameter of the same module.
const WITHIN: &str = ".base_layer";

/// Endings of names of modules, and those that stand for them.
const ENDINGS: [(&str, &str); 7] = [
    (".w1", ".gate_proj"),
    (".w2", ".down_proj"),
    (".w3", ".up_proj"),
    (".mlp.router.layer", ".mlp.gate"),
    (".mlp.router", ".mlp.gate"),
    (".mlp.input_linear", EXPERTS),
    (".mlp.output_linear", EXPERTS),
];

/// Returns the name under which a module is known here, whichever of its names an adapter uses.
pub(super) fn canonical(module: &str) -> String {
    let module = module.replace(".block_sparse_moe.", ".mlp.");
    let module = module.trim_end_matches(WITHIN);
    let ending = ENDINGS.into_iter().find_map(|(old, new)| Some((module.strip_suffix(old)?, new)));
    ending.map_or_else(|| module.to_owned(), |(stem, new)| format!("{stem}{new}"))
}

/// Returns the canonical name of the router's module in a layer.
pub(super) fn router(names: &Names, layer: usize) -> String {
    let name = names.weight(Format::HuggingFace, Role::Router, layer);
    canonical(name.strip_suffix(".weight").unwrap_or(&name))
}

/// Returns the canonical name of the module that has the parameters of all experts of a layer.
fn experts(names: &Names, layer: usize) -> String {
    let router = router(names, layer);
    router.strip_suffix(".mlp.gate").map_or(router.clone(), |stem| format!("{stem}{EXPERTS}"))
}

/// Returns the canonical name of an expert's module; `None` if the role is none of experts.
pub(super) fn expert(names: &Names, role: Role, layer: usize, expert: usize) -> Option<String> {
    let projection = match role {
        Role::ExpertGate => "gate_proj",
        Role::ExpertUp => "up_proj",
        Role::ExpertGateUp => "gate_up_proj",
        Role::ExpertDown => "down_proj",
        _ => return None,
    };
    Some(format!("{}.{expert}.{projection}", experts(names, layer)))
}

/// What an adapter adds to a parameter that has the matrices of all experts of a layer.
#[derive(Debug)]
pub(super) struct Stack {
    /// Number of outputs and inputs of an expert.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Sum of the ranks of all experts.
    pub(super) ranks: usize,
    /// A `[experts · rank, cols]`, expert by expert.
    pub(super) a: Vec<f32>,
    /// B `[rows, rank · experts]`, with the experts in turn.
    pub(super) b: Vec<f32>,
}

/// Sizes of the experts of a layer.
#[derive(Clone, Copy, Debug)]
struct ExpertSizes {
    count: usize,
    hidden: usize,
    inner: usize,
}

/// How the experts of a model are stored.
#[derive(Clone, Debug)]
pub(super) struct ExpertLayout {
    /// By canonical name.
    layers: HashMap<String, ExpertSizes>,
    /// Whether gate and up of an expert are one part of its weight.
    fused: bool,
    /// Whether the parameter of gate and up has their outputs in turn.
    in_turn: bool,
}

impl ExpertLayout {
    pub(super) fn new(config: &ModelConfig, format: Format) -> Self {
        let names = &config.family.names;
        let layers = config.layers.iter().enumerate().filter_map(|(index, layer)| {
            let count = layer.experts.as_ref()?.count;
            let sizes = ExpertSizes { count, hidden: config.hidden_size, inner: layer.mlp.intermediate_size };
            Some((experts(names, index), sizes))
        });
        Self { layers: layers.collect(), fused: names.fuses_experts(format), in_turn: names.experts_in_turn }
    }

    /// Divides a stack into the deltas of the experts' modules, by canonical name. Those that change nothing are left out.
    pub(super) fn split(
        &self,
        config: &AdapterConfig,
        module: &str,
        stack: &Stack,
    ) -> Result<Vec<(String, Delta)>, String> {
        let (name, shown) = (canonical(module), module.escape_debug());
        let &ExpertSizes { count, hidden, inner } =
            self.layers.get(&name).ok_or_else(|| format!("the model has no experts '{shown}'"))?;
        let size = [stack.rows, stack.cols];
        // The shapes differ, so they tell the parameters apart, in whatever order PEFT has adapted them.
        let (parameter, parts): (_, &[(&str, Outputs)]) = match size {
            _ if size == [2 * inner, hidden] && self.fused => ("gate_up_proj", &[("gate_up_proj", Outputs::All)]),
            _ if size == [2 * inner, hidden] && self.in_turn => {
                ("gate_up_proj", &[("gate_proj", Outputs::Even), ("up_proj", Outputs::Odd)])
            }
            _ if size == [2 * inner, hidden] => {
                ("gate_up_proj", &[("gate_proj", Outputs::First), ("up_proj", Outputs::Last)])
            }
            _ if size == [hidden, inner] => ("down_proj", &[("down_proj", Outputs::All)]),
            [rows, cols] => {
                return Err(format!(
                    "its delta of '{shown}' is {rows} x {cols}, but the experts have {} x {hidden} and {hidden} x {inner}",
                    2 * inner
                ));
            }
        };
        let whole = format!("{}.{parameter}", module.trim_end_matches(WITHIN));
        let rank = config.rank(&whole);
        if !(1..=MAX_RANK).contains(&rank) || stack.ranks != rank * count {
            return Err(format!(
                "the tensors of '{shown}' have {} rows for {count} experts; its configuration says the rank {rank}, and the largest is {MAX_RANK}",
                stack.ranks
            ));
        }
        let scaling = config.scaling(&whole);
        let mut deltas = Vec::with_capacity(count * parts.len());
        for expert in 0..count {
            for (projection, outputs) in parts {
                let delta = stack.delta((expert, count), scaling, *outputs);
                deltas.extend(delta.map(|delta| (format!("{name}.{expert}.{projection}"), delta)));
            }
        }
        Ok(deltas)
    }
}

/// Some outputs of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outputs {
    All,
    /// The first and the last half.
    First,
    Last,
    /// Every other one.
    Even,
    Odd,
}

impl Outputs {
    /// Returns the number of such parts of the whole.
    pub(super) const fn parts(self) -> usize {
        match self {
            Self::All => 1,
            Self::First | Self::Last | Self::Even | Self::Odd => 2,
        }
    }

    /// Returns the rows among so many.
    pub(super) fn of(self, rows: usize) -> impl Iterator<Item = usize> {
        let (from, to, step) = match self {
            Self::All => (0, rows, 1),
            Self::First => (0, rows / 2, 1),
            Self::Last => (rows / 2, rows, 1),
            Self::Even => (0, rows, 2),
            Self::Odd => (1, rows, 2),
        };
        (from..to).step_by(step)
    }
}

impl Stack {
    /// Returns the delta of some outputs of an expert. Columns of B without effect are left out: where an adapter of separate
    /// projections was converted to one of their common parameter, half of them are zero for each. `None` if all are.
    fn delta(&self, (expert, count): (usize, usize), scaling: f32, outputs: Outputs) -> Option<Delta> {
        let (cols, rank) = (self.cols, self.ranks / count);
        let at = |row: usize, j: usize| self.b[row * self.ranks + j * count + expert];
        let used: Vec<usize> = (0..rank).filter(|&j| outputs.of(self.rows).any(|row| at(row, j) != 0.0)).collect();
        if used.is_empty() {
            return None;
        }
        let a = used.iter().flat_map(|j| &self.a[(expert * rank + j) * cols..][..cols]).copied().collect();
        let b: Vec<f32> = outputs.of(self.rows).flat_map(|row| used.iter().map(move |&j| at(row, j))).collect();
        Some(Delta { rows: b.len() / used.len(), cols, rank: used.len(), scaling, a, b })
    }
}

/// Where a checkpoint in safetensors files has the weight of a module.
#[derive(Debug)]
pub(super) struct StoredWeight {
    /// Name of the tensor.
    pub(super) tensor: String,
    pub(super) slab: Slab,
}

/// A matrix in a tensor that has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slab {
    /// Index and number of the matrices.
    pub(super) index: usize,
    pub(super) count: usize,
    /// The outputs, among those of the matrix.
    pub(super) outputs: Outputs,
    /// Whether the matrix is inputs by outputs.
    pub(super) by_inputs: bool,
}

impl Slab {
    /// A tensor with one matrix.
    pub(super) const WHOLE: Self = Self { index: 0, count: 1, outputs: Outputs::All, by_inputs: false };
}

/// Returns where a checkpoint has the weights of routers and experts, by the canonical names of their modules.
pub(super) fn stored(config: &ModelConfig) -> HashMap<String, StoredWeight> {
    let names = &config.family.names;
    let name = |role, layer| names.weight(Format::HuggingFace, role, layer);
    let mut all = HashMap::new();
    for (layer, LayerConfig { experts: found, .. }) in config.layers.iter().enumerate() {
        let Some(ExpertsConfig { count, .. }) = found else { continue };
        all.insert(router(names, layer), StoredWeight { tensor: name(Role::Router, layer), slab: Slab::WHOLE });
        for index in 0..*count {
            for role in [Role::ExpertGate, Role::ExpertUp, Role::ExpertGateUp, Role::ExpertDown] {
                let Some(module) = expert(names, role, layer, index) else { continue };
                let tensor = name(role, layer);
                let (tensor, slab) = match role {
                    _ if names.experts_in_turn => in_turn(&module, Slab { index, count: *count, ..Slab::WHOLE }),
                    _ if tensor.contains(EXPERT) => (tensor.replace(EXPERT, &index.to_string()), Slab::WHOLE),
                    _ => (tensor, Slab { index, count: *count, ..Slab::WHOLE }),
                };
                all.insert(module, StoredWeight { tensor, slab });
            }
        }
    }
    all
}

/// Returns the place of an expert's matrix in a parameter of transformers, inputs by outputs.
fn in_turn(module: &str, slab: Slab) -> (String, Slab) {
    let (stem, projection) = module.rsplit_once('.').unwrap_or(("", module));
    let stem = stem.rsplit_once('.').map_or(stem, |(stem, _)| stem);
    let (parameter, outputs) = match projection {
        "gate_proj" => ("gate_up_proj", Outputs::Even),
        "up_proj" => ("gate_up_proj", Outputs::Odd),
        other => (other, Outputs::All),
    };
    (format!("{stem}.{parameter}"), Slab { outputs, by_inputs: true, ..slab })
}

/// Returns whether the parameters of all experts belong to a module.
pub(super) fn is_stack(module: &str) -> bool {
    canonical(module).ends_with(EXPERTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_one_name() {
        for (module, name) in [
            ("model.layers.1.block_sparse_moe.experts.3.w2", "model.layers.1.mlp.experts.3.down_proj"),
            ("model.layers.1.mlp.experts.3.up_proj", "model.layers.1.mlp.experts.3.up_proj"),
            ("model.layers.0.mlp.experts.base_layer", "model.layers.0.mlp.experts"),
            ("model.layers.0.block_sparse_moe.input_linear", "model.layers.0.mlp.experts"),
            ("model.layers.0.block_sparse_moe.router.layer", "model.layers.0.mlp.gate"),
            ("model.layers.0.mlp.router", "model.layers.0.mlp.gate"),
            ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj"),
        ] {
            assert_eq!(canonical(module), name);
        }
        assert!(is_stack("model.layers.0.mlp.experts.base_layer"));
        assert!(!is_stack("model.layers.0.mlp.experts.0.up_proj"));
    }

    /// Two experts of rank 2 with four outputs and one input.
    fn stack() -> Stack {
        let b = (0..16).map(|at| if matches!(at % 4, 2 | 3) && at < 8 { 0.0 } else { at as f32 }).collect();
        Stack { rows: 4, cols: 1, ranks: 4, a: vec![1.0, 2.0, 3.0, 4.0], b }
    }

    #[test]
    fn a_stack_has_its_experts_in_turn() {
        let delta = stack().delta((1, 2), 0.5, Outputs::All).unwrap();
        assert_eq!((delta.rows, delta.cols, delta.rank, delta.scaling), (4, 1, 2, 0.5));
        assert_eq!((delta.a, delta.b), (vec![3.0, 4.0], vec![1.0, 0.0, 5.0, 0.0, 9.0, 11.0, 13.0, 15.0]));
        let odd = stack().delta((0, 2), 1.0, Outputs::Odd).unwrap();
        assert_eq!((odd.a, odd.b), (vec![1.0, 2.0], vec![4.0, 0.0, 12.0, 14.0]));
    }

    #[test]
    fn columns_without_effect_are_left_out() {
        let first = stack().delta((1, 2), 1.0, Outputs::First).unwrap();
        assert_eq!((first.rank, first.a, first.b), (1, vec![3.0], vec![1.0, 5.0]));
        let empty = Stack { b: vec![0.0; 16], ..stack() };
        assert!(empty.delta((1, 2), 1.0, Outputs::All).is_none());
    }
}
