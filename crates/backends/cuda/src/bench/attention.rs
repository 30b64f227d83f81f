//! Cases of attention over the paged cache, for one layer.

use octavo_kernels::manifest::{self, AttentionTypes, CacheType};
use octavo_kernels::params::{AttentionParams, KV_BLOCK, PagedDecodeParams, RoundedRows};
use octavo_kernels::plan::{DecodePlan, PrefillPlan, PrefillTile, split_tokens};

use super::At;
use super::cases::{Cases, Tables, Work, counted};
use crate::arena::{Plan, Region};

/// Sequences of the same length in separate blocks, and the locations of their arrays.
#[derive(Clone, Copy)]
struct Layer {
    out: Region,
    q: Region,
    cache: Region,
    block_table: usize,
    query_start: usize,
    seq_lens: usize,
    stride: usize,
    sequences: usize,
    heads: octavo_ops::HeadShape,
    tile: PrefillTile,
    /// Element types, and the size of an element of the cache in bytes.
    types: AttentionTypes,
    kv_size: usize,
}

impl Layer {
    /// Plans `queries` queries of each of `sequences` sequences of `tokens` tokens.
    fn new(
        cases: &Cases<'_>,
        [sequences, queries, tokens]: [usize; 3],
        cache: CacheType,
        plan: &mut Plan,
        tables: &mut Tables,
    ) -> Self {
        let (heads, size, kv_size) = (cases.bench.heads, cases.size(), cache.bytes(cases.dtype));
        let types = AttentionTypes { dtype: cases.dtype, cache };
        let stride = tokens.div_ceil(KV_BLOCK);
        let rows = (sequences * queries * heads.q_cols() * size) as u64;
        let (q, out) = (plan.take(rows), plan.take(rows));
        let cache = plan.take((sequences * stride * 2 * KV_BLOCK * heads.kv_cols() * kv_size) as u64);
        // A sequence's blocks are far from each other, as in a cache that has been in use.
        let blocks = (0..sequences).flat_map(|s| (0..stride).map(move |index| (index * sequences + s) as u32));
        let block_table = tables.add(blocks);
        let query_start = tables.add((0..=sequences).map(|s| (s * queries) as u32));
        let seq_lens = tables.add(std::iter::repeat_n(tokens as u32, sequences));
        let tile = manifest::prefill_tile(cases.chip(), [heads.q / heads.kv]);
        Self { out, q, cache, block_table, query_start, seq_lens, stride, sequences, heads, tile, types, kv_size }
    }

    fn params(&self, at: At, plan: usize) -> AttentionParams {
        let half = KV_BLOCK * self.heads.kv_cols();
        AttentionParams {
            out: at.data(self.out),
            q: at.data(self.q),
            k_cache: at.data(self.cache),
            v_cache: at.data(self.cache) + (half * self.kv_size) as u64,
            block_table: at.table(self.block_table),
            seats: 0,
            query_start: at.table(self.query_start),
            seq_lens: at.table(self.seq_lens),
            seen_ends: 0,
            plan: at.table(plan),
            sinks: 0,
            block_stride: 2 * half as u64,
            table_stride: self.stride as u32,
            sequences: self.sequences as u32,
            q_heads: self.heads.q as u32,
            kv_heads: self.heads.kv as u32,
            head_size: self.heads.dim as u32,
            window: 0,
            scale: (self.heads.dim as f32).sqrt().recip(),
            softcap: 0.0,
            lookahead: 0,
            value_size: self.heads.dim as u32,
            value_scale: 1.0,
            tile_heads: self.tile.heads,
        }
    }
}

impl Cases<'_> {
    pub(super) fn attention(&mut self) {
        for cache in CacheType::ALL {
            for context in self.bench.contexts.clone() {
                for sequences in self.bench.batch_sizes.clone() {
                    self.attend([sequences, 1, context], cache);
                }
            }
            for tokens in self.bench.prefill.clone() {
                self.attend([1, tokens, tokens], cache);
            }
        }
    }

    /// Adds attention for the numbers of sequences, of queries of each, and of tokens of each.
    fn attend(&mut self, sizes: [usize; 3], cache: CacheType) {
        let [sequences, queries, tokens] = sizes;
        let (heads, size) = (self.bench.heads, self.size());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let layer = Layer::new(self, sizes, cache, &mut plan, &mut tables);
        let first = tokens - queries;
        let pairs = sequences * (queries * (2 * first + queries + 1) / 2);
        let bytes = 2 * sequences * (tokens * heads.kv_cols() * layer.kv_size + queries * heads.q_cols() * size);
        let flops = 4 * pairs * heads.q_cols();
        let what = match queries {
            1 => format!("{} of {}", counted(sequences, "sequence"), counted(tokens, "token")),
            _ => format!("a prompt of {}", counted(tokens, "token")),
        };
        let work = Work { what, bytes, flops, plan, tables };
        if queries == 1 {
            self.decode(layer, tokens, work);
        } else {
            self.prefill(layer, tokens, work);
        }
    }

    fn decode(&mut self, layer: Layer, tokens: usize, mut work: Work) {
        let (heads, sequences) = (layer.heads, layer.sequences);
        let group = heads.q / heads.kv;
        let Some(kernel) = manifest::paged_decode(self.chip(), layer.types, heads.dim, group) else {
            return self.plain(layer, sequences, work);
        };
        let starts: Vec<u32> = (0..=sequences as u32).collect();
        let mut split_plan = Vec::new();
        let splits = DecodePlan::write(&starts, &vec![tokens as u32; sequences], split_tokens, &mut split_plan).splits;
        let floats = size_of::<f32>();
        let partial_out = work.plan.take((splits as usize * heads.q_cols() * floats) as u64);
        let partial_sums = work.plan.take((splits as usize * heads.q * 2 * floats) as u64);
        let split_plan = work.tables.add(split_plan);
        let tickets = work.tables.add(std::iter::repeat_n(0, sequences * heads.q));
        let (processors, tile) = (self.device.processors, kernel.tile);
        self.kernel(kernel.instance, work, move |at, _| {
            let params = PagedDecodeParams {
                partial_out: at.data(partial_out),
                partial_sums: at.data(partial_sums),
                tickets: at.table(tickets),
                rounded: RoundedRows::default(),
                attention: layer.params(at, split_plan),
            };
            (params, tile.grid(&params, processors, splits))
        });
    }

    fn prefill(&mut self, layer: Layer, tokens: usize, mut work: Work) {
        let Some(instance) = manifest::paged_prefill(self.chip(), layer.types, layer.heads.dim) else {
            return self.plain(layer, tokens, work);
        };
        let mut tiles = Vec::new();
        let tile = layer.tile;
        let count = PrefillPlan::write(&[0, tokens as u32], &[tokens as u32], tile.queries, &mut tiles).tiles;
        let tiles = work.tables.add(tiles);
        self.kernel(instance, work, move |at, _| {
            let params = layer.params(at, tiles);
            (params, params.prefill_grid(tile, count))
        });
    }

    /// Adds the kernel for every element type and head size.
    fn plain(&mut self, layer: Layer, tokens: usize, work: Work) {
        self.kernel(manifest::paged_attention(layer.types, self.bench.heads.dim), work, move |at, _| {
            let params = AttentionParams { plan: 0, ..layer.params(at, 0) };
            (params, params.plain_grid(tokens as u32))
        });
    }
}
