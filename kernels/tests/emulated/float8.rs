//! Compares products whose activations are rounded to e4m3 with f64.

use octavo_kernels::manifest::{self, Dtype, Instance};
use octavo_kernels::params::{QuantLinearParams, QuantWeight, QuantizeParams};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::testing::TestRng;
use octavo_ops::{e4m3, to_e4m3};

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_fp8, has_fp8_mma};
use crate::quantized::Weight;
use crate::support::{Array, Tolerance, uniform};

/// Rounded activations `[m, k]`.
#[derive(PartialEq)]
struct Rounded {
    codes: Vec<u8>,
    /// Bits of the scale of each row, which may be NaN.
    scales: Vec<u32>,
}

impl Rounded {
    fn scale(&self, row: usize) -> f32 {
        f32::from_bits(self.scales[row])
    }

    fn values(&self, k: usize) -> Vec<f64> {
        let value = |(at, code): (usize, &u8)| f64::from(e4m3(*code)) * f64::from(self.scale(at / k));
        self.codes.iter().enumerate().map(value).collect()
    }
}

fn round(kernels: &Kernels, input: &Array, m: usize, k: usize) -> Rounded {
    let instance = manifest::quantize_f8(input.dtype);
    in_every_order(|order| {
        let (mut codes, mut scales) = (vec![0x7f; m * k], vec![u32::MAX; m]);
        let params = QuantizeParams {
            input: input.ptr(),
            codes: address_mut(&mut codes),
            scales: address_mut(&mut scales),
            m: m as u32,
            k: k as u32,
            ..QuantizeParams::default()
        };
        launch(kernels, order, &instance, params.row_grid(), &params);
        Rounded { codes, scales }
    })
}

/// Returns the 16-bit types of the kernels that round.
fn rounded() -> Vec<Dtype> {
    dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32 && has_fp8()).collect()
}

/// Returns the 16-bit types of the kernels that multiply.
fn narrow() -> Vec<Dtype> {
    rounded().into_iter().filter(|_| has_fp8_mma()).collect()
}

/// Compares activations that are rounded in groups of 128, of which the last may be shorter, with their definition.
fn check_groups(dtype: Dtype, [m, k, stride]: [usize; 3], rng: &mut TestRng) {
    let instance = manifest::quantize_f8_groups(dtype);
    let kernels = Kernels::new(std::slice::from_ref(&instance));
    let groups = k.div_ceil(128);
    let mut input = uniform(dtype, m * k, 3.0, rng);
    // Groups of very different sizes, one of zeros, one that is tiny, and one that has no scale.
    (0..m * k).for_each(|at| input.set(at, input.get(at) * [1.0, 64.0, 0.01][at / 128 % 3]));
    (0..k.min(128)).for_each(|at| input.set(at, 0.0));
    (0..k.min(128)).for_each(|at| input.set((m - 1) * k + at, 1e-6));
    let wrong = m / 2 * k + k - 1;
    input.set(wrong, f64::NAN);
    let (codes, scales) = in_every_order(|order| {
        let (mut codes, mut scales) = (vec![0x7fu8; m * k], vec![u32::MAX; groups * stride]);
        let params = QuantizeParams {
            input: input.ptr(),
            codes: address_mut(&mut codes),
            scales: address_mut(&mut scales),
            m: m as u32,
            k: k as u32,
            stride: stride as u32,
            reserved: 0,
        };
        launch(&kernels, order, &instance, params.grid(instance.threads), &params);
        (codes, scales)
    });
    for (group, row) in (0..groups).flat_map(|group| (0..stride).map(move |row| (group, row))) {
        let scale = scales[group * stride + row];
        if row >= m {
            assert_eq!(scale, u32::MAX, "{dtype:?}: surplus rows have no scales");
            continue;
        }
        let place = row * k + group * 128..(row * k + (group + 1) * 128).min((row + 1) * k);
        let (x, codes) = (input.range(place.clone()), &codes[place.clone()]);
        if place.contains(&wrong) {
            assert!(f32::from_bits(scale).is_nan() && codes.iter().all(|code| *code == 0));
            continue;
        }
        let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs() as f32));
        let expected = (largest / 448.0).max(1.0 / (448.0 * 512.0));
        assert_eq!(f32::from_bits(scale), expected, "{dtype:?} row {row} group {group}");
        assert!(
            x.iter().map(|x| to_e4m3(*x as f32 / expected)).eq(codes.iter().copied()),
            "{dtype:?} row {row} group {group}"
        );
    }
}

#[test]
fn small_groups_are_rounded_as_vllm_rounds_them() {
    let mut rng = rng();
    for dtype in rounded() {
        for shape in [[3, 32, 3], [5, 1184, 16], [2 + rng.below(4), 32 * (1 + rng.below(60)), 16]] {
            check_groups(dtype, shape, &mut rng);
        }
    }
}

#[test]
fn small_rows_are_rounded_as_vllm_rounds_them() {
    let mut rng = rng();
    for dtype in rounded() {
        let kernels = Kernels::new(&[manifest::quantize_f8(dtype)]);
        let (m, k) = (5, 32 * (1 + rng.below(80)));
        let mut input = uniform(dtype, m * k, 3.0, &mut rng);
        (0..k).for_each(|at| input.set(at, 0.0));
        // Numbers far below the largest are denormal, then zero.
        (0..k).for_each(|at| input.set(k + at, input.get(k + at) / f64::from(1u32 << (at % 20))));
        (0..k).for_each(|at| input.set(2 * k + at, 1e-6));
        input.set(3 * k + k / 2, f64::NAN);
        input.set(4 * k + k - 1, f64::NEG_INFINITY);
        let rounded = round(&kernels, &input, m, k);
        for row in 0..3 {
            let x = input.range(row * k..(row + 1) * k);
            let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs() as f32));
            let scale = (largest / 448.0).max(1.0 / (448.0 * 512.0));
            assert_eq!(rounded.scale(row), scale, "{dtype:?} row {row}");
            let codes = x.iter().map(|x| to_e4m3(*x as f32 * (1.0 / scale)));
            assert!(codes.eq(rounded.codes[row * k..][..k].iter().copied()), "{dtype:?} row {row}");
        }
        for row in 3..5 {
            assert!(rounded.scale(row).is_nan() && rounded.codes[row * k..][..k].iter().all(|code| *code == 0));
        }
    }
}

/// A product and its addends.
struct Case {
    weight: Weight,
    out: Dtype,
    n: usize,
    k: usize,
    bias: Vec<f32>,
}

impl Case {
    fn run(&self, kernels: &Kernels, instance: &Instance, x: &Rounded, add: Option<&Array>) -> Array {
        let m = x.scales.len();
        in_every_order(|order| {
            let mut found = Array::poisoned(self.out, m * self.n);
            let params = QuantLinearParams {
                weight: self.weight.layout.planes(address(&self.weight.memory)),
                input: address(&x.codes),
                scales: address(&x.scales),
                bias: address(&self.bias),
                add: add.map_or(0, Array::ptr),
                out: found.ptr_mut(),
                m: m as u32,
                n: self.n as u32,
                k: self.k as u32,
                out_stride: self.n as u32,
                scale: 0.5,
                softcap: 0.0,
            };
            launch(kernels, order, instance, params.tile_grid(manifest::GEMM_F8_TILE), &params);
            found
        })
    }
}

/// Compares a product with that of the rounded activations, a row with the same row alone, and looks where NaN goes.
pub(crate) fn check(dtype: Dtype, out: Dtype, [m, n, k]: [usize; 3], rng: &mut TestRng) {
    let instance = manifest::gemm_f8(out);
    let kernels = Kernels::new(&[instance.clone(), manifest::quantize_f8(dtype)]);
    let weight = Weight::draw(rng, QuantFormat::F8E4M3, n, k);
    let case = Case { weight, out, n, k, bias: (0..n).map(|_| rng.signed()).collect() };
    let mut input = uniform(dtype, m * k, 2.0, rng);
    let add = uniform(out, m * n, 1.0, rng);
    let rounded = round(&kernels, &input, m, k);
    let found = case.run(&kernels, &instance, &rounded, Some(&add));
    let x = rounded.values(k);
    let dot = |i: usize, j: usize| -> f64 {
        x[i * k..][..k].iter().zip(&case.weight.values[j * k..][..k]).map(|(a, b)| a * b).sum()
    };
    let value = |at: usize| (dot(at / n, at % n) + f64::from(case.bias[at % n])) * 0.5 + add.get(at);
    let expected: Vec<f64> = (0..m * n).map(value).collect();
    let context = format!("{} of {dtype:?}, m {m} n {n} k {k}", instance.name);
    assert_near(&found.values(), &expected, Tolerance::Product.bound(out), &context);

    let row = rng.below(m);
    let alone = round(&kernels, &Array::new(dtype, &input.range(row * k..(row + 1) * k)), 1, k);
    let alone = case.run(&kernels, &instance, &alone, None);
    let wrong = (row + 1) % m;
    if m > 1 {
        input.set(wrong * k + rng.below(k), f64::NAN);
    }
    let all = case.run(&kernels, &instance, &round(&kernels, &input, m, k), None);
    assert!(alone.bits(0..n) == all.bits(row * n..(row + 1) * n), "{context}: row {row} alone");
    for i in 0..m {
        let is_nan = all.range(i * n..(i + 1) * n).iter().all(|x| x.is_nan());
        assert_eq!(is_nan, m > 1 && i == wrong, "{context}: NaN stays in its row");
    }
}

#[test]
fn products_of_drawn_shapes_are_near_those_of_the_rounded_values() {
    let mut rng = rng();
    for dtype in narrow() {
        for out in [dtype, Dtype::F32] {
            let drawn = [1 + rng.below(140), 1 + rng.below(150), 32 * (1 + rng.below(9))];
            for shape in [[1, 1, 32], [129, 130, 96], drawn] {
                check(dtype, out, shape, &mut rng);
            }
        }
    }
}

#[test]
fn small_product() {
    narrow().into_iter().take(1).for_each(|dtype| check(dtype, dtype, [20, 12, 96], &mut rng()));
}

#[test]
fn scales_are_applied_to_the_sums_of_codes() {
    let mut rng = rng();
    for out in dtypes().into_iter().filter(|_| has_fp8()) {
        let instance = manifest::scale_f8(out);
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let (m, n, stride) = (1 + rng.below(5), 1 + rng.below(600), 640);
        let mut numbers = |count: usize| (0..count).map(|_| rng.signed()).collect::<Vec<f32>>();
        let (sums, rows, columns, bias) = (numbers(m * n), numbers(m), numbers(n), numbers(n));
        let add = uniform(out, m * stride, 1.0, &mut rng);
        let found = in_every_order(|order| {
            let mut found = Array::poisoned(out, m * stride);
            let params = QuantLinearParams {
                weight: QuantWeight { scales: address(&columns), ..QuantWeight::default() },
                input: address(&sums),
                scales: address(&rows),
                bias: address(&bias),
                add: add.ptr(),
                out: found.ptr_mut(),
                m: m as u32,
                n: n as u32,
                k: 32,
                out_stride: stride as u32,
                scale: 0.5,
                softcap: 0.0,
            };
            launch(&kernels, order, &instance, params.column_grid(instance.threads), &params);
            found
        });
        for row in 0..m {
            let value = |column: usize| {
                let scaled = f64::from(sums[row * n + column]) * f64::from(rows[row]) * f64::from(columns[column]);
                (scaled + f64::from(bias[column])) * 0.5 + add.get(row * stride + column)
            };
            let (expected, place) = ((0..n).map(value).collect::<Vec<_>>(), row * stride..row * stride + n);
            assert_near(&found.range(place), &expected, Tolerance::Elementwise.bound(out), &instance.name);
            let beyond = row * stride + n..(row + 1) * stride;
            assert!(found.range(beyond).iter().all(|x| x.is_nan()), "{}: columns beyond the last", instance.name);
        }
    }
}
