//! Cases of adapters.

use octavo_kernels::manifest;
use octavo_kernels::params::{LORA_ROWS, LORA_TILE_WORDS, LoraPairsParams, LoraParams, LoraPart, Params};

use super::ExpertSizes;
use super::cases::{Cases, Tables, Work, counted};
use super::experts::{Tiled, expert_of};
use crate::arena::Plan;
use crate::lora::{most_tiles, routed_tiles, splits};

/// Number of adapters and their rank, as in the measurement on processors.
const ADAPTERS: usize = 8;
const RANK: usize = 16;

/// A weight to which adapters add.
struct Site {
    name: String,
    /// Number of columns of each part.
    columns: Vec<usize>,
    /// Number of experts that have such a weight, and of those of a token.
    experts: usize,
    chosen: usize,
}

impl Cases<'_> {
    /// Adds both launches for the projection of q, k and v, for that of gate and up, and for that of the experts. Each
    /// adapter has as many adjacent rows of a step.
    pub(super) fn lora(&mut self) {
        let heads = self.bench.heads;
        let kv = heads.kv_cols();
        let plain = |name: &str, columns: Vec<usize>| Site { name: name.into(), columns, experts: 1, chosen: 1 };
        let mut sites = vec![plain("qkv", vec![heads.q_cols(), kv, kv]), plain("gate_up", vec![self.bench.inner; 2])];
        sites.extend(self.bench.experts.map(|ExpertSizes { count, chosen, inner }| Site {
            name: format!("{count} experts"),
            columns: vec![inner; 2],
            experts: count,
            chosen,
        }));
        for rows in self.row_counts() {
            sites.iter().for_each(|site| self.lora_site(rows, site));
            self.lora_pairs(rows);
        }
    }

    fn lora_site(&mut self, rows: usize, site: &Site) {
        let Site { ref columns, experts, chosen, .. } = *site;
        let (k, size, adapters) = (self.bench.hidden, self.size(), ADAPTERS.min(rows));
        let (n, pairs, parts): (usize, _, _) = (columns.iter().sum(), rows * chosen, columns.len());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let described = describe(site, (k, size), adapters);
        let matrices = plan.take(described.bytes);
        let [input, out] = [rows * k, pairs * n].map(|numbers| plan.take((numbers * size) as u64));
        let parts_of = tables.add(described.words);
        let Tiled { tiles, order, kinds } = divided(rows, adapters, site);
        let most = match experts {
            1 => most_tiles(rows, adapters),
            _ => routed_tiles(pairs, experts * adapters),
        } as u32;
        let (tiles, order) = (tables.add(tiles), tables.add(order));
        let splits = splits(most, k as u32);
        let partial = plan.take((most * splits * (parts * RANK) as u32 * LORA_ROWS * 4).into());
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
            part_stride: (experts * parts) as u32,
            rank: RANK as u32,
            splits,
            scale: 1.0,
            share: chosen as u32,
            ..LoraParams::default()
        };
        let of_chosen = if experts == 1 { String::new() } else { format!(" of {chosen}") };
        let what =
            format!("{} {n}x{k}, {}, {}{of_chosen}", site.name, counted(adapters, "adapter"), counted(rows, "row"));
        let work = |of_a: bool| {
            let numbers = if of_a { RANK * parts * k } else { RANK * n };
            let moved = kinds * numbers + if of_a { rows * k } else { 2 * pairs * n };
            let (bytes, flops) = (moved * size, 2 * pairs * numbers);
            Work { what: what.clone(), bytes, flops, plan: plan.clone(), tables: tables.clone() }
        };
        self.kernel(manifest::lora_shrink(self.dtype), work(true), move |at, threads| {
            let params = params(at);
            (params, params.shrink_grid(most, threads))
        });
        let columns: Vec<u32> = columns.iter().map(|&columns| columns as u32).collect();
        self.kernel(manifest::lora_expand(self.dtype, self.dtype), work(false), move |at, threads| {
            let params = params(at);
            (params, params.expand_grid(most, threads, columns.iter().copied()))
        });
    }

    /// Adds the division of the pairs of tokens and experts, which precedes the sites of a layer's experts.
    fn lora_pairs(&mut self, rows: usize) {
        let Some(ExpertSizes { count, chosen, .. }) = self.bench.experts else { return };
        let (adapters, pairs) = (ADAPTERS.min(rows), rows * chosen);
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let adapted = divided(rows, adapters, &Site { name: String::new(), columns: vec![], experts: 1, chosen: 1 });
        let (adapted_tiles, adapted_rows) = (tables.add(adapted.tiles), tables.add(adapted.order));
        let picked = tables.add((0..pairs).map(|pair| expert_of(pair, count) as u32));
        let tiles = 1 + LORA_TILE_WORDS as usize * routed_tiles(pairs, count * adapters);
        let [counts, tiles, order] = [count * adapters, tiles, pairs].map(|words| plan.take(4 * words as u64));
        let what = format!("{count} experts, {}, {} of {chosen}", counted(adapters, "adapter"), counted(rows, "row"));
        // The pairs are read, counted and written.
        let work = Work { what, bytes: 4 * (2 * pairs + count * adapters), flops: 0, plan, tables };
        self.kernel(manifest::lora_pairs(), work, move |at, _| {
            let params = LoraPairsParams {
                picked: at.table(picked),
                adapted_tiles: at.table(adapted_tiles),
                adapted_rows: at.table(adapted_rows),
                counts: at.data(counts),
                tiles: at.data(tiles),
                rows: at.data(order),
                chosen: chosen as u32,
                experts: count as u32,
                slots: adapters as u32,
                reserved: 0,
            };
            (params, [1; 3])
        });
    }
}

/// The matrices of adapters for a site: what describes their parts, by adapter and expert, and their size.
struct Described {
    words: Vec<u32>,
    bytes: u64,
}

/// Places the matrices of `adapters` adapters.
fn describe(site: &Site, (k, size): (usize, usize), adapters: usize) -> Described {
    let mut matrices = Plan::default();
    let mut words = Vec::new();
    for _ in 0..adapters * site.experts {
        let mut first = 0;
        for &columns in &site.columns {
            let [a, b] = [k, columns].map(|numbers| matrices.take((RANK * numbers * size) as u64).offset);
            let (rank, columns) = (RANK as u32, columns as u32);
            let part = LoraPart { a, b, rank, scaling: 2.0, first, columns };
            words.extend(part.bytes().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
            first += columns;
        }
    }
    Described { words, bytes: matrices.bytes() }
}

/// Divides rows, or pairs of tokens and experts, into tiles of one adapter and one expert. Tokens choose experts evenly, and each
/// adapter has as many adjacent rows.
fn divided(rows: usize, adapters: usize, site: &Site) -> Tiled {
    Tiled::new(rows * site.chosen, LORA_ROWS, |pair| {
        let adapter = pair / site.chosen * adapters / rows;
        [adapter as u32, expert_of(pair, site.experts) as u32]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_one_adapter_and_one_expert() {
        let site = |experts, chosen| Site { name: String::new(), columns: vec![], experts, chosen };
        let Tiled { tiles, order, kinds } = divided(20, 2, &site(1, 1));
        assert_eq!((kinds, &tiles[..]), (2, &[4, 0, 0, 0, 8, 0, 0, 8, 2, 1, 0, 10, 8, 1, 0, 18, 2][..]));
        assert_eq!((order[0], order[19]), (0, 19));
        // Five pairs of each expert and each adapter.
        let Tiled { tiles, order, kinds } = divided(40, 2, &site(8, 2));
        assert_eq!((kinds, tiles[0], order.len()), (16, 16, 80));
        for tile in tiles[1..].chunks(4) {
            for &pair in &order[tile[2] as usize..][..tile[3] as usize] {
                assert_eq!((expert_of(pair as usize, 8), pair / 40), (tile[1] as usize, tile[0]));
            }
        }
    }
}
