//! Tests of the kernels for adapters.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Dtype, Instance};
use octavo_kernels::params::{
    LORA_OUTPUTS, LORA_ROWS, LORA_TILE_WORDS, LoraPairsParams, LoraParams, LoraPart, expert_tiles, lora_splits,
};
use octavo_ops::testing::TestRng;

use crate::common::{assert_near, by_rows, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes};
use crate::support::{Array, Tolerance, pick, uniform};

/// The matrices of an adapter for a part: places of A as `[rank, k]` or as a table `[k, rank]`, and of B transposed.
#[derive(Clone, Copy)]
struct Matrices {
    rank: usize,
    scaling: f32,
    a: usize,
    b: usize,
}

/// A site with its adapters and the rows of a step.
struct Case {
    dtype: Dtype,
    out: Dtype,
    is_table: bool,
    k: usize,
    /// Number of columns of each part.
    columns: Vec<usize>,
    /// Number of experts, each with all parts, and number of rows that read one row of the input.
    experts: usize,
    share: usize,
    /// Number of elements between rows of the output.
    stride: usize,
    rank: usize,
    /// By slot, expert and part; `None` if the adapter has none.
    matrices: Vec<Vec<Option<Matrices>>>,
    numbers: Array,
    input: Array,
    /// Ids of the tokens, as they are and as a step names them, and the tokens of the preceding step.
    ids: Vec<u32>,
    named: Vec<u32>,
    drawn: Vec<u32>,
    before: Array,
    scale: f32,
}

impl Case {
    fn draw(rng: &mut TestRng, (dtype, out): (Dtype, Dtype), is_table: bool, rows: usize) -> Self {
        let k = if is_table { 11 } else { pick(rng, &[8, 40, 512, 520, 1544]) };
        let columns: Vec<_> = (0..1 + rng.below(3)).map(|_| pick(rng, &[1, 24, 30, 516, 1030])).collect();
        let all: usize = columns.iter().sum();
        let stride = all + pick(rng, &[0, 3, 4]);
        let rank = pick(rng, &[1, 8, 20, 64]);
        let (experts, share) = if is_table { (1, 1) } else { (pick(rng, &[1, 3]), pick(rng, &[1, 2])) };
        let mut len = 0;
        // Matrices begin at multiples of 16 bytes.
        let mut place = |numbers: usize| {
            let at = len;
            len += numbers.next_multiple_of(8);
            at
        };
        let mut part = |columns: usize| {
            let own = 1 + rng.below(rank);
            let (a, b) = (place(own * k), place(columns.next_multiple_of(LORA_OUTPUTS as usize) * own));
            (rng.below(4) > 0).then_some(Matrices { rank: own, scaling: 0.25 + rng.signed().abs(), a, b })
        };
        let mut of_slot =
            || columns.iter().cycle().take(experts * columns.len()).map(|&columns| part(columns)).collect();
        let matrices = (0..3).map(|_| of_slot()).collect();
        let numbers = uniform(dtype, len, 1.0, rng);
        let ids = rng.tokens(rows, k);
        let (named, drawn) = by_rows(&ids, rng);
        let input = uniform(dtype, if is_table { 8 } else { rows.div_ceil(share) * k }, 1.0, rng);
        let before = uniform(out, rows * stride, 1.0, rng);
        let scale = pick(rng, &[1.0, 0.5, -2.0]);
        Self {
            dtype,
            out,
            is_table,
            k,
            columns,
            experts,
            share,
            stride,
            rank,
            matrices,
            numbers,
            input,
            ids,
            named,
            drawn,
            before,
            scale,
        }
    }

    fn instances(&self) -> [Instance; 2] {
        let expand = match self.is_table {
            true => manifest::lora_expand_table(self.dtype),
            false => manifest::lora_expand(self.dtype, self.out),
        };
        [manifest::lora_shrink(self.dtype), expand]
    }

    /// Returns the descriptions of all parts by slot, with those of another site before and behind them.
    fn parts_of(&self) -> Vec<LoraPart> {
        let mut parts = Vec::new();
        for slot in &self.matrices {
            parts.push(LoraPart::default());
            let mut first = 0;
            for (index, (matrices, &columns)) in slot.iter().zip(self.columns.iter().cycle()).enumerate() {
                if index % self.columns.len() == 0 {
                    first = 0;
                }
                let empty = LoraPart { first, columns: columns as u32, ..LoraPart::default() };
                parts.push(matrices.as_ref().map_or(empty, |of| LoraPart {
                    a: (of.a * self.dtype.bytes()) as u64,
                    b: (of.b * self.dtype.bytes()) as u64,
                    rank: of.rank as u32,
                    scaling: of.scaling,
                    ..empty
                }));
                first += columns as u32;
            }
            parts.push(LoraPart::default());
        }
        parts
    }

    /// Returns the expert of a row.
    fn expert(&self, row: usize) -> usize {
        row * 7 / 2 % self.experts
    }

    /// Returns the output of rows that have these adapters, 0 for none or 1 + the slot, with `surplus` tiles in the grid.
    fn run(&self, kernels: &Kernels, order: Order, adapters: &[usize], splits: bool, surplus: u32) -> Array {
        let (tiles, rows) = self.tiles(adapters);
        // A launch has a tile at least.
        let most = (tiles[0] + surplus).max(1);
        let splits = if splits { lora_splits(self.k as u32) } else { 1 };
        let mut out = self.before.clone();
        let parts_of = self.parts_of();
        let sums = most as usize * splits as usize * self.columns.len() * self.rank * LORA_ROWS as usize;
        let mut partial = vec![f32::NAN; sums];
        let params = LoraParams {
            out: out.ptr_mut(),
            input: self.input.ptr(),
            partial: address_mut(&mut partial),
            matrices: self.numbers.ptr(),
            parts_of: address(&parts_of) + size_of::<LoraPart>() as u64,
            tiles: address(&tiles),
            rows: address(&rows),
            ids: address(&self.named),
            drawn: address(&self.drawn),
            k: self.k as u32,
            out_stride: self.stride as u32,
            parts: self.columns.len() as u32,
            part_stride: (self.experts * self.columns.len()) as u32 + 2,
            rank: self.rank as u32,
            splits,
            scale: self.scale,
            share: self.share as u32,
        };
        let [shrink, expand] = self.instances();
        if !self.is_table {
            launch(kernels, order, &shrink, params.shrink_grid(most, shrink.threads), &params);
        }
        let columns = self.columns.iter().map(|&columns| columns as u32);
        launch(kernels, order, &expand, params.expand_grid(most, expand.threads, columns), &params);
        out
    }

    /// Returns what a row's adapter adds to it.
    fn delta(&self, row: usize, slot: usize) -> Vec<f64> {
        let mut delta = Vec::new();
        let own = self.matrices[slot].iter().skip(self.expert(row) * self.columns.len());
        for (matrices, &columns) in own.zip(&self.columns) {
            let Some(Matrices { rank, scaling, a, b }) = *matrices else {
                delta.extend(vec![0.0; columns]);
                continue;
            };
            let shrunk = |j: usize| match self.is_table {
                true => self.numbers.get(a + self.ids[row] as usize * rank + j),
                false => (0..self.k)
                    .map(|c| self.numbers.get(a + j * self.k + c) * self.input.get(row / self.share * self.k + c))
                    .sum::<f64>(),
            };
            let shrunk: Vec<f64> = (0..rank).map(|j| f64::from(scaling) * shrunk(j)).collect();
            let stride = columns.next_multiple_of(LORA_OUTPUTS as usize);
            let column =
                |n| shrunk.iter().enumerate().map(|(j, x)| x * self.numbers.get(b + j * stride + n)).sum::<f64>();
            delta.extend((0..columns).map(|n| f64::from(self.scale) * column(n)));
        }
        delta.resize(self.stride, 0.0);
        delta
    }

    fn check(&self, found: &Array, adapters: &[usize]) {
        let (mut near, mut expected) = (Vec::new(), Vec::new());
        for (row, &adapter) in adapters.iter().enumerate() {
            let at = row * self.stride..(row + 1) * self.stride;
            if adapter == 0 {
                assert!(found.bits(at.clone()) == self.before.bits(at), "row {row} has no adapter");
                continue;
            }
            near.extend(found.range(at.clone()));
            expected.extend(self.before.range(at).iter().zip(self.delta(row, adapter - 1)).map(|(x, y)| x + y));
        }
        let context = format!("k {} columns {:?} rank {} {adapters:?}", self.k, self.columns, self.rank);
        assert_near(&near, &expected, Tolerance::Product.bound(self.out), &context);
    }

    /// Returns the tiles of rows with these adapters, and the rows in their order.
    fn tiles(&self, adapters: &[usize]) -> (Vec<u32>, Vec<u32>) {
        tiles(adapters, |row| self.expert(row))
    }
}

/// Returns the tiles of rows with these adapters and experts, and the rows in their order.
fn tiles(adapters: &[usize], expert: impl Fn(usize) -> usize) -> (Vec<u32>, Vec<u32>) {
    let kind = |row: u32| (adapters[row as usize], expert(row as usize));
    let mut order: Vec<u32> = (0..adapters.len() as u32).filter(|&row| adapters[row as usize] > 0).collect();
    order.sort_by_key(|&row| kind(row));
    let (mut tiles, mut first) = (vec![0], 0);
    for same in order.chunk_by(|&a, &b| kind(a) == kind(b)) {
        for rows in same.chunks(LORA_ROWS as usize) {
            let (adapter, expert) = kind(rows[0]);
            tiles.extend([adapter as u32 - 1, expert as u32, first, rows.len() as u32]);
            first += rows.len() as u32;
            tiles[0] += 1;
        }
    }
    (tiles, order)
}

/// Returns the types of activations with those of the output, and whether A is a table.
fn kinds() -> Vec<((Dtype, Dtype), bool)> {
    let logits = |dtype| (dtype != Dtype::F32).then_some(((dtype, Dtype::F32), false));
    let of = |dtype| [((dtype, dtype), false), ((dtype, dtype), true)].into_iter().chain(logits(dtype));
    dtypes().into_iter().flat_map(of).collect()
}

fn check_all(cases: usize) {
    kinds().into_iter().for_each(|kind| check(kind, cases));
}

pub(crate) fn check((types, is_table): ((Dtype, Dtype), bool), cases: usize) {
    let rng = &mut rng();
    let case = Case::draw(rng, types, is_table, 1);
    let kernels = Kernels::new(&case.instances());
    for _ in 0..cases {
        let rows = 1 + rng.below(30);
        let case = Case::draw(rng, types, is_table, rows);
        let adapters: Vec<usize> = (0..rows).map(|_| rng.below(4)).collect();
        let found = in_every_order(|order| case.run(&kernels, order, &adapters, true, 0));
        case.check(&found, &adapters);
        let same = case.run(&kernels, Order::Forward, &adapters, false, 3);
        assert!(same == found, "the grid and the splits make no difference");
        // Each row alone.
        for row in (0..rows).step_by(7) {
            let only: Vec<_> = (0..rows).map(|other| if other == row { adapters[row] } else { 0 }).collect();
            let alone = case.run(&kernels, Order::Forward, &only, true, 0);
            let at = row * case.stride..(row + 1) * case.stride;
            assert!(alone.bits(at.clone()) == found.bits(at), "row {row} depends on others");
        }
    }
}

#[test]
fn adapters_are_as_in_f64_and_rows_do_not_depend_on_others() {
    check_all(6);
}

#[test]
fn small_adapters() {
    check_all(1);
}

#[test]
fn tiles_of_experts_hold_every_pair_with_an_adapter_once() {
    check_pairs();
}

pub(crate) fn check_pairs() {
    let (rng, kernels) = (&mut rng(), Kernels::new(&[manifest::lora_pairs()]));
    for (experts, slots, tokens) in [(5, 3, 20), (1, 1, 40), (300, 7, 90), (4, 2, 0)] {
        let (chosen, words) = (1 + rng.below(4), LORA_TILE_WORDS as usize);
        let picked = rng.tokens(tokens * chosen, experts);
        let adapters: Vec<usize> = (0..tokens).map(|_| rng.below(slots + 1)).collect();
        let (adapted_tiles, adapted_rows) = tiles(&adapters, |_| 0);
        let most = expert_tiles(picked.len() as u32, (experts * slots) as u32, LORA_ROWS) as usize;
        for order in [Order::Forward, Order::Reverse, Order::Random(3)] {
            let (mut found, mut rows) = (vec![u32::MAX; 1 + words * most], vec![u32::MAX; picked.len()]);
            let mut counts = vec![u32::MAX; experts * slots];
            let params = LoraPairsParams {
                picked: address(&picked),
                adapted_tiles: address(&adapted_tiles),
                adapted_rows: address(&adapted_rows),
                counts: address_mut(&mut counts),
                tiles: address_mut(&mut found),
                rows: address_mut(&mut rows),
                chosen: chosen as u32,
                experts: experts as u32,
                slots: slots as u32,
                reserved: 0,
            };
            launch(&kernels, order, &manifest::lora_pairs(), [1; 3], &params);
            let mut seen = vec![false; picked.len()];
            for tile in found[1..][..words * found[0] as usize].chunks(words) {
                assert!((1..=LORA_ROWS).contains(&tile[3]));
                for &pair in &rows[tile[2] as usize..][..tile[3] as usize] {
                    let adapter = adapters[pair as usize / chosen] as u32;
                    assert_eq!((picked[pair as usize], adapter), (tile[1], tile[0] + 1));
                    assert!(!std::mem::replace(&mut seen[pair as usize], true), "pair {pair} is in two tiles");
                }
            }
            assert!((0..picked.len()).all(|pair| seen[pair] == (adapters[pair / chosen] > 0)));
        }
    }
}
