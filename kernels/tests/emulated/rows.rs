//! Tests of kernels for single rows.

use std::sync::LazyLock;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Activation, Dtype, NormMean, Pool};
use octavo_kernels::params::{
    ActParams, CopyBlocksParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluParams, NormParams,
    PoolRowsParams, TableRunsParams,
};
use octavo_ops::testing::{TestRng, erf};

use crate::common::{assert_near, by_rows, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes};
use crate::support::{Array, Tolerance, normal, pick};

const ACTIVATIONS: [Activation; 4] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Tanh];
const GATED: [Activation; 4] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::ClampedSwiglu];

static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let mut instances = vec![manifest::copy_blocks(), manifest::table_runs()];
    for dtype in dtypes() {
        instances.extend([manifest::embed(dtype), manifest::embed_add(dtype), manifest::gather_rows(dtype)]);
        instances.push(manifest::gather_columns(dtype));
        instances.extend([Pool::First, Pool::Mean].map(|pool| manifest::pool_rows(dtype, pool)));
        instances.extend([NormMean::Rms, NormMean::Layer].map(|mean| manifest::norm(dtype, mean)));
        instances.extend(GATED.map(|kind| manifest::glu(dtype, kind)));
        instances.extend(ACTIVATIONS.map(|kind| manifest::act(dtype, kind)));
    }
    Kernels::new(&instances)
});

/// Numbers of columns: whole 16-byte pieces or not, fewer and more than a CTA's threads process at once.
const COLS: [usize; 7] = [1, 7, 24, 64, 100, 1024, 2312];

fn f32s(len: usize, rng: &mut TestRng) -> Vec<f32> {
    (0..len).map(|_| normal(rng) as f32).collect()
}

fn check_embed(dtype: Dtype, rng: &mut TestRng) {
    let (vocabulary, cols, tokens) = (9, pick(rng, &COLS), 1 + rng.below(5));
    let table = Array::random(dtype, vocabulary * cols, rng);
    let ids = rng.tokens(tokens, vocabulary);
    let (named, drawn) = by_rows(&ids, rng);
    let (scale, before) = (pick(rng, &[1.0, 11.3137]), Array::random(dtype, tokens * cols, rng));
    let adds = rng.below(2) == 0;
    let out = in_every_order(|order| {
        let mut out = if adds { before.clone() } else { Array::poisoned(dtype, tokens * cols) };
        let params = EmbedParams {
            out: out.ptr_mut(),
            table: table.ptr(),
            ids: address(&named),
            drawn: address(&drawn),
            tokens: tokens as u32,
            cols: cols as u32,
            vocabulary: vocabulary as u32,
            scale,
        };
        let instance = if adds { manifest::embed_add(dtype) } else { manifest::embed(dtype) };
        launch(&KERNELS, order, &instance, params.grid(), &params);
        out
    });
    for (t, &id) in ids.iter().enumerate() {
        let (at, row) = (t * cols..(t + 1) * cols, id as usize * cols..(id as usize + 1) * cols);
        if scale == 1.0 && !adds {
            assert!(out.bits(at) == table.bits(row), "an unscaled row is copied");
            continue;
        }
        let added = before.range(at.clone()).into_iter().map(|x| if adds { x } else { 0.0 });
        let expected: Vec<f64> = table.range(row).iter().zip(added).map(|(x, y)| y + x * f64::from(scale)).collect();
        assert_near(&out.range(at), &expected, Tolerance::Elementwise.bound(dtype), "embed");
    }
}

fn norm_in_f64(mean: NormMean, row: &[f64], weight: &[f32], bias: Option<&[f32]>, eps: f32, offset: f32) -> Vec<f64> {
    let n = row.len() as f64;
    let centre = if mean == NormMean::Layer { row.iter().sum::<f64>() / n } else { 0.0 };
    let variance = row.iter().map(|x| (x - centre).powi(2)).sum::<f64>() / n;
    let root = (variance + f64::from(eps)).sqrt();
    let value = |(i, x): (usize, &f64)| {
        (x - centre) / root * (f64::from(weight[i]) + f64::from(offset)) + bias.map_or(0.0, |b| f64::from(b[i]))
    };
    row.iter().enumerate().map(value).collect()
}

/// Memory to which a norm writes.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Apart,
    Input,
    Residual,
}

pub(crate) fn check_norm(dtype: Dtype, mean: NormMean, rng: &mut TestRng) {
    let (rows, cols) = (1 + rng.below(4), pick(rng, &COLS[1..]));
    // The values are far from 0, where a variance by differences of squares would lose its precision.
    let shift = if mean == NormMean::Layer { 8.0 } else { 0.0 };
    let input = Array::new(dtype, &(0..rows * cols).map(|_| shift + normal(rng)).collect::<Vec<_>>());
    let residual = (rng.below(2) == 0).then(|| Array::random(dtype, rows * cols, rng));
    let weight = f32s(cols, rng);
    let bias = (mean == NormMean::Layer && rng.below(2) == 0).then(|| f32s(cols, rng));
    let (eps, offset) = (1e-5, pick(rng, &[0.0, 1.0]));
    let after = residual.is_some() && rng.below(2) == 0;
    let place = pick(
        rng,
        if after { &[Place::Apart, Place::Input, Place::Residual][..] } else { &[Place::Apart, Place::Input] },
    );
    let (out, stream) = in_every_order(|order| {
        let (mut input, mut stream) = (input.clone(), residual.clone());
        let mut out = Array::poisoned(dtype, rows * cols);
        let residual = stream.as_mut().map_or(0, Array::ptr_mut);
        let params = NormParams {
            out: match place {
                Place::Apart => out.ptr_mut(),
                Place::Input => input.ptr_mut(),
                Place::Residual => residual,
            },
            input: input.ptr(),
            residual,
            weight: address(&weight),
            bias: bias.as_deref().map_or(0, address),
            rows: rows as u32,
            cols: cols as u32,
            eps,
            weight_offset: offset,
            residual_after: u32::from(after),
            reserved: 0,
        };
        let instance = manifest::norm(dtype, mean);
        let shared = NormParams::dynamic_shared(cols);
        KERNELS.launch(order, &instance, params.grid(), shared, &params);
        match (place, stream) {
            (Place::Apart, stream) => (out, stream),
            (Place::Input, stream) => (input, stream),
            (Place::Residual, stream) => (stream.expect("a residual"), None),
        }
    });
    let mut read = input.clone();
    if let (Some(before), Some(stream), true) = (&residual, &stream, after) {
        assert!(stream.bits(0..rows * cols) == before.bits(0..rows * cols), "a residual after the norm is only read");
    }
    if let (Some(before), Some(after), false) = (&residual, &stream, after) {
        let sums: Vec<f64> = before.values().iter().zip(input.values()).map(|(a, b)| a + b).collect();
        assert_near(&after.values(), &sums, Tolerance::Elementwise.bound(dtype), "residual");
        read = after.clone();
    }
    for r in 0..rows {
        let row = r * cols..(r + 1) * cols;
        let mut expected = norm_in_f64(mean, &read.range(row.clone()), &weight, bias.as_deref(), eps, offset);
        if let (Some(residual), true) = (&residual, after) {
            expected.iter_mut().zip(residual.range(row.clone())).for_each(|(x, add)| *x += add);
        }
        // A mean is subtracted, so the rounding error of f32 is that of numbers as large as the mean.
        let tolerance = Tolerance::Elementwise.bound(dtype) * (1.0 + shift);
        assert_near(&out.range(row), &expected, tolerance, "norm");
    }
}

fn activation_in_f64(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
        Activation::Tanh => x.tanh(),
        Activation::ClampedSwiglu => unreachable!("it needs a gate"),
    }
}

fn gated_in_f64(kind: Activation, gate: f64, up: f64, (alpha, limit): (f32, f32)) -> f64 {
    if kind != Activation::ClampedSwiglu {
        return activation_in_f64(kind, gate) * up;
    }
    let (alpha, limit) = (f64::from(alpha), f64::from(limit));
    let gate = gate.min(limit);
    (up.clamp(-limit, limit) + 1.0) * gate / (1.0 + (-alpha * gate).exp())
}

fn check_glu(dtype: Dtype, kind: Activation, rng: &mut TestRng) {
    let (rows, cols) = (1 + rng.below(4), pick(rng, &COLS));
    let input = Array::random(dtype, rows * 2 * cols, rng);
    let (alpha, limit) = (1.702, pick(rng, &[7.0, 0.75]));
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, rows * cols);
        let (rows, cols) = (rows as u32, cols as u32);
        let params = GluParams { out: out.ptr_mut(), input: input.ptr(), rows, cols, alpha, limit };
        let instance = manifest::glu(dtype, kind);
        launch(&KERNELS, order, &instance, params.grid(instance.threads), &params);
        out
    });
    for r in 0..rows {
        let value = |c| {
            let (gate, up) = (input.get(r * 2 * cols + c), input.get((r * 2 + 1) * cols + c));
            gated_in_f64(kind, gate, up, (alpha, limit))
        };
        let expected: Vec<f64> = (0..cols).map(value).collect();
        let got = out.range(r * cols..(r + 1) * cols);
        // With few columns, all may be close to a zero of the gate, where only the last bits of the f32 arithmetic
        // remain.
        let tolerance = Tolerance::Elementwise.bound(dtype) * if cols < 8 { 4.0 } else { 1.0 };
        assert_near(&got, &expected, tolerance, "glu");
    }
}

fn check_act(dtype: Dtype, kind: Activation, rng: &mut TestRng) {
    let (rows, cols) = (1 + rng.below(4), pick(rng, &COLS));
    let (input, in_place) = (Array::random(dtype, rows * cols, rng), rng.below(2) == 0);
    let out = in_every_order(|order| {
        let mut out = if in_place { input.clone() } else { Array::poisoned(dtype, rows * cols) };
        let input = if in_place { out.ptr() } else { input.ptr() };
        let params = ActParams { out: out.ptr_mut(), input, rows: rows as u32, cols: cols as u32 };
        let instance = manifest::act(dtype, kind);
        launch(&KERNELS, order, &instance, params.grid(instance.threads), &params);
        out
    });
    let expected: Vec<f64> = input.values().into_iter().map(|x| activation_in_f64(kind, x)).collect();
    let tolerance = Tolerance::Elementwise.bound(dtype) * if rows * cols < 8 { 4.0 } else { 1.0 };
    assert_near(&out.values(), &expected, tolerance, "act");
}

fn check_gather(dtype: Dtype, rng: &mut TestRng) {
    let (rows, count, cols) = (6, 1 + rng.below(8), pick(rng, &COLS));
    let mut input = Array::random(dtype, rows * cols, rng);
    // Rows that are not selected may contain anything.
    let row_index = rng.tokens(count, rows - 1);
    input.copy_from((rows - 1) * cols, &Array::poisoned(dtype, cols), 0..cols);
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, count * cols);
        let params = GatherRowsParams {
            out: out.ptr_mut(),
            input: input.ptr(),
            row_index: address(&row_index),
            count: count as u32,
            cols: cols as u32,
        };
        launch(&KERNELS, order, &manifest::gather_rows(dtype), params.grid(), &params);
        out
    });
    for (i, &row) in row_index.iter().enumerate() {
        let from = row as usize * cols..(row as usize + 1) * cols;
        assert!(out.bits(i * cols..(i + 1) * cols) == input.bits(from), "row {i}");
    }
}

fn check_gather_columns(dtype: Dtype, rng: &mut TestRng) {
    let (rows, cols) = (1 + rng.below(4), pick(rng, &COLS));
    let input = Array::random(dtype, rows * cols, rng);
    let columns: Vec<usize> = (0..cols).map(|_| rng.below(cols)).collect();
    let column_index: Vec<f32> = columns.iter().map(|&column| column as f32).collect();
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, rows * cols);
        let params = GatherColumnsParams {
            out: out.ptr_mut(),
            input: input.ptr(),
            column_index: address(&column_index),
            rows: rows as u32,
            cols: cols as u32,
        };
        let instance = manifest::gather_columns(dtype);
        launch(&KERNELS, order, &instance, params.grid(instance.threads), &params);
        out
    });
    for at in 0..rows * cols {
        let from = at / cols * cols + columns[at % cols];
        assert!(out.bits(at..at + 1) == input.bits(from..from + 1), "element {at}");
    }
}

pub(crate) fn check_pool(dtype: Dtype, pool: Pool, rng: &mut TestRng) {
    let (rows, count, cols) = (1 + rng.below(40), 1 + rng.below(4), pick(rng, &COLS));
    let ranges: Vec<_> = (0..count)
        .map(|_| {
            let last = rng.below(rows);
            last - rng.below(last + 1)..last + 1
        })
        .collect();
    // Rows that are not reduced may contain anything.
    let mut input = Array::poisoned(dtype, rows * cols);
    let values = Array::random(dtype, rows * cols, rng);
    for range in &ranges {
        input.copy_from(range.start * cols, &values, range.start * cols..range.end * cols);
    }
    let row_index: Vec<u32> = ranges.iter().map(|range| range.end as u32 - 1).collect();
    let lens: Vec<u32> = ranges.iter().map(|range| range.len() as u32).collect();
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, count * cols);
        let params = PoolRowsParams {
            out: out.ptr_mut(),
            input: input.ptr(),
            row_index: address(&row_index),
            lens: address(&lens),
            count: count as u32,
            cols: cols as u32,
        };
        let instance = manifest::pool_rows(dtype, pool);
        launch(&KERNELS, order, &instance, params.grid(instance.threads), &params);
        out
    });
    for (i, range) in ranges.iter().enumerate() {
        let at = i * cols..(i + 1) * cols;
        if pool == Pool::First || range.len() == 1 {
            let first = range.start * cols..(range.start + 1) * cols;
            assert!(out.bits(at) == input.bits(first), "{pool:?} of {range:?}");
            continue;
        }
        let mean = |c| range.clone().map(|row| input.get(row * cols + c)).sum::<f64>() / range.len() as f64;
        let expected: Vec<f64> = (0..cols).map(mean).collect();
        // Few columns may all be sums that cancel.
        let tolerance = Tolerance::Elementwise.bound(dtype) * if cols < 8 { 40.0 } else { 1.0 };
        assert_near(&out.range(at), &expected, tolerance, "pool");
    }
}

pub(crate) fn check_copy_blocks(rng: &mut TestRng) {
    let (blocks, size) = (6, pick(rng, &[4, 256, 5000]));
    let before = Array::random(Dtype::F32, blocks * size, rng);
    let pairs = [1u32, 4, 3, 5];
    let after = in_every_order(|order| {
        let mut cache = before.clone();
        let params = CopyBlocksParams {
            cache: cache.ptr_mut(),
            pairs: address(&pairs),
            block_bytes: size as u64 * 4,
            count: 2,
            reserved: 0,
        };
        let instance = manifest::copy_blocks();
        launch(&KERNELS, order, &instance, params.grid(instance.threads), &params);
        cache
    });
    for (block, source) in [0, 1, 2, 3, 1, 3].into_iter().enumerate() {
        let bits = |array: &Array, block| array.bits(block * size..(block + 1) * size).to_vec();
        assert!(bits(&after, block) == bits(&before, source), "block {block}");
    }
}

pub(crate) fn check_table_runs(rng: &mut TestRng) {
    let before: Vec<u32> = (0..500).collect();
    // Runs that do not touch each other.
    let (mut runs, mut values, mut expected, mut at) = (Vec::new(), Vec::new(), before.clone(), rng.below(20));
    while at < 400 {
        let len = 1 + rng.below(90);
        runs.extend([at as u32, values.len() as u32, len as u32]);
        let new: Vec<u32> = (0..len).map(|_| 1000 + rng.below(1000) as u32).collect();
        expected[at..at + len].copy_from_slice(&new);
        values.extend(new);
        at += len + 1 + rng.below(30);
    }
    let found = in_every_order(|order| {
        let mut tables = before.clone();
        let params = TableRunsParams {
            tables: address_mut(&mut tables),
            runs: address(&runs),
            values: address(&values),
            count: runs.len() as u32 / 3,
            reserved: 0,
        };
        let instance = manifest::table_runs();
        launch(&KERNELS, order, &instance, params.grid(), &params);
        tables
    });
    assert_eq!(found, expected);
}

fn check_all(cases: u64) {
    let rng = &mut rng();
    for _ in 0..cases {
        for dtype in dtypes() {
            check_embed(dtype, rng);
            check_norm(dtype, NormMean::Rms, rng);
            check_norm(dtype, NormMean::Layer, rng);
            GATED.into_iter().for_each(|kind| check_glu(dtype, kind, rng));
            ACTIVATIONS.into_iter().for_each(|kind| check_act(dtype, kind, rng));
            check_gather(dtype, rng);
            check_gather_columns(dtype, rng);
            [Pool::First, Pool::Mean].into_iter().for_each(|pool| check_pool(dtype, pool, rng));
        }
        check_copy_blocks(rng);
        check_table_runs(rng);
    }
}

#[test]
fn rows_are_as_in_f64() {
    check_all(12);
}

#[test]
fn small_rows() {
    check_all(2);
}

#[test]
fn activations_end_well_at_both_ends() {
    let gates = [-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4];
    for kind in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
        let row: Vec<f64> = gates.iter().copied().chain([1.0; 7]).collect();
        let (input, mut out) = (Array::new(Dtype::F32, &row), Array::poisoned(Dtype::F32, 7));
        let params = GluParams { out: out.ptr_mut(), input: input.ptr(), rows: 1, cols: 7, ..GluParams::default() };
        let instance = manifest::glu(Dtype::F32, kind);
        launch(&KERNELS, Order::Forward, &instance, params.grid(instance.threads), &params);
        let expected = gates.map(|x: f64| x.max(0.0));
        assert_near(&out.values(), &expected, 1e-7, "activation");
    }
}
