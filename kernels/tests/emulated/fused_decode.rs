//! Compares decode attention that completes the heads of q, k and v with the two kernels that do so one after the other: bit for bit.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Chip, DecodeKernel, Dtype};
use octavo_kernels::params::{AttentionParams, FusedDecodeParams, KV_BLOCK, NO_SLOT, PagedDecodeParams};
use octavo_kernels::plan::DecodePlan;
use octavo_ops::testing::TestRng;
use octavo_ops::to_e4m3;

use crate::common::{encode, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_sm80};
use crate::qkv_post;
use crate::rounded::Rounded;
use crate::support::{Array, normal, pick};

/// Number of tokens in a split.
const SPLIT: u32 = 32;

/// A step of sequences that decode.
struct Case {
    /// What precedes attention. The cache has the keys and values of all tokens before these.
    post: qkv_post::Case,
    cache: CacheType,
    /// The cache as bytes; those that are not written are NaN.
    bytes: Vec<u8>,
    lens: Vec<u32>,
    tables: Vec<u32>,
    table_stride: usize,
    window: u32,
    softcap: f32,
    sinks: Option<Vec<f32>>,
    /// Number of CTAs that share the splits.
    columns: u32,
}

/// What a step writes.
#[derive(PartialEq)]
struct Written {
    out: Array,
    rounded: Rounded,
    cache: Vec<u8>,
}

impl Case {
    /// Returns a step of these lengths. A sequence without keys is padding.
    fn new(types: AttentionTypes, heads: [usize; 2], size: usize, lens: &[u32], rng: &mut TestRng) -> Self {
        let blocks_of = |len: u32| (len as usize).div_ceil(KV_BLOCK);
        let blocks = 1 + lens.iter().map(|&len| blocks_of(len)).sum::<usize>();
        let table_stride = lens.iter().map(|&len| blocks_of(len)).max().unwrap_or(0) + 1;
        let mut free: Vec<u32> = (1..blocks as u32).collect();
        let (mut tables, mut slots) = (vec![0; lens.len() * table_stride], Vec::new());
        for (table, &len) in tables.chunks_mut(table_stride).zip(lens) {
            table[..blocks_of(len)].fill_with(|| free.swap_remove(rng.below(free.len())));
            let last = len.checked_sub(1).map(|last| last as usize);
            slots
                .push(last.map_or(NO_SLOT, |last| table[last / KV_BLOCK] * KV_BLOCK as u32 + (last % KV_BLOCK) as u32));
        }
        let AttentionTypes { dtype, cache } = types;
        let post = qkv_post::Case::with_slots(dtype, (heads, size), (slots, blocks), rng);
        let element = cache.bytes(dtype);
        let mut bytes = vec![0xff; blocks * post.block_stride() * element];
        let row = post.kv_heads * size;
        for (table, &len) in tables.chunks(table_stride).zip(lens) {
            for (key, plane) in (0..(len as usize).saturating_sub(1)).flat_map(|key| [(key, 0), (key, 1)]) {
                let block = table[key / KV_BLOCK] as usize * post.block_stride();
                let at = (block + post.layer() + plane * post.plane() + key % KV_BLOCK * row) * element;
                for place in bytes[at..at + row * element].chunks_mut(element) {
                    match cache {
                        CacheType::Activation => place.copy_from_slice(&encode(dtype, normal(rng) as f32)),
                        CacheType::E4m3 => place[0] = to_e4m3(normal(rng) as f32),
                    }
                }
            }
        }
        Self {
            cache,
            bytes,
            lens: lens.to_vec(),
            tables,
            table_stride,
            window: pick(rng, &[0, 0, 1, 19, 70]),
            softcap: pick(rng, &[0.0, 2.0]),
            sinks: (rng.below(2) == 0).then(|| (0..heads[0]).map(|_| normal(rng) as f32).collect()),
            columns: 1 + rng.below(4) as u32,
            post,
        }
    }

    fn types(&self) -> AttentionTypes {
        AttentionTypes { dtype: self.post.dtype, cache: self.cache }
    }

    /// Returns the kernels that attend, and that complete the heads and attend.
    fn kernels(&self) -> [DecodeKernel; 2] {
        let (size, group) = (self.post.size, self.post.q_heads / self.post.kv_heads);
        [manifest::paged_decode, manifest::paged_decode_fused]
            .map(|kernel| kernel(Chip::SM_89, self.types(), size, group).expect("a kernel"))
    }

    /// Returns what a step writes: `run` gets the parameters of what precedes attention with an address for the queries, those of
    /// attention, and the grid.
    fn written(&self, run: impl FnOnce(u64, PagedDecodeParams, [u32; 3])) -> Written {
        let qkv_post::Case { dtype, q_heads, kv_heads, size, .. } = self.post;
        let (rows, cols) = (self.lens.len(), q_heads * size);
        let (mut cache, mut plan) = (self.bytes.clone(), Vec::new());
        let query_start: Vec<u32> = (0..=rows as u32).collect();
        let splits = DecodePlan::write(&query_start, &self.lens, |_| SPLIT, &mut plan).splits as usize;
        let mut out = Array::poisoned(dtype, rows * cols);
        let mut rounded = Rounded::poisoned(rows * cols);
        let mut partial_out = Array::poisoned(Dtype::F32, splits * cols);
        let mut partial_sums = Array::poisoned(Dtype::F32, splits * q_heads * 2);
        let base = address_mut(&mut cache);
        let post = self.post.params(0, self.cache, base);
        let mut params = PagedDecodeParams {
            partial_out: partial_out.ptr_mut(),
            partial_sums: partial_sums.ptr_mut(),
            tickets: 0,
            rounded: rounded.params(),
            attention: AttentionParams {
                out: out.ptr_mut(),
                k_cache: post.k_cache,
                v_cache: post.v_cache,
                block_table: address(&self.tables),
                query_start: address(&query_start),
                seq_lens: address(&self.lens),
                plan: address(&plan),
                sinks: self.sinks.as_deref().map_or(0, address),
                block_stride: post.block_stride,
                table_stride: self.table_stride as u32,
                sequences: rows as u32,
                q_heads: q_heads as u32,
                kv_heads: kv_heads as u32,
                head_size: size as u32,
                window: self.window,
                scale: 0.1,
                softcap: self.softcap,
                value_size: size as u32,
                value_scale: 1.5,
                tile_heads: 1,
                ..AttentionParams::default()
            },
        };
        let grid = [self.columns, params.rows(self.kernels()[0].tile.heads), 1];
        let mut tickets = vec![0u32; rows * grid[1] as usize];
        params.tickets = address_mut(&mut tickets);
        run(base, params, grid);
        assert!(tickets.iter().all(|&ticket| ticket == 0), "tickets are ready for the next launch");
        Written { out, rounded, cache }
    }

    /// Returns what the kernel for both writes.
    fn fused(&self, kernels: &Kernels, order: Order) -> Written {
        let [_, kernel] = self.kernels();
        self.written(|base, decode, grid| {
            let params = FusedDecodeParams { post: self.post.params(0, self.cache, base), decode };
            launch(kernels, order, &kernel.instance, grid, &params);
        })
    }

    /// Returns what the two kernels write, launched one after the other.
    fn apart(&self, kernels: &Kernels) -> Written {
        let [kernel, _] = self.kernels();
        self.written(|base, decode, grid| {
            let q = self.post.launch(Order::Forward, self.cache, base);
            let params = PagedDecodeParams { attention: AttentionParams { q: q.ptr(), ..decode.attention }, ..decode };
            launch(kernels, Order::Forward, &kernel.instance, grid, &params);
        })
    }

    fn check(&self) {
        let kernels = Kernels::new(&self.kernels().map(|kernel| kernel.instance));
        let found = in_every_order(|order| self.fused(&kernels, order));
        let expected = self.apart(&kernels);
        let context = format!("{:?}, heads of {}, lengths {:?}", self.types(), self.post.size, self.lens);
        assert!(found.cache == expected.cache, "{context}: other bits in the cache");
        assert!(found.out == expected.out, "{context}: other bits in the output");
        assert!(found.rounded == expected.rounded, "{context}: other codes");
    }
}

/// Lengths of sequences: padding, one key, splits and blocks that end with the last key or begin with it, and others.
fn lens(rng: &mut TestRng) -> Vec<u32> {
    (0..3).map(|_| rng.below(120) as u32).chain([0, 1, SPLIT, SPLIT + 1, 2 * SPLIT + 16, 2 * SPLIT + 17]).collect()
}

/// Checks a step of a tile of all query heads of a KV head, and one of several tiles.
pub(crate) fn check(rng: &mut TestRng) {
    if !has_sm80() {
        return;
    }
    let types = AttentionTypes { dtype: Dtype::F16, cache: CacheType::Activation };
    for heads in [[6, 2], [18, 1]] {
        Case::new(types, heads, 64, &[0, 33, 70], rng).check();
    }
}

#[test]
fn heads_that_attention_completes_have_the_same_bits() {
    let rng = &mut rng();
    for dtype in dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32 && has_sm80()) {
        for (size, heads) in [(64, [18, 1]), (96, [2, 2]), (128, [8, 2]), (256, [10, 1])] {
            // Each kernel takes seconds to compile, so a size runs with one type of cache.
            let cache = if size > 128 { CacheType::Activation } else { pick(rng, &CacheType::ALL) };
            Case::new(AttentionTypes { dtype, cache }, heads, size, &lens(rng), rng).check();
        }
    }
}

/// Values that are not finite reach the outputs, and the marks of their keys the cache.
#[test]
fn what_is_not_finite_has_the_same_bits() {
    let rng = &mut rng();
    for cache in CacheType::ALL.into_iter().filter(|_| has_sm80()) {
        let types = AttentionTypes { dtype: Dtype::F16, cache };
        let mut case = Case::new(types, [4, 2], 64, &[40, 17], rng);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let place = rng.below(case.post.qkv.len());
            case.post.qkv.set(place, bad);
        }
        case.check();
    }
}
