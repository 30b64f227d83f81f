//! A loaded model: its memory, its kernels and its recorded steps.

use std::sync::Arc;

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::KV_BLOCK;
use octavo_ops::sampling::{SampleBatch, SampledToken};
use octavo_ops::{BackendError, BufferId, Op, Program, StepBatch, WeightSource, check_block_counts};

use crate::arena::Arena;
use crate::build::{Builder, Instances};
use crate::driver::{Event, Gpu, Graph, Pinned};
use crate::dummy::Fill;
use crate::forward::{Cache, Machine, Scratch, Step};
use crate::layout::{Layout, Limits, RopeTables, logits_stride};
use crate::libraries::cublaslt::CublasLt;
use crate::libraries::{Kind, Places, Version, ranked};
use crate::linear::Setting;
use crate::lower::{Lowering, block_elements};
use crate::sample::{SampleKernels, Sampling};
use crate::step::{Filler, StepShape};
use crate::weights::{Loader, STAGING_WORDS};
use crate::{CudaConfig, Memory, NAME, failed};

/// Number of bytes left to the driver under a share of the memory, for code, stacks and graphs.
const RESERVED: u64 = 256 << 20;

/// Maximum number of bytes lost by aligning the KV groups.
const SLACK: u64 = 4096;

/// Numbers of sequences for which decode steps are recorded.
const GRAPH_SEQUENCES: [usize; 16] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256];

/// Device and settings for loading a model.
#[derive(Clone, Copy)]
pub(crate) struct Opened<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) driver: Version,
    pub(crate) config: &'a CudaConfig,
    pub(crate) dtype: Dtype,
}

/// A program with its weights and its KV cache on the device. Fields are dropped in order, so that graphs and kernels
/// are released before the memory that they use.
pub(crate) struct Model {
    /// Recorded steps by number of sequences, ascending.
    graphs: Vec<Recorded>,
    machine: Machine,
    sampling: Sampling,
    /// Block of the next step and that of the one before.
    blocks: [Block; 2],
    filler: Filler,
    /// Whether attention uses plans.
    planned: bool,
    arena: Arena,
    layout: Layout,
    program: Program,
    limits: Limits,
    caches: Vec<Cache>,
    /// Number of tokens in a block and number of blocks, by cache.
    cache_sizes: Vec<(usize, usize)>,
    /// Numbers of sampled and pooled rows of the last step.
    last: (usize, usize),
    /// Buffer for hidden states.
    hidden: Vec<u32>,
    /// Numbers of steps that were replayed and that were launched op by op.
    pub(crate) steps: (u64, u64),
}

/// The arrays of a step in host memory, to be copied to the device.
struct Block {
    words: Pinned,
    /// Event that completes when they have been copied.
    copied: Event,
}

/// A recorded step.
struct Recorded {
    shape: StepShape,
    graph: Graph,
}

impl Block {
    fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self, BackendError> {
        Ok(Self { words: Pinned::new(gpu, words)?, copied: Event::new(gpu)? })
    }
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
        let found = Places::usual(&self.config.libraries).find(Kind::CublasLt);
        for candidate in ranked(&found, Kind::CublasLt, self.driver, chip) {
            match CublasLt::open(candidate, self.gpu, self.dtype, workspace) {
                Ok(library) => {
                    tracing::info!("products: cuBLASLt ({})", library.path.display());
                    return Some(library);
                }
                Err(reason) => tracing::debug!(reason, "cuBLASLt is not used"),
            }
        }
        let package = Kind::CublasLt.package(12);
        tracing::warn!(
            "products: own kernels, as no cuBLASLt is found; prompts take longer (`pip install {package}` brings it)"
        );
        None
    }

    /// Returns the size of the arena in bytes, of which `fixed` do not belong to the KV cache.
    fn arena_bytes(&self, fixed: u64) -> Result<u64, BackendError> {
        let (free, total) = self.gpu.memory()?;
        let short = |needed| BackendError::OutOfMemory {
            what: format!("weights and step buffers on {} ({free} of {total} bytes are free)", self.gpu.info().name),
            needed,
        };
        match self.config.memory {
            Memory::KvCache(bytes) => {
                let needed = fixed.saturating_add(bytes).saturating_add(SLACK);
                if needed > free { Err(short(needed)) } else { Ok(needed) }
            }
            Memory::Share(share) => {
                let used = total.saturating_sub(free).saturating_add(RESERVED);
                let budget = ((total as f64 * share) as u64).saturating_sub(used).min(free);
                if fixed.saturating_add(SLACK) > budget { Err(short(fixed)) } else { Ok(budget) }
            }
        }
    }
}

impl Model {
    /// Reads the weights and builds the kernels.
    pub(crate) fn load(
        opened: &Opened<'_>,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, BackendError> {
        let (gpu, dtype, limits) = (opened.gpu, opened.dtype, Limits::new(opened.config));
        too_large(program, dtype, gpu.memory()?.1)?;
        let layout = Layout::new(program, dtype, &limits)?;
        let arena = Arena::new(gpu, opened.arena_bytes(layout.plan.bytes())?)?;

        let chip = gpu.info().chip;
        let setting = Setting { chip, dtype, batch_invariant: opened.config.batch_invariant };
        let mut lowering =
            Lowering { program, layout: &layout, arena: &arena, setting, instances: Instances::default() };
        let stages = lowering.stages()?;
        let sample_kernels = SampleKernels::new(&mut lowering.instances);
        let builder = Builder { gpu, driver: opened.driver, config: opened.config };
        // The kernels come before the weights, which take longer: a missing compiler is then reported at once.
        let kernels = builder.build(&lowering.instances)?;
        let fill = Fill::new(&builder, dtype, program, source)?;
        load_weights(opened, program, &layout, &arena, (source, fill.as_ref()), progress)?;
        let planned = stages.iter().any(|stage| stage.is_planned());
        let (codes, scales) = layout.rounded;
        let mut machine = Machine {
            gpu: gpu.clone(),
            kernels,
            cublaslt: opened.cublaslt(arena.at(layout.workspace)),
            stages,
            scratch: Scratch { values: arena.at(layout.values), rounded: (arena.at(codes), arena.at(scales)) },
            element: dtype.bytes() as u64,
        };
        machine.plan_products(limits.tokens, limits.rows);
        let logits = logits_buffer(program).map_or(0, |id| arena.at(layout.buffers[id.0]));
        let sampling = Sampling::new(&machine, sample_kernels, logits, &arena, &layout, program.vocab_size)?;
        let largest = limits.largest_step(program);
        gpu.synchronize()?;
        Ok(Self {
            graphs: Vec::new(),
            blocks: [Block::new(gpu, largest.words())?, Block::new(gpu, largest.words())?],
            filler: Filler::with_capacity(largest.tiles, largest.splits),
            planned,
            machine,
            sampling,
            arena,
            layout,
            program: program.clone(),
            limits,
            caches: Vec::new(),
            cache_sizes: Vec::new(),
            last: (0, 0),
            hidden: Vec::new(),
            steps: (0, 0),
        })
    }

    pub(crate) fn weight_bytes(&self) -> u64 {
        self.layout.weight_bytes
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.machine.gpu.info().memory
    }

    pub(crate) fn step_bytes(&self) -> u64 {
        self.layout.plan.bytes() - self.layout.weight_bytes
    }

    pub(crate) fn kv_bytes(&self) -> u64 {
        (self.arena.bytes() - self.layout.plan.bytes()).saturating_sub(SLACK)
    }

    /// Divides the rest of the arena into zeroed blocks.
    pub(crate) fn allocate_kv(&mut self, blocks: &[usize]) -> Result<(), BackendError> {
        let groups = &self.program.kv_groups;
        check_block_counts(NAME, groups, blocks)?;
        let mut plan = self.layout.plan.clone();
        let sizes = groups.iter().zip(blocks).map(|(group, &blocks)| {
            let block_elements = block_elements(group);
            let bytes = block_elements.saturating_mul(self.machine.element).saturating_mul(blocks as u64);
            (plan.take(bytes), block_elements, blocks)
        });
        let sizes: Vec<_> = sizes.collect();
        if plan.bytes() > self.arena.bytes() {
            let needed = plan.bytes().saturating_sub(self.layout.plan.bytes());
            return Err(BackendError::OutOfMemory { what: "the KV cache".into(), needed });
        }
        self.graphs.clear();
        self.caches.clear();
        self.cache_sizes.clear();
        for (region, block_elements, blocks) in sizes {
            let address = self.arena.at(region);
            self.machine.gpu.zero(address, region.bytes)?;
            self.caches.push(Cache { address, block_elements, blocks });
            self.cache_sizes.push((KV_BLOCK, blocks));
        }
        Ok(self.machine.gpu.synchronize()?)
    }

    /// Records the steps in which all sequences decode, starting with the largest number of sequences.
    pub(crate) fn record(&mut self) -> Result<(), BackendError> {
        let limits = self.limits;
        let most = limits.sequences.min(limits.tokens).min(limits.rows);
        let mut sizes: Vec<_> = GRAPH_SEQUENCES.into_iter().filter(|&size| size < most).collect();
        sizes.push(most.min(GRAPH_SEQUENCES[GRAPH_SEQUENCES.len() - 1]));
        for &sequences in sizes.iter().rev() {
            let shape = StepShape {
                tokens: sequences,
                sequences,
                sampled: sequences,
                splits: if self.planned { limits.splits(sequences) } else { 0 },
                tiles: 0,
                pooled: 0,
                ..limits.largest_step(&self.program)
            };
            self.pad(&shape)?;
            let address = self.arena.at(self.layout.step);
            let step = Step { shape, address, caches: &self.caches };
            // The step runs once first, because initialisation by a kernel or a library must not be part of the graph.
            self.machine.run(&step)?;
            self.machine.gpu.synchronize()?;
            let graph = self.machine.gpu.capture(|| self.machine.run(&step))?;
            self.graphs.insert(0, Recorded { shape, graph });
        }
        tracing::info!("graphs: decode steps of {} sizes are recorded, up to {most} sequences", self.graphs.len());
        Ok(())
    }

    /// Writes a step that consists of padding only.
    fn pad(&mut self, shape: &StepShape) -> Result<(), BackendError> {
        let groups = self.caches.len();
        let mut empty = StepBatch::with_capacity(0, 0, 0, groups);
        empty.query_start.push(0);
        self.filler.plan(&empty, shape.streams, self.planned);
        self.upload(&empty, shape)
    }

    /// Writes a step into the block and copies it to the device.
    fn upload(&mut self, batch: &StepBatch, shape: &StepShape) -> Result<(), BackendError> {
        self.blocks.reverse();
        let Block { words, copied } = &mut self.blocks[0];
        if shape.words() > words.len() {
            let (needed, found) = (shape.words(), words.len());
            return Err(failed(format!("a step of {needed} words is more than the {found} it was made for")));
        }
        copied.wait()?;
        let used = self.filler.write(batch, shape, words);
        self.machine.gpu.upload(self.arena.at(self.layout.step), words, used)?;
        Ok(copied.record()?)
    }

    pub(crate) fn forward(&mut self, batch: &StepBatch, limits: &Limits) -> Result<(), BackendError> {
        self.last = (0, 0);
        let memory = octavo_ops::Limits { kv: &self.cache_sizes, drawn: self.sampling.drawn(), media_rows: 0 };
        let checked = batch.check(&self.program, memory);
        checked.map_err(|reason| failed(format!("the batch is malformed: {reason}")))?;
        check_limits(batch, limits)?;
        let exact = self.filler.plan(batch, self.program.position_streams(), self.planned);
        let recorded = self.recorded(batch, &exact);
        let shape = recorded.map_or(exact, |at| self.graphs[at].shape);
        self.upload(batch, &shape)?;
        match recorded {
            Some(at) => self.graphs[at].graph.launch()?,
            None => {
                let address = self.arena.at(self.layout.step);
                self.machine.run(&Step { shape, address, caches: &self.caches })?;
            }
        }
        let (replayed, launched) = &mut self.steps;
        *(if recorded.is_some() { replayed } else { launched }) += 1;
        self.last = (batch.sampled_rows.len(), batch.pooled_rows.len());
        Ok(())
    }

    /// Returns the recorded step for a batch in which all sequences decode and are sampled.
    fn recorded(&self, batch: &StepBatch, exact: &StepShape) -> Option<usize> {
        let decodes = exact.tokens == exact.sequences
            && exact.sequences > 0
            && exact.pooled == 0
            && batch.query_start.iter().zip(0..).all(|(&start, row)| start == row)
            && batch.sampled_rows.len() == exact.tokens
            && batch.sampled_rows.iter().zip(0..).all(|(&sampled, row)| sampled == row);
        let fits = |recorded: &Recorded| {
            let shape = &recorded.shape;
            exact.sequences <= shape.sequences
                && exact.table_stride <= shape.table_stride
                && exact.splits <= shape.splits
        };
        if decodes { self.graphs.iter().position(fits) } else { None }
    }

    pub(crate) fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        batch.check(NAME, self.last.0)?;
        self.sampling.start(&self.machine, batch)
    }

    pub(crate) fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        self.sampling.take(out)
    }

    /// Returns the hidden states of the last step; a word holds two of 16 bits.
    pub(crate) fn embeddings(&mut self) -> Result<&[u32], BackendError> {
        self.hidden.clear();
        if let Some(id) = self.program.embedding() {
            let elements = (self.program.buffers[id.0].cols * self.last.1) as u64;
            // The number of columns is a multiple of 8, so words are whole.
            self.hidden.resize((elements * self.machine.element / size_of::<u32>() as u64) as usize, 0);
            self.machine.gpu.download(&mut self.hidden, self.arena.at(self.layout.buffers[id.0]))?;
        }
        Ok(&self.hidden)
    }

    pub(crate) fn logits(&self) -> Result<Vec<f32>, BackendError> {
        let Some(id) = logits_buffer(&self.program) else { return Ok(Vec::new()) };
        let stride = logits_stride(self.program.vocab_size) as usize;
        let mut words = vec![0; self.last.0 * stride];
        self.machine.gpu.download(&mut words, self.arena.at(self.layout.buffers[id.0]))?;
        let rows = words.chunks_exact(stride).map(|row| &row[..self.program.vocab_size]);
        Ok(rows.flatten().map(|&word| f32::from_bits(word)).collect())
    }

    pub(crate) fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        let cache = *self.caches.get(group).ok_or_else(|| failed(format!("there is no KV group {group}")))?;
        let bytes = cache.block_elements * self.machine.element;
        for &(from, to) in pairs {
            if from.max(to) as usize >= cache.blocks {
                return Err(failed(format!("cannot copy block {from} to {to}: there are {} blocks", cache.blocks)));
            }
            let [from, to] = [from, to].map(|block| cache.address + u64::from(block) * bytes);
            self.machine.gpu.copy(to, from, bytes)?;
        }
        Ok(())
    }
}

/// Returns the buffer of the logits.
fn logits_buffer(program: &Program) -> Option<BufferId> {
    program.ops.iter().find_map(|op| match op {
        Op::Logits(op) => Some(op.out),
        _ => None,
    })
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

/// Checks that a batch does not exceed the buffers.
fn check_limits(batch: &StepBatch, limits: &Limits) -> Result<(), BackendError> {
    let counts = [
        ("tokens", batch.tokens(), limits.tokens),
        ("sequences", batch.sequences(), limits.sequences),
        ("sampled rows", batch.sampled_rows.len(), limits.rows),
        ("pooled rows", batch.pooled_rows.len(), limits.rows),
        ("positions", batch.positions.iter().max().map_or(0, |&last| last as usize + 1), limits.positions),
        ("tokens of a sequence", batch.seq_lens.iter().max().map_or(0, |&len| len as usize), limits.positions),
    ];
    match counts.into_iter().find(|(_, found, most)| found > most) {
        Some((what, found, most)) => Err(failed(format!("a step has {found} {what}, but memory was taken for {most}"))),
        None => Ok(()),
    }
}

/// Copies weights and tables of angles to the device, and clears the memory that must start as zero.
fn load_weights(
    opened: &Opened<'_>,
    program: &Program,
    layout: &Layout,
    arena: &Arena,
    (source, fill): (&dyn WeightSource, Option<&Fill>),
    progress: &mut dyn FnMut(u64),
) -> Result<(), BackendError> {
    let (gpu, dtype) = (opened.gpu, opened.dtype);
    let mut staging = Pinned::new(gpu, STAGING_WORDS)?;
    let mut read = 0;
    let mut advance = |bytes: usize| {
        read += bytes as u64;
        progress(read);
    };
    let mut loader = Loader { gpu, arena, dtype, source, staging: &mut staging, fill, progress: &mut advance };
    for (weight, placed) in program.weights.iter().zip(&layout.weights) {
        loader.load(weight, placed)?;
    }
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
    let tickets = layout.partial.2;
    gpu.zero(arena.at(tickets), tickets.bytes)?;
    // The staging memory is still being read.
    Ok(gpu.synchronize()?)
}
