//! Cases of adapters.

use octavo_kernels::manifest;
use octavo_kernels::params::{LORA_ROWS, LoraParams, LoraPart, Params, lora_splits};

use super::cases::{Cases, Tables, Work, counted};
use crate::arena::Plan;

/// Number of adapters and their rank, as in the measurement on processors.
const ADAPTERS: usize = 8;
const RANK: usize = 16;

impl Cases<'_> {
    /// Adds both launches for the projection of q, k and v and for that of gate and up: the rows of a step have adapters in
    /// turn.
    pub(super) fn lora(&mut self) {
        let heads = self.bench.heads;
        let kv = heads.kv_cols();
        let sites = [("qkv", vec![heads.q_cols(), kv, kv]), ("gate_up", vec![self.bench.inner; 2])];
        for rows in self.row_counts() {
            for (name, columns) in &sites {
                self.lora_site(rows, name, columns);
            }
        }
    }

    fn lora_site(&mut self, rows: usize, name: &str, columns: &[usize]) {
        let (k, size, adapters) = (self.bench.hidden, self.size(), ADAPTERS.min(rows));
        let n: usize = columns.iter().sum();
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        // The places of a slot's matrices, and then its size.
        let mut slot = Plan::default();
        let mut first = 0;
        let of_slot: Vec<_> = (columns.iter())
            .map(|&columns| {
                let [a, b] = [k, columns].map(|numbers| slot.take((RANK * numbers * size) as u64));
                first += columns;
                (a.offset, b.offset, first - columns, columns)
            })
            .collect();
        let matrices = plan.take(slot.bytes() * adapters as u64);
        let [input, out] = [k, n].map(|columns| plan.take((rows * columns * size) as u64));
        let described = (0..adapters as u64).flat_map(|adapter| {
            let start = adapter * slot.bytes();
            of_slot.iter().flat_map(move |&(a, b, first, columns)| {
                words(&LoraPart {
                    a: start + a,
                    b: start + b,
                    rank: RANK as u32,
                    scaling: 2.0,
                    first: first as u32,
                    columns: columns as u32,
                })
            })
        });
        let described: Vec<u32> = described.collect();
        let parts_of = tables.add(described);
        let (tiles, order) = divide(rows, adapters);
        let count = tiles[0];
        let (tiles, order) = (tables.add(tiles), tables.add(order));
        let splits = lora_splits(k as u32);
        let partial = plan.take((count * splits * (columns.len() * RANK) as u32 * LORA_ROWS * 4).into());
        let parts = columns.len();
        let params = move |at: super::At| LoraParams {
            out: at.data(out),
            input: at.data(input),
            partial: at.data(partial),
            matrices: at.data(matrices),
            parts_of: at.table(parts_of),
            tiles: at.table(tiles),
            rows: at.table(order),
            k: k as u32,
            out_stride: n as u32,
            parts: parts as u32,
            part_stride: parts as u32,
            rank: RANK as u32,
            splits,
            scale: 1.0,
            share: 1,
            ..LoraParams::default()
        };
        let what = format!("{name} {n}x{k}, {}, {}", counted(adapters, "adapter"), counted(rows, "row"));
        let work = |of_a: bool| {
            let numbers = if of_a { RANK * parts * k } else { RANK * n };
            let moved = adapters * numbers + rows * if of_a { k } else { 2 * n };
            let (bytes, flops) = (moved * size, 2 * rows * numbers);
            Work { what: what.clone(), bytes, flops, plan: plan.clone(), tables: tables.clone() }
        };
        self.kernel(manifest::lora_shrink(self.dtype), work(true), move |at, threads| {
            let params = params(at);
            (params, params.shrink_grid(count, threads))
        });
        let columns: Vec<u32> = columns.iter().map(|&columns| columns as u32).collect();
        self.kernel(manifest::lora_expand(self.dtype, self.dtype), work(false), move |at, threads| {
            let params = params(at);
            (params, params.expand_grid(count, threads, columns.iter().copied()))
        });
    }
}

/// Returns the words of a struct.
fn words(params: &impl Params) -> Vec<u32> {
    params.bytes().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// Divides rows, which have adapters in turn, into tiles. Returns the tiles and the order of the rows.
fn divide(rows: usize, adapters: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut tiles, mut order) = (vec![0], Vec::new());
    for adapter in 0..adapters {
        let own: Vec<u32> = (adapter as u32..rows as u32).step_by(adapters).collect();
        for tile in own.chunks(LORA_ROWS as usize) {
            tiles.extend([adapter as u32, 0, order.len() as u32, tile.len() as u32]);
            tiles[0] += 1;
            order.extend_from_slice(tile);
        }
    }
    (tiles, order)
}
