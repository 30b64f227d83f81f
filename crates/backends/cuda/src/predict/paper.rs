//! A program whose launches are listed and not run: no device and no driver is needed.

use std::any::Any;
use std::cell::RefCell;

use octavo_kernels::manifest::{self, Chip, Dtype, Instance};
use octavo_kernels::params::{Params, SamplingParams};
use octavo_ops::cost::{ElementBytes, op_cost};
use octavo_ops::{BackendError, Op, Program, ProgramKind, StepBatch};

use super::work::{self, Product, Sizes, Work};
use crate::arena::Arena;
use crate::build::{Instances, KernelId};
use crate::forward::{Cache, Machine, Scratch, Step};
use crate::launcher::Launcher;
use crate::layout::{Layout, Limits, kv_groups};
use crate::libraries::cublaslt::{Operands, Shape};
use crate::linear::Setting;
use crate::lower::{Attention, Lowering, Stage, block_elements};
use crate::media::MediaRows;
use crate::model::{graph_sizes, recorded_shape};
use crate::step::{Filler, Plans, StepShape};
use crate::tables::TablesAt;
use crate::{CudaConfig, unsupported};

/// Name of a product that the library computes.
pub(super) const LIBRARY: &str = "cublasLt";

/// A launch.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Launch {
    /// Name of the instance, `cublasLt`, or `copy`.
    pub(super) name: String,
    /// Sizes of the weight, `24576x4096`; empty if it has none.
    pub(super) what: String,
    /// The instance; `None` if it is no kernel of ours.
    pub(super) instance: Option<Instance>,
    /// Number of CTAs in each dimension.
    pub(super) grid: [u32; 3],
    /// Dynamic shared memory of a CTA in bytes.
    pub(super) shared: usize,
    /// What it does.
    pub(super) work: Work,
}

impl Launch {
    /// Returns the number of CTAs.
    pub(super) fn ctas(&self) -> u64 {
        self.grid.into_iter().map(u64::from).product()
    }
}

/// A launch whose work may not be known yet.
struct Noted {
    launch: Launch,
    is_known: bool,
}

/// Lists launches.
pub(super) struct Paper {
    processors: u32,
    instances: Vec<Instance>,
    sizes: Sizes,
    noted: RefCell<Vec<Noted>>,
}

impl Launcher for Paper {
    fn processors(&self) -> u32 {
        self.processors
    }

    fn threads(&self, kernel: KernelId) -> u32 {
        self.instances[kernel.index()].threads
    }

    fn launch<P: Params + 'static>(
        &self,
        kernel: KernelId,
        grid: [u32; 3],
        shared: Option<u32>,
        params: &P,
    ) -> Result<(), BackendError> {
        let instance = &self.instances[kernel.index()];
        let known = work::of_product(instance, grid, params as &dyn Any, self.sizes);
        let is_known = known.is_some();
        let (work, what) = known.unwrap_or_default();
        let launch = Launch {
            name: instance.name.clone(),
            what,
            instance: Some(instance.clone()),
            grid,
            shared: shared.map_or(instance.dynamic_shared, |bytes| bytes as usize),
            work,
        };
        self.noted.borrow_mut().push(Noted { launch, is_known });
        Ok(())
    }

    fn copy(&self, _: u64, _: u64, bytes: u64) -> Result<(), BackendError> {
        let work = Work { activations: 2 * bytes, ..Work::default() };
        self.note_foreign("copy", String::new(), work);
        Ok(())
    }

    /// The library is assumed to multiply everything except FP8, which depends on its version.
    fn supports(&self, shape: Shape, _: u32) -> bool {
        shape.scaling.is_none()
    }

    fn multiply(&self, shape: Shape, rows: u32, operands: &Operands) -> Result<bool, BackendError> {
        let element = self.sizes.dtype.bytes() as u64;
        let Shape { n, k, out, .. } = shape;
        let weight = u64::from(n) * u64::from(k) * element;
        let product = Product { m: rows, n, k, weight, out: out.bytes() as u64, adds: operands.add != 0 };
        let work = product.work(element, (0, 0), operands.weight != self.sizes.values);
        self.note_foreign(LIBRARY, product.name(), work);
        Ok(true)
    }
}

impl Paper {
    /// Notes a launch of no kernel of ours.
    fn note_foreign(&self, name: &str, what: String, work: Work) {
        let launch = Launch { name: name.to_owned(), what, instance: None, grid: [0; 3], shared: 0, work };
        self.noted.borrow_mut().push(Noted { launch, is_known: true });
    }

    /// Returns the launches of ops of this work, which those that are not known share.
    fn take(&self, whole: Work) -> Vec<Launch> {
        let noted = self.noted.take();
        let mut done = Work::default();
        noted.iter().filter(|noted| noted.is_known).for_each(|noted| done += noted.launch.work);
        let unknown = noted.iter().filter(|noted| !noted.is_known).count() as u64;
        let share = whole.without(&done).share(unknown);
        let finish = |Noted { launch, is_known }| if is_known { launch } else { Launch { work: share, ..launch } };
        noted.into_iter().map(finish).collect()
    }
}

/// A program on paper.
pub(super) struct PaperProgram {
    program: Program,
    machine: Machine<Paper>,
    layout: Layout,
    arena: Arena,
    limits: Limits,
    plans: Plans,
    elements: ElementBytes,
    /// Kernel that finds the most likely tokens.
    scan: KernelId,
    /// Whether decode steps are recorded.
    graphs: bool,
}

impl PaperProgram {
    /// Lowers a program for a chip.
    pub(super) fn new(
        program: &Program,
        config: &CudaConfig,
        (chip, processors): (Chip, u32),
        dtype: Dtype,
    ) -> Result<Self, BackendError> {
        if program.kind() != ProgramKind::Decoder {
            return Err(unsupported("predictions of models that draw no tokens"));
        }
        let limits = Limits::new(config, program);
        let setting = Setting {
            chip,
            dtype,
            cache: config.kv_cache,
            batch_invariant: config.batch_invariant,
            fp8_inputs: program.fp8_inputs,
            tune: false,
        };
        let layout = Layout::new(program, &setting, &limits)?;
        let arena = Arena::on_paper(layout.plan.bytes());
        let mut lowering =
            Lowering { program, layout: &layout, arena: &arena, setting, instances: Instances::default() };
        let stages = lowering.stages()?;
        let fusions = lowering.fusions(&stages);
        let scan = lowering.instances.id(manifest::sampling_scan());
        let scratch = Scratch::new(&arena, &layout);
        let sizes = Sizes { dtype, values: scratch.values };
        let launcher =
            Paper { processors, instances: lowering.instances.into_list(), sizes, noted: RefCell::default() };
        let kv_element = setting.cache.bytes(dtype) as u64;
        let plans = Plans::of(&stages, program.kind());
        let element = dtype.bytes() as u64;
        let machine = Machine { launcher, stages, fusions, scratch, dtype, element, kv_element };
        Ok(Self {
            program: program.clone(),
            machine,
            layout,
            arena,
            limits,
            plans,
            elements: ElementBytes { activation: element, kv: kv_element, ..ElementBytes::HALF },
            scan,
            graphs: config.graphs,
        })
    }

    /// Returns the sizes of elements.
    pub(super) fn elements(&self) -> ElementBytes {
        self.elements
    }

    /// Returns the launches of a step and its sampling, and whether they are those of a recorded graph.
    pub(super) fn launches(&self, batch: &StepBatch) -> Result<(Vec<Launch>, bool), BackendError> {
        let exact = Filler::default().plan(batch, self.program.position_streams(), self.plans);
        let decodes = exact.tokens == exact.sequences;
        let graph = if self.graphs && decodes { self.graph(exact.sequences) } else { None };
        let groups = kv_groups(&self.program);
        let caches: Vec<_> = groups.iter().map(|group| self.cache(block_elements(group))).collect();
        let step = Step {
            shape: graph.unwrap_or(exact),
            address: self.arena.at(self.layout.step),
            tables: self.tables(),
            caches: &caches,
            media: MediaRows { address: 0, columns: 0 },
            patches: 0,
            adapters: None,
        };
        let shape = octavo_ops::cost::StepShape::from_batch(batch);
        let mut launches = Vec::new();
        let (ops, mut at) = (self.program.forward_ops(), 0);
        while at < ops.len() {
            let count = self.machine.stages_from(at, &step)?;
            let mut whole = Work::default();
            for op in &ops[at..at + count] {
                whole += Work::of_cost(&op_cost(&self.program, op, &shape, self.elements));
            }
            let mut of_ops = self.machine.launcher.take(whole);
            // Attention is the last of the ops of a launch.
            let last = at + count - 1;
            if let (Op::PagedAttention(op), Stage::Attention { attention, .. }) =
                (&ops[last], &self.machine.stages[last])
            {
                let attended = Attended { exact: &exact, batch, heads: op.heads, window: op.window };
                of_ops.iter_mut().for_each(|launch| attended.refine(attention, launch, self.elements.kv));
            }
            launches.extend(of_ops);
            at += count;
        }
        launches.extend(self.scan(batch.sampled_rows.len())?);
        Ok((launches, graph.is_some()))
    }

    /// Returns the shape of the recorded step for so many sequences, if there is one.
    fn graph(&self, sequences: usize) -> Option<StepShape> {
        let size = graph_sizes(&self.limits).into_iter().find(|size| *size >= sequences)?;
        Some(recorded_shape(&self.program, &self.limits, self.plans, size))
    }

    fn cache(&self, block_elements: u64) -> Cache {
        Cache { address: 0, block_elements, blocks: 0 }
    }

    fn tables(&self) -> TablesAt {
        let (seats, stride) = (self.limits.sequences, self.limits.table_stride());
        TablesAt { address: self.arena.at(self.layout.tables.0), seats, stride }
    }

    /// Returns the launch that takes the most likely token of each row.
    fn scan(&self, rows: usize) -> Result<Vec<Launch>, BackendError> {
        if rows == 0 {
            return Ok(Vec::new());
        }
        let (rows_of, vocab) = (rows as u32, self.program.vocab_size as u32);
        let segment = SamplingParams::segment_for(rows_of, vocab);
        let params = SamplingParams { rows: rows_of, vocab, segment, ..SamplingParams::default() };
        self.machine.launch(self.scan, params.grid(), &params)?;
        let bytes = (rows * self.program.vocab_size * size_of::<f32>()) as u64;
        Ok(self.machine.launcher.take(Work { activations: bytes, asked: bytes, ..Work::default() }))
    }
}

/// Number of keys in a tile of attention in kernels without a number of their own.
const TILE_KEYS: u64 = 32;

/// A layer's attention in a step.
struct Attended<'a> {
    exact: &'a StepShape,
    batch: &'a StepBatch,
    heads: octavo_ops::HeadShape,
    window: Option<usize>,
}

impl Attended<'_> {
    /// Replaces what the CTAs of a launch ask for, which read keys and values more than once.
    fn refine(&self, attention: &Attention, launch: &mut Launch, element: u64) {
        let row = (self.heads.dim + self.heads.value_dim()) as u64 * element;
        match attention {
            Attention::Planned { tile, .. } if self.exact.splits > 0 => {
                let tiles = (self.heads.q / self.heads.kv).div_ceil(tile.heads as usize) as u64;
                launch.work.asked = launch.work.stored * tiles;
                launch.work.tasks = self.exact.splits as u64 * self.heads.kv as u64 * tiles;
                launch.work.iterations = launch.instance.as_ref().map_or(0, |instance| self.split_tiles(instance));
            }
            Attention::Planned { prefill, .. } | Attention::Tiled { prefill, .. } => {
                let keys = self.tile_keys(prefill.tile.queries as usize);
                launch.work.asked = self.heads.q as u64 / u64::from(prefill.tile.heads) * keys * row;
                let tile = launch.instance.as_ref().and_then(|instance| instance.stage_keys);
                let tile = tile.map_or(TILE_KEYS, u64::from);
                launch.work.iterations = keys.div_ceil(tile * self.exact.tiles.max(1) as u64);
            }
            Attention::Plain { .. } => launch.work.asked = self.heads.q as u64 * self.pairs() * row,
        }
    }

    /// Returns the average number of tiles of a split that each warp of decode attention on tensor cores multiplies; 0 for another
    /// kernel.
    fn split_tiles(&self, instance: &Instance) -> u64 {
        let Some(tile) = instance.stage_keys else { return 0 };
        let keys: u64 =
            self.batch.seq_lens.iter().map(|&keys| u64::from(keys).min(self.window.unwrap_or(usize::MAX) as u64)).sum();
        let (splits, warps) = (self.exact.splits.max(1) as u64, u64::from(instance.threads / 32));
        keys.div_ceil(splits).div_ceil(tile.into()).div_ceil(warps)
    }

    /// Returns the number of keys that the tiles of prefill see, of `tile` queries each, added up.
    fn tile_keys(&self, tile: usize) -> u64 {
        self.sum(|queries, before| {
            let ends = (0..queries).step_by(tile).map(|first| before + (first + tile).min(queries));
            ends.map(|end| end.min(self.window.map_or(usize::MAX, |window| window + tile)) as u64).sum()
        })
    }

    /// Returns the number of pairs of queries and keys.
    fn pairs(&self) -> u64 {
        let seen = |position: usize| (position + 1).min(self.window.unwrap_or(usize::MAX)) as u64;
        self.sum(|queries, before| (before..before + queries).map(seen).sum())
    }

    /// Adds up a number of the queries of each sequence and the keys before them.
    fn sum(&self, of: impl Fn(usize, usize) -> u64) -> u64 {
        let sequence = |s: usize| {
            let queries = self.batch.query_range(s).len();
            of(queries, (self.batch.seq_lens[s] as usize).saturating_sub(queries))
        };
        (0..self.batch.sequences()).map(sequence).sum()
    }
}
