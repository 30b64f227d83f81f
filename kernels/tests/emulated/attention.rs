//! Tests of paged attention: steps over random sequences, in random layouts of the cache.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use octavo_kernels::emulation::{BankUse, Order};
use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Chip, DecodeKernel, Dtype, Instance};
use octavo_kernels::params::{AttentionParams, KV_BLOCK, PagedDecodeParams, RoundedRows};
use octavo_kernels::plan::{DecodePlan, PrefillPlan, PrefillTile};
use octavo_ops::testing::TestRng;
use octavo_ops::{Sight, e4m3, to_e4m3};

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_large_memory, has_sm80, on_device};
use crate::rounded::Rounded;
use crate::support::{Array, Tolerance, pick};

/// Returns the position after the span of a position, or after the position itself. Spans of two lengths occur: one is within
/// a tile of queries, the other longer than one.
pub(crate) fn span_end(position: usize) -> usize {
    match position % 130 {
        offset @ 5..15 => position - offset + 15,
        offset @ 30..125 => position - offset + 125,
        _ => position + 1,
    }
}

/// Kernels that run a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Path {
    /// The kernel for every head size.
    Plain,
    /// Decode with splits of `split_tokens` tokens shared by `columns` CTAs, and prefill as on a chip.
    Fast { chip: Chip, split_tokens: u32, columns: u32 },
    /// Prefill as on a chip, of all sequences.
    Invariant { chip: Chip },
}

impl Path {
    pub(crate) const AMPERE: Self = Self::Fast { chip: Chip::SM_89, split_tokens: 32, columns: 3 };
    /// The tiles of Hopper.
    pub(crate) const HOPPER: Self = Self::Fast { chip: Chip::SM_90, split_tokens: 32, columns: 3 };
    pub(crate) const VOLTA: Self = Self::Fast { chip: Chip::SM_70, split_tokens: 32, columns: 3 };

    /// Returns the chip, unless the kernel is that for every head size.
    fn chip(self) -> Option<Chip> {
        match self {
            Self::Plain => None,
            Self::Fast { chip, .. } | Self::Invariant { chip } => Some(chip),
        }
    }
}

/// Parameters shared by all sequences of a test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) dtype: Dtype,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) size: usize,
    /// Number of tokens that a query sees, or of those on each side if it sees later ones.
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
    /// Whether heads have sinks.
    pub(crate) sinks: bool,
    /// The keys that a query sees, in spans by [`span_end`].
    pub(crate) sight: Sight,
    /// Number of elements of a value, if values are the first elements of the keys.
    pub(crate) prefix: Option<usize>,
    pub(crate) cache: CacheType,
    pub(crate) path: Path,
}

/// Queries, keys and values at every position, `[position][heads * size]`, rounded to the element type.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) q: Array,
    pub(crate) k: Array,
    pub(crate) v: Array,
}

/// A sequence's rows in a step: the queries at these positions. Keys exist up to the end of the range.
pub(crate) type Chunk<'a> = (&'a Sequence, Range<usize>);

impl Setup {
    pub(crate) fn q_cols(&self) -> usize {
        self.q_heads * self.size
    }

    pub(crate) fn kv_cols(&self) -> usize {
        self.kv_heads * self.size
    }

    fn value_size(&self) -> usize {
        self.prefix.unwrap_or(self.size)
    }

    pub(crate) fn out_cols(&self) -> usize {
        self.q_heads * self.value_size()
    }

    /// Returns the number of planes of a layer in the cache: keys, and values if they are no part of them.
    fn planes(&self) -> usize {
        if self.prefix.is_some() { 1 } else { 2 }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }

    /// Returns the sinks, from scores below those of keys to scores far above.
    fn sinks(&self) -> Option<Vec<f32>> {
        self.sinks.then(|| (0..self.q_heads).map(|head| [0.5, -2.0, 6.0, 1.5][head % 4]).collect())
    }

    /// Returns the types of the kernels.
    fn types(&self) -> AttentionTypes {
        AttentionTypes { dtype: self.dtype, cache: self.cache }
    }

    /// Returns the scales of the keys and of the values, which are 1 unless the cache is in e4m3.
    fn kv_scales(&self) -> [f32; 2] {
        match (self.cache, self.prefix) {
            (CacheType::Activation, _) => [1.0; 2],
            (CacheType::E4m3, None) => [0.37, 2.9],
            (CacheType::E4m3, Some(_)) => [0.37; 2],
        }
    }

    /// Returns random queries, and keys and values that the cache has exactly.
    pub(crate) fn sequence(&self, len: usize, rng: &mut TestRng) -> Sequence {
        let mut array = |cols| Array::random(self.dtype, len * cols, rng);
        let q = array(self.q_cols());
        let mut array = |cols| match self.cache {
            CacheType::Activation => array(cols),
            CacheType::E4m3 => {
                let rounded = |x| f64::from(e4m3(to_e4m3(x as f32)));
                Array::new(self.dtype, &array(cols).values().into_iter().map(rounded).collect::<Vec<_>>())
            }
        };
        let k = array(self.kv_cols());
        Sequence { v: if self.prefix.is_some() { k.clone() } else { array(self.kv_cols()) }, q, k }
    }

    fn instances(&self) -> Vec<Instance> {
        let first = match (self.path.chip(), self.prefix) {
            (None, _) => manifest::paged_attention(self.types(), self.size),
            (Some(chip), None) => manifest::paged_prefill(chip, self.types(), self.size).expect("a prefill kernel"),
            (Some(chip), Some(rank)) => {
                manifest::latent_prefill(chip, self.types(), (rank, self.size)).expect("a prefill kernel")
            }
        };
        std::iter::once(first).chain(self.decode().map(|kernel| kernel.instance)).collect()
    }

    /// Returns the kernel for sequences of one query, if there is another.
    fn decode(&self) -> Option<DecodeKernel> {
        let Path::Fast { chip, .. } = self.path else { return None };
        if self.sight == Sight::Both {
            return None;
        }
        let kernel = match self.prefix {
            None => manifest::paged_decode(chip, self.types(), self.size, self.q_heads / self.kv_heads),
            Some(rank) => manifest::latent_decode(chip, self.types(), (rank, self.size)),
        };
        Some(kernel.expect("a decode kernel"))
    }

    /// Returns the tile of prefill.
    fn tile(&self) -> PrefillTile {
        let group = if self.prefix.is_some() { 1 } else { self.q_heads / self.kv_heads };
        manifest::prefill_tile(self.path.chip().unwrap_or(Chip::SM_70), [group])
    }

    /// Returns the keys that the query at a position of a sequence of `len` tokens sees.
    pub(crate) fn seen(&self, position: usize, len: usize) -> Range<usize> {
        let (first, last) = self.sight.keys(position, len, span_end(position), self.window);
        first..last + 1
    }

    /// Returns the window and the lookahead of the parameters.
    fn reach(&self) -> (u32, u32) {
        match (self.sight == Sight::Both, self.window.map(|window| window as u32)) {
            (true, Some(window)) => (2 * window + 1, window),
            (true, None) => (0, u32::MAX),
            (false, window) => (window.unwrap_or(0), 0),
        }
    }

    /// Returns a query's output in f64, `[q_cols]`, computed from queries, keys and values as f64.
    fn expected(&self, [q, k, v]: [&[f64]; 3], position: usize) -> Vec<f64> {
        let range = self.seen(position, k.len() / self.kv_cols());
        let [k_scale, v_scale] = self.kv_scales().map(f64::from);
        let mut out = vec![0.0; self.out_cols()];
        for (head, out) in out.chunks_mut(self.value_size()).enumerate() {
            let q = &q[position * self.q_cols() + head * self.size..][..self.size];
            let kv_head = head / (self.q_heads / self.kv_heads);
            let at = |key| key * self.kv_cols() + kv_head * self.size;
            let score = |key| {
                let product: f64 = q.iter().zip(&k[at(key)..]).map(|(q, k)| q * k).sum();
                let score = product * k_scale * f64::from(self.scale());
                self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let scores: Vec<f64> = range.clone().map(score).collect();
            let sink = self.sinks().map(|sinks| f64::from(sinks[head]));
            let largest = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - largest).exp()).sum();
            for (key, score) in range.clone().zip(&scores) {
                let weight = (score - largest).exp() / sum;
                out.iter_mut().zip(&v[at(key)..]).for_each(|(o, v)| *o += weight * v_scale * v);
            }
        }
        out
    }

    /// Checks that the outputs of a step, one array per chunk, are close to those in f64.
    pub(crate) fn check(&self, chunks: &[Chunk<'_>], outputs: &[Array]) {
        let tolerance = Tolerance::Attention.bound(self.dtype);
        for ((sequence, positions), output) in chunks.iter().zip(outputs) {
            let [q, k, v] = [&sequence.q, &sequence.k, &sequence.v].map(Array::values);
            for (i, position) in positions.clone().enumerate() {
                let got = output.range(i * self.out_cols()..(i + 1) * self.out_cols());
                let label = format!("{self:?}, position {position} of {positions:?}");
                assert_near(&got, &self.expected([&q, &k, &v], position), tolerance, &label);
            }
        }
    }

    /// Returns the outputs of a step, one array per chunk, and checks that their bits are the same in every scheduling
    /// order.
    pub(crate) fn run(&self, chunks: &[Chunk<'_>], layout: u64) -> Vec<Array> {
        in_every_order(|order| Step::new(self, chunks, layout).run(order))
    }

    /// Returns the outputs of one sequence without others, in a random order of threads.
    pub(crate) fn run_alone(&self, chunk: &Chunk<'_>, layout: u64) -> Array {
        Step::new(self, std::slice::from_ref(chunk), layout).run(Order::Random(layout)).remove(0)
    }

    /// Returns the bank use of a step in shared memory.
    pub(crate) fn bank_use(&self, chunks: &[Chunk<'_>]) -> Option<BankUse> {
        kernels(self).bank_use(|| drop(Step::new(self, chunks, 1).run(Order::Forward)))
    }

    /// Returns the outputs in a batch with `padding` additional rows without keys.
    pub(crate) fn run_padded(&self, chunks: &[Chunk<'_>], nothing: &Sequence, padding: usize) -> Vec<Array> {
        in_every_order(|order| {
            let mut step = Step::new(self, chunks, 1);
            for _ in 0..padding {
                step.pad(nothing);
            }
            step.run(order)
        })
    }
}

/// Returns the instances in use, compiled once per process.
fn kernels(setup: &Setup) -> &'static Kernels {
    static LOADED: LazyLock<Mutex<HashMap<String, &'static Kernels>>> = LazyLock::new(Mutex::default);
    let instances = setup.instances();
    // Chips have different instances of a name.
    let calls: Vec<&str> = instances.iter().map(|i| i.call.as_str()).collect();
    let mut loaded = LOADED.lock().expect("no test has failed to compile them");
    loaded.entry(calls.join(" ")).or_insert_with(|| Box::leak(Box::new(Kernels::new(&instances))))
}

/// Arrays of a step. Layer 1 of 2 is used; the other layer, unused blocks and slots beyond a sequence's end are NaN.
struct Step<'a> {
    setup: &'a Setup,
    rows: Vec<Range<usize>>,
    q: Array,
    cache: Array,
    /// The cache in e4m3, if that is its type.
    codes: Vec<u8>,
    sinks: Option<Vec<f32>>,
    table: Vec<u32>,
    /// Row of each sequence in the table, unless that is its index.
    seats: Vec<u32>,
    table_stride: usize,
    query_start: Vec<u32>,
    seq_lens: Vec<u32>,
    /// Empty unless the setup has spans.
    seen_ends: Vec<u32>,
}

impl<'a> Step<'a> {
    const LAYERS: usize = 2;

    fn new(setup: &'a Setup, chunks: &[Chunk<'_>], layout: u64) -> Self {
        let mut rng = TestRng(layout);
        let blocks_of = |(_, positions): &Chunk<'_>| positions.end.div_ceil(KV_BLOCK);
        let table_stride = chunks.iter().map(blocks_of).max().unwrap_or(0) + rng.below(3);
        let blocks = 1 + chunks.iter().map(blocks_of).sum::<usize>() + rng.below(4);
        let mut free: Vec<u32> = (1..blocks as u32).collect();
        let mut step = Self {
            setup,
            rows: Vec::new(),
            q: Array::poisoned(setup.dtype, chunks.iter().map(|(_, p)| p.len()).sum::<usize>() * setup.q_cols()),
            cache: Array::poisoned(setup.dtype, blocks * Self::LAYERS * setup.planes() * KV_BLOCK * setup.kv_cols()),
            codes: Vec::new(),
            sinks: setup.sinks(),
            table: Vec::new(),
            seats: Vec::new(),
            table_stride,
            query_start: vec![0],
            seq_lens: chunks.iter().map(|(_, p)| p.end as u32).collect(),
            seen_ends: Vec::new(),
        };
        for chunk in chunks {
            let (sequence, positions) = chunk;
            let row: Vec<u32> = (0..blocks_of(chunk)).map(|_| free.swap_remove(rng.below(free.len()))).collect();
            // Keys before the window are not used any more.
            let seen = setup.seen(positions.start, positions.end);
            if setup.sight == Sight::Spans {
                let ends = positions.clone().map(|position| span_end(position).min(positions.end) as u32);
                step.seen_ends.extend(ends);
            }
            for key in seen.start..positions.end {
                let at = step.slot(row[key / KV_BLOCK] as usize, key % KV_BLOCK);
                let cols = key * setup.kv_cols()..(key + 1) * setup.kv_cols();
                step.cache.copy_from(at, &sequence.k, cols.clone());
                if setup.prefix.is_none() {
                    step.cache.copy_from(at + KV_BLOCK * setup.kv_cols(), &sequence.v, cols);
                }
            }
            step.table.extend(&row);
            step.table.resize(step.table.len() + table_stride - row.len(), 0);
            let start = *step.query_start.last().expect("a start") as usize;
            let cols = positions.start * setup.q_cols()..positions.end * setup.q_cols();
            step.q.copy_from(start * setup.q_cols(), &sequence.q, cols);
            step.rows.push(start..start + positions.len());
            step.query_start.push((start + positions.len()) as u32);
        }
        if rng.below(2) == 0 {
            step.shuffle_seats(&mut rng);
        }
        if setup.cache == CacheType::E4m3 {
            step.codes = step.cache.values().into_iter().map(|x| to_e4m3(x as f32)).collect();
        }
        step
    }

    /// Puts the rows of the table into another order, with unused ones between them.
    fn shuffle_seats(&mut self, rng: &mut TestRng) {
        let mut free: Vec<u32> = (0..2 * self.seq_lens.len() as u32).collect();
        self.seats = self.seq_lens.iter().map(|_| free.swap_remove(rng.below(free.len()))).collect();
        let rows = std::mem::take(&mut self.table);
        self.table.resize(2 * rows.len(), u32::MAX / 2);
        for (row, &seat) in rows.chunks(self.table_stride.max(1)).zip(&self.seats) {
            self.table[seat as usize * self.table_stride..][..self.table_stride].copy_from_slice(row);
        }
    }

    /// Appends a sequence of one query and no keys.
    fn pad(&mut self, nothing: &Sequence) {
        let (row, cols) = (self.q.len() / self.setup.q_cols(), self.setup.q_cols());
        let mut q = Array::poisoned(self.setup.dtype, (row + 1) * cols);
        q.copy_from(0, &self.q, 0..row * cols);
        q.copy_from(row * cols, &nothing.q, 0..cols);
        self.q = q;
        if !self.seats.is_empty() {
            self.seats.push((self.table.len() / self.table_stride.max(1)) as u32);
        }
        self.table.resize(self.table.len() + self.table_stride, 0);
        self.rows.push(row..row + 1);
        self.query_start.push(row as u32 + 1);
        self.seq_lens.push(0);
        if self.setup.sight == Sight::Spans {
            self.seen_ends.push(0);
        }
    }

    /// Returns the index of the key of a slot in the cache; its value follows one plane later.
    fn slot(&self, block: usize, offset: usize) -> usize {
        let plane = KV_BLOCK * self.setup.kv_cols();
        (block * Self::LAYERS + 1) * self.setup.planes() * plane + offset * self.setup.kv_cols()
    }

    /// Returns parameters shared by all kernels, with an output and a plan.
    fn params(&self, out: u64, plan: u64) -> AttentionParams {
        let (window, lookahead) = self.setup.reach();
        let plane = KV_BLOCK * self.setup.kv_cols();
        let start = if self.codes.is_empty() { self.cache.ptr() } else { address(&self.codes) };
        let layer = |number: usize| start + (number * plane * self.setup.cache.bytes(self.setup.dtype)) as u64;
        let [k_scale, value_scale] = self.setup.kv_scales();
        AttentionParams {
            out,
            q: self.q.ptr(),
            k_cache: layer(self.setup.planes()),
            v_cache: layer(2 * self.setup.planes() - 1),
            block_table: address(&self.table),
            seats: if self.seats.is_empty() { 0 } else { address(&self.seats) },
            query_start: address(&self.query_start),
            seq_lens: address(&self.seq_lens),
            seen_ends: if self.seen_ends.is_empty() { 0 } else { address(&self.seen_ends) },
            plan,
            sinks: self.sinks.as_deref().map_or(0, address),
            block_stride: (Self::LAYERS * self.setup.planes() * plane) as u64,
            table_stride: self.table_stride as u32,
            sequences: self.seq_lens.len() as u32,
            q_heads: self.setup.q_heads as u32,
            kv_heads: self.setup.kv_heads as u32,
            head_size: self.setup.size as u32,
            window,
            scale: self.setup.scale() * k_scale,
            softcap: self.setup.softcap.unwrap_or(0.0),
            lookahead,
            value_size: self.setup.value_size() as u32,
            value_scale,
            tile_heads: self.setup.tile().heads,
        }
    }

    fn run(&self, order: Order) -> Vec<Array> {
        let (kernels, instances) = (kernels(self.setup), self.setup.instances());
        let rows = self.q.len() / self.setup.q_cols();
        let mut out = Array::poisoned(self.setup.dtype, rows * self.setup.out_cols());
        match self.setup.path {
            Path::Plain => {
                let params = self.params(out.ptr_mut(), 0);
                let tokens = *self.query_start.last().expect("a start");
                launch(kernels, order, &instances[0], params.plain_grid(tokens), &params);
            }
            Path::Fast { split_tokens, columns, .. } => {
                if let Some(decode) = self.setup.decode() {
                    self.decode(kernels, order, &decode, &mut out, (split_tokens, columns));
                }
                self.prefill(kernels, order, &instances[0], &mut out);
            }
            Path::Invariant { .. } => self.prefill(kernels, order, &instances[0], &mut out),
        }
        let array = |rows: &Range<usize>| {
            let cols = self.setup.out_cols();
            let mut array = Array::poisoned(self.setup.dtype, rows.len() * cols);
            array.copy_from(0, &out, rows.start * cols..rows.end * cols);
            array
        };
        self.rows.iter().map(array).collect()
    }

    fn prefill(&self, kernels: &Kernels, order: Order, instance: &Instance, out: &mut Array) {
        let (tile, mut plan) = (self.setup.tile(), Vec::new());
        let (starts, lens, most) = (&self.query_start, &self.seq_lens, tile.queries);
        let PrefillPlan { tiles } = match (self.setup.sight, self.setup.path) {
            (Sight::Both, _) => PrefillPlan::write_segments(starts, most, &mut plan),
            (_, Path::Invariant { .. }) => PrefillPlan::write_all(starts, lens, most, &mut plan),
            (Sight::Causal | Sight::Spans, _) => PrefillPlan::write(starts, lens, most, &mut plan),
        };
        if tiles > 0 {
            let params = self.params(out.ptr_mut(), address(&plan));
            let grid = match self.setup.prefix {
                None => params.prefill_grid(tile, tiles),
                Some(_) => params.latent_prefill_grid(tile, tiles),
            };
            launch(kernels, order, instance, grid, &params);
        }
    }

    fn decode(&self, kernels: &Kernels, order: Order, kernel: &DecodeKernel, out: &mut Array, shape: (u32, u32)) {
        let (split_tokens, columns) = shape;
        let (setup, mut plan) = (self.setup, Vec::new());
        let DecodePlan { splits } = DecodePlan::write(&self.query_start, &self.seq_lens, |_| split_tokens, &mut plan);
        if splits == 0 {
            return;
        }
        let partials = splits as usize * setup.q_heads;
        let mut partial_out = Array::poisoned(Dtype::F32, partials * setup.value_size());
        let mut partial_sums = Array::poisoned(Dtype::F32, partials * 2);
        let mut params = PagedDecodeParams {
            partial_out: partial_out.ptr_mut(),
            partial_sums: partial_sums.ptr_mut(),
            tickets: 0,
            rounded: RoundedRows::default(),
            attention: self.params(out.ptr_mut(), address(&plan)),
        };
        let grid = [columns, params.rows(kernel.tile.heads), 1];
        let mut tickets = vec![0u32; self.seq_lens.len() * grid[1] as usize];
        params.tickets = address_mut(&mut tickets);
        let rounds = setup.prefix.is_none() && setup.value_size().is_multiple_of(32);
        let mut rounded = Rounded::poisoned(out.len());
        if rounds {
            params.rounded = rounded.params();
        }
        launch(kernels, order, &kernel.instance, grid, &params);
        assert!(tickets.iter().all(|&t| t == 0), "tickets are ready for the next launch");
        for rows in self.rows.iter().filter(|rows| rounds && rows.len() == 1) {
            let row = rows.start * setup.out_cols()..rows.end * setup.out_cols();
            let values = out.range(row.clone());
            if values.iter().all(|x| x.is_finite()) {
                rounded.check(row.start, &values, &kernel.instance.name);
            }
        }
    }
}

/// Returns the shapes with which every path is tested: head sizes, each with an element type and heads.
pub(crate) fn setups() -> Vec<Setup> {
    let setup = |dtype, (q_heads, kv_heads), size, path| {
        let (window, softcap, sinks, sight) = (None, None, false, Sight::Causal);
        // A setup that does not run on this device is replaced by a similar one.
        let dtype = if dtypes().contains(&dtype) { dtype } else { Dtype::F16 };
        let path = if path == Path::HOPPER && !has_large_memory() { Path::AMPERE } else { path };
        let path = if path == Path::AMPERE && !has_sm80() { Path::VOLTA } else { path };
        Setup {
            dtype,
            q_heads,
            kv_heads,
            size,
            window,
            softcap,
            sinks,
            sight,
            prefix: None,
            cache: CacheType::Activation,
            path,
        }
    };
    vec![
        setup(Dtype::Bf16, (4, 1), 128, Path::AMPERE),
        setup(Dtype::F16, (6, 2), 64, Path::AMPERE),
        setup(Dtype::F16, (2, 2), 96, Path::AMPERE),
        setup(Dtype::Bf16, (10, 1), 256, Path::AMPERE),
        setup(Dtype::F16, (4, 1), 128, Path::VOLTA),
        setup(Dtype::F16, (6, 2), 64, Path::VOLTA),
        setup(Dtype::F16, (2, 2), 96, Path::VOLTA),
        setup(Dtype::F16, (10, 1), 256, Path::VOLTA),
        setup(Dtype::F32, (4, 2), 16, Path::Plain),
        setup(Dtype::Bf16, (3, 1), 80, Path::Plain),
        setup(Dtype::F16, (2, 1), 256, Path::Plain),
        setup(Dtype::Bf16, (20, 1), 64, Path::AMPERE),
        setup(Dtype::F16, (6, 2), 64, Path::HOPPER),
        setup(Dtype::Bf16, (4, 1), 128, Path::HOPPER),
        setup(Dtype::F16, (2, 1), 256, Path::HOPPER),
    ]
}

/// Adds a window, a cap and sinks, or some of them, or none.
pub(crate) fn with_options(setup: Setup, rng: &mut TestRng) -> Setup {
    let window = pick(rng, &[None, Some(1), Some(19), Some(70)]);
    Setup { window, softcap: pick(rng, &[None, Some(2.0)]), sinks: rng.below(2) == 0, ..setup }
}

/// Checks a step of decodes and chunks of random length, at random offsets.
pub(crate) fn check_drawn_step(setup: &Setup, rng: &mut TestRng, longest: usize) {
    let sequences: Vec<(Sequence, Range<usize>)> = (0..1 + rng.below(4))
        .map(|_| {
            let end = 1 + rng.below(longest);
            let any = 1 + rng.below(end);
            let queries = pick(rng, &[1, any]);
            (setup.sequence(end, rng), end - queries..end)
        })
        .collect();
    let chunks: Vec<Chunk<'_>> = sequences.iter().map(|(s, positions)| (s, positions.clone())).collect();
    setup.check(&chunks, &setup.run(&chunks, rng.next_u64()));
}

/// A step does not end in a span. Chunks begin in spans and outside, and one decodes.
#[test]
fn spans_are_as_in_f64() {
    let rng = &mut rng();
    for setup in setups() {
        for setup in [setup, with_options(setup, rng)] {
            let setup = Setup { sight: Sight::Spans, ..setup };
            let drawn: Vec<(Sequence, Range<usize>)> = (0..4)
                .map(|chunk| {
                    let end = span_end(rng.below(260));
                    let start = if chunk == 0 { end - 1 } else { rng.below(end) };
                    (setup.sequence(end, rng), start..end)
                })
                .collect();
            let chunks: Vec<Chunk<'_>> = drawn.iter().map(|(s, positions)| (s, positions.clone())).collect();
            let outputs = setup.run(&chunks, rng.next_u64());
            setup.check(&chunks, &outputs);
            for (chunk, output) in chunks.iter().zip(&outputs) {
                assert!(setup.run_alone(chunk, 4) == *output, "{setup:?}: alone");
            }
        }
    }
}

#[test]
fn attention_over_a_cache_in_e4m3_is_as_in_f64() {
    let rng = &mut rng();
    for setup in setups() {
        let setup = Setup { cache: CacheType::E4m3, ..setup };
        check_drawn_step(&setup, rng, 150);
        check_drawn_step(&with_options(setup, rng), rng, 150);
    }
}

/// A key of a cache in e4m3 that is NaN reaches the rows that see it and no other.
#[test]
fn keys_in_e4m3_that_are_no_numbers_reach_no_row_before_them() {
    let rng = &mut rng();
    for setup in setups() {
        let setup = Setup { cache: CacheType::E4m3, ..setup };
        let (len, kv_cols, cols) = (90, setup.kv_cols(), setup.out_cols());
        let mut sequence = setup.sequence(len, rng);
        let expected = setup.run(&[(&sequence, 0..len)], 1).remove(0);
        let place = 1 + rng.below(len - 1);
        sequence.k.copy_from(place * kv_cols, &Array::poisoned(setup.dtype, kv_cols), 0..kv_cols);
        let found = setup.run(&[(&sequence, 0..len)], 2).remove(0);
        assert!(found.bits(0..place * cols) == expected.bits(0..place * cols), "{setup:?}: rows before {place}");
        assert!(found.range(place * cols..len * cols).iter().all(|x| x.is_nan()), "{setup:?}: rows from {place} on");
    }
}

#[test]
fn attention_is_as_in_f64() {
    let rng = &mut rng();
    for setup in setups() {
        check_drawn_step(&setup, rng, 150);
        for _ in 0..2 {
            check_drawn_step(&with_options(setup, rng), rng, 150);
        }
    }
}

/// Returns the setups of the manifest for each 16-bit type, head size and number of queries per KV head.
fn every_setup() -> Vec<Setup> {
    let mut all = Vec::new();
    for dtype in dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32) {
        for (size, q_heads) in
            manifest::HEAD_SIZES.into_iter().flat_map(|size| [1, 2, 4, 8, 16].map(|group| (size, group)))
        {
            let (window, softcap, sinks, sight) = (None, None, false, Sight::Causal);
            let setup = |path| Setup {
                dtype,
                q_heads,
                kv_heads: 1,
                size,
                window,
                softcap,
                sinks,
                sight,
                prefix: None,
                cache: CacheType::Activation,
                path,
            };
            for cache in CacheType::ALL {
                let setup = |path| Setup { cache, ..setup(path) };
                all.extend(has_sm80().then(|| setup(Path::AMPERE)));
                all.extend((dtype == Dtype::F16).then(|| setup(Path::VOLTA)));
            }
        }
    }
    all
}

#[test]
fn every_instance_is_as_in_f64() {
    let rng = &mut rng();
    let mut setups = every_setup();
    // For the emulation each takes seconds to compile, so only a few of them run.
    while !on_device() && setups.len() > 3 {
        setups.swap_remove(rng.below(setups.len()));
    }
    for setup in setups {
        check_drawn_step(&with_options(setup, rng), rng, 100);
    }
}

#[test]
fn small_attention() {
    let setups = setups();
    let rng = &mut rng();
    for setup in [setups[1], setups[5], setups[8]] {
        check_drawn_step(&with_options(setup, rng), rng, 80);
        check_drawn_step(&Setup { cache: CacheType::E4m3, ..setup }, rng, 80);
    }
}
