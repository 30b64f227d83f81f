//! Compares products of few rows with quantised weights on tensor cores with f64 and with each other.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Chip, Dtype, SkinnyQuant};
use octavo_kernels::params::{QuantLinearParams, SkinnyQuantParams};
use octavo_kernels::parts::{InputParts, SKINNY_ROWS, WeightStage};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::testing::TestRng;

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_sm80};
use crate::quantized::Weight;
use crate::support::{Array, Tolerance, uniform};

/// Types of activations and outputs, and the chip whose kernels multiply them.
#[derive(Clone, Copy, Debug)]
struct Types {
    chip: Chip,
    dtype: Dtype,
    out: Dtype,
}

const AMPERE: Types = Types { chip: Chip::SM_80, dtype: Dtype::F16, out: Dtype::F16 };
const VOLTA: Types = Types { chip: Chip::SM_70, ..AMPERE };

fn types() -> impl Iterator<Item = Types> {
    let with_f32 = [Types { dtype: Dtype::Bf16, out: Dtype::F32, ..AMPERE }, Types { out: Dtype::F32, ..VOLTA }];
    let all = [AMPERE, VOLTA].into_iter().chain(with_f32);
    all.filter(|types| (has_sm80() || types.chip == VOLTA.chip) && dtypes().contains(&types.dtype))
}

/// Returns the smallest numbers of rows of the instances.
fn first_tiles(types: Types, format: QuantFormat) -> &'static [u32] {
    let tiles = manifest::skinny_quant_tiles(types.chip, format);
    &tiles[..tiles.len().min(2)]
}

/// A product with all options.
struct Case {
    format: QuantFormat,
    types: Types,
    sizes: [usize; 3],
    weight: Weight,
    input: Array,
    bias: Vec<f32>,
    add: Array,
}

impl Case {
    fn draw(rng: &mut TestRng, format: QuantFormat, types: Types, sizes: [usize; 3]) -> Self {
        let [m, n, k] = sizes;
        Self {
            format,
            types,
            sizes,
            weight: Weight::draw(rng, format, n, k),
            input: uniform(types.dtype, m * k, 2.0, rng),
            bias: (0..n).map(|_| rng.signed()).collect(),
            add: uniform(types.out, m * n, 1.0, rng),
        }
    }

    /// Returns the case of one row.
    fn row(self, row: usize) -> Self {
        let [_, n, k] = self.sizes;
        let input = Array::new(self.types.dtype, &self.input.range(row * k..(row + 1) * k));
        let add = Array::new(self.types.out, &self.add.range(row * n..(row + 1) * n));
        Self { sizes: [1, n, k], input, add, ..self }
    }

    fn instance(&self, rows: u32) -> SkinnyQuant {
        let Types { chip, dtype, .. } = self.types;
        manifest::gemm_skinny_quant(chip, self.format, dtype, rows)
    }

    /// Returns the output, with the inputs divided into parts of `steps` stages. The tickets must be zero again.
    fn run(&self, kernels: &Kernels, order: Order, skinny: &SkinnyQuant, steps: u32) -> Array {
        let [m, n, k] = self.sizes;
        let mut found = Array::poisoned(self.types.out, m * n);
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
        let out_f32 = u32::from(self.types.out == Dtype::F32);
        let params = SkinnyQuantParams { product, steps, out_f32, ..SkinnyQuantParams::default() };
        let SkinnyQuant { instance, tile } = skinny;
        let grid @ [tiles, parts, _] = params.grid(*tile);
        let mut partial = vec![f32::NAN; (tiles * parts * tile[0] * tile[1]) as usize];
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
        let least = if self.format.is_float() { Tolerance::Product.bound(self.types.dtype) } else { 0.0 };
        let tolerance = Tolerance::Product.bound(self.types.out).max(least);
        assert_near(&found.values(), &expected, tolerance, &format!("{context}: {m} x {n} x {k}"));
    }
}

/// Checks a format for numbers of rows: near f64, in every order, and with the same bits by each instance.
fn check_rows(rng: &mut TestRng, format: QuantFormat, types: Types, all: &[u32]) {
    let of_rows = |rows: &u32| manifest::gemm_skinny_quant(types.chip, format, types.dtype, *rows);
    let instances: Vec<SkinnyQuant> = all.iter().map(of_rows).collect();
    let kernels = Kernels::new(&instances.iter().map(|skinny| skinny.instance.clone()).collect::<Vec<_>>());
    let widest = instances.last().expect("instances");
    for skinny in &instances {
        // On Volta, the rows are those of several tiles, too.
        let most = if types.chip == VOLTA.chip { SKINNY_ROWS } else { skinny.tile[0] };
        let m = most as usize - rng.below(most as usize / 2 + 1);
        let sizes = [m, 1 + rng.below(300), 256 * (1 + rng.below(4))];
        let steps = 1 + rng.below(5) as u32;
        let case = Case::draw(rng, format, types, sizes);
        let found = in_every_order(|order| case.run(&kernels, order, skinny, steps));
        let context = format!("{} in parts of {steps}", skinny.instance.name);
        case.check(&found, &context);
        assert!(
            found == case.run(&kernels, Order::Forward, widest, steps),
            "{context}: {} differs",
            widest.instance.name
        );
    }
}

#[test]
fn skinny_products_of_all_formats_are_near_f64() {
    let mut rng = rng();
    for format in QuantFormat::ALL {
        types().for_each(|types| check_rows(&mut rng, format, types, first_tiles(types, format)));
    }
}

#[test]
fn small_skinny_products_of_all_rows_have_the_same_bits() {
    let mut rng = rng();
    for types in types() {
        check_rows(&mut rng, QuantFormat::Q4K, types, manifest::skinny_quant_tiles(types.chip, QuantFormat::Q4K));
    }
    for types in types().filter(|types| types.out == Dtype::F16) {
        check_rows(&mut rng, QuantFormat::Q6K, types, manifest::skinny_quant_tiles(types.chip, QuantFormat::Q6K));
    }
}

#[test]
fn small_skinny_rows_of_a_quantised_weight_have_the_same_bits_alone_and_among_others() {
    let mut rng = rng();
    for types in types() {
        let case = Case::draw(&mut rng, QuantFormat::Q4K, types, [50, 24, 256 * 5]);
        let tiles = manifest::skinny_quant_tiles(types.chip, case.format);
        let instances = [tiles[0], tiles[tiles.len() - 1]].map(|rows| case.instance(rows));
        let kernels = Kernels::new(&instances.each_ref().map(|skinny| skinny.instance.clone()));
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
        let skinny = case.instance(first_tiles(types, case.format)[0]);
        let kernels = Kernels::new(std::slice::from_ref(&skinny.instance));
        let found = case.run(&kernels, Order::Forward, &skinny, 1);
        for (row, values) in found.values().chunks(33).enumerate() {
            assert!(values.iter().all(|x| x.is_nan() == (row == 5)), "{types:?} row {row}");
        }
    }
}

/// Checks a product whose outputs are each shared by several CTAs.
fn check_parts_of(types: Types) {
    let case = Case::draw(&mut rng(), QuantFormat::Q4K, types, [7, 129, 256 * 5]);
    let skinny = case.instance(first_tiles(types, case.format)[0]);
    let kernels = Kernels::new(std::slice::from_ref(&skinny.instance));
    let found = in_every_order(|order| case.run(&kernels, order, &skinny, 7));
    case.check(&found, &skinny.instance.name);
}

pub(crate) fn check_parts() {
    check_parts_of(AMPERE);
}

pub(crate) fn check_parts_on_volta() {
    check_parts_of(VOLTA);
}

#[test]
fn skinny_products_of_quantised_weights_meet_in_no_bank() {
    let rng = &mut rng();
    let formats = [QuantFormat::Q4K, QuantFormat::Q6K, QuantFormat::Q8_0, QuantFormat::Q5K];
    for (types, format) in [AMPERE, VOLTA].into_iter().flat_map(|types| formats.map(|format| (types, format))) {
        for rows in first_tiles(types, format) {
            let case = Case::draw(rng, format, types, [*rows as usize, 256, 512]);
            let skinny = case.instance(*rows);
            let kernels = Kernels::new(std::slice::from_ref(&skinny.instance));
            let bank_use = kernels.bank_use(|| {
                case.run(&kernels, Order::Forward, &skinny, 4);
            });
            if let Some(bank_use) = bank_use {
                assert_eq!(bank_use.wavefronts, bank_use.phases, "{}: {bank_use:?}", skinny.instance.name);
            }
        }
    }
}
