//! The implementation of [`Backend`].

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use octavo_ops::cost::ElementBytes;
use octavo_ops::sampling::{SampleBatch, SampledToken, Sampler};
use octavo_ops::{
    AdapterSource, Backend, BackendError, DeviceProfile, EncodeBatch, KvGroup, Limits, Program, ProgramKind, Rows,
    StepBatch, WeightSource, check_block_size, check_encoder, check_sites,
};

use crate::activation::Activation;
use crate::forward::{Forward, Memory, Scratch};
use crate::kv::{self, BLOCK, KvCache, KvDtype};
use crate::loaded::{self, Copies};
use crate::lora::Adapter;
use crate::media::MediaCache;
use crate::plan::Plan;
use crate::pool::{Pool, available_threads};
use crate::weights::{Arena, Target, WeightDtype};
use crate::{Isa, NAME, failed};

/// Supported numbers of tokens per KV block.
const BLOCK_SIZES: &[usize] = &[BLOCK];

/// Number of logits from which a step's rows are sampled by several threads; fewer are sampled before the threads wake.
const SHARED_SAMPLING: usize = 1 << 15;

thread_local! {
    static SAMPLER: RefCell<Sampler> = RefCell::default();
}

/// Options of the backend. The default uses all available resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Number of threads; by default the number of processors that this process may use.
    pub threads: Option<usize>,
    /// Instruction set; by default the best available.
    pub isa: Option<Isa>,
    /// Type in which weights of floating-point numbers are kept.
    pub weights: WeightDtype,
    /// Element type of keys and values.
    pub kv: KvDtype,
    /// Precision of activations that are multiplied with quantised weights.
    pub activations: ActivationBits,
    /// Memory for the weights of a model in bytes, all copies together. If the threads run on several NUMA nodes and one
    /// copy for each of them fits, each node reads its own; otherwise there is one, whatever its size.
    pub copies_bytes: u64,
}

/// Precision of activations that are multiplied with quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationBits {
    /// Integers of 8 bits with a scale for 32 inputs, except four outliers, which have 12. The inputs of products that take no less
    /// time with 8 bits have 12 bits too. Answers are about twice as near to those in f32 as with 8 bits for all inputs, which is how
    /// llama.cpp rounds.
    #[default]
    Eight,
    /// 12 bits: about four times as near, and up to 1.3 times as long where arithmetic limits the speed.
    Twelve,
}

/// Runs programs on the processor's cores.
pub struct CpuBackend {
    isa: Isa,
    weight_dtype: WeightDtype,
    kv_dtype: KvDtype,
    coarse: bool,
    copies_bytes: u64,
    pool: Pool,
    model: Option<Model>,
    kv: KvCache,
    /// Keys and values of a step, if the model is an encoder of texts.
    step_memory: StepMemory,
    encoder: Option<Encoder>,
    media: MediaCache,
    /// Adapters by slot, and their largest rank.
    adapters: Vec<Option<Adapter>>,
    largest_rank: usize,
    scratch: Scratch,
    /// Number of rows of the last forward pass that reached the head.
    sampled: usize,
    /// Number of rows of the last forward pass whose hidden state is returned.
    pooled: usize,
    /// Token that a thread has sampled, by row of the step.
    drawn: Vec<Mutex<Option<SampledToken>>>,
    /// Tokens of the last step that have not been taken.
    tokens: Vec<SampledToken>,
}

struct Model {
    program: Program,
    plan: Plan,
    weights: Copies,
    /// Activations by [`octavo_ops::BufferId`].
    activations: Vec<Activation>,
}

/// An encoder of images and what it needs from step to step.
struct Encoder {
    model: Model,
    memory: StepMemory,
    scratch: Scratch,
}

/// Keys and values that only one step sees.
#[derive(Default)]
struct StepMemory {
    /// The blocks; empty before the first step.
    kv: Option<KvCache>,
    /// The step over the blocks of `kv`.
    step: StepBatch,
}

impl StepMemory {
    /// Gives each sequence of a step blocks of its own.
    fn divide(&mut self, program: &Program, batch: &StepBatch) -> Result<(&mut KvCache, &StepBatch), BackendError> {
        let blocks = batch.in_own_blocks(BLOCK, &mut self.step);
        let kv = match self.kv.take() {
            Some(kv) if kv.blocks() >= blocks => kv,
            _ => KvCache::new(&[program.step_kv()], blocks, KvDtype::Bf16)?,
        };
        Ok((self.kv.insert(kv), &self.step))
    }
}

impl CpuBackend {
    /// Creates a backend without a model.
    pub fn new(config: CpuConfig) -> Result<Self, BackendError> {
        let threads = config.threads.unwrap_or_else(available_threads);
        let pool = Pool::new(threads).map_err(|error| failed(format!("cannot start {threads} threads: {error}")))?;
        Self::on(config, pool)
    }

    /// Creates a backend without a model on a team of threads.
    pub(crate) fn on(config: CpuConfig, pool: Pool) -> Result<Self, BackendError> {
        let isa = config.isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            return Err(BackendError::Unsupported { backend: NAME, what: format!("{isa} on this machine") });
        }
        Ok(Self {
            isa,
            weight_dtype: config.weights,
            kv_dtype: config.kv,
            coarse: config.activations == ActivationBits::Eight,
            copies_bytes: config.copies_bytes,
            pool,
            model: None,
            kv: KvCache::default(),
            step_memory: StepMemory::default(),
            encoder: None,
            media: MediaCache::default(),
            adapters: Vec::new(),
            largest_rank: 0,
            scratch: Scratch::default(),
            sampled: 0,
            pooled: 0,
            drawn: Vec::new(),
            tokens: Vec::new(),
        })
    }

    /// Returns the instruction set that it uses.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns the number of threads that it uses, including the caller's.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs a forward pass like [`Backend::forward`], but stops after each stage. Returns the time of each stage with
    /// the index of its op, or `None` for a stage that serves all ops. For benches: together the stages take longer
    /// than a pass, because threads are woken and joined for each.
    ///
    /// # Errors
    /// Returns the errors of [`Backend::forward`].
    pub fn profile(&mut self, batch: &StepBatch) -> Result<Vec<(Option<usize>, Duration)>, BackendError> {
        let times = self.pass(batch, |forward, pool, memory| forward.profile(pool, memory))?;
        let ops = &self.model()?.plan.ops;
        Ok(ops.iter().copied().zip(times).collect())
    }

    /// Checks a batch and runs the forward pass with `run`.
    fn pass<T>(
        &mut self,
        batch: &StepBatch,
        run: impl FnOnce(&Forward<'_>, &mut Pool, Memory<'_>) -> T,
    ) -> Result<T, BackendError> {
        (self.sampled, self.pooled) = (0, 0);
        let Model { program, plan, weights, activations } = self.model.as_mut().ok_or_else(no_model)?;
        let memory = (BLOCK, self.kv.blocks());
        let limits = Limits { kv: memory, drawn: 0, media_rows: self.media.rows(), adapters: self.adapters.len() };
        batch.check(program, limits).map_err(malformed)?;
        let _running = self.kv.step();
        let (kv, step) = match program.kind() {
            ProgramKind::Encoder => self.step_memory.divide(program, batch)?,
            ProgramKind::Decoder | ProgramKind::Embedder => (&mut self.kv, batch),
        };
        let adapters = &self.adapters;
        let forward = Forward { isa: self.isa, program, plan, weights, batch: step, images: None, adapters };
        let (media, scratch) = (&mut self.media, &mut self.scratch);
        let result = run(&forward, &mut self.pool, Memory { activations, kv, media, scratch });
        self.kv.map_ahead();
        (self.sampled, self.pooled) = (batch.sampled_rows.len(), batch.pooled_rows.len());
        Ok(result)
    }

    /// Reads the weights of a program.
    fn read(
        &mut self,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Model, BackendError> {
        let mut read = 0;
        let mut advance = |bytes: usize| {
            read += bytes as u64;
            progress(read);
        };
        let arenas = (0..self.copies(program)).map(|_| Arena::default()).collect();
        let short = self.isa.multiplies_short();
        let target = Target { pool: &mut self.pool, arenas, dtype: self.weight_dtype, short };
        let loaded = Copies::read(program, target, source, &mut advance)?;
        for (storage, kept) in loaded::conversions(program, self.weight_dtype) {
            tracing::info!("weights in {storage} are kept as {kept}");
        }
        let plan = Plan::new(program, loaded.shapes(), self.isa, self.coarse)?;
        let activations =
            plan.buffers.iter().zip(&plan.forms).map(|(b, &forms)| Activation::new(b.cols, forms)).collect();
        Ok(Model { program: program.clone(), plan, weights: loaded, activations })
    }

    #[cfg(test)]
    pub(crate) fn weights(&self) -> Result<&Copies, BackendError> {
        Ok(&self.model()?.weights)
    }

    /// Runs `work` on every thread, with the weights of the model.
    #[cfg(test)]
    pub(crate) fn threads_do(&mut self, work: &(dyn Fn(crate::pool::Worker<'_>, &Copies) + Sync)) {
        let Some(model) = &self.model else { return };
        self.pool.run(&|worker| work(worker, &model.weights));
    }

    /// Returns the number of copies of a program's weights: one for each NUMA node, if they fit.
    fn copies(&self, program: &Program) -> usize {
        let nodes = self.pool.nodes();
        if nodes == 1 {
            return 1;
        }
        let each = loaded::matrix_bytes(program, self.weight_dtype);
        let fit = each.saturating_mul(nodes as u64) <= self.copies_bytes.saturating_sub(self.weight_bytes());
        tracing::info!(
            nodes,
            bytes = each,
            "the threads run on several NUMA nodes; a copy of the weights on each: {fit}"
        );
        if fit { nodes } else { 1 }
    }

    fn model(&self) -> Result<&Model, BackendError> {
        self.model.as_ref().ok_or_else(no_model)
    }
}

fn malformed(reason: &'static str) -> BackendError {
    failed(format!("the batch is malformed: {reason}"))
}

fn no_model() -> BackendError {
    failed("no model is loaded")
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn block_sizes(&self) -> &[usize] {
        BLOCK_SIZES
    }

    fn kv_dtype(&self) -> &'static str {
        self.kv_dtype.name()
    }

    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64 {
        kv::block_bytes(group, self.kv_dtype) * block_size.div_ceil(BLOCK) as u64
    }

    fn load(
        &mut self,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        (self.model, self.encoder, self.sampled, self.pooled) = (None, None, 0, 0);
        self.kv = KvCache::default();
        self.step_memory = StepMemory::default();
        self.media = MediaCache::default();
        self.adapters.clear();
        self.model = Some(self.read(program, source, progress)?);
        Ok(())
    }

    fn load_encoder(
        &mut self,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        check_encoder(NAME, &self.model()?.program, program)?;
        let model = self.read(program, source, progress)?;
        self.encoder = Some(Encoder { model, memory: StepMemory::default(), scratch: Scratch::default() });
        Ok(())
    }

    fn media_row_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| (model.program.media_columns() * size_of::<f32>()) as u64)
    }

    fn allocate_media(&mut self, rows: usize) -> Result<(), BackendError> {
        self.media = MediaCache::new(rows, self.model()?.program.media_columns())?;
        Ok(())
    }

    fn encode(&mut self, batch: &EncodeBatch) -> Result<(), BackendError> {
        let encoder = self.encoder.as_mut().ok_or_else(|| failed("no encoder is loaded"))?;
        let Encoder { model: Model { program, plan, weights, activations }, memory, scratch } = encoder;
        batch.check(program, self.media.rows()).map_err(malformed)?;
        let _running = self.kv.step();
        let (kv, step) = memory.divide(program, &batch.rows)?;
        let forward =
            Forward { isa: self.isa, program, plan, weights, batch: step, images: Some(batch), adapters: &[] };
        let media = &mut self.media;
        forward.run(&mut self.pool, Memory { activations, kv, media, scratch });
        Ok(())
    }

    fn media(&self, rows: &[u32]) -> Result<Vec<f32>, BackendError> {
        let rows: Result<Vec<_>, _> = rows.iter().map(|&row| self.media.row(row)).collect();
        Ok(rows?.concat())
    }

    fn allocate_adapters(&mut self, slots: usize, rank: usize) -> Result<(), BackendError> {
        check_sites(NAME, &self.model()?.program)?;
        self.adapters.clear();
        self.adapters.resize_with(slots, || None);
        self.largest_rank = rank;
        Ok(())
    }

    fn set_adapter(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        let program = &self.model.as_ref().ok_or_else(no_model)?.program;
        let place = self.adapters.get_mut(slot).ok_or_else(|| failed(format!("there is no slot {slot}")))?;
        // The old one makes room for the new one.
        *place = None;
        let adapter = place.insert(Adapter::new(program, adapter, self.largest_rank)?);
        tracing::debug!(slot, bytes = adapter.bytes(), "an adapter was packed");
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        let encoder = self.encoder.iter().map(|encoder| &encoder.model);
        self.model.iter().chain(encoder).map(|model| model.weights.bytes()).sum()
    }

    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError> {
        check_block_size(NAME, BLOCK_SIZES, block_size)?;
        self.kv = KvCache::new(&self.model()?.program.kv_groups, blocks, self.kv_dtype)?;
        Ok(())
    }

    /// Returns no peak rates, because measuring them takes longer than loading a small model.
    fn device_profile(&self) -> DeviceProfile {
        let kv = match self.kv_dtype {
            KvDtype::Bf16 => 2,
            KvDtype::Int8 | KvDtype::Fp8 => 1,
        };
        let eight_bf16 = if self.isa.multiplies_short() { 12 } else { 16 };
        DeviceProfile { elements: ElementBytes { activation: 4, kv, eight_bf16 }, peaks: None, memory: None }
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.pass(batch, |forward, pool, memory| forward.run(pool, memory))
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let found = self.sampled;
        batch.check(NAME, found)?;
        let Model { program, plan, activations, weights } = self.model.as_ref().ok_or_else(no_model)?;
        let out = &mut self.tokens;
        out.clear();
        let Some((logits, head)) = plan.logits else { return Ok(()) };
        let (logits, head) = (&activations[logits.0], weights.shapes()[head.0].factor());
        let (rows, vocab, scratch) = (batch.rows, program.vocab_size, &self.scratch);
        let sample = |row: usize| {
            let logits = logits.row(row);
            let largest = rows[row].wants_the_largest().then(|| scratch.argmax(head, row, found, logits)).flatten();
            match largest.filter(|id| !rows[row].forbidden.contains(id)) {
                Some(id) => SampledToken { id, logprobs: None },
                None => SAMPLER.with_borrow_mut(|sampler| sampler.sample(logits, &rows[row])),
            }
        };
        let work = rows.iter().filter(|row| !row.wants_the_largest()).count() * vocab;
        if rows.len() < 2 || work < SHARED_SAMPLING {
            out.extend((0..rows.len()).map(sample));
            return Ok(());
        }
        if self.drawn.len() < rows.len() {
            self.drawn.resize_with(rows.len(), Mutex::default);
        }
        let drawn = &self.drawn;
        self.pool.run(&|worker| {
            worker.share(rows.len(), |row| {
                *drawn[row].lock().unwrap_or_else(PoisonError::into_inner) = Some(sample(row));
            });
        });
        let take = |slot: &mut Mutex<Option<_>>| slot.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        out.extend(self.drawn[..rows.len()].iter_mut().filter_map(take));
        Ok(())
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        std::mem::swap(out, &mut self.tokens);
        self.tokens.clear();
        Ok(())
    }

    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError> {
        let Model { program, activations, .. } = self.model()?;
        out.clear();
        if let Some(id) = program.embedding() {
            debug_assert_eq!(program.buffers[id.0].rows, Rows::Pooled);
            activations[id.0].append_rows(self.pooled, out);
        }
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        let Model { plan, activations, .. } = self.model()?;
        let mut logits = Vec::new();
        if let Some((id, _)) = plan.logits {
            activations[id.0].append_rows(self.sampled, &mut logits);
        }
        Ok(logits)
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        self.kv.copy_blocks(pairs)
    }
}
