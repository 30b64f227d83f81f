//! Merging of an adapter into the weights of a Hugging Face directory.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use octavo_ops::{WeightError, WeightSource};
use safetensors::{Dtype, View, serialize_to_file};
use serde_json::{Map, Value, json};

use super::experts::{self, ExpertLayout, Outputs, Slab};
use super::{Adapter, AdapterError, Delta};
use crate::checkpoint::{
    Checkpoint, CheckpointError, Format, INDEX, QUANTISATION, is_side_file, other_names, read_object,
};
use crate::program::names::Role;
use crate::progress::Progress;

const CONFIG: &str = "config.json";

/// Whether the head is the embedding table.
const TIED: &str = "tie_word_embeddings";

/// Keys of `config.json` that describe how weights are quantised.
const SETTINGS: [&str; 2] = [QUANTISATION, "compression_config"];

/// Extensions of files of weights.
const WEIGHTS: [&str; 7] = ["safetensors", "bin", "pt", "pth", "gguf", "h5", "onnx"];

/// What is merged.
#[derive(Clone, Copy, Debug)]
pub struct MergeOptions<'a> {
    /// A Hugging Face directory.
    pub base: &'a Path,
    /// A folder with an adapter in PEFT's format.
    pub adapter: &'a Path,
    /// Folder to write, which must not exist or be empty.
    pub output: &'a Path,
}

/// What was merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Number of weights that were changed.
    pub changed: usize,
    /// Number of weights that were quantised and are not any more.
    pub unpacked: usize,
    /// Size of these weights before and now, in bytes.
    pub unpacked_bytes: [u64; 2],
    /// Size of the weights that were written, in bytes.
    pub bytes: u64,
}

/// Writes the model with the adapter's deltas added to its weights. Sums are computed in f32 and rounded once to the type of
/// the weight. Quantised weights are written in the element type of `config.json`; experts in MXFP4 blocks, however, are kept if
/// the adapter changes none.
///
/// # Errors
/// Returns an error if a file is missing or damaged, if the adapter does not fit the model, or if the output exists.
pub fn merge(options: MergeOptions<'_>, progress: &dyn Progress) -> Result<Merged, AdapterError> {
    let base = Checkpoint::open(options.base)?;
    if base.format() != Format::HuggingFace {
        return Err(AdapterError::Model(format!(
            "'{}' is a GGUF file; adapters are merged into Hugging Face directories",
            base.path().display()
        )));
    }
    let mut adapter = Adapter::open(options.adapter)?;
    adapter.split(&ExpertLayout::new(base.config(), base.format()))?;
    let plan = Plan::new(&base, &adapter)?;
    let partial = Partial::create(options.output)?;
    let bytes = plan.tensors.values().map(|tensor| tensor.bytes() as u64).sum();
    let task = progress.begin("merging", Some(bytes));
    let done = Cell::new(0);
    let written = |bytes| {
        done.set(done.get() + bytes);
        task.advance_to(done.get());
    };
    let mut weight_map = Map::new();
    for (file, tensors) in &plan.files {
        plan.write(&partial.path.join(file), tensors, &written)?;
        weight_map.extend(tensors.iter().map(|name| (name.clone(), Value::from(file.as_str()))));
    }
    if plan.files.len() > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
        write_json(&partial.path.join(INDEX), &index)?;
    }
    copy_others(options.base, &partial.path)?;
    write_json(&partial.path.join(CONFIG), &plan.config()?)?;
    partial.finish(options.output)?;
    task.finish();
    let unpacked = || plan.tensors.values().filter(|tensor| matches!(tensor.source, Source::Unpacked));
    let unpacked_bytes = [plan.packed_bytes, unpacked().map(|tensor| tensor.bytes() as u64).sum()];
    Ok(Merged { changed: adapter.deltas.len(), unpacked: unpacked().count(), unpacked_bytes, bytes })
}

/// A tensor to write.
struct Target<'a> {
    source: Source,
    shape: Vec<usize>,
    dtype: Dtype,
    /// What is added to the matrices of the tensor, by the index of the matrix; empty if nothing is.
    changes: Vec<Vec<Change<'a>>>,
}

/// What is added to a matrix.
struct Change<'a> {
    delta: &'a Delta,
    /// The outputs of the delta, among those of the matrix.
    outputs: Outputs,
    /// Whether the matrix is inputs by outputs.
    by_inputs: bool,
}

/// Where a tensor's values are.
enum Source {
    /// In the tensor of this name.
    Stored(String),
    /// In the tensors of a quantised module, or in blocks of all experts.
    Unpacked,
}

/// Everything to write.
struct Plan<'a> {
    base: &'a Checkpoint,
    tensors: BTreeMap<String, Target<'a>>,
    /// Names of the tensors of each file.
    files: BTreeMap<String, BTreeSet<String>>,
    /// Size of the quantised weights that are not copied as they are.
    packed_bytes: u64,
    /// Whether the head becomes a tensor of its own.
    is_untied: bool,
}

impl<'a> Plan<'a> {
    fn new(base: &'a Checkpoint, adapter: &'a Adapter) -> Result<Self, AdapterError> {
        let stored = experts::stored(base.config());
        let changes_experts = adapter.deltas.keys().filter_map(|module| stored.get(module)).any(|of| of.slab.count > 1);
        let unpacked = |tensor: &str| match base.quantised_module(tensor) {
            Some(module) => Some(format!("{module}.weight")),
            None => base.packed_experts(tensor).filter(|_| changes_experts).map(str::to_owned),
        };
        let (tensors, files) = (BTreeMap::new(), BTreeMap::new());
        let mut plan = Self { base, tensors, files, packed_bytes: 0, is_untied: false };
        let element = match base.config().dtype.as_str() {
            "float16" | "half" => Dtype::F16,
            "bfloat16" => Dtype::BF16,
            _ => Dtype::F32,
        };
        for (file, name) in base.stored_names() {
            let unknown = || AdapterError::Model(format!("the weight '{}' cannot be copied", name.escape_debug()));
            // Folders of sentence-transformers have files of their own for modules behind the model.
            if name.contains('/') {
                return Err(AdapterError::Model(
                    "adapters are not merged into folders of sentence-transformers".into(),
                ));
            }
            let (name, target) = match unpacked(name) {
                Some(weight) => {
                    let (_, shape) = base.describe(&weight, &[])?;
                    plan.packed_bytes += base.stored(name).map_or(0, |stored| stored.bytes.len() as u64);
                    (weight, Target { source: Source::Unpacked, shape, dtype: element, changes: Vec::new() })
                }
                None => {
                    let stored = base.stored(name).ok_or_else(unknown)?;
                    let dtype = serde_json::from_value(stored.dtype.into()).map_err(|_| unknown())?;
                    let (source, shape) = (Source::Stored(name.to_owned()), stored.shape.to_vec());
                    (name.to_owned(), Target { source, shape, dtype, changes: Vec::new() })
                }
            };
            if plan.tensors.insert(name.clone(), target).is_none() {
                plan.files.entry(file.to_owned()).or_default().insert(name);
            }
        }
        for (module, delta) in &adapter.deltas {
            match stored.get(module) {
                Some(weight) => plan.change(adapter, &weight.tensor, weight.slab, delta)?,
                None => plan.add(adapter, module, delta)?,
            }
        }
        Ok(plan)
    }

    /// Adds a delta to the tensor of a module.
    fn add(&mut self, adapter: &Adapter, module: &str, delta: &'a Delta) -> Result<(), AdapterError> {
        let names = &self.base.config().family.names;
        let named = |role| names.weight(Format::HuggingFace, role, 0);
        let name = format!("{module}.weight");
        let (head, embedding) = (named(Role::Head), named(Role::Embedding));
        if !self.tensors.contains_key(&head) && (name == head || name == embedding) {
            self.untie(&head, &embedding);
        }
        self.change(adapter, &name, Slab::WHOLE, delta)
    }

    /// Adds a delta to a matrix of a tensor.
    fn change(&mut self, adapter: &Adapter, name: &str, slab: Slab, delta: &'a Delta) -> Result<(), AdapterError> {
        let stored = std::iter::once(Cow::from(name)).chain(other_names(name));
        let stored = stored.into_iter().find(|name| self.tensors.contains_key(&**name));
        let Some(target) = stored.and_then(|name| self.tensors.get_mut(&*name)) else {
            return Err(adapter.unfit(format!("the model has no weight '{}'", name.escape_debug())));
        };
        let rows = delta.rows * slab.outputs.parts();
        let (size, wanted) = match slab.by_inputs {
            true => ([delta.cols, rows], [slab.count, delta.cols, rows]),
            false => ([rows, delta.cols], [slab.count, rows, delta.cols]),
        };
        if target.shape != wanted && (slab.count > 1 || target.shape != size) {
            return Err(adapter.unfit(format!(
                "its delta of '{}' is {} x {}, but the weight has the shape {:?}",
                name.escape_debug(),
                delta.rows,
                delta.cols,
                target.shape
            )));
        }
        if !matches!(target.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(adapter.unfit(format!("the weight '{}' has no floating-point elements", name.escape_debug())));
        }
        target.changes.resize_with(slab.count, Vec::new);
        target.changes[slab.index].push(Change { delta, outputs: slab.outputs, by_inputs: slab.by_inputs });
        Ok(())
    }

    /// Gives the head its own copy of the embedding table.
    fn untie(&mut self, head: &str, embedding: &str) {
        let Some(table) = self.tensors.get(embedding) else { return };
        let Some((_, names)) = self.files.iter_mut().find(|(_, names)| names.contains(embedding)) else { return };
        names.insert(head.to_owned());
        let source = match &table.source {
            Source::Stored(name) => Source::Stored(name.clone()),
            Source::Unpacked => return,
        };
        let copy = Target { source, shape: table.shape.clone(), dtype: table.dtype, changes: Vec::new() };
        self.tensors.insert(head.to_owned(), copy);
        self.is_untied = true;
    }

    /// Returns `config.json` of the merged model.
    fn config(&self) -> Result<Value, AdapterError> {
        let is_unpacked = self.tensors.values().any(|tensor| matches!(tensor.source, Source::Unpacked));
        let change = |object: &mut Map<String, Value>| {
            if is_unpacked {
                SETTINGS.iter().for_each(|key| _ = object.shift_remove(*key));
            }
            if self.is_untied {
                object.insert(TIED.into(), false.into());
            }
        };
        let mut config = read_object(&self.base.path().join(CONFIG))?.unwrap_or_default();
        change(&mut config);
        if let Some(Value::Object(text)) = config.get_mut("text_config") {
            change(text);
        }
        Ok(Value::Object(config))
    }

    /// Writes a file of tensors, one after the other.
    fn write(&self, path: &Path, names: &BTreeSet<String>, progress: &dyn Fn(u64)) -> Result<(), AdapterError> {
        let failure = RefCell::new(None);
        let view = |name| Lazy { name, target: &self.tensors[name], base: self.base, progress, failure: &failure };
        let metadata = [("format".to_owned(), "pt".to_owned())].into();
        serialize_to_file(names.iter().map(|name| (name, view(name))), Some(metadata), path)
            .map_err(|error| write_error(path, &error))?;
        failure.into_inner().map_or(Ok(()), |error: WeightError| Err(error.into()))
    }
}

impl Target<'_> {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl Change<'_> {
    /// Adds the change of a row of the matrix.
    fn add_row(&self, row: usize, sums: &mut Vec<f32>, weights: &mut [f32]) {
        match self.by_inputs {
            true => self.delta.add_column(row, self.outputs.of(weights.len()), weights),
            false => self.delta.add_row(row, sums, weights),
        }
    }
}

/// A tensor that is computed when it is written.
struct Lazy<'a> {
    name: &'a str,
    target: &'a Target<'a>,
    base: &'a Checkpoint,
    progress: &'a dyn Fn(u64),
    /// The first error, because a view has none.
    failure: &'a RefCell<Option<WeightError>>,
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Dtype {
        self.target.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.target.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let data = self.read().unwrap_or_else(|error| {
            self.failure.borrow_mut().get_or_insert(error);
            vec![0; self.data_len()].into()
        });
        (self.progress)(data.len() as u64);
        data
    }

    fn data_len(&self) -> usize {
        self.target.bytes()
    }
}

impl Lazy<'_> {
    fn read(&self) -> Result<Cow<'_, [u8]>, WeightError> {
        let Target { source, changes, dtype, .. } = self.target;
        let tensor = match source {
            Source::Stored(name) if changes.is_empty() => {
                let bytes = self.base.stored(name).map(|stored| stored.bytes);
                return bytes.map(Cow::Borrowed).ok_or_else(|| WeightError::Missing(name.clone()));
            }
            Source::Stored(name) => self.base.tensor(name)?,
            Source::Unpacked => self.base.tensor(self.name)?,
        };
        let unreadable = || WeightError::Invalid {
            name: self.name.to_owned(),
            reason: format!("it is stored as {}, which cannot be merged", tensor.storage),
        };
        let cols = tensor.shape.last().copied().unwrap_or(0);
        let decode = tensor.storage.decoder().ok_or_else(unreadable)?;
        let from = tensor.storage.bytes_for(cols).filter(|bytes| *bytes > 0).ok_or_else(unreadable)?;
        let mut out = vec![0; self.data_len()];
        let to = cols * dtype.bitsize() / 8;
        let rows = out.len() / to;
        let of_matrix = rows / changes.len().max(1);
        let each = rows.div_ceil(std::thread::available_parallelism().map_or(1, usize::from)).max(1);
        std::thread::scope(|scope| {
            for (chunk, (out, bytes)) in out.chunks_mut(each * to).zip(tensor.bytes.chunks(each * from)).enumerate() {
                scope.spawn(move || {
                    let (mut values, mut sums) = (vec![0.0; cols], Vec::new());
                    for (row, (out, bytes)) in out.chunks_exact_mut(to).zip(bytes.chunks_exact(from)).enumerate() {
                        decode(bytes, &mut values);
                        let row = chunk * each + row;
                        let changes = changes.get(row / of_matrix.max(1)).into_iter().flatten();
                        changes.for_each(|change| change.add_row(row % of_matrix, &mut sums, &mut values));
                        encode(&values, *dtype, out);
                    }
                });
            }
        });
        Ok(out.into())
    }
}

/// Rounds numbers to an element type.
fn encode(values: &[f32], dtype: Dtype, out: &mut [u8]) {
    match dtype {
        Dtype::F16 => {
            let halves = values.iter().map(|x| f16::from_f32(*x).to_le_bytes());
            out.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(out, x)| *out = x);
        }
        Dtype::BF16 => {
            let halves = values.iter().map(|x| bf16::from_f32(*x).to_le_bytes());
            out.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(out, x)| *out = x);
        }
        _ => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, x)| *out = x.to_le_bytes()),
    }
}

/// A folder that gets its name when it is complete, and is removed otherwise.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn create(output: &Path) -> Result<Self, AdapterError> {
        match std::fs::read_dir(output).map(|mut entries| entries.next().is_some()) {
            Ok(true) => return Err(write_error(output, &"the folder exists and is not empty")),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(write_error(output, &error)),
            _ => {}
        }
        let name = output.file_name().ok_or_else(|| write_error(output, &"it is no name of a folder"))?;
        let mut partial = name.to_owned();
        partial.push(".partial");
        let path = output.with_file_name(partial);
        std::fs::create_dir_all(&path).map_err(|error| write_error(&path, &error))?;
        Ok(Self { path })
    }

    fn finish(self, output: &Path) -> Result<(), AdapterError> {
        // An empty folder is replaced.
        if let Err(error) = std::fs::remove_dir(output)
            && error.kind() != ErrorKind::NotFound
        {
            return Err(write_error(output, &error));
        }
        std::fs::rename(&self.path, output).map_err(|error| write_error(output, &error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After it has got its name, there is nothing to remove.
        _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Copies the small files of the base: tokenizer, templates and settings.
fn copy_others(from: &Path, to: &Path) -> Result<(), AdapterError> {
    let failed = |error| CheckpointError::Io { path: from.to_owned(), source: error };
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else { continue };
        let is_weights =
            path.extension().and_then(|extension| extension.to_str()).is_some_and(|x| WEIGHTS.contains(&x));
        let text = name.to_string_lossy();
        if !is_weights && name != CONFIG && !text.ends_with(".index.json") && !is_side_file(&text) {
            let to = to.join(name);
            std::fs::copy(&path, &to).map_err(|error| write_error(&to, &error))?;
        }
    }
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<(), AdapterError> {
    std::fs::write(path, format!("{value:#}\n")).map_err(|error| write_error(path, &error))
}

fn write_error(path: &Path, error: &dyn std::fmt::Display) -> AdapterError {
    AdapterError::Write { path: path.to_owned(), reason: error.to_string() }
}
