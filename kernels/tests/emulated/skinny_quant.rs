//! Compares products of few rows with quantised weights on tensor cores with f64 and with each other.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Dtype, Instance};
use octavo_kernels::params::{QuantLinearParams, SkinnyQuantParams};
use octavo_kernels::parts::{InputParts, SKINNY_ROWS, WeightStage};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::testing::TestRng;

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_sm80};
use crate::quantized::Weight;
use crate::support::{Array, Tolerance, uniform};

/// Returns a type of activations with that of outputs.
fn types() -> impl Iterator<Item = (Dtype, Dtype)> {
    let all = [(Dtype::F16, Dtype::F16), (Dtype::Bf16, Dtype::F32)];
    all.into_iter().filter(|(dtype, _)| has_sm80() && dtypes().contains(dtype))
}

/// A product with all options.
struct Case {
    format: QuantFormat,
    dtype: Dtype,
    out: Dtype,
    sizes: [usize; 3],
    weight: Weight,
    input: Array,
    bias: Vec<f32>,
    add: Array,
}

impl Case {
    fn draw(rng: &mut TestRng, format: QuantFormat, (dtype, out): (Dtype, Dtype), sizes: [usize; 3]) -> Self {
        let [m, n, k] = sizes;
        Self {
            format,
            dtype,
            out,
            sizes,
            weight: Weight::draw(rng, format, n, k),
            input: uniform(dtype, m * k, 2.0, rng),
            bias: (0..n).map(|_| rng.signed()).collect(),
            add: uniform(out, m * n, 1.0, rng),
        }
    }

    /// Returns the case of one row.
    fn row(self, row: usize) -> Self {
        let [_, n, k] = self.sizes;
        let input = Array::new(self.dtype, &self.input.range(row * k..(row + 1) * k));
        let add = Array::new(self.out, &self.add.range(row * n..(row + 1) * n));
        Self { sizes: [1, n, k], input, add, ..self }
    }

    fn instance(&self, rows: u32) -> Instance {
        manifest::gemm_skinny_quant(self.format, self.dtype, rows)
    }

    /// Returns the output, with the inputs divided into parts of `steps` stages. The tickets must be zero again.
    fn run(&self, kernels: &Kernels, order: Order, instance: &Instance, steps: u32) -> Array {
        let [m, n, k] = self.sizes;
        let mut found = Array::poisoned(self.out, m * n);
        let product = QuantLinearParams {
            weight: self.weight.layout.planes(address(&self.weight.memory)),
            input: self.input.ptr(),
            bias: address(&self.bias),
            add: self.add.ptr(),
            out: found.ptr_mut(),
            m: m as u32,
            n: n as u32,
            k: k as u32,
            out_stride: n as u32,
            scale: 0.5,
            ..QuantLinearParams::default()
        };
        let out_f32 = u32::from(self.out == Dtype::F32);
        let params = SkinnyQuantParams { product, steps, out_f32, ..SkinnyQuantParams::default() };
        let grid @ [tiles, parts, _] = params.grid(instance.threads);
        let mut partial = vec![f32::NAN; (tiles * parts * instance.threads * SKINNY_ROWS) as usize];
        let mut tickets = vec![0u32; tiles as usize];
        let (partial, tickets_at) = (address_mut(&mut partial), address_mut(&mut tickets));
        launch(kernels, order, instance, grid, &SkinnyQuantParams { partial, tickets: tickets_at, ..params });
        assert!(tickets.iter().all(|ticket| *ticket == 0), "{}: {tickets:?}", instance.name);
        found
    }

    fn check(&self, found: &Array, context: &str) {
        let [m, n, k] = self.sizes;
        let x = self.input.values();
        let dot = |i: usize, j: usize| -> f64 {
            x[i * k..][..k].iter().zip(&self.weight.values[j * k..][..k]).map(|(a, b)| a * b).sum()
        };
        let value = |at: usize| 0.5 * (dot(at / n, at % n) + f64::from(self.bias[at % n])) + self.add.get(at);
        let expected: Vec<f64> = (0..m * n).map(value).collect();
        // The entries of a table are rounded.
        let least = if self.format.is_float() { Tolerance::Product.bound(self.dtype) } else { 0.0 };
        let tolerance = Tolerance::Product.bound(self.out).max(least);
        assert_near(&found.values(), &expected, tolerance, &format!("{context}: {m} x {n} x {k}"));
    }
}

/// Checks a format for numbers of rows: near f64, in every order, and with the same bits by each instance.
fn check_rows(rng: &mut TestRng, format: QuantFormat, types: (Dtype, Dtype), all: &[u32]) {
    let instances: Vec<_> =
        all.iter().map(|rows| (*rows, manifest::gemm_skinny_quant(format, types.0, *rows))).collect();
    let kernels = Kernels::new(&instances.iter().map(|(_, instance)| instance.clone()).collect::<Vec<_>>());
    let widest = &instances.last().expect("instances").1;
    for (rows, instance) in &instances {
        let m = *rows as usize - rng.below(*rows as usize / 2 + 1);
        let sizes = [m, 1 + rng.below(300), 256 * (1 + rng.below(4))];
        let steps = 1 + rng.below(5) as u32;
        let case = Case::draw(rng, format, types, sizes);
        let found = in_every_order(|order| case.run(&kernels, order, instance, steps));
        let context = format!("{} in parts of {steps}", instance.name);
        case.check(&found, &context);
        assert!(found == case.run(&kernels, Order::Forward, widest, steps), "{context}: {} differs", widest.name);
    }
}

#[test]
fn skinny_products_of_all_formats_are_near_f64() {
    let mut rng = rng();
    for format in QuantFormat::ALL {
        types().for_each(|types| check_rows(&mut rng, format, types, &[8, 32]));
    }
}

#[test]
fn small_skinny_products_of_all_rows_have_the_same_bits() {
    let mut rng = rng();
    for types in types() {
        check_rows(&mut rng, QuantFormat::Q4K, types, &manifest::SKINNY_QUANT_TILES);
    }
    for types in types().take(1) {
        check_rows(&mut rng, QuantFormat::Q6K, types, &manifest::SKINNY_QUANT_TILES);
    }
}

#[test]
fn small_skinny_rows_of_a_quantised_weight_have_the_same_bits_alone_and_among_others() {
    let mut rng = rng();
    for types in types() {
        let case = Case::draw(&mut rng, QuantFormat::Q4K, types, [50, 24, 256 * 5]);
        let instances = [case.instance(8), case.instance(64)];
        let kernels = Kernels::new(&instances);
        // No number of rows decides the parts.
        let parts = InputParts::new(WeightStage::quantised(QuantFormat::Q4K), 24, 256 * 5, 132);
        assert!(parts.count > 1, "{parts:?}");
        let together = case.run(&kernels, Order::Forward, &instances[1], parts.steps);
        let row = rng.below(50);
        let alone = case.row(row).run(&kernels, Order::Reverse, &instances[0], parts.steps);
        assert!(together.bits(row * 24..(row + 1) * 24) == alone.bits(0..24), "{types:?} row {row}");
    }
}

#[test]
fn small_skinny_nan_in_one_row_of_a_quantised_product_stays_there() {
    let mut rng = rng();
    for types in types() {
        let mut case = Case::draw(&mut rng, QuantFormat::Q5K, types, [8, 33, 256]);
        case.input.set(5 * 256 + 7, f64::NAN);
        let instance = case.instance(8);
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let found = case.run(&kernels, Order::Forward, &instance, 1);
        for (row, values) in found.values().chunks(33).enumerate() {
            assert!(values.iter().all(|x| x.is_nan() == (row == 5)), "{types:?} row {row}");
        }
    }
}

/// Checks a product whose outputs are each shared by several CTAs.
pub(crate) fn check_parts() {
    let case = Case::draw(&mut rng(), QuantFormat::Q4K, (Dtype::F16, Dtype::F16), [7, 129, 256 * 5]);
    let instance = case.instance(8);
    let kernels = Kernels::new(std::slice::from_ref(&instance));
    let found = in_every_order(|order| case.run(&kernels, order, &instance, 7));
    case.check(&found, &instance.name);
}

#[test]
fn skinny_products_of_quantised_weights_meet_in_no_bank() {
    let rng = &mut rng();
    for format in [QuantFormat::Q4K, QuantFormat::Q6K, QuantFormat::Q8_0, QuantFormat::Q5K] {
        for rows in [8, 32] {
            let case = Case::draw(rng, format, (Dtype::F16, Dtype::F16), [rows, 256, 512]);
            let instance = case.instance(rows as u32);
            let kernels = Kernels::new(std::slice::from_ref(&instance));
            let bank_use = kernels.bank_use(|| {
                case.run(&kernels, Order::Forward, &instance, 4);
            });
            if let Some(bank_use) = bank_use {
                assert_eq!(bank_use.wavefronts, bank_use.phases, "{}: {bank_use:?}", instance.name);
            }
        }
    }
}
