//! Attention over the paged cache: causal for decoders, but within their spans, and whole for the segments of encoders.
//!
//! A task is a few adjacent rows of one sequence with the query heads that share a KV head, so that keys and values are
//! read once for all of them. A row's keys are processed in tiles at fixed positions, in order, with a running maximum,
//! so its bits depend only on its query and its keys: keys that only its neighbours may see have a weight of exactly
//! zero.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_bf16;
mod plain;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
mod walk;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(target_arch = "x86_64")]
mod ymm;

use std::cell::RefCell;
use std::ops::Range;

use octavo_ops::{HeadShape, SequenceTables, Sight, Values};

use crate::activation::{Rows, Span};
use crate::isa::{Isa, per_isa};
use crate::kv::{BLOCK, CHUNK, KvDtype, LayerCache};
use crate::memory::Lines;
use crate::rows::GROUP;
use plain::Running;

/// Maximum number of rows, each a query head of a token, that a kernel processes at once.
const ROWS: usize = 16;

/// Number of keys between two updates of the maximum.
const KEYS: usize = 8 * BLOCK;

/// Attention of one layer.
pub(crate) struct Attention<'a> {
    pub(crate) cache: LayerCache,
    pub(crate) tables: SequenceTables<'a>,
    pub(crate) heads: HeadShape,
    pub(crate) scale: f32,
    /// The keys that a row sees.
    pub(crate) sight: Sight,
    /// [`StepBatch::seen_ends`](octavo_ops::StepBatch::seen_ends).
    pub(crate) seen_ends: &'a [u32],
    /// Number of keys that a row sees, or on each side of its own.
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
    /// Attention sinks by query head.
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) q: Rows,
    pub(crate) out: Rows,
    /// Whether the output is read in f32.
    pub(crate) plain: bool,
    /// Whether the output's other representations can be made from the query heads of a KV head.
    pub(crate) prepares: bool,
}

/// Adjacent rows of a step that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) sequence: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// Position of the first row.
    pub(crate) position: usize,
    /// Number of tokens of the sequence whose keys are in the cache.
    pub(crate) len: usize,
}

/// Some of the query heads that share a KV head, for the rows of a run.
pub(crate) struct Task {
    pub(crate) run: Run,
    /// The KV head.
    pub(crate) head: usize,
    /// The query heads.
    pub(crate) heads: Range<usize>,
}

impl Task {
    /// Returns the number of rows, each a query head of a token.
    fn rows(&self) -> usize {
        self.run.count * self.heads.len()
    }
}

/// Returns the number of rows that the kernel processes at once: in f32 they need more registers.
fn most_rows(isa: Isa) -> usize {
    if isa.multiplies_bf16() { ROWS } else { ROWS / 2 }
}

/// Largest number of calls of the kernel in a task.
const CALLS: usize = 4;

/// Returns the number of tokens in a task: those whose rows, with all query heads of a KV head, fill the most of the rows that
/// a few calls of the kernel process.
pub(crate) fn task_tokens(isa: Isa, heads: HeadShape) -> usize {
    let (most, group) = (most_rows(isa), heads.q / heads.kv);
    let tokens = |calls: usize| calls * most / group;
    // Shares of rows that exist are compared as fractions; the first call has no share to beat.
    let best = (1..=CALLS).reduce(|best, calls| if tokens(calls) * best > tokens(best) * calls { calls } else { best });
    tokens(best.unwrap_or(1)).max(1)
}

/// Input and output of one call of the kernel.
pub(crate) struct Block<'a> {
    keys: Keys<'a>,
    /// Scaled queries `[rows, D]`, D rounded up to pairs of chunks.
    q: &'a [f32],
    /// Queries in bf16, for instruction sets that multiply bf16.
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    narrow_q: &'a [u16],
    /// First and last position that each row sees.
    sees: &'a [(usize, usize)],
    /// State of each row before its first key.
    starts: &'a [Running],
    softcap: Option<f32>,
    weights: &'a mut [[f32; KEYS]; ROWS],
    /// Scratch memory for weights in bf16.
    narrow_weights: &'a mut [[u16; KEYS]; ROWS],
    /// Output `[rows, Dv]`, Dv rounded up to chunks.
    out: &'a mut [f32],
    /// Scratch memory for the values of a block that is not full.
    partial: &'a mut [u32],
}

/// Keys and values of one head of a sequence.
pub(crate) struct Keys<'a> {
    cache: LayerCache,
    table: &'a [u32],
    head: usize,
    len: usize,
    /// Blocks and head of the keys that the thread is likely to read after these.
    next: (&'a [u32], usize),
    widened: &'a mut Widened,
}

/// A tile of elements of 8 bits, widened, or the values of a tile whose cache has them as a part of the keys.
struct Widened {
    /// Words by block: keys, then values, in bf16 in the layout of [`crate::kv`]. There are only values if the cache has
    /// keys in bf16.
    words: Lines<u32>,
    /// Scales by slot of the tile.
    key_scales: [f32; KEYS],
    /// Scales by slot of the tile; 0 for slots without a token, whose content is arbitrary.
    value_scales: [f32; KEYS],
}

impl Keys<'_> {
    /// Returns the number of words of the keys of a block in bf16.
    fn key_words(&self) -> usize {
        self.cache.heads().dim.div_ceil(2) * BLOCK
    }

    /// Returns the number of words of the keys and of the values of a widened block. Those of the keys are padded to
    /// whole words of integers.
    fn widened_words(cache: LayerCache) -> (usize, usize) {
        let keys = match cache.dtype() {
            KvDtype::Bf16 => 0,
            KvDtype::Int8 | KvDtype::Fp8 => cache.heads().dim.next_multiple_of(4) * BLOCK / 2,
        };
        let has_values = cache.dtype() != KvDtype::Bf16 || cache.heads().values != Values::Own;
        let values = cache.heads().value_dim().next_multiple_of(CHUNK) * BLOCK / 2;
        (keys, if has_values { values } else { 0 })
    }

    /// Prepares a tile's blocks for reading; blocks of keys and values in bf16 need no preparation. Must be called before
    /// any of its blocks is read.
    fn enter(&mut self, isa: Isa, blocks: Range<usize>) {
        let (key_words, value_words) = Self::widened_words(self.cache);
        if value_words == 0 {
            return;
        }
        for index in blocks {
            // SAFETY: no thread writes the cache while it is read.
            let block = unsafe { self.cache.read(self.table[index], self.head) };
            let slot = index % (KEYS / BLOCK);
            let words = &mut self.widened.words[slot * (key_words + value_words)..][..key_words + value_words];
            let (keys, values) = words.split_at_mut(key_words);
            let keys = match self.cache.dtype() {
                KvDtype::Bf16 => block.keys,
                dtype => {
                    widen(isa, dtype, block.keys, keys);
                    &*keys
                }
            };
            match self.cache.heads().values {
                Values::Own => widen(isa, self.cache.dtype(), block.values, values),
                Values::Prefix(_) => turn(isa, keys, values),
            }
            if self.cache.dtype() != KvDtype::Int8 {
                continue;
            }
            let filled = self.len.saturating_sub(index * BLOCK);
            let (key_scales, value_scales) = block.scales.split_at(BLOCK);
            for lane in 0..BLOCK {
                self.widened.key_scales[slot * BLOCK + lane] = f32::from_bits(key_scales[lane]);
                let scale = if lane < filled { f32::from_bits(value_scales[lane]) } else { 0.0 };
                self.widened.value_scales[slot * BLOCK + lane] = scale;
            }
        }
    }

    /// Returns keys and values of a block of the sequence, in bf16.
    ///
    /// It is inlined, because a result in memory is written by halves and read at once, which waits for the writes.
    #[inline(always)]
    fn block(&self, index: usize) -> (&[u32], &[u32]) {
        // SAFETY: no thread writes the cache while it is read.
        let stored = || unsafe { self.cache.read(self.table[index], self.head) };
        if self.cache.dtype() == KvDtype::Bf16 && self.cache.heads().values == Values::Own {
            let block = stored();
            return (block.keys, block.values);
        }
        let (key_words, value_words) = Self::widened_words(self.cache);
        let stride = key_words + value_words;
        let (keys, values) = self.widened.words[index % (KEYS / BLOCK) * stride..][..stride].split_at(key_words);
        match self.cache.dtype() {
            KvDtype::Bf16 => (stored().keys, values),
            KvDtype::Int8 | KvDtype::Fp8 => (&keys[..self.key_words()], values),
        }
    }

    /// Prefetches a block that is read after a tile. After `last`, blocks count from those that are read next.
    fn prefetch(&self, block: usize, last: usize) {
        let ((table, head), index) = match block.checked_sub(last + 1) {
            None => ((self.table, self.head), block),
            Some(after) => (self.next, after),
        };
        if let Some(&block) = table.get(index) {
            self.cache.prefetch_block(block, head);
        }
    }

    /// Returns the factors of the scores and of the weights of the current tile, if there are any.
    fn scales(&self) -> Option<(&[f32; KEYS], &[f32; KEYS])> {
        match self.cache.dtype() {
            KvDtype::Bf16 | KvDtype::Fp8 => None,
            KvDtype::Int8 => Some((&self.widened.key_scales, &self.widened.value_scales)),
        }
    }
}

per_isa! {
    plain;
    /// Computes attention row by row, on instruction sets without a special kernel.
    fn attend_plain(isa: Isa, block: Block<'_>);

    /// Does [`turn`] on instruction sets without a special kernel.
    fn turn_plain(keys: &[u32], values: &mut [u32]);
}

/// Converts words of four elements of 8 bits to words of two bf16.
fn widen(isa: Isa, dtype: KvDtype, words: &[u32], out: &mut [u32]) {
    match dtype {
        KvDtype::Fp8 => isa.widen_e4m3(words, out),
        KvDtype::Int8 | KvDtype::Bf16 => isa.widen(words, out),
    }
}

/// Turns the first dimensions of sixteen keys, in pairs of dimensions, into values, in pairs of slots. Dimensions that the
/// keys do not have become zeros.
fn turn(isa: Isa, keys: &[u32], values: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: an `Isa` is only used where it is available.
        return unsafe { wide::turn(keys, values) };
    }
    isa.turn_plain(keys, values);
}

/// Computes attention of up to [`most_rows`] rows.
fn attend(isa: Isa, block: Block<'_>) {
    let heads = block.keys.cache.heads();
    let whole_tiles = [heads.dim, heads.value_dim()].iter().all(|dim| dim.is_multiple_of(2 * CHUNK));
    #[cfg(target_arch = "x86_64")]
    // SAFETY: an `Isa` is only used where it is available, and tiles are used only for heads that they support.
    unsafe {
        match isa {
            Isa::Amx if whole_tiles => return amx::attend(block),
            Isa::Avx512Bf16 | Isa::Amx => return bf16::attend(block),
            Isa::Avx512 => return wide::attend(block),
            Isa::Avx2 | Isa::AvxVnni => return ymm::attend(block),
            Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: an `Isa` is only used where it is available.
    unsafe {
        match isa {
            Isa::I8mmBf16 => return neon_bf16::attend(block),
            Isa::Neon | Isa::Dotprod | Isa::I8mm => return neon::attend(block),
            _ => {}
        }
    }
    let _ = whole_tiles;
    isa.attend_plain(isa, block);
}

/// Returns a chunk of the values of a block, by pair of slots.
#[inline]
fn chunk_of(values: &[u32], chunk: usize) -> &[[u32; CHUNK]; BLOCK / 2] {
    &values.as_chunks().0.as_chunks().0[chunk]
}

struct Scratch {
    q: Lines<f32>,
    narrow_q: Lines<u16>,
    out: Lines<f32>,
    partial: Lines<u32>,
    weights: Box<[[f32; KEYS]; ROWS]>,
    narrow_weights: Box<[[u16; KEYS]; ROWS]>,
    widened: Widened,
    sees: Vec<(usize, usize)>,
    starts: Vec<Running>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        q: Lines::default(),
        narrow_q: Lines::default(),
        out: Lines::default(),
        partial: Lines::default(),
        weights: Box::new([[0.0; KEYS]; ROWS]),
        narrow_weights: Box::new([[0; KEYS]; ROWS]),
        widened: Widened { words: Lines::default(), key_scales: [0.0; KEYS], value_scales: [0.0; KEYS] },
        sees: Vec::with_capacity(ROWS),
        starts: Vec::with_capacity(ROWS),
    });
}

impl Scratch {
    /// Allocates memory for the heads of a layer.
    fn reserve(&mut self, cache: LayerCache) {
        let (padded, chunked) = row_widths(cache.heads());
        self.q.reserve_zeroed(ROWS * padded);
        self.narrow_q.reserve_zeroed(ROWS * padded);
        self.out.reserve_zeroed(ROWS * chunked);
        self.partial.reserve_zeroed(chunked * BLOCK / 2);
        let (keys, values) = Keys::widened_words(cache);
        self.widened.words.reserve_zeroed(KEYS / BLOCK * (keys + values));
    }
}

/// Returns the number of elements of a row of queries and of a row of the output in scratch memory.
fn row_widths(heads: HeadShape) -> (usize, usize) {
    (heads.dim.next_multiple_of(2), heads.value_dim().next_multiple_of(CHUNK))
}

/// Least number of query heads in a part of those that share a KV head: each part reads the keys again.
const LEAST_HEADS: usize = 4;

impl Attention<'_> {
    /// Returns the first and the last key that a token of a run sees.
    fn sees(&self, run: Run, token: usize) -> (usize, usize) {
        let seen_end = self.seen_ends.get(run.first + token).map_or(0, |&end| end as usize);
        self.sight.keys(run.position + token, run.len, seen_end, self.window)
    }

    /// Returns the number of parts into which the query heads of a KV head are divided: one, unless most threads would
    /// have no task. This is so when a few sequences decode with latent attention, which has one KV head.
    pub(crate) fn parts(&self, runs: usize, threads: usize) -> usize {
        let HeadShape { q, kv, .. } = self.heads;
        // Other representations of the output are made for whole groups of columns.
        if self.prepares { 1 } else { (threads / (runs * kv).max(1)).clamp(1, (q / kv / LEAST_HEADS).max(1)) }
    }

    /// Returns the query heads of a part of those of a KV head.
    pub(crate) fn part(&self, head: usize, part: usize, parts: usize) -> Range<usize> {
        let group = self.heads.q / self.heads.kv;
        let start = |part: usize| head * group + part * group / parts;
        start(part)..start(part + 1)
    }

    /// Returns the blocks that a task reads, in order, and its KV head.
    fn read_by(&self, task: &Task) -> (&[u32], usize) {
        let first = self.sees(task.run, 0).0 / KEYS * (KEYS / BLOCK);
        let blocks = self.tables.row(task.run.sequence).get(first..task.run.len.div_ceil(BLOCK));
        (blocks.unwrap_or_default(), task.head)
    }

    /// Computes a task. The thread is likely to take `next` after it.
    ///
    /// # Safety
    /// Cache and activations must not be moved. During the call, no other thread may write the queries or the cache, or
    /// use the output of these rows and heads.
    pub(crate) unsafe fn run(&self, isa: Isa, task: &Task, next: Option<Task>) {
        let next = next.as_ref().map_or((&[][..], 0), |next| self.read_by(next));
        SCRATCH.with_borrow_mut(|scratch| {
            let (padded, chunked) = row_widths(self.heads);
            scratch.reserve(self.cache);
            let (all, most) = (task.rows(), most_rows(isa));
            for start in (0..all).step_by(most) {
                let rows = start..(start + most).min(all);
                // SAFETY: the caller guarantees this.
                unsafe { self.read_queries(isa, task, rows.clone(), scratch) };
                let results = &mut scratch.out[..rows.len() * chunked];
                attend(
                    isa,
                    Block {
                        keys: Keys {
                            cache: self.cache,
                            table: self.tables.row(task.run.sequence),
                            head: task.head,
                            len: task.run.len,
                            next,
                            widened: &mut scratch.widened,
                        },
                        q: &scratch.q[..rows.len() * padded],
                        #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
                        narrow_q: &scratch.narrow_q,
                        sees: &scratch.sees,
                        starts: &scratch.starts,
                        softcap: self.softcap,
                        weights: &mut scratch.weights,
                        narrow_weights: &mut scratch.narrow_weights,
                        out: &mut *results,
                        partial: &mut scratch.partial[..chunked * BLOCK / 2],
                    },
                );
                let scale = self.cache.scales().value;
                if scale != 1.0 {
                    isa.scale(results, scale);
                }
                // SAFETY: the caller guarantees this.
                unsafe { self.write_results(isa, task, rows, results) };
            }
        });
        if self.prepares && !self.prepares_by_row() {
            let columns = self.span(task, 0, self.heads.value_dim());
            for token in 0..task.run.count {
                let (row, len) = (columns.row + token, task.heads.len() * columns.len);
                // SAFETY: the caller guarantees this.
                unsafe { self.out.prepare(isa, Span { row, len, ..columns }) };
            }
        }
    }

    /// Returns the place of a row's head, whose vectors have `dim` elements.
    fn span(&self, task: &Task, row: usize, dim: usize) -> Span {
        let (token, member) = (row / task.heads.len(), row % task.heads.len());
        Span { row: task.run.first + token, from: (task.heads.start + member) * dim, len: dim }
    }

    /// Reads the scaled queries of some rows, and what they see.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] apply.
    unsafe fn read_queries(&self, isa: Isa, task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
        let (dim, padded) = (self.heads.dim, row_widths(self.heads).0);
        scratch.sees.clear();
        scratch.starts.clear();
        for (slot, row) in rows.enumerate() {
            scratch.sees.push(self.sees(task.run, row / task.heads.len()));
            let sink = self.sinks.map(|sinks| sinks[task.heads.start + row % task.heads.len()]);
            scratch.starts.push(Running::start(sink));
            let scaled = &mut scratch.q[slot * padded..][..padded];
            // SAFETY: the caller guarantees this.
            let q = unsafe { self.q.read(self.span(task, row, dim)) };
            scaled[..dim].copy_from_slice(q);
            scaled[dim..].fill(0.0);
            isa.scale(scaled, self.scale * self.cache.scales().key);
            if isa.multiplies_bf16() {
                isa.to_bf16(scaled, &mut scratch.narrow_q[slot * padded..][..padded]);
            }
        }
    }

    /// Returns whether the output's other representations can be made row by row, from results that are nowhere else.
    fn prepares_by_row(&self) -> bool {
        self.prepares && self.heads.value_dim().is_multiple_of(GROUP)
    }

    /// Writes the results of some rows `[rows, Dv]`, Dv rounded up to chunks, in the representations that are read and can be made of
    /// them.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] apply.
    unsafe fn write_results(&self, isa: Isa, task: &Task, rows: Range<usize>, mut results: &[f32]) {
        let (dim, heads) = (self.heads.value_dim(), task.heads.len());
        let by_row = self.prepares_by_row();
        if self.plain || !by_row {
            for (row, result) in rows.clone().zip(results.chunks(row_widths(self.heads).1)) {
                // SAFETY: the caller guarantees this.
                unsafe { self.out.write(self.span(task, row, dim)) }.copy_from_slice(&result[..dim]);
            }
        }
        let mut first = rows.start;
        while by_row && first < rows.end {
            // Heads of a token are adjacent, here as in the output.
            let end = ((first / heads + 1) * heads).min(rows.end);
            let (token, others) = results.split_at((end - first) * dim);
            // SAFETY: the caller guarantees this.
            unsafe { self.out.prepare_from(isa, token, Span { len: token.len(), ..self.span(task, first, dim) }) };
            (first, results) = (end, others);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_fill_the_rows_of_a_kernel() {
        let tokens =
            |q: usize, kv: usize| task_tokens(Isa::Portable, HeadShape { q, kv, dim: 64, values: Values::Own });
        assert_eq!(most_rows(Isa::Portable), 8);
        // One token has up to eight rows, and three query heads of eight tokens fill three calls.
        for (q, kv, expected) in [(8, 8, 8), (8, 4, 4), (9, 3, 8), (32, 8, 2), (5, 1, 3), (8, 1, 1), (20, 1, 1)] {
            assert_eq!(tokens(q, kv), expected, "{q} query heads, {kv} KV heads");
        }
    }

    /// Element d of the key in slot s is `100 · d + s`.
    #[test]
    fn keys_turn_into_values_on_every_instruction_set() {
        for (dims, rank) in [(48, 32), (44, 40), (21, 17)] {
            let element = |d: usize, s: usize| if d < dims { (100 * d + s) as u32 } else { 0 };
            let pair = |pair: usize| (0..BLOCK).map(move |s| element(2 * pair, s) | element(2 * pair + 1, s) << 16);
            let keys: Vec<u32> = (0..dims.div_ceil(2)).flat_map(pair).collect();
            let mut values = vec![u32::MAX; usize::next_multiple_of(rank, CHUNK) * BLOCK / 2];
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                turn(isa, &keys, &mut values);
                for d in 0..rank {
                    for s in 0..BLOCK {
                        let word = values[(d / CHUNK * (BLOCK / 2) + s / 2) * CHUNK + d % CHUNK];
                        assert_eq!(word >> (16 * (s % 2)) & 0xffff, element(d, s), "{isa}: {d} of slot {s}");
                    }
                }
            }
        }
    }
}
