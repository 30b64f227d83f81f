//! A program on the device: its memory and its kernels.

use std::collections::HashMap;
use std::sync::Arc;

use octavo_kernels::manifest::{self, CacheType, Dtype};
use octavo_ops::{BackendError, Program, ProgramKind, StepBatch, WeightSource};

use crate::arena::Arena;
use crate::build::{Builder, Instances};
use crate::driver::Gpu;
use crate::dummy::Fill;
use crate::float8::Scaling;
use crate::forward::{Machine, Scratch};
use crate::launcher::Device;
use crate::layout::{Layout, Limits, RopeTables, kv_groups};
use crate::libraries::cublaslt::CublasLt;
use crate::libraries::{LibraryKind, Places, Version, ranked};
use crate::linear::Setting;
use crate::lower::Lowering;
use crate::tables::{Tables, TablesAt};
use crate::tuning::{self, TuningFile};
use crate::uploads::Uploads;
use crate::weights::Loader;
use crate::{CudaConfig, Memory};

/// Number of bytes left to the driver under a share of the memory, for code, stacks and graphs.
const RESERVED: u64 = 256 << 20;

/// Maximum number of bytes lost by aligning the KV groups.
pub(crate) const SLACK: u64 = 4096;

/// Device and settings for loading a model.
#[derive(Clone, Copy)]
pub(crate) struct Opened<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) driver: Version,
    pub(crate) config: &'a CudaConfig,
    pub(crate) dtype: Dtype,
}

/// A program to load.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) program: &'a Program,
    pub(crate) limits: Limits,
    pub(crate) source: &'a dyn WeightSource,
}

/// A program with its weights and step buffers on the device. Fields are dropped in order, so that kernels are released
/// before the memory that they use.
pub(crate) struct Loaded {
    pub(crate) machine: Machine,
    pub(crate) tables: Tables,
    pub(crate) arena: Arena,
    pub(crate) layout: Layout,
    pub(crate) program: Program,
    pub(crate) limits: Limits,
    /// Number of bytes that are left to the KV cache.
    pub(crate) kv_bytes: u64,
}

impl Opened<'_> {
    /// Opens cuBLASLt if it is to be used and available. Logs at the start which library computes products.
    pub(crate) fn cublaslt(&self, workspace: u64) -> Option<CublasLt> {
        let chip = self.gpu.info().chip;
        if self.config.batch_invariant {
            tracing::info!(
                "products: own kernels, one for any number of rows (batch-invariant); cuBLASLt would be faster"
            );
            return None;
        }
        if self.dtype == Dtype::F32 {
            tracing::info!("products: own kernels in float32");
            return None;
        }
        let found = Places::usual(&self.config.libraries).find(LibraryKind::CublasLt);
        for candidate in ranked(&found, LibraryKind::CublasLt, self.driver, chip) {
            match CublasLt::open(candidate, self.gpu, self.dtype, workspace) {
                Ok(library) => {
                    tracing::info!("products: cuBLASLt ({})", library.path.display());
                    return Some(library);
                }
                Err(reason) => tracing::debug!(reason, "cuBLASLt is not used"),
            }
        }
        let package = LibraryKind::CublasLt.package(12);
        tracing::warn!(
            "products: own kernels, as no cuBLASLt is found; prompts take longer (`pip install {package}` brings it)"
        );
        None
    }

    /// Returns the setting shared by a program's products and its attention.
    fn setting(&self, program: &Program) -> Setting {
        // The keys and values of an encoder, which live for a step, have the type of activations.
        let cache = match program.kind() {
            ProgramKind::Encoder => CacheType::Activation,
            ProgramKind::Decoder | ProgramKind::Embedder => self.config.kv_cache,
        };
        Setting {
            chip: self.gpu.info().chip,
            dtype: self.dtype,
            cache,
            batch_invariant: self.config.batch_invariant,
            fp8_inputs: program.fp8_inputs,
            tune: tuning::is_wanted(self),
        }
    }

    /// Returns the number of bytes that the KV cache may have beside `fixed` bytes of weights and step buffers, which are
    /// about to be allocated.
    fn kv_bytes(&self, fixed: u64) -> Result<u64, BackendError> {
        let (free, total) = self.gpu.memory()?;
        let short = |needed| BackendError::OutOfMemory {
            what: format!("weights and step buffers on {} ({free} of {total} bytes are free)", self.gpu.info().name),
            needed,
        };
        match self.config.memory {
            Memory::KvCache(bytes) => {
                let needed = fixed.saturating_add(bytes).saturating_add(SLACK);
                if needed > free { Err(short(needed)) } else { Ok(bytes) }
            }
            Memory::Share(share) => {
                let used = total.saturating_sub(free).saturating_add(RESERVED);
                let budget = ((total as f64 * share) as u64).saturating_sub(used).min(free);
                let needed = fixed.saturating_add(SLACK);
                if needed > budget { Err(short(fixed)) } else { Ok(budget - needed) }
            }
        }
    }
}

impl Loaded {
    /// Reads the weights and builds the kernels, and those that `more` adds.
    pub(crate) fn new<K>(
        opened: &Opened<'_>,
        of: &Wanted<'_>,
        progress: &mut dyn FnMut(u64),
        more: impl FnOnce(&mut Instances) -> K,
    ) -> Result<(Self, K), BackendError> {
        let Wanted { program, limits, source } = *of;
        let (gpu, dtype) = (opened.gpu, opened.dtype);
        too_large(program, dtype, gpu.memory()?.1)?;
        let setting = opened.setting(program);
        let layout = Layout::new(program, &setting, &limits)?;
        let kv_bytes = opened.kv_bytes(layout.plan.bytes())?;
        let arena = Arena::new(gpu, layout.plan.bytes(), "weights and step buffers")?;

        let mut lowering =
            Lowering { program, layout: &layout, arena: &arena, setting, instances: Instances::default() };
        let stages = lowering.stages()?;
        let fusions = lowering.fusions(&stages);
        let table_runs = lowering.instances.id(manifest::table_runs());
        let more = more(&mut lowering.instances);
        let builder = Builder { gpu, driver: opened.driver, config: opened.config };
        // The kernels come before the weights, which take longer: a missing compiler is then reported at once.
        let kernels = builder.build(&lowering.instances)?;
        let fill = Fill::new(&builder, dtype, program, source)?;
        let scalings = load_weights(opened, program, &layout, &arena, (source, fill.as_ref()), progress)?;
        let mut machine = Machine {
            launcher: Device { gpu: gpu.clone(), kernels, cublaslt: opened.cublaslt(arena.at(layout.workspace)) },
            stages,
            fusions,
            scratch: Scratch::new(&arena, &layout),
            dtype,
            element: dtype.bytes() as u64,
            kv_element: setting.cache.bytes(dtype) as u64,
        };
        machine.plan_products(|rows| limits.most(program, rows), &scalings);
        if let Some(file) = TuningFile::of(opened, machine.launcher.cublaslt.as_ref()) {
            machine.tune(&file, |rows| limits.most(program, rows))?;
        }
        let in_fp8 = machine.fp8_products(|rows| limits.most(program, rows));
        if !in_fp8.is_empty() {
            let (rounded, all) = (in_fp8.iter().filter(|rounds| **rounds).count(), in_fp8.len());
            tracing::info!("products: {rounded} of {all} FP8 matrices are multiplied in FP8 in steps of many tokens");
        }
        let experts = machine.quantised_experts();
        if experts > 0 {
            let dtype = dtype.name();
            tracing::info!(
                "products: {experts} weights of experts stay quantised and are multiplied with inputs in {dtype}"
            );
        }
        gpu.synchronize()?;
        let (tables, changes) = layout.tables;
        let at = TablesAt { address: arena.at(tables), seats: limits.sequences, stride: limits.table_stride() };
        let tables = Tables::new(gpu, kv_groups(program).len(), at, arena.at(changes), table_runs)?;
        Ok((Self { machine, tables, arena, layout, program: program.clone(), limits, kv_bytes }, more))
    }

    /// Returns whether products of the largest steps round their input to FP8.
    pub(crate) fn rounds_to_fp8(&self) -> bool {
        self.machine.fp8_products(|rows| self.limits.most(&self.program, rows)).contains(&true)
    }

    /// Returns the size of the step buffers in bytes.
    pub(crate) fn step_bytes(&self) -> u64 {
        self.layout.plan.bytes() - self.layout.weight_bytes
    }

    /// Writes what a step changes in the block tables.
    pub(crate) fn update_tables(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.tables.update(&self.machine, batch)
    }

    /// Returns the device address of the step's block.
    pub(crate) fn step(&self) -> u64 {
        self.arena.at(self.layout.step)
    }
}

/// Returns an error if a single weight exceeds the device's memory.
fn too_large(program: &Program, dtype: Dtype, memory: u64) -> Result<(), BackendError> {
    for weight in &program.weights {
        let plain = |part: &octavo_ops::WeightPart| part.storage.block_elements() == 1;
        let needed = match weight.parts.iter().all(plain) {
            true => (weight.elements() as u64).saturating_mul(dtype.bytes() as u64),
            false => weight.bytes(),
        };
        if needed > memory {
            return Err(BackendError::OutOfMemory { what: format!("weight '{}'", weight.name), needed });
        }
    }
    Ok(())
}

/// Copies weights and tables of angles to the device, and clears the memory that must start as zero. Returns which elements of FP8
/// weights share a scale, by the address of the scales.
fn load_weights(
    opened: &Opened<'_>,
    program: &Program,
    layout: &Layout,
    arena: &Arena,
    (source, fill): (&dyn WeightSource, Option<&Fill>),
    progress: &mut dyn FnMut(u64),
) -> Result<HashMap<u64, Scaling>, BackendError> {
    let (gpu, dtype) = (opened.gpu, opened.dtype);
    let mut read = 0;
    let mut advance = |bytes: usize| {
        read += bytes as u64;
        progress(read);
    };
    let scalings = std::thread::scope(|scope| -> Result<_, BackendError> {
        let (uploads, scalings) = (Uploads::new(gpu, scope)?, HashMap::new());
        let mut loader = Loader { gpu, arena, dtype, source, uploads, scalings, fill, progress: &mut advance };
        for (weight, placed) in program.weights.iter().zip(&layout.weights) {
            loader.load(weight, placed)?;
        }
        loader.uploads.finish()?;
        Ok(loader.scalings)
    })?;
    for RopeTables { rope, cosine, sine, streams } in &layout.ropes {
        let pairs = rope.inv_freq.len();
        let positions = cosine.bytes as usize / (pairs * size_of::<f32>());
        for (region, of) in [(cosine, f64::cos as fn(f64) -> f64), (sine, f64::sin)] {
            let mut table = Vec::with_capacity(positions * pairs);
            for position in 0..positions {
                let angles = rope.inv_freq.iter().map(|frequency| position as f64 * frequency);
                table.extend(angles.map(|angle| ((of(angle) * rope.magnitude) as f32).to_bits()));
            }
            gpu.write(arena.at(*region), &table)?;
        }
        if let Some(region) = streams {
            let table: Vec<u32> = rope.streams.iter().map(|&stream| stream as u32).collect();
            gpu.write(arena.at(*region), &table)?;
        }
    }
    for region in [layout.partial.2, layout.part_tickets, layout.sampling.zeroed] {
        gpu.zero(arena.at(region), region.bytes)?;
    }
    Ok(scalings)
}
