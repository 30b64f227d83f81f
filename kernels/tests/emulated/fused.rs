//! Compares products that normalise their input and activate their output with the kernels that do so one after the other.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Activation, Dtype, FUSED_ROWS, FUSED_SHARED, NormMean, Pairs};
use octavo_kernels::params::{FusedLinearParams, GluParams, LinearParams, NormParams};
use octavo_ops::testing::TestRng;

use crate::common::{in_every_order, launch, rng};
use crate::launcher::{Kernels, address, dtypes};
use crate::support::{Array, pick, uniform};

const GATED: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

/// A product with all that may be fused with it.
struct Case {
    dtype: Dtype,
    out: Dtype,
    m: usize,
    /// Number of rows of the weight.
    n: usize,
    k: usize,
    /// Number of elements between rows of the output.
    stride: usize,
    input: Array,
    /// Weight of the norm, if there is one, and the value added to it.
    norm: Option<(Vec<f32>, f32)>,
    weight: Array,
    bias: Option<Vec<f32>>,
    /// Addend, without an activation.
    add: Option<Array>,
    activation: Option<Activation>,
    softcap: f32,
}

impl Case {
    fn draw(rng: &mut TestRng, (dtype, out): (Dtype, Dtype), [m, n, k]: [usize; 3]) -> Self {
        let activation = (dtype == out && rng.below(2) == 0).then(|| pick(rng, &GATED));
        let n = if activation.is_some() { 2 * n } else { n };
        let cols = if activation.is_some() { n / 2 } else { n };
        let stride = if activation.is_some() { cols } else { n + rng.below(3) };
        let floats = |len: usize, rng: &mut TestRng| (0..len).map(|_| rng.signed()).collect::<Vec<_>>();
        let is_normed = activation.is_none() || rng.below(4) > 0;
        Self {
            dtype,
            out,
            m,
            n,
            k,
            stride,
            input: uniform(dtype, m * k, 3.0, rng),
            norm: is_normed.then(|| (floats(k, rng), pick(rng, &[0.0, 1.0]))),
            weight: uniform(dtype, n * k, 0.5, rng),
            bias: (rng.below(2) == 0).then(|| floats(n, rng)),
            add: (activation.is_none() && rng.below(2) == 0).then(|| uniform(out, m * stride, 2.0, rng)),
            activation,
            softcap: if activation.is_none() && rng.below(3) == 0 { 3.0 } else { 0.0 },
        }
    }

    fn linear(&self, input: u64, out: &mut Array) -> LinearParams {
        LinearParams {
            input,
            weight: self.weight.ptr(),
            bias: self.bias.as_ref().map_or(0, |bias| address(bias)),
            add: self.add.as_ref().map_or(0, Array::ptr),
            out: out.ptr_mut(),
            m: self.m as u32,
            n: self.n as u32,
            k: self.k as u32,
            out_stride: self.stride as u32,
            scale: 1.0,
            softcap: self.softcap,
        }
    }

    fn norm_weight(&self) -> (u64, f32) {
        self.norm.as_ref().map_or((0, 0.0), |(weight, offset)| (address(weight), *offset))
    }

    fn fused(&self, kernels: &Kernels, order: Order, rows: u32, processors: u32) -> Array {
        let mut out = Array::poisoned(self.out, self.m * self.stride);
        let (norm_weight, weight_offset) = self.norm_weight();
        let params = FusedLinearParams {
            norm_weight,
            linear: self.linear(self.input.ptr(), &mut out),
            eps: 1e-6,
            weight_offset,
            pairs: self.activation.map_or(0, |kind| Pairs::of(kind).expect("a kernel") as u32),
            reserved: 0,
        };
        let instance = manifest::gemv_fused(self.dtype, self.out, rows);
        let shared = params.dynamic_shared(rows, self.dtype.bytes());
        kernels.launch(order, &instance, params.grid(instance.threads, processors), shared, &params);
        out
    }

    /// Returns what a norm, a GEMV and an activation give, launched one after the other.
    fn apart(&self, kernels: &Kernels) -> Array {
        let (rows, cols) = (self.m as u32, self.k as u32);
        let mut normed = self.input.clone();
        if self.norm.is_some() {
            let (weight, weight_offset) = self.norm_weight();
            let (out, input) = (normed.ptr_mut(), self.input.ptr());
            let params =
                NormParams { out, input, weight, rows, cols, eps: 1e-6, weight_offset, ..NormParams::default() };
            let instance = manifest::norm(self.dtype, NormMean::Rms);
            kernels.launch(Order::Forward, &instance, params.grid(), NormParams::dynamic_shared(self.k), &params);
        }
        let width = if self.activation.is_some() { self.n } else { self.stride };
        let mut product = Array::poisoned(self.out, self.m * width);
        let params = LinearParams { out_stride: width as u32, ..self.linear(normed.ptr(), &mut product) };
        launch(kernels, Order::Forward, &manifest::gemv(self.dtype, self.out, 4), params.gemv_grid(), &params);
        let Some(kind) = self.activation else { return product };
        let mut out = Array::poisoned(self.out, self.m * self.stride);
        let (alpha, limit, cols) = (0.0, 0.0, self.stride as u32);
        let params = GluParams { out: out.ptr_mut(), input: product.ptr(), rows, cols, alpha, limit };
        let instance = manifest::glu(self.dtype, kind);
        launch(kernels, Order::Forward, &instance, params.grid(instance.threads), &params);
        out
    }

    fn check(&self, kernels: &Kernels, rows: u32, processors: u32) {
        let found = in_every_order(|order| self.fused(kernels, order, rows, processors));
        let Self { m, n, k, activation, .. } = self;
        let context = format!("{m} x {n} x {k}, activation {activation:?}, norm {}", self.norm.is_some());
        assert!(found == self.apart(kernels), "{} has other bits: {context}", self.dtype.name());
    }
}

/// Returns every pair of an element type and a result type.
fn types() -> Vec<(Dtype, Dtype)> {
    let narrow = dtypes().into_iter().filter(|dtype| *dtype != Dtype::F32);
    narrow.flat_map(|dtype| [(dtype, dtype), (dtype, Dtype::F32)]).collect()
}

fn kernels((dtype, out): (Dtype, Dtype)) -> Kernels {
    let mut instances = vec![manifest::norm(dtype, NormMean::Rms), manifest::gemv(dtype, out, 4)];
    instances.extend(GATED.map(|kind| manifest::glu(dtype, kind)));
    instances.extend(FUSED_ROWS.map(|rows| manifest::gemv_fused(dtype, out, rows)));
    Kernels::new(&instances)
}

/// Checks a product whose warps compute several pairs of outputs, with a norm.
pub(crate) fn check_turns() {
    let (of, rng) = ((Dtype::F16, Dtype::F16), &mut rng());
    let case = Case { norm: Some((vec![0.5; 264], 1.0)), ..Case::draw(rng, of, [2, 39, 264]) };
    case.check(&kernels(of), 2, 1);
}

#[test]
fn fused_products_have_the_bits_of_their_parts() {
    let mut rng = rng();
    for of in types() {
        let kernels = kernels(of);
        for rows in FUSED_ROWS {
            let most = FUSED_SHARED / of.0.bytes() / rows as usize / 8;
            let edges = [[rows as usize, 1, 8], [1, 33, 2048], [rows as usize, 3, 8 * most.min(640)]];
            let drawn =
                [(); 3].map(|()| [1 + rng.below(rows as usize), 1 + rng.below(60), 8 * (1 + rng.below(most.min(300)))]);
            for shape in edges.into_iter().chain(drawn) {
                let processors = 1 + rng.below(3) as u32;
                Case::draw(&mut rng, of, shape).check(&kernels, rows, processors);
            }
        }
    }
}

#[test]
fn rows_that_are_not_numbers_stay_alone() {
    let rng = &mut rng();
    let of = types()[0];
    let kernels = kernels(of);
    let mut case = Case { add: None, ..Case::draw(rng, of, [4, 20, 64]) };
    case.input.set(2 * case.k + 5, f64::NAN);
    let found = case.fused(&kernels, Order::Forward, 4, 1);
    let cols = if case.activation.is_some() { case.n / 2 } else { case.n };
    for (row, values) in found.values().chunks(case.stride).enumerate() {
        assert!(values[..cols].iter().all(|x| x.is_nan() == (row == 2)), "row {row}");
    }
}
