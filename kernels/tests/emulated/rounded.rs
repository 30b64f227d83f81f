//! Compares kernels that round their output for products with integers, or compute more than one of these, with the kernels that
//! do so one after the other: bit for bit.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Activation, Dtype, Instance, NormMean};
use octavo_kernels::params::{
    GluCodesParams, GluParams, NormCodesParams, NormParams, QuantGluParams, QuantLinearParams, QuantPairParams,
    QuantizeParams, RoundedRows,
};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::testing::TestRng;

use crate::common::{in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes};
use crate::quantized::Weight;
use crate::support::{Array, pick, uniform};

/// Rows that a kernel has rounded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rounded {
    codes: Vec<i8>,
    /// Bits of the scales, which may be NaN.
    scales: Vec<[u32; 2]>,
}

impl Rounded {
    pub(crate) fn poisoned(elements: usize) -> Self {
        Self { codes: vec![-128; elements], scales: vec![[u32::MAX; 2]; elements / 32] }
    }

    pub(crate) fn params(&mut self) -> RoundedRows {
        RoundedRows { codes: address_mut(&mut self.codes), scales: address_mut(&mut self.scales) }
    }

    /// Rounds rows by the kernel for it.
    fn of(kernels: &Kernels, order: Order, input: &Array, cols: usize) -> Self {
        let mut rounded = Self::poisoned(input.len());
        let RoundedRows { codes, scales } = rounded.params();
        let (m, k) = ((input.len() / cols) as u32, cols as u32);
        let params = QuantizeParams { input: input.ptr(), codes, scales, m, k, ..QuantizeParams::default() };
        let instance = manifest::quantize_activations(input.dtype);
        launch(kernels, order, &instance, params.grid(instance.threads), &params);
        rounded
    }

    /// Checks that elements from `first` on are `values`, rounded.
    pub(crate) fn check(&self, first: usize, values: &[f64], context: &str) {
        for (at, block) in values.chunks(32).enumerate() {
            let largest = block.iter().fold(0.0f32, |most, x| most.max(x.abs() as f32));
            let (scale, inverse) = (largest / 127.0, if largest == 0.0 { 0.0 } else { 127.0 / largest });
            let code = |x: &f64| (*x as f32 * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
            let codes: Vec<i8> = block.iter().map(code).collect();
            let sum: i32 = codes.iter().map(|code| i32::from(*code)).sum();
            let from = first + at * 32;
            assert_eq!(self.codes[from..from + 32], codes, "{context}: codes of block {at}");
            let scales = [scale, scale * sum as f32].map(f32::to_bits);
            assert_eq!(self.scales[from / 32], scales, "{context}: scales of block {at}");
        }
    }
}

/// Numbers of columns: one block, less than a CTA, and more.
const COLS: [usize; 5] = [32, 96, 1024, 2080, 4096];

fn check_norm(dtype: Dtype, mean: NormMean, rng: &mut TestRng) {
    let instances =
        [manifest::norm(dtype, mean), manifest::norm_codes(dtype, mean), manifest::quantize_activations(dtype)];
    let kernels = Kernels::new(&instances);
    let (rows, cols) = (1 + rng.below(3), pick(rng, &COLS));
    let (input, residual) = (Array::random(dtype, rows * cols, rng), Array::random(dtype, rows * cols, rng));
    let weight: Vec<f32> = (0..cols).map(|_| rng.signed()).collect();
    let residual_after = rng.below(2) as u32;
    let run = |order, instance: &Instance, is_rounded: bool| {
        let (mut stream, mut out) = (residual.clone(), Array::poisoned(dtype, rows * cols));
        let norm = NormParams {
            out: out.ptr_mut(),
            input: input.ptr(),
            residual: stream.ptr_mut(),
            weight: address(&weight),
            rows: rows as u32,
            cols: cols as u32,
            eps: 1e-5,
            weight_offset: 1.0,
            residual_after,
            ..NormParams::default()
        };
        let (mut rounded, shared) = (Rounded::poisoned(rows * cols), NormParams::dynamic_shared(cols));
        if is_rounded {
            let params = NormCodesParams { rounded: rounded.params(), norm };
            kernels.launch(order, instance, norm.grid(), shared, &params);
        } else {
            kernels.launch(order, instance, norm.grid(), shared, &norm);
            rounded = Rounded::of(&kernels, order, &out, cols);
        }
        (out, stream, rounded)
    };
    let found = in_every_order(|order| run(order, &instances[1], true));
    assert!(found == run(Order::Forward, &instances[0], false), "{}: {rows} x {cols}", instances[1].name);
    found.2.check(0, &found.0.values(), &instances[1].name);
}

fn check_glu(dtype: Dtype, kind: Activation, rng: &mut TestRng) {
    let instances =
        [manifest::glu(dtype, kind), manifest::glu_codes(dtype, kind), manifest::quantize_activations(dtype)];
    let kernels = Kernels::new(&instances);
    let (rows, cols) = (1 + rng.below(3), pick(rng, &COLS));
    let input = Array::random(dtype, rows * 2 * cols, rng);
    let run = |order, instance: &Instance, is_rounded: bool| {
        let (mut out, mut rounded) = (Array::poisoned(dtype, rows * cols), Rounded::poisoned(rows * cols));
        let (rows, columns) = (rows as u32, cols as u32);
        let glu = GluParams { out: out.ptr_mut(), input: input.ptr(), rows, cols: columns, alpha: 1.702, limit: 0.75 };
        let grid = glu.grid(instance.threads);
        if is_rounded {
            launch(&kernels, order, instance, grid, &GluCodesParams { rounded: rounded.params(), glu });
        } else {
            launch(&kernels, order, instance, grid, &glu);
            rounded = Rounded::of(&kernels, order, &out, cols);
        }
        (out, rounded)
    };
    let found = in_every_order(|order| run(order, &instances[1], true));
    assert!(found == run(Order::Forward, &instances[0], false), "{}: {rows} x {cols}", instances[1].name);
}

#[test]
fn rows_are_rounded_as_after_they_are_stored() {
    let rng = &mut rng();
    for dtype in dtypes() {
        [NormMean::Rms, NormMean::Layer].into_iter().for_each(|mean| check_norm(dtype, mean, rng));
        let kinds = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::ClampedSwiglu];
        kinds.into_iter().for_each(|kind| check_glu(dtype, kind, rng));
    }
}

/// A weight, its rows, and the product's sizes and addends.
fn product(weight: &Weight, x: &mut Rounded, [m, n, k]: [usize; 3]) -> QuantLinearParams {
    let RoundedRows { codes, scales } = x.params();
    QuantLinearParams {
        weight: weight.layout.planes(address(&weight.memory)),
        input: codes,
        scales,
        m: m as u32,
        n: n as u32,
        k: k as u32,
        out_stride: n as u32,
        scale: 1.5,
        ..QuantLinearParams::default()
    }
}

fn check_pair(formats: [QuantFormat; 2], out: Dtype, rows: u32, rng: &mut TestRng) {
    let [first, second] = formats.map(|format| manifest::mmvq(format, out, rows));
    let instances =
        [manifest::mmvq_pair(formats, out, rows), first, second, manifest::quantize_activations(Dtype::F32)];
    let kernels = Kernels::new(&instances);
    let (m, k, sizes) =
        (1 + rng.below(rows as usize), 256 * (1 + rng.below(5)), [1 + rng.below(30), 1 + rng.below(30)]);
    let weights = [0, 1].map(|at| Weight::draw(rng, formats[at], sizes[at], k));
    let mut x = Rounded::of(&kernels, Order::Forward, &uniform(Dtype::F32, m * k, 2.0, rng), k);
    let stride = sizes[0] + sizes[1];
    let bias: Vec<f32> = (0..stride).map(|_| rng.signed()).collect();
    let mut run = |order, at_once: bool| {
        let mut found = Array::poisoned(out, m * stride);
        let mut part = |at: usize| {
            let columns = at * sizes[0];
            QuantLinearParams {
                bias: address(&bias) + (columns * size_of::<f32>()) as u64,
                out: found.ptr_mut() + (columns * out.bytes()) as u64,
                out_stride: stride as u32,
                ..product(&weights[at], &mut x, [m, sizes[at], k])
            }
        };
        let params = QuantPairParams { first: part(0), second: part(1) };
        if at_once {
            launch(&kernels, order, &instances[0], params.grid(), &params);
        } else {
            launch(&kernels, order, &instances[1], params.first.grid(), &params.first);
            launch(&kernels, order, &instances[2], params.second.grid(), &params.second);
        }
        found
    };
    let found = in_every_order(|order| run(order, true));
    assert!(found == run(Order::Forward, false), "{}: {m} x {sizes:?} x {k}", instances[0].name);
}

#[test]
fn two_formats_at_once_are_as_one_after_the_other() {
    let rng = &mut rng();
    for formats in manifest::MMVQ_PAIRS {
        for (out, rows) in dtypes().into_iter().zip([1, 4, 8]) {
            check_pair(formats, out, rows, rng);
        }
        check_pair(formats, Dtype::F16, 2, rng);
    }
}

/// Compares with a product, its activation and the rounding.
pub(crate) fn check_gated(format: QuantFormat, dtype: Dtype, activation: Activation, rng: &mut TestRng) {
    assert!(manifest::has_mmvq_glu(dtype, activation));
    let [gated, mmvq, glu] =
        [manifest::mmvq_glu(format, dtype), manifest::mmvq(format, dtype, 1), manifest::glu(dtype, activation)];
    let roundings = [manifest::quantize_activations(dtype), manifest::quantize_activations(Dtype::F32)];
    let kernels = Kernels::new(&[&[gated.clone(), mmvq.clone(), glu.clone()], &roundings[..]].concat());
    let (cols, k) = (32 * (1 + rng.below(3)), format.block_elements() * (1 + rng.below(3)));
    let weight = Weight::draw(rng, format, 2 * cols, k);
    let mut x = Rounded::of(&kernels, Order::Forward, &uniform(Dtype::F32, k, 2.0, rng), k);
    let bias: Vec<f32> = (0..2 * cols).map(|_| rng.signed()).collect();
    let of = QuantLinearParams { bias: address(&bias), ..product(&weight, &mut x, [1, 2 * cols, k]) };

    let found = in_every_order(|order| {
        let (mut out, mut rounded) = (Array::poisoned(dtype, cols), Rounded::poisoned(cols));
        let params = QuantGluParams {
            rounded: rounded.params(),
            product: QuantLinearParams { out: out.ptr_mut(), ..of },
            gelu_tanh: u32::from(activation == Activation::GeluTanh),
            reserved: 0,
        };
        launch(&kernels, order, &gated, params.grid(), &params);
        (out, rounded)
    });
    let (mut both, mut out) = (Array::poisoned(dtype, 2 * cols), Array::poisoned(dtype, cols));
    let params = QuantLinearParams { out: both.ptr_mut(), ..of };
    launch(&kernels, Order::Forward, &mmvq, params.grid(), &params);
    let (out_at, input) = (out.ptr_mut(), both.ptr());
    let params = GluParams { out: out_at, input, rows: 1, cols: cols as u32, ..GluParams::default() };
    launch(&kernels, Order::Forward, &glu, params.grid(glu.threads), &params);
    let rounded = Rounded::of(&kernels, Order::Forward, &out, cols);
    assert!(found == (out, rounded), "{} {activation:?}: {cols} x {k}", gated.name);
}

#[test]
fn gated_products_are_as_one_after_the_other() {
    let rng = &mut rng();
    let narrow: Vec<_> = dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32).collect();
    for (at, format) in QuantFormat::ALL.into_iter().filter(|format| !format.is_float()).enumerate() {
        let activation = [Activation::Silu, Activation::GeluTanh][at / 2 % 2];
        check_gated(format, narrow[at % narrow.len()], activation, rng);
    }
}
