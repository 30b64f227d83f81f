//! LoRA adapters in PEFT's format, and their merging into a checkpoint.
//!
//! An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. For a module `P` of the model it has
//! matrices A `[rank, inputs]` and B `[outputs, rank]`, and the module computes `W x + s · B (A x)` (Hu et al. 2021). For an
//! embedding, A is `[rank, tokens]` and the rows of the table gain `s · (B A)ᵀ`. A parameter with the matrices of all experts
//! of a layer has an A and a B for each of them.

mod config;
mod experts;
mod merge;
mod served;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use octavo_ops::WeightError;
use serde_json::Value;

pub use merge::{MergeOptions, Merged, merge};
pub use served::{AdapterTargets, ServedAdapter};

use crate::checkpoint::{CheckpointError, Shards, read_object};
use crate::config::ConfigError;
use config::AdapterConfig;
use experts::{ExpertLayout, Stack, canonical, is_stack};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Prefix of the names of an adapter's modules.
const PREFIX: &str = "base_model.model.";

/// Largest accepted rank.
const MAX_RANK: usize = 256;

/// Reason why an adapter cannot be used or merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The folder does not exist or has no adapter.
    #[error("'{}' has no adapter: there is no {CONFIG}", _0.display())]
    Absent(PathBuf),
    /// A file of the adapter or of the model is missing or damaged.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The adapter's configuration is wrong or unsupported.
    #[error("'{}': {source}", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Defect of the configuration.
        source: ConfigError,
    },
    /// A tensor of the adapter does not fit its configuration or the model.
    #[error("'{}': {reason}", path.display())]
    Unfit {
        /// Path of the adapter.
        path: PathBuf,
        /// Description of the defect, which names the tensor.
        reason: String,
    },
    /// A weight of the model cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The model cannot take an adapter; contains a sentence.
    #[error("{0}")]
    Model(String),
    /// The merged model cannot be written.
    #[error("cannot write '{}': {reason}", path.display())]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the system.
        reason: String,
    },
}

/// What an adapter adds to a weight `[rows, cols]` of a module: `scaling · B A`.
#[derive(Debug)]
struct Delta {
    rows: usize,
    cols: usize,
    rank: usize,
    scaling: f32,
    /// A `[rank, cols]`.
    a: Vec<f32>,
    /// B `[rows, rank]`.
    b: Vec<f32>,
}

/// A LoRA adapter in memory.
#[derive(Debug)]
struct Adapter {
    path: PathBuf,
    /// Name of the model for which it was trained.
    base: Option<String>,
    config: AdapterConfig,
    /// By the module's canonical name.
    deltas: BTreeMap<String, Delta>,
    /// By the module's name.
    stacks: BTreeMap<String, Stack>,
}

/// Names of the tensors of a module.
#[derive(Default)]
struct Tensors {
    a: Option<String>,
    b: Option<String>,
    is_embedding: bool,
}

impl Adapter {
    /// Reads and checks the adapter in a folder.
    fn open(folder: &Path) -> Result<Self, AdapterError> {
        let path = folder.join(CONFIG);
        let object = read_object(&path)?.ok_or_else(|| AdapterError::Absent(folder.to_owned()))?;
        let config = AdapterConfig::read(&path, &object)?;
        let path = folder.join(WEIGHTS);
        let unfit = |reason: String| AdapterError::Unfit { path: path.clone(), reason };
        let shards = Shards::open_file(&path)?;
        let (mut deltas, mut stacks) = (BTreeMap::new(), BTreeMap::new());
        for (module, tensors) in modules(&shards).map_err(unfit)? {
            if is_stack(&module) {
                let stack = Stack::read(&shards, &module, &tensors).map_err(unfit)?;
                stacks.insert(module, stack);
                continue;
            }
            let delta = Delta::read(&shards, &config, &module, &tensors).map_err(unfit)?;
            if deltas.insert(canonical(&module), delta).is_some() {
                return Err(unfit(format!("it has the module '{}' under two names", module.escape_debug())));
            }
        }
        if deltas.is_empty() && stacks.is_empty() {
            return Err(unfit("it has no tensors of LoRA".into()));
        }
        let base = object.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        Ok(Self { path: folder.to_owned(), base, config, deltas, stacks })
    }

    /// Divides what belongs to all experts of a layer into the deltas of each.
    fn split(&mut self, layout: &ExpertLayout) -> Result<(), AdapterError> {
        for (module, stack) in std::mem::take(&mut self.stacks) {
            for (name, delta) in layout.split(&self.config, &module, &stack).map_err(|reason| self.unfit(reason))? {
                if self.deltas.insert(name, delta).is_some() {
                    return Err(self.unfit(format!("it has the experts of '{}' twice", module.escape_debug())));
                }
            }
        }
        Ok(())
    }

    fn unfit(&self, reason: String) -> AdapterError {
        AdapterError::Unfit { path: self.path.clone(), reason }
    }
}

/// Returns the name of the model for which the adapter in a folder says that it was trained; `None` if the folder has no
/// LoRA adapter.
pub fn adapter_base(folder: &Path) -> Option<String> {
    let object = read_object(&folder.join(CONFIG)).ok()??;
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    text("base_model_name_or_path").filter(|_| text("peft_type") == Some("LORA")).map(str::to_owned)
}

/// Returns the sizes and times of an adapter's files, which tell them from those after a change; `None` if one is missing.
pub fn adapter_version(folder: &Path) -> Option<String> {
    let file = |name: &str| {
        let file = std::fs::metadata(folder.join(name)).ok()?;
        let changed = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!("{}@{}", file.len(), changed.as_nanos()))
    };
    Some(format!("{}, {}", file(CONFIG)?, file(WEIGHTS)?))
}

/// Returns the tensors of each module.
fn modules(shards: &Shards) -> Result<BTreeMap<String, Tensors>, String> {
    let mut modules: BTreeMap<String, Tensors> = BTreeMap::new();
    for name in shards.names() {
        let shown = name.escape_debug();
        let rest =
            name.strip_prefix(PREFIX).ok_or_else(|| format!("the tensor '{shown}' does not begin with {PREFIX}"))?;
        // PEFT stores the unchanged weights of embeddings and heads beside their adapters.
        if rest.ends_with(".base_layer.weight") {
            continue;
        }
        let parts = [(".lora_A.weight", false, true), (".lora_B.weight", false, false)];
        let parts = parts.into_iter().chain([(".lora_embedding_A", true, true), (".lora_embedding_B", true, false)]);
        let found =
            parts.filter_map(|(suffix, embedding, is_a)| Some((rest.strip_suffix(suffix)?, embedding, is_a))).next();
        let (module, is_embedding, is_a) = found.ok_or_else(|| format!("the tensor '{shown}' is none of LoRA"))?;
        let tensors = modules.entry(module.to_owned()).or_default();
        tensors.is_embedding = is_embedding;
        *(if is_a { &mut tensors.a } else { &mut tensors.b }) = Some(name.to_owned());
    }
    Ok(modules)
}

impl Tensors {
    /// Returns the names of A and B.
    fn both(&self, module: &str) -> Result<(&str, &str), String> {
        match (&self.a, &self.b) {
            (Some(a), Some(b)) => Ok((a, b)),
            _ => Err(format!("the module '{}' has one of the tensors A and B only", module.escape_debug())),
        }
    }
}

impl Stack {
    fn read(shards: &Shards, module: &str, tensors: &Tensors) -> Result<Self, String> {
        let (a, b) = tensors.both(module)?;
        let ([ranks, cols], a) = matrix(shards, a)?;
        let ([rows, other], b) = matrix(shards, b)?;
        if ranks != other || ranks == 0 || tensors.is_embedding {
            return Err(format!("the tensors of '{}' have {ranks} and {other} ranks", module.escape_debug()));
        }
        Ok(Self { rows, cols, ranks, a, b })
    }
}

impl Delta {
    fn read(shards: &Shards, config: &AdapterConfig, module: &str, tensors: &Tensors) -> Result<Self, String> {
        let (a, b) = tensors.both(module)?;
        let ([rank, cols], mut first) = matrix(shards, a)?;
        let ([rows, other], mut second) = matrix(shards, b)?;
        if rank != other || rank != config.rank(module) || !(1..=MAX_RANK).contains(&rank) {
            return Err(format!(
                "the tensors of '{}' have the ranks {rank} and {other}; its configuration says {}, and the largest is {MAX_RANK}",
                module.escape_debug(),
                config.rank(module)
            ));
        }
        let scaling = config.scaling(module);
        if tensors.is_embedding {
            // The table has a row for each token: its delta is the transpose of the product.
            (first, second) = (transposed(&second, rank), transposed(&first, cols));
            return Ok(Self { rows: cols, cols: rows, rank, scaling, a: first, b: second });
        }
        Ok(Self { rows, cols, rank, scaling, a: first, b: second })
    }

    /// Adds the delta of a row to the weights of that row, as PEFT does: the product is complete before it is added. `sums` is
    /// memory for it.
    fn add_row(&self, row: usize, sums: &mut Vec<f32>, weights: &mut [f32]) {
        sums.clear();
        sums.resize(weights.len(), 0.0);
        for (b, a) in self.b[row * self.rank..][..self.rank].iter().zip(self.a.chunks_exact(self.cols.max(1))) {
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
        }
        weights.iter_mut().zip(sums).for_each(|(weight, sum)| *weight += self.scaling * *sum);
    }

    /// Adds the delta of an input to the weights of that input, which are those at `outputs`.
    fn add_column(&self, input: usize, outputs: impl Iterator<Item = usize>, weights: &mut [f32]) {
        for (at, b) in outputs.zip(self.b.chunks_exact(self.rank.max(1))) {
            let sum: f32 = b.iter().enumerate().map(|(j, b)| b * self.a[j * self.cols + input]).sum();
            weights[at] += self.scaling * sum;
        }
    }
}

/// Reads a matrix of finite numbers.
fn matrix(shards: &Shards, name: &str) -> Result<([usize; 2], Vec<f32>), String> {
    let shown = name.escape_debug();
    let tensor = shards.plain(name).map_err(|error| error.to_string())?;
    let &[rows, cols] = tensor.shape.as_slice() else {
        return Err(format!("the tensor '{shown}' has the shape {:?}, not that of a matrix", tensor.shape));
    };
    let mut values = vec![0.0; rows * cols];
    let decode = tensor.storage.decoder().ok_or_else(|| format!("the tensor '{shown}' is no plain one"))?;
    decode(&tensor.bytes, &mut values);
    match values.iter().all(|value: &f32| value.is_finite()) {
        true => Ok(([rows, cols], values)),
        false => Err(format!("the tensor '{shown}' has elements that are not finite")),
    }
}

/// Returns the transpose of a matrix of `cols` columns.
fn transposed(matrix: &[f32], cols: usize) -> Vec<f32> {
    let rows = matrix.len() / cols.max(1);
    (0..cols).flat_map(|col| (0..rows).map(move |row| matrix[row * cols + col])).collect()
}
