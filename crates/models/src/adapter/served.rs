//! Adapters that are applied while a model runs.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use octavo_ops::{AdapterSource, LoraMatrices, Program, RopeStyle, SiteId, SiteKind};

use super::experts::{self, ExpertLayout};
use super::{Adapter, AdapterError, Delta, transposed};
use crate::checkpoint::{BY_GROUP, Checkpoint, Format, other_names};
use crate::config::ModelConfig;
use crate::program::names::{EXPERT, Role};

/// Roles in the layers whose weights adapters can change, without experts.
const ROLES: [Role; 17] = [
    Role::Q,
    Role::K,
    Role::V,
    Role::Qkv,
    Role::Output,
    Role::QLow,
    Role::QHigh,
    Role::Latent,
    Role::Gate,
    Role::Up,
    Role::GateUp,
    Role::Down,
    Role::SharedRouter,
    Role::SharedGate,
    Role::SharedUp,
    Role::SharedDown,
    Role::Router,
];

/// Roles of the weights of experts.
const EXPERT_ROLES: [Role; 4] = [Role::ExpertGate, Role::ExpertUp, Role::ExpertGateUp, Role::ExpertDown];

/// The weights of a program to which adapters can add, by the canonical names of their modules.
#[derive(Clone, Debug)]
pub struct AdapterTargets {
    modules: HashMap<String, Target>,
    experts: ExpertLayout,
}

/// Place of a module's matrices.
#[derive(Clone, Debug)]
struct Target {
    site: SiteId,
    part: usize,
    kind: SiteKind,
    /// Number of outputs N and inputs K.
    size: [usize; 2],
    /// Number of heads whose rows a GGUF file stores in the order of rotated pairs.
    permuted: Option<usize>,
}

/// An adapter whose matrices fit a program.
#[derive(Debug)]
pub struct ServedAdapter {
    path: PathBuf,
    base: Option<String>,
    rank: usize,
    matrices: HashMap<(SiteId, usize), Matrices>,
}

#[derive(Debug)]
struct Matrices {
    rank: usize,
    scaling: f32,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl AdapterTargets {
    /// Lists the targets of a checkpoint's program, which must have sites ([`Program::with_adapters`]).
    pub fn new(checkpoint: &Checkpoint, program: &Program) -> Self {
        let (config, format) = (checkpoint.config(), checkpoint.format());
        let names = &config.family.names;
        let module = |role, layer| match role {
            Role::Router => experts::router(names, layer),
            _ => without_ending(names.weight(Format::HuggingFace, role, layer)),
        };
        // Role and layer of each tensor; of those of experts, that of the first.
        let mut known = HashMap::new();
        for layer in 0..config.layers.len() {
            // GGUF files have one name for up and for the rows of both.
            let absent = if names.fused { Role::Up } else { Role::GateUp };
            for role in ROLES.into_iter().filter(|role| *role != absent).chain(EXPERT_ROLES) {
                known.insert(names.weight(format, role, layer).replace(EXPERT, "0"), (role, layer));
            }
        }
        let mut modules = HashMap::new();
        for (index, site) in program.sites.iter().enumerate() {
            let (id, weight) = (SiteId(index), &program.weights[site.weight.0]);
            let (sizes, each) = (program.site_parts(id), program.parts_each(id));
            let mut add = |module, part: usize, permuted| {
                let (site_id, kind, size) = (id, site.kind, sizes[part]);
                modules.insert(module, Target { site: site_id, part, kind, size, permuted });
            };
            let parts = weight.parts.iter().take(each).enumerate();
            let parts = parts.filter_map(|(part, rows)| {
                known
                    .get(rows.tensor.strip_suffix(BY_GROUP).unwrap_or(&rows.tensor))
                    .map(|(role, layer)| (part, *role, *layer))
            });
            match site.kind {
                SiteKind::Embedding => add(module(Role::Embedding, 0), 0, None),
                // The parts of a head are never modules of their own.
                SiteKind::Head if sizes.len() == 1 => add(module(Role::Head, 0), 0, None),
                SiteKind::Head => {}
                SiteKind::Linear | SiteKind::Router => {
                    for (part, role, layer) in parts {
                        add(module(role, layer), part, permuted_heads(config, format, role, layer));
                    }
                }
                SiteKind::Experts(count) => {
                    for (part, role, layer) in parts {
                        for expert in 0..count {
                            let module = experts::expert(names, role, layer, expert);
                            module.into_iter().for_each(|module| add(module, expert * each + part, None));
                        }
                    }
                }
            }
        }
        Self { modules, experts: ExpertLayout::new(config, format) }
    }

    /// Reads an adapter in PEFT's format.
    ///
    /// # Errors
    /// Returns an error if a file is missing or damaged, if the adapter does not fit the model, or if its rank is above
    /// `max_rank`.
    pub fn load(&self, folder: &Path, max_rank: usize) -> Result<ServedAdapter, AdapterError> {
        let mut adapter = Adapter::open(folder)?;
        adapter.split(&self.experts)?;
        let mut matrices = HashMap::new();
        for (module, delta) in std::mem::take(&mut adapter.deltas) {
            let shown = module.escape_debug();
            let target = self
                .target(&module)
                .ok_or_else(|| adapter.unfit(format!("the model has no weight '{shown}' that adapters can change")))?;
            let found = match target.kind {
                SiteKind::Embedding => [delta.cols, delta.rows],
                SiteKind::Linear | SiteKind::Head | SiteKind::Router | SiteKind::Experts(_) => [delta.rows, delta.cols],
            };
            if found != target.size {
                let [rows, cols] = target.size;
                return Err(adapter.unfit(format!(
                    "its delta of '{shown}' is {} x {}, but the model's weight has {rows} outputs and {cols} inputs",
                    found[0], found[1]
                )));
            }
            if delta.rank > max_rank {
                return Err(adapter.unfit(format!(
                    "its rank {} at '{shown}' is above the largest that is served, {max_rank}; --max-lora-rank sets it",
                    delta.rank
                )));
            }
            matrices.insert((target.site, target.part), Matrices::new(delta, target));
        }
        let rank = matrices.values().map(|matrices: &Matrices| matrices.rank).max().unwrap_or(0);
        Ok(ServedAdapter { path: folder.to_owned(), base: adapter.base, rank, matrices })
    }

    fn target(&self, module: &str) -> Option<&Target> {
        let weight = format!("{module}.weight");
        let mut others = other_names(&weight).filter_map(|name| self.modules.get(name.strip_suffix(".weight")?));
        self.modules.get(module).or_else(|| others.next())
    }
}

fn without_ending(name: String) -> String {
    name.strip_suffix(".weight").map(str::to_owned).unwrap_or(name)
}

/// Returns the number of heads of a weight whose rows a GGUF file stores as `(2i, 2i + 1)` pairs.
fn permuted_heads(config: &ModelConfig, format: Format, role: Role, layer: usize) -> Option<usize> {
    let attention = &config.layers[layer].attention;
    let is_paired = attention.rope.as_ref().is_some_and(|rope| rope.style == RopeStyle::GptJ);
    if format != Format::Gguf || !is_paired || attention.latent.is_some() {
        return None;
    }
    match role {
        Role::Q => Some(attention.heads.q),
        Role::K => Some(attention.heads.kv),
        _ => None,
    }
}

impl Matrices {
    fn new(delta: Delta, target: &Target) -> Self {
        let Delta { rows, rank, scaling, a, b, .. } = delta;
        if target.kind == SiteKind::Embedding {
            // A delta has the table's rows as outputs; the product has its columns.
            return Self { rank, scaling, b: transposed(&a, a.len() / rank), a: b };
        }
        let b = match target.permuted {
            Some(heads) => paired(&b, rank, rows / heads),
            None => b,
        };
        Self { rank, scaling, a, b }
    }
}

/// Returns the rows of heads of `dim` rows in the order of rotated pairs: `(i, i + dim/2)` become adjacent.
fn paired(rows: &[f32], cols: usize, dim: usize) -> Vec<f32> {
    let row = |at: usize| -> Range<usize> { at * cols..(at + 1) * cols };
    let order = |place: usize| place / dim * dim + place % 2 * (dim / 2) + place % dim / 2;
    (0..rows.len() / cols).flat_map(|place| rows[row(order(place))].iter().copied()).collect()
}

impl ServedAdapter {
    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the model for which the adapter was trained, if its configuration has one.
    pub fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    /// Returns the size of the matrices in memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.matrices.values().map(|m| (size_of_val(&m.a[..]) + size_of_val(&m.b[..])) as u64).sum()
    }
}

impl AdapterSource for ServedAdapter {
    fn matrices(&self, site: SiteId, part: usize) -> Option<LoraMatrices<'_>> {
        let Matrices { rank, scaling, a, b } = self.matrices.get(&(site, part))?;
        Some(LoraMatrices { rank: *rank, scaling: *scaling, a, b })
    }

    fn rank(&self) -> usize {
        self.rank
    }
}
