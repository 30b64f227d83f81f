//! A loaded model: its programs, its caches and its recorded steps.

use std::time::Duration;

use octavo_kernels::params::{KV_BLOCK, LORA_MAX_RANK};
use octavo_ops::sampling::{SampleBatch, SampledToken};
use octavo_ops::{
    AdapterSource, BackendError, BufferId, EncodeBatch, Op, Program, ProgramKind, StepBatch, WeightSource,
    check_adapter, check_encoder, check_sites,
};

use crate::arena::{Arena, Plan};
use crate::driver::Graph;
use crate::encoder::Encoder;
use crate::forward::{Cache, Step};
use crate::layout::{Limits, logits_stride};
use crate::loaded::{Loaded, Opened, SLACK, Wanted};
use crate::lora::{Adapted, AdapterPlan, Adapters, most_tiles};
use crate::lower::block_elements;
use crate::media::MediaCache;
use crate::sample::{SampleKernels, Sampling};
use crate::staged::Staged;
use crate::step::{Filler, Plans, StepShape};
use crate::texts::Texts;
use crate::{AdapterRoom, Memory, NAME, failed};

/// Numbers of sequences for which decode steps are recorded.
const GRAPH_SEQUENCES: [usize; 16] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256];

/// A program with its KV cache on the device, and the encoder of its images. Fields are dropped in order, so that graphs
/// and kernels are released before the memory that they use.
pub(crate) struct Model {
    /// Recorded steps by number of sequences, ascending.
    graphs: Vec<Recorded>,
    sampling: Sampling,
    /// Block of the next step and that of the one before.
    blocks: [Staged; 2],
    filler: Filler,
    /// Plans of attention.
    plans: Plans,
    loaded: Loaded,
    /// Steps of an encoder of texts, which has no KV cache.
    texts: Option<Texts>,
    encoder: Option<Encoder>,
    media: MediaCache,
    adapters: Option<Adapters>,
    /// Number of bytes of the KV cache's memory that are kept for adapters.
    reserved: u64,
    /// Memory of the KV cache.
    kv: Option<Arena>,
    /// Cache of each KV group, all in the same memory.
    caches: Vec<Cache>,
    /// Number of tokens in a block and number of blocks.
    cache_size: (usize, usize),
    /// Numbers of sampled and pooled rows of the last step.
    last: (usize, usize),
    /// Buffer for hidden states.
    hidden: Vec<u32>,
    /// Numbers of steps that were replayed and that were launched op by op.
    pub(crate) steps: (u64, u64),
}

/// A recorded step.
struct Recorded {
    shape: StepShape,
    graph: Graph,
}

impl Model {
    /// Reads the weights and builds the kernels.
    pub(crate) fn load(
        opened: &Opened<'_>,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, BackendError> {
        let (gpu, limits) = (opened.gpu, Limits::new(opened.config, program));
        let (of, is_encoder) = (Wanted { program, limits, source }, program.kind() == ProgramKind::Encoder);
        let head = logits_buffer(program);
        let (loaded, sample_kernels) =
            Loaded::new(opened, &of, progress, |instances| head.map(|_| SampleKernels::new(instances)))?;
        let Loaded { machine, arena, layout, .. } = &loaded;
        let logits = head.map_or(0, |id| arena.at(layout.buffers[id.0]));
        let sampling = Sampling::new(machine, sample_kernels, logits, arena, layout, program.vocab_size)?;
        let largest = limits.largest_step(program);
        Ok(Self {
            graphs: Vec::new(),
            blocks: [Staged::new(gpu, largest.words())?, Staged::new(gpu, largest.words())?],
            filler: Filler::with_capacity(largest.tiles, largest.splits),
            plans: Plans::of(&machine.stages, program.kind()),
            sampling,
            texts: is_encoder.then(|| Texts::new(&loaded)),
            loaded,
            encoder: None,
            media: MediaCache::default(),
            adapters: None,
            reserved: reserved(opened, program, &limits),
            kv: None,
            caches: Vec::new(),
            cache_size: (0, 0),
            last: (0, 0),
            hidden: Vec::new(),
            steps: (0, 0),
        })
    }

    /// Loads the encoder of the model's images.
    pub(crate) fn load_encoder(
        &mut self,
        opened: &Opened<'_>,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        check_encoder(NAME, &self.loaded.program, program)?;
        // Its memory is free before that of another is allocated.
        self.encoder = None;
        self.encoder = Some(Encoder::load(opened, program, source, progress)?);
        Ok(())
    }

    /// Returns the programs on the device.
    fn programs(&self) -> impl Iterator<Item = &Loaded> {
        std::iter::once(&self.loaded).chain(self.encoder.iter().map(Encoder::loaded))
    }

    pub(crate) fn weight_bytes(&self) -> u64 {
        self.programs().map(|loaded| loaded.layout.weight_bytes).sum()
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.loaded.machine.launcher.gpu.info().memory
    }

    /// Returns whether products of the largest steps round their input to FP8.
    pub(crate) fn rounds_to_fp8(&self) -> bool {
        self.programs().any(Loaded::rounds_to_fp8)
    }

    pub(crate) fn step_bytes(&self) -> u64 {
        self.programs().map(Loaded::step_bytes).sum()
    }

    /// Returns the number of bytes that the programs leave to the KV cache and the media cache.
    pub(crate) fn kv_bytes(&self) -> u64 {
        self.programs().last().map_or(0, |loaded| loaded.kv_bytes.saturating_sub(self.reserved))
    }

    /// Allocates zeroed blocks.
    pub(crate) fn allocate_kv(&mut self, blocks: usize) -> Result<(), BackendError> {
        let machine = &self.loaded.machine;
        let groups = &self.loaded.program.kv_groups;
        let mut plan = Plan::default();
        let block_elements = groups.iter().map(block_elements).max().unwrap_or(0);
        let region = plan.take(block_elements.saturating_mul(machine.kv_element).saturating_mul(blocks as u64));
        if plan.bytes() > self.kv_bytes().saturating_add(SLACK) {
            return Err(BackendError::OutOfMemory { what: "the KV cache".into(), needed: plan.bytes() });
        }
        self.graphs.clear();
        self.caches.clear();
        self.cache_size = (0, 0);
        self.kv = None;
        let arena = Arena::new(&machine.launcher.gpu, plan.bytes(), "the KV cache")?;
        let address = arena.at(region);
        machine.launcher.gpu.zero(address, region.bytes)?;
        self.caches.resize(groups.len(), Cache { address, block_elements, blocks });
        self.cache_size = (KV_BLOCK, blocks);
        self.kv = Some(arena);
        Ok(machine.launcher.gpu.synchronize()?)
    }

    /// Returns the size in bytes of a row of the media cache.
    pub(crate) fn media_row_bytes(&self) -> u64 {
        self.loaded.program.media_columns() as u64 * self.loaded.machine.element
    }

    /// Allocates zeroed rows of the media cache.
    pub(crate) fn allocate_media(&mut self, rows: usize) -> Result<(), BackendError> {
        self.media = MediaCache::default();
        let columns = self.loaded.program.media_columns();
        self.media = MediaCache::new(&self.loaded.machine.launcher.gpu, rows, columns, self.media_row_bytes())?;
        Ok(())
    }

    /// Encodes images and stores their rows.
    pub(crate) fn encode(&mut self, batch: &EncodeBatch) -> Result<(), BackendError> {
        let encoder = self.encoder.as_mut().ok_or_else(|| failed("no encoder is loaded"))?;
        encoder.encode(batch, &self.media)
    }

    /// Returns rows of the media cache; a word holds two elements of 16 bits.
    pub(crate) fn media(&self, rows: &[u32]) -> Result<Vec<u32>, BackendError> {
        self.media.read(&self.loaded.machine.launcher.gpu, rows)
    }

    /// Allocates empty slots for adapters. Steps have to be recorded again.
    pub(crate) fn allocate_adapters(&mut self, slots: usize, rank: usize) -> Result<(), BackendError> {
        let Loaded { program, machine, limits, .. } = &self.loaded;
        check_sites(NAME, program)?;
        if rank > LORA_MAX_RANK as usize {
            return Err(failed(format!("adapters may have a rank of {LORA_MAX_RANK} at most, not {rank}")));
        }
        self.graphs.clear();
        self.adapters = None;
        let plan = AdapterPlan::new(program, machine.dtype, (slots, rank), limits.tokens);
        self.adapters = Some(Adapters::new(&machine.launcher.gpu, machine.dtype, plan)?);
        Ok(())
    }

    /// Copies an adapter into a slot.
    pub(crate) fn set_adapter(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        let slots = self.adapters.as_ref().map_or(0, Adapters::slots);
        let Some(adapters) = self.adapters.as_mut().filter(|_| slot < slots) else {
            return Err(failed(format!("there is no slot {slot} for adapters, only {slots}")));
        };
        check_adapter(NAME, &self.loaded.program, adapter, adapters.rank())?;
        adapters.set(slot, adapter)
    }

    /// Returns whether the KV cache is allocated.
    pub(crate) fn has_kv(&self) -> bool {
        self.kv.is_some()
    }

    /// Records the steps in which all sequences decode, with and without adapters, starting with the largest number of sequences. A program that
    /// samples nothing has none.
    pub(crate) fn record(&mut self) -> Result<(), BackendError> {
        if self.loaded.program.kind() != ProgramKind::Decoder {
            return Ok(());
        }
        let limits = self.loaded.limits;
        let sizes = graph_sizes(&limits);
        let slots = self.adapters.as_ref().map_or(0, Adapters::slots);
        self.graphs.clear();
        for &sequences in sizes.iter().rev() {
            let base = recorded_shape(&self.loaded.program, &limits, self.plans, sequences);
            let most = Adapted { rows: sequences, tiles: most_tiles(sequences, slots) };
            let adapted = (slots > 0).then_some(StepShape { adapted: [most; 2], ..base });
            for shape in [Some(base), adapted].into_iter().flatten() {
                self.pad(&shape)?;
                let (machine, step) = (&self.loaded.machine, self.step(shape));
                // The step runs once first, because initialisation by a kernel or a library must not be part of the graph.
                machine.run(&step)?;
                machine.launcher.gpu.synchronize()?;
                let graph = machine.launcher.gpu.capture(|| machine.run(&step))?;
                self.graphs.insert(0, Recorded { shape, graph });
            }
        }
        let most = sizes.last().copied().unwrap_or(0);
        tracing::info!("graphs: decode steps of {} sizes are recorded, up to {most} sequences", sizes.len());
        Ok(())
    }

    /// Writes a step that consists of padding only.
    fn pad(&mut self, shape: &StepShape) -> Result<(), BackendError> {
        let groups = self.caches.len();
        let mut empty = StepBatch::with_capacity(0, 0, 0, groups);
        empty.query_start.push(0);
        self.filler.plan(&empty, shape.streams, self.plans);
        upload(&mut self.blocks, &self.filler, &empty, shape, self.loaded.step())
    }

    /// Returns a step that has been copied to the device.
    fn step(&self, shape: StepShape) -> Step<'_> {
        let caches = self.texts.as_ref().map_or(&self.caches[..], |texts| std::slice::from_ref(texts.cache()));
        Step {
            shape,
            address: self.loaded.step(),
            tables: self.loaded.tables.at,
            caches,
            media: self.media.rows(),
            patches: 0,
            adapters: self.adapters.as_ref(),
        }
    }

    pub(crate) fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.last = (0, 0);
        let memory = octavo_ops::Limits {
            kv: self.cache_size,
            drawn: self.sampling.drawn(),
            media_rows: self.media.count(),
            adapters: self.adapters.as_ref().map_or(0, Adapters::slots),
        };
        let program = &self.loaded.program;
        let checked = batch.check(program, memory);
        checked.map_err(|reason| failed(format!("the batch is malformed: {reason}")))?;
        check_limits(batch, &self.loaded.limits)?;
        if let Some(texts) = &mut self.texts {
            texts.divide(batch);
        }
        let rows = self.texts.as_ref().map_or(batch, Texts::step);
        let exact = self.filler.plan(rows, program.position_streams(), self.plans);
        self.sampling.begin_forward()?;
        let recorded = self.recorded(rows, &exact);
        let shape = recorded.map_or(exact, |at| self.graphs[at].shape);
        upload(&mut self.blocks, &self.filler, rows, &shape, self.loaded.step())?;
        self.loaded.tables.update(&self.loaded.machine, rows)?;
        match recorded {
            Some(at) => self.graphs[at].graph.launch()?,
            None => self.loaded.machine.run(&self.step(shape))?,
        }
        self.sampling.end_forward()?;
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
            && exact.media == 0
            && batch.query_start.iter().zip(0..).all(|(&start, row)| start == row)
            && batch.sampled_rows.len() == exact.tokens
            && batch.sampled_rows.iter().zip(0..).all(|(&sampled, row)| sampled == row);
        let fits = |recorded: &Recorded| {
            let shape = &recorded.shape;
            exact.sequences <= shape.sequences
                && exact.splits <= shape.splits
                && exact.tiles <= shape.tiles
                && (exact.adapted[0].tiles > 0) == (shape.adapted[0].tiles > 0)
                && exact.adapted[0].tiles <= shape.adapted[0].tiles
        };
        if decodes { self.graphs.iter().position(fits) } else { None }
    }

    pub(crate) fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        batch.check(NAME, self.last.0)?;
        self.sampling.start(&self.loaded.machine, batch)
    }

    pub(crate) fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        self.sampling.take(out)
    }

    /// Returns the time that the device worked on the step whose tokens were taken last.
    pub(crate) fn step_time(&self) -> Option<Duration> {
        self.sampling.step_time()
    }

    /// Returns the hidden states of the last step and their number; a word holds two of 16 bits, and the last word may
    /// hold one.
    pub(crate) fn embeddings(&mut self) -> Result<(&[u32], usize), BackendError> {
        self.hidden.clear();
        let Loaded { machine, arena, layout, program, .. } = &self.loaded;
        let Some(id) = program.embedding() else { return Ok((&self.hidden, 0)) };
        let elements = program.buffers[id.0].cols * self.last.1;
        // A classifier may have an odd number of scores. The buffer has an even number of rows.
        self.hidden.resize((elements * machine.element as usize).div_ceil(size_of::<u32>()), 0);
        machine.launcher.gpu.download(&mut self.hidden, arena.at(layout.buffers[id.0]))?;
        Ok((&self.hidden, elements))
    }

    pub(crate) fn logits(&self) -> Result<Vec<f32>, BackendError> {
        let Loaded { machine, arena, layout, program, .. } = &self.loaded;
        let Some(id) = logits_buffer(program) else { return Ok(Vec::new()) };
        let stride = logits_stride(program.vocab_size) as usize;
        let mut words = vec![0; self.last.0 * stride];
        machine.launcher.gpu.download(&mut words, arena.at(layout.buffers[id.0]))?;
        let rows = words.chunks_exact(stride).map(|row| &row[..program.vocab_size]);
        Ok(rows.flatten().map(|&word| f32::from_bits(word)).collect())
    }

    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        let Some(&cache) = self.caches.first() else { return Ok(()) };
        let machine = &self.loaded.machine;
        let bytes = cache.block_elements * machine.kv_element;
        for &(from, to) in pairs {
            if from.max(to) as usize >= cache.blocks {
                return Err(failed(format!("cannot copy block {from} to {to}: there are {} blocks", cache.blocks)));
            }
            let [from, to] = [from, to].map(|block| cache.address + u64::from(block) * bytes);
            machine.launcher.gpu.copy(to, from, bytes)?;
        }
        Ok(())
    }
}

/// Returns the numbers of sequences for which decode steps are recorded, ascending.
pub(crate) fn graph_sizes(limits: &Limits) -> Vec<usize> {
    let most = limits.sequences.min(limits.tokens).min(limits.rows);
    let mut sizes: Vec<_> = GRAPH_SEQUENCES.into_iter().filter(|&size| size < most).collect();
    sizes.push(most.min(GRAPH_SEQUENCES[GRAPH_SEQUENCES.len() - 1]));
    sizes
}

/// Returns the shape of a recorded step of so many sequences without adapters.
pub(crate) fn recorded_shape(program: &Program, limits: &Limits, plans: Plans, sequences: usize) -> StepShape {
    StepShape {
        tokens: sequences,
        sequences,
        sampled: sequences,
        splits: if matches!(plans, Plans::Sequences { .. }) { limits.splits(sequences) } else { 0 },
        tiles: if matches!(plans, Plans::Tiles { .. }) { sequences } else { 0 },
        pooled: 0,
        media: 0,
        adapted: [Adapted::default(); 2],
        ..limits.largest_step(program)
    }
}

/// Writes a step of a shape into the next of the blocks and copies it to an address on the device.
fn upload(
    blocks: &mut [Staged; 2],
    filler: &Filler,
    batch: &StepBatch,
    shape: &StepShape,
    address: u64,
) -> Result<(), BackendError> {
    blocks.reverse();
    blocks[0].send(address, shape.words(), |out| filler.write(batch, shape, out))
}

/// Returns the number of bytes of a share of the memory that are kept for adapters.
fn reserved(opened: &Opened<'_>, program: &Program, limits: &Limits) -> u64 {
    match (opened.config.memory, opened.config.adapters) {
        (Memory::Share(_), Some(AdapterRoom { slots, rank })) => {
            AdapterPlan::new(program, opened.dtype, (slots, rank), limits.tokens).bytes()
        }
        _ => 0,
    }
}

/// Returns the buffer of the logits.
fn logits_buffer(program: &Program) -> Option<BufferId> {
    program.ops.iter().find_map(|op| match op {
        Op::Logits(op) => Some(op.out),
        _ => None,
    })
}

/// Checks that a batch does not exceed the buffers.
fn check_limits(batch: &StepBatch, limits: &Limits) -> Result<(), BackendError> {
    let counts = [
        ("tokens", batch.tokens(), limits.tokens),
        ("sequences", batch.sequences(), limits.sequences),
        ("seats", batch.seats.iter().max().map_or(0, |&last| last as usize + 1), limits.sequences),
        ("sampled rows", batch.sampled_rows.len(), limits.rows),
        ("pooled rows", batch.pooled_rows.len(), limits.pooled),
        ("positions", batch.positions.iter().max().map_or(0, |&last| last as usize + 1), limits.positions),
        ("tokens of a sequence", batch.seq_lens.iter().max().map_or(0, |&len| len as usize), limits.positions),
    ];
    match counts.into_iter().find(|(_, found, most)| found > most) {
        Some((what, found, most)) => Err(failed(format!("a step has {found} {what}, but memory was taken for {most}"))),
        None => Ok(()),
    }
}
