//! Tests of the kernels for mixtures of experts.

use std::sync::LazyLock;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Chip, Dtype, ExpertProduct, ExpertTiles, GemmTile};
use octavo_kernels::params::{
    EXPERT_ROWS, ExpertLinearParams, ExpertSumParams, GateRowsParams, MAX_EXPERTS, QuantWeight, RouteParams,
    SortExpertsParams, expert_tiles,
};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::testing::TestRng;
use octavo_ops::{BufferId, ChoiceScratch, ExpertGroups, GroupScore, Route, RouteScores, WeightId};

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes};
use crate::quantized::Weight;
use crate::support::{Array, Tolerance, normal, pick};

static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let mut instances = vec![manifest::sort_experts()];
    for dtype in dtypes() {
        instances.extend([manifest::route(dtype), manifest::expert_sum(dtype), manifest::gate_rows(dtype)]);
        instances.extend(formats().flat_map(|format| products(format, dtype)).map(|product| product.instance));
    }
    Kernels::new(&instances)
});

/// Returns no format, for dense weights, and all formats.
fn formats() -> impl Iterator<Item = Option<QuantFormat>> {
    std::iter::once(None).chain(QuantFormat::ALL.map(Some))
}

/// Returns all products with weights of a format, on each of the chips.
fn products(format: Option<QuantFormat>, dtype: Dtype) -> Vec<ExpertProduct> {
    let mut products = vec![manifest::expert_gemv(format, dtype)];
    for chip in [Chip::SM_70, Chip::SM_89] {
        let gemms = GemmTile::ALL.into_iter().filter_map(|tile| manifest::expert_gemm(chip, format, dtype, tile));
        products.extend(gemms);
    }
    products
}

fn f32s(len: usize, rng: &mut TestRng) -> Vec<f32> {
    (0..len).map(|_| normal(rng) as f32).collect()
}

/// Returns a random choice among `experts` experts, and the number of chosen ones.
fn random_route(rng: &mut TestRng) -> (Route, usize, usize) {
    let (groups, size) = (1 + rng.below(5), 1 + rng.below(20));
    let kept = 1 + rng.below(groups);
    let score = pick(rng, &[GroupScore::Best, GroupScore::BestTwo]);
    let grouped = (rng.below(2) == 0).then_some(ExpertGroups { count: groups, kept, score });
    let eligible = if grouped.is_some() { kept * size } else { groups * size };
    let route = Route {
        weight: WeightId(0),
        bias: None,
        site: None,
        correction: None,
        scores: pick(rng, &[RouteScores::Softmax, RouteScores::Sigmoid]),
        groups: grouped,
        normalise: rng.below(2) == 0,
        scale: pick(rng, &[1.0, 2.5]),
        input: BufferId(0),
        out: BufferId(0),
    };
    (route, groups * size, 1 + rng.below(eligible.min(9)))
}

pub(crate) fn check_route(dtype: Dtype, rng: &mut TestRng) {
    let (route, experts, chosen) = random_route(rng);
    let (tokens, cols) = (1 + rng.below(4), 8 * (1 + rng.below(20)));
    let input = Array::random(dtype, tokens * cols, rng);
    let weight = f32s(experts * cols, rng);
    let [bias, correction] = [(); 2].map(|()| (rng.below(2) == 0).then(|| f32s(experts, rng)));
    let deltas = (rng.below(2) == 0).then(|| f32s(tokens * experts, rng));
    // Weights are compared by bits across orders.
    let (picked, weights) = in_every_order(|order| {
        let (mut picked, mut weights) = (vec![u32::MAX; tokens * chosen], vec![f32::NAN; tokens * chosen]);
        let mut added = deltas.clone();
        let params = RouteParams {
            input: input.ptr(),
            weight: address(&weight),
            bias: bias.as_deref().map_or(0, address),
            correction: correction.as_deref().map_or(0, address),
            deltas: added.as_deref_mut().map_or(0, address_mut),
            picked: address_mut(&mut picked),
            weights: address_mut(&mut weights),
            tokens: tokens as u32,
            cols: cols as u32,
            experts: experts as u32,
            chosen: chosen as u32,
            sigmoid: u32::from(route.scores == RouteScores::Sigmoid),
            groups: route.groups.map_or(0, |groups| groups.count as u32),
            kept_groups: route.groups.map_or(0, |groups| groups.kept as u32),
            best_two: u32::from(route.groups.is_some_and(|groups| groups.score == GroupScore::BestTwo)),
            normalise: u32::from(route.normalise),
            scale: route.scale,
        };
        launch(&KERNELS, order, &manifest::route(dtype), params.grid(), &params);
        assert!(added.iter().flatten().all(|delta| *delta == 0.0), "the memory is ready for the next router");
        (picked, weights.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    });
    for token in 0..tokens {
        let row = input.range(token * cols..(token + 1) * cols);
        let logit = |expert: usize| {
            let dot: f64 = row.iter().zip(&weight[expert * cols..]).map(|(x, w)| x * f64::from(*w)).sum();
            let delta = deltas.as_ref().map_or(0.0, |deltas| f64::from(deltas[token * experts + expert]));
            (dot + bias.as_ref().map_or(0.0, |bias| f64::from(bias[expert])) + delta) as f32
        };
        let logits: Vec<f32> = (0..experts).map(logit).collect();
        let (mut expected, mut shares) = (vec![0; chosen], vec![0.0; chosen]);
        let scratch = &mut ChoiceScratch::default();
        route.choose(&logits, correction.as_deref().unwrap_or_default(), scratch, &mut expected, &mut shares);
        let range = token * chosen..(token + 1) * chosen;
        assert_eq!(picked[range.clone()], expected, "{route:?} of {experts}");
        let found: Vec<f64> = weights[range].iter().map(|bits| f64::from(f32::from_bits(*bits))).collect();
        let shares: Vec<f64> = shares.iter().map(|x| f64::from(*x)).collect();
        assert_near(&found, &shares, 1e-4, "weights");
    }
}

/// The experts of some tokens in the order of experts.
struct Sorted {
    order: Vec<u32>,
    tiles: Vec<u32>,
}

fn sort(order: Order, picked: &[u32], experts: usize, tile_rows: u32) -> Sorted {
    let most = expert_tiles(picked.len() as u32, experts as u32, tile_rows) as usize;
    let mut sorted = Sorted { order: vec![u32::MAX; picked.len()], tiles: vec![u32::MAX; 1 + 3 * most] };
    let params = SortExpertsParams {
        picked: address(picked),
        order: address_mut(&mut sorted.order),
        tiles: address_mut(&mut sorted.tiles),
        pairs: picked.len() as u32,
        experts: experts as u32,
        tile_rows,
        reserved: 0,
    };
    launch(&KERNELS, order, &manifest::sort_experts(), [1; 3], &params);
    sorted
}

/// The numbers that stand in the header too: a router of as many experts as there may be, and full tiles of one expert.
#[test]
fn the_most_experts_and_pairs_are_those_of_the_header() {
    let picked: Vec<u32> = (0..MAX_EXPERTS as u32).flat_map(|expert| vec![expert; EXPERT_ROWS as usize]).collect();
    let Sorted { tiles, .. } = sort(Order::Forward, &picked, MAX_EXPERTS, EXPERT_ROWS);
    assert_eq!(tiles[0], MAX_EXPERTS as u32, "one tile for each expert");
    assert!(tiles[1..][..3 * MAX_EXPERTS].chunks(3).all(|tile| tile[2] == EXPERT_ROWS));
    let header = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/include/params.h")).expect("the header");
    let line = format!("constexpr u32 MAX_EXPERTS = {MAX_EXPERTS}, EXPERT_ROWS = {EXPERT_ROWS};");
    assert!(header.contains(&line), "{line}");
}

#[test]
fn tiles_hold_every_pair_once() {
    check_tiles(20);
}

pub(crate) fn check_tiles(cases: usize) {
    let mut rng = rng();
    for _ in 0..cases {
        let experts = 1 + rng.below(40);
        let pairs = 1 + rng.below(300);
        let picked = rng.tokens(pairs, experts);
        for order in [Order::Forward, Order::Reverse, Order::Random(3)] {
            let tile_rows = pick(&mut rng, &ExpertTiles::ALL).rows();
            let Sorted { order, tiles } = sort(order, &picked, experts, tile_rows);
            let mut seen = vec![false; picked.len()];
            for tile in tiles[1..][..3 * tiles[0] as usize].chunks(3) {
                assert!((1..=tile_rows).contains(&tile[2]));
                for &pair in &order[tile[1] as usize..][..tile[2] as usize] {
                    assert_eq!(picked[pair as usize], tile[0]);
                    assert!(!std::mem::replace(&mut seen[pair as usize], true), "pair {pair} is in two tiles");
                }
            }
            assert!(seen.iter().all(|&seen| seen), "a pair is missing");
        }
    }
}

/// Returns a number of rows of a tile of the list whose parts a product can take, and a number of pairs that fills several.
fn random_tiles(product: &ExpertProduct, rng: &mut TestRng) -> (u32, usize) {
    let rows: Vec<u32> = ExpertTiles::ALL.map(ExpertTiles::rows).to_vec();
    let whole: Vec<u32> = rows.into_iter().filter(|rows| rows.is_multiple_of(product.cta[0])).collect();
    (pick(rng, &whole), 1 + rng.below(2 * product.cta[0] as usize))
}

/// A weight of experts, or of heads.
struct Weights {
    plain: Array,
    quantised: Option<Weight>,
    values: Vec<f64>,
}

impl Weights {
    fn draw(dtype: Dtype, format: Option<QuantFormat>, [rows, k]: [usize; 2], rng: &mut TestRng) -> Self {
        let plain = Array::random(dtype, rows * k, rng);
        let quantised = format.map(|format| Weight::draw(rng, format, rows, k));
        let values = quantised.as_ref().map_or_else(|| plain.values(), |weight| weight.values.clone());
        Self { plain, quantised, values }
    }

    /// Returns parameters with the weight.
    fn params(&self) -> ExpertLinearParams {
        let quant = self.quantised.as_ref().map_or_else(QuantWeight::default, |w| w.layout.planes(address(&w.memory)));
        ExpertLinearParams { quant, weight: self.plain.ptr(), ..ExpertLinearParams::default() }
    }
}

pub(crate) fn check_linear(dtype: Dtype, format: Option<QuantFormat>, product: &ExpertProduct, rng: &mut TestRng) {
    let (experts, n, chosen) = (1 + rng.below(5), 1 + rng.below(2 * product.cta[1] as usize), 1 + rng.below(3));
    let (tile_rows, tokens) = random_tiles(product, rng);
    let block = format.map_or(8, QuantFormat::block_elements);
    let k = block * (1 + rng.below((96 / block).max(1)));
    let pairs = tokens * chosen;
    let share = pick(rng, &[1, chosen]);
    let (stride, column) = (n + 5, rng.below(6));
    let input = Array::random(dtype, pairs / share * k, rng);
    let weights = Weights::draw(dtype, format, [experts * n, k], rng);
    let bias = (rng.below(2) == 0).then(|| f32s(experts * stride, rng));
    let picked = rng.tokens(pairs, experts);
    let out = in_every_order(|order| {
        let sorted = sort(order, &picked, experts, tile_rows);
        let mut out = Array::new(dtype, &vec![0.0; pairs * stride]);
        let params = ExpertLinearParams {
            input: input.ptr(),
            out: out.ptr_mut(),
            bias: bias.as_deref().map_or(0, address),
            order: address(&sorted.order),
            tiles: address(&sorted.tiles),
            n: n as u32,
            k: k as u32,
            share: share as u32,
            column: column as u32,
            out_stride: stride as u32,
            input_stride: k as u32,
            tile_rows,
            ..weights.params()
        };
        launch(&KERNELS, order, &product.instance, params.grid(pairs as u32, experts as u32, product.cta), &params);
        out
    });
    let value = |(pair, column_of): (usize, usize)| {
        if !(column..column + n).contains(&column_of) {
            return 0.0;
        }
        let expert = picked[pair] as usize;
        let row = &weights.values[(expert * n + column_of - column) * k..][..k];
        let x = input.range(pair / share * k..(pair / share + 1) * k);
        let dot: f64 = x.iter().zip(row).map(|(x, w)| x * w).sum();
        dot + bias.as_ref().map_or(0.0, |bias| f64::from(bias[expert * stride + column_of]))
    };
    let expected: Vec<f64> = (0..pairs * stride).map(|i| value((i / stride, i % stride))).collect();
    assert_near(&out.values(), &expected, 4.0 * Tolerance::Elementwise.bound(dtype), &product.instance.name);
}

/// Checks the products of heads, which use some of the columns of their input and output.
fn check_heads(dtype: Dtype, format: Option<QuantFormat>, product: &ExpertProduct, rng: &mut TestRng) {
    let (heads, n) = (1 + rng.below(4), 1 + rng.below(20));
    let (tile_rows, tokens) = random_tiles(product, rng);
    let k = format.map_or(8, QuantFormat::block_elements) * (1 + rng.below(2));
    let (width, stride) = (k + 8 * rng.below(3), n + rng.below(4));
    let input = Array::random(dtype, tokens * heads * width, rng);
    let weights = Weights::draw(dtype, format, [heads * n, k], rng);
    let out = in_every_order(|order| {
        let mut out = Array::new(dtype, &vec![0.0; tokens * heads * stride]);
        let params = ExpertLinearParams {
            input: input.ptr(),
            out: out.ptr_mut(),
            n: n as u32,
            k: k as u32,
            share: 1,
            input_stride: width as u32,
            out_stride: stride as u32,
            heads: heads as u32,
            tokens: tokens as u32,
            tile_rows,
            ..weights.params()
        };
        launch(&KERNELS, order, &product.instance, params.head_grid(product.cta), &params);
        out
    });
    let value = |i: usize| {
        let (row, column) = (i / stride, i % stride);
        if column >= n {
            return 0.0;
        }
        let weight = &weights.values[(row % heads * n + column) * k..][..k];
        input.range(row * width..row * width + k).iter().zip(weight).map(|(x, w)| x * w).sum()
    };
    let expected: Vec<f64> = (0..tokens * heads * stride).map(value).collect();
    let context = format!("{} for heads", product.instance.name);
    assert_near(&out.values(), &expected, 4.0 * Tolerance::Elementwise.bound(dtype), &context);
}

fn check_sum(dtype: Dtype, rng: &mut TestRng) {
    let (tokens, chosen, cols) = (1 + rng.below(4), 1 + rng.below(5), pick(rng, &[1, 7, 100, 300]));
    let input = Array::random(dtype, tokens * chosen * cols, rng);
    let weights = f32s(tokens * chosen, rng);
    let before = Array::random(dtype, tokens * cols, rng);
    let (adds, scale) = (rng.below(2) == 0, pick(rng, &[1.0f32, 0.22]));
    let out = in_every_order(|order| {
        let mut out = before.clone();
        let at = out.ptr_mut();
        let params = ExpertSumParams {
            out: at,
            input: input.ptr(),
            weights: address(&weights),
            add: if adds { at } else { 0 },
            tokens: tokens as u32,
            cols: cols as u32,
            chosen: chosen as u32,
            scale,
        };
        launch(&KERNELS, order, &manifest::expert_sum(dtype), params.grid(), &params);
        out
    });
    let value = |i: usize| {
        let (token, col) = (i / cols, i % cols);
        let row = |j: usize| token * chosen + j;
        let sum: f64 = (0..chosen).map(|j| f64::from(weights[row(j)]) * input.get(row(j) * cols + col)).sum();
        f64::from(scale) * sum + if adds { before.get(i) } else { 0.0 }
    };
    let expected: Vec<f64> = (0..tokens * cols).map(value).collect();
    assert_near(&out.values(), &expected, 2.0 * Tolerance::Elementwise.bound(dtype), "the sum of experts");
}

fn check_gate(dtype: Dtype, rng: &mut TestRng) {
    let (rows, cols) = (1 + rng.below(5), pick(rng, &[1, 7, 100, 300]));
    let (before, gate) = (Array::random(dtype, rows * cols, rng), Array::random(dtype, rows, rng));
    let out = in_every_order(|order| {
        let mut out = before.clone();
        let params = GateRowsParams { out: out.ptr_mut(), gate: gate.ptr(), rows: rows as u32, cols: cols as u32 };
        launch(&KERNELS, order, &manifest::gate_rows(dtype), params.grid(), &params);
        out
    });
    let value = |i: usize| before.get(i) / (1.0 + (-gate.get(i / cols)).exp());
    let expected: Vec<f64> = (0..rows * cols).map(value).collect();
    assert_near(&out.values(), &expected, 2.0 * Tolerance::Elementwise.bound(dtype), "the gate");
}

#[test]
fn experts_are_those_of_the_host() {
    let mut rng = rng();
    for dtype in dtypes() {
        (0..20).for_each(|_| check_route(dtype, &mut rng));
    }
}

#[test]
fn products_are_those_of_the_experts() {
    let mut rng = rng();
    for dtype in dtypes() {
        for format in formats() {
            for product in products(format, dtype) {
                let times = if format.is_none() { 6 } else { 1 };
                (0..times).for_each(|_| check_linear(dtype, format, &product, &mut rng));
                if matches!(format, None | Some(QuantFormat::Q4_0)) {
                    check_heads(dtype, format, &product, &mut rng);
                }
            }
        }
    }
}

/// A prompt in parts, or beside others, has the same experts' outputs as alone.
#[test]
fn a_pair_has_the_same_bits_in_any_tile() {
    let mut rng = rng();
    let (experts, n, k, tokens) = (3usize, 21usize, 64usize, 150usize);
    let chips = [Chip::SM_70, Chip::SM_89];
    for (chip, dtype) in chips.into_iter().flat_map(|chip| dtypes().into_iter().map(move |dtype| (chip, dtype))) {
        for format in [None, Some(QuantFormat::Q4_0), Some(QuantFormat::F8E4M3)] {
            let weights = Weights::draw(dtype, format, [experts * n, k], &mut rng);
            let input = Array::random(dtype, tokens * k, &mut rng);
            let picked = rng.tokens(tokens, experts);
            let outputs = |product: &ExpertProduct, tile_rows: u32, tokens: usize| {
                let sorted = sort(Order::Forward, &picked[..tokens], experts, tile_rows);
                let mut out = Array::new(dtype, &vec![0.0; tokens * n]);
                let params = ExpertLinearParams {
                    input: input.ptr(),
                    out: out.ptr_mut(),
                    order: address(&sorted.order),
                    tiles: address(&sorted.tiles),
                    n: n as u32,
                    k: k as u32,
                    share: 1,
                    out_stride: n as u32,
                    input_stride: k as u32,
                    tile_rows,
                    ..weights.params()
                };
                let grid = params.grid(tokens as u32, experts as u32, product.cta);
                launch(&KERNELS, Order::Forward, &product.instance, grid, &params);
                out.values()
            };
            let gemm = |tile| manifest::expert_gemm(chip, format, dtype, tile);
            let (Some(small), Some(large)) = (gemm(GemmTile::Small), gemm(GemmTile::Large)) else { continue };
            let alone = outputs(&small, 32, 5);
            assert!(alone.iter().any(|value| *value != 0.0));
            assert_eq!(alone, outputs(&small, 128, tokens)[..5 * n], "{}", small.instance.name);
            let whole = outputs(&large, 128, tokens);
            assert_eq!(outputs(&large, 128, 5), whole[..5 * n], "{}", large.instance.name);
            if format.is_none() {
                assert_eq!(alone, whole[..5 * n], "{} and {}", small.instance.name, large.instance.name);
            }
        }
    }
}

#[test]
fn rows_are_summed_and_gated() {
    let mut rng = rng();
    for dtype in dtypes() {
        for _ in 0..8 {
            check_sum(dtype, &mut rng);
            check_gate(dtype, &mut rng);
        }
    }
}

#[test]
fn logits_that_are_not_numbers_choose_experts_that_exist() {
    let (experts, chosen, cols) = (6usize, 3usize, 8usize);
    let input = Array::new(Dtype::F32, &[f64::NAN; 8]);
    let weight = vec![1.0f32; experts * cols];
    for sigmoid in [0, 1] {
        let (mut picked, mut weights) = (vec![u32::MAX; chosen], vec![0.0f32; chosen]);
        let params = RouteParams {
            input: input.ptr(),
            weight: address(&weight),
            picked: address_mut(&mut picked),
            weights: address_mut(&mut weights),
            tokens: 1,
            cols: cols as u32,
            experts: experts as u32,
            chosen: chosen as u32,
            sigmoid,
            scale: 1.0,
            ..RouteParams::default()
        };
        launch(&KERNELS, Order::Forward, &manifest::route(Dtype::F32), params.grid(), &params);
        assert_eq!(picked, [0, 1, 2]);
        assert!(weights.iter().all(|weight| weight.is_nan()));
    }
}
