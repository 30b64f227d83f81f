//! Cases of kernels for single rows, of the copy of KV blocks, and of sampling.

use octavo_kernels::manifest::{self, Activation, Instance, NormMean};
use octavo_kernels::params::{
    CopyBlocksParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluParams, KV_BLOCK, NormParams, Params,
    QkvPostParams, SAMPLING_LOGPROBS, SamplingParams, SamplingRow,
};

use super::cases::{Cases, Tables, Work, counted};
use crate::arena::Plan;
use crate::layout::logits_stride;
use crate::lower::norm_instance;

/// Number of positions for which there are angles.
const POSITIONS: usize = 4096;

/// Number of blocks that are copied.
const COPIED: usize = 32;

/// Number of the most likely tokens that a row reports.
const REPORTED: usize = 20;

impl Cases<'_> {
    pub(super) fn rows(&mut self) {
        for rows in self.row_counts() {
            self.embed(rows);
            self.norm(rows);
            self.qkv_post(rows);
            self.glu(rows);
            self.gather(rows);
            self.gather_columns(rows);
        }
        self.copy_blocks();
    }

    fn embed(&mut self, rows: usize) {
        let (hidden, vocabulary, size) = (self.bench.hidden, self.bench.vocab_size, self.size());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let table = plan.take((vocabulary * hidden * size) as u64);
        let out = plan.take((rows * hidden * size) as u64);
        let ids = tables.add((0..rows).map(|row| (row * 7919 % vocabulary) as u32));
        let bytes = 2 * rows * hidden * size;
        let work = Work { what: format!("{hidden} columns, {}", counted(rows, "row")), bytes, flops: 0, plan, tables };
        self.kernel(manifest::embed(self.dtype), work, move |at, _| {
            let params = EmbedParams {
                out: at.data(out),
                table: at.data(table),
                ids: at.table(ids),
                drawn: 0,
                tokens: rows as u32,
                cols: hidden as u32,
                vocabulary: vocabulary as u32,
                scale: 1.0,
            };
            (params, params.grid())
        });
    }

    fn norm(&mut self, rows: usize) {
        let (hidden, size) = (self.bench.hidden, self.size());
        let mut plan = Plan::default();
        let [input, residual, out] = [(); 3].map(|()| plan.take((rows * hidden * size) as u64));
        let weight = plan.take((hidden * size_of::<f32>()) as u64);
        let bytes = 4 * rows * hidden * size + hidden * size_of::<f32>();
        let what = format!("{hidden} columns, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 5 * rows * hidden, plan, tables: Tables::default() };
        let shared = NormParams::dynamic_shared(hidden) as u32;
        self.kernel_with_shared(norm_instance(self.dtype, NormMean::Rms, hidden), work, Some(shared), move |at, _| {
            let params = NormParams {
                out: at.data(out),
                input: at.data(input),
                residual: at.data(residual),
                weight: at.data(weight),
                bias: 0,
                rows: rows as u32,
                cols: hidden as u32,
                eps: 1e-6,
                weight_offset: 0.0,
                residual_after: 0,
                reserved: 0,
            };
            (params, params.grid())
        });
    }

    fn qkv_post(&mut self, rows: usize) {
        let (heads, size) = (self.bench.heads, self.size());
        let half = KV_BLOCK * heads.kv_cols();
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let qkv = plan.take((rows * heads.qkv_cols() * size) as u64);
        let q = plan.take((rows * heads.q_cols() * size) as u64);
        let cache = plan.take((rows.div_ceil(KV_BLOCK) * 2 * half * size) as u64);
        let [cosine, sine] = [(); 2].map(|()| plan.take((POSITIONS * heads.dim / 2 * size_of::<f32>()) as u64));
        let weight = plan.take((heads.dim * size_of::<f32>()) as u64);
        let positions = tables.add((0..rows).map(|row| (row % POSITIONS) as u32));
        let slots = tables.add(0..rows as u32);
        let bytes = rows * (heads.qkv_cols() + heads.q_cols() + 2 * heads.kv_cols()) * size;
        let flops = 7 * rows * (heads.q_cols() + heads.kv_cols());
        let what = format!("{} + 2 x {} heads of {}, {}", heads.q, heads.kv, heads.dim, counted(rows, "row"));
        let work = Work { what, bytes, flops, plan, tables };
        self.kernel(manifest::qkv_post(self.dtype), work, move |at, _| {
            let params = QkvPostParams {
                q: at.data(q),
                k_cache: at.data(cache),
                v_cache: at.data(cache) + (half * size) as u64,
                qkv: at.data(qkv),
                q_weight: at.data(weight),
                k_weight: at.data(weight),
                cosine: at.data(cosine),
                sine: at.data(sine),
                positions: at.table(positions),
                slots: at.table(slots),
                block_stride: 2 * half as u64,
                tokens: rows as u32,
                q_heads: heads.q as u32,
                kv_heads: heads.kv as u32,
                head_size: heads.dim as u32,
                rotary_dim: heads.dim as u32,
                eps: 1e-6,
                ..QkvPostParams::default()
            };
            (params, params.grid())
        });
    }

    fn glu(&mut self, rows: usize) {
        let (inner, size) = (self.bench.inner, self.size());
        let mut plan = Plan::default();
        let input = plan.take((2 * rows * inner * size) as u64);
        let out = plan.take((rows * inner * size) as u64);
        let (what, bytes) = (format!("{inner} columns, {}", counted(rows, "row")), 3 * rows * inner * size);
        let work = Work { what, bytes, flops: 6 * rows * inner, plan, tables: Tables::default() };
        self.kernel(manifest::glu(self.dtype, Activation::Silu), work, move |at, threads| {
            let params = GluParams {
                out: at.data(out),
                input: at.data(input),
                rows: rows as u32,
                cols: inner as u32,
                ..GluParams::default()
            };
            (params, params.grid(threads))
        });
    }

    fn gather(&mut self, rows: usize) {
        let (hidden, size) = (self.bench.hidden, self.size());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let [input, out] = [(); 2].map(|()| plan.take((rows * hidden * size) as u64));
        let index = tables.add((0..rows as u32).rev());
        let (what, bytes) = (format!("{hidden} columns, {}", counted(rows, "row")), 2 * rows * hidden * size);
        let work = Work { what, bytes, flops: 0, plan, tables };
        self.kernel(manifest::gather_rows(self.dtype), work, move |at, _| {
            let params = GatherRowsParams {
                out: at.data(out),
                input: at.data(input),
                row_index: at.table(index),
                count: rows as u32,
                cols: hidden as u32,
            };
            (params, params.grid())
        });
    }

    /// The inputs of a product whose weight was quantised in another order of its columns.
    fn gather_columns(&mut self, rows: usize) {
        let (hidden, size) = (self.bench.hidden, self.size());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let [input, out] = [(); 2].map(|()| plan.take((rows * hidden * size) as u64));
        // Neighbours of the result lie apart, as in a checkpoint.
        let order = tables.add((0..hidden).map(|column| ((column * 7919 % hidden) as f32).to_bits()));
        let bytes = 2 * rows * hidden * size + hidden * size_of::<f32>();
        let work = Work { what: format!("{hidden} columns, {}", counted(rows, "row")), bytes, flops: 0, plan, tables };
        self.kernel(manifest::gather_columns(self.dtype), work, move |at, threads| {
            let params = GatherColumnsParams {
                out: at.data(out),
                input: at.data(input),
                column_index: at.table(order),
                rows: rows as u32,
                cols: hidden as u32,
            };
            (params, params.grid(threads))
        });
    }

    fn copy_blocks(&mut self) {
        let block = 2 * self.bench.layers * KV_BLOCK * self.bench.heads.kv_cols() * self.size();
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let cache = plan.take((2 * COPIED * block) as u64);
        let pairs = tables.add((0..COPIED as u32).flat_map(|pair| [pair, pair + COPIED as u32]));
        let what = format!("{COPIED} blocks of {block} bytes");
        let work = Work { what, bytes: 2 * COPIED * block, flops: 0, plan, tables };
        self.kernel(manifest::copy_blocks(), work, move |at, threads| {
            let params = CopyBlocksParams {
                cache: at.data(cache),
                pairs: at.table(pairs),
                block_bytes: block as u64,
                count: COPIED as u32,
                reserved: 0,
            };
            (params, params.grid(threads))
        });
    }

    pub(super) fn sampling(&mut self) {
        let drawn = SamplingRow { temperature: 1.0, ..SamplingRow::GREEDY };
        let filtered = SamplingRow { top_p: 0.9, top_k: 50, ..drawn };
        let reported = SamplingRow { flags: SAMPLING_LOGPROBS, top: REPORTED as u32, ..SamplingRow::GREEDY };
        let [scan, weigh, draw] = [manifest::sampling_scan(), manifest::sampling_weigh(), manifest::sampling_draw()];
        let [rank, report] = [manifest::sampling_rank(), manifest::sampling_report()];
        for rows in self.bench.batch_sizes.clone() {
            self.sample(rows, "greedy", SamplingRow::GREEDY, &[&scan]);
            self.sample(rows, "drawn", drawn, &[&scan, &weigh]);
            self.sample(rows, "top-k 50, top-p 0.9", filtered, &[&scan, &weigh, &draw]);
            self.sample(rows, "log-probabilities", reported, &[&scan, &rank, &report]);
        }
    }

    /// Adds the launches that sample rows of one kind.
    fn sample(&mut self, rows: usize, how: &str, row: SamplingRow, launches: &[&Instance]) {
        let vocabulary = self.bench.vocab_size;
        let stride = logits_stride(vocabulary);
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let logits = plan.take(rows as u64 * stride * size_of::<f32>() as u64);
        let scratch = plan.take((rows * SamplingParams::scratch_bytes(vocabulary)) as u64);
        // Token, status, log-probability, rank and count of a row, and its reported tokens.
        let results = plan.take((rows * (5 + 2 * REPORTED) * size_of::<u32>()) as u64);
        let (words, _) = row.bytes().as_chunks();
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let rows_of = tables.add((0..rows).flat_map(|_| words.clone()));
        let zeroed = tables.add(vec![0; rows * SamplingParams::ZEROED_BYTES / size_of::<u32>()]);
        let (what, bytes) =
            (format!("{how}, {vocabulary} tokens, {}", counted(rows, "row")), rows * vocabulary * size_of::<f32>());
        let work = Work { what, bytes, flops: 0, plan, tables };
        self.sequence("sampling", launches.iter().map(|&instance| instance.clone()), work, move |at| {
            let result = |array: usize| at.data(results) + (array * rows * size_of::<u32>()) as u64;
            let params = SamplingParams {
                logits: at.data(logits),
                rows_of: at.table(rows_of),
                ids: result(0),
                status: result(1),
                logprobs: result(2),
                ranks: result(3),
                top_counts: result(4),
                top_ids: result(5),
                top_logprobs: result(5 + REPORTED),
                rows: rows as u32,
                vocab: vocabulary as u32,
                row_stride: stride as u32,
                mask_words: vocabulary.div_ceil(32) as u32,
                top_stride: REPORTED as u32,
                segment: SamplingParams::segment_for(rows as u32, vocabulary as u32),
                ..SamplingParams::default()
            };
            let params = params.with_scratch(rows, at.table(zeroed), at.data(scratch));
            (params, params.grid())
        });
    }
}
