//! Compares dense products of few rows on tensor cores with f64 and with each other.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Chip, Dtype, GemmTile, Instance};
use octavo_kernels::params::{LinearParams, SkinnyLinearParams};
use octavo_kernels::parts::{InputParts, SKINNY_OUTPUTS, WeightStage};

use crate::common::{in_every_order, launch, rng};
use crate::launcher::{Kernels, address_mut, dtypes, has_sm80};
use crate::linear::{Case, row_of};
use crate::support::Array;

const ROWS: [u32; 4] = [8, 16, 32, 64];

/// Returns every pair of an element type and a result type.
fn types() -> impl Iterator<Item = (Dtype, Dtype)> {
    let narrow = [Dtype::F16, Dtype::Bf16].into_iter().filter(|dtype| has_sm80() && dtypes().contains(dtype));
    narrow.flat_map(|dtype| [(dtype, dtype), (dtype, Dtype::F32)])
}

fn instances(dtype: Dtype, out: Dtype) -> Vec<(u32, Instance)> {
    ROWS.map(|rows| (rows, manifest::gemm_skinny(dtype, out, rows))).into()
}

/// Returns the output of a product whose inputs are divided into parts of `steps` stages. The tickets must be zero again.
fn run(case: &Case, kernels: &Kernels, order: Order, (rows, instance): &(u32, Instance), steps: u32) -> Array {
    let launch = |linear: &LinearParams| {
        let params = SkinnyLinearParams { linear: *linear, steps, ..SkinnyLinearParams::default() };
        let grid @ [tiles, parts, _] = params.grid();
        let mut partial = vec![f32::NAN; (tiles * parts * SKINNY_OUTPUTS * rows) as usize];
        let mut tickets = vec![0u32; tiles as usize];
        let (partial, tickets_at) = (address_mut(&mut partial), address_mut(&mut tickets));
        launch(kernels, order, instance, grid, &SkinnyLinearParams { partial, tickets: tickets_at, ..params });
        assert!(tickets.iter().all(|ticket| *ticket == 0), "{}: {tickets:?}", instance.name);
    };
    case.run_with(launch)
}

/// Checks a product whose outputs are each shared by several CTAs.
pub(crate) fn check_parts() {
    let instance = (8, manifest::gemm_skinny(Dtype::F16, Dtype::F16, 8));
    let kernels = Kernels::new(std::slice::from_ref(&instance.1));
    let case = Case::draw(&mut rng(), Dtype::F16, Dtype::F16, [7, 129, 264]);
    case.check(&in_every_order(|order| run(&case, &kernels, order, &instance, 2)), &instance.1.name);
}

#[test]
fn small_skinny_products_are_near_f64_and_instances_give_the_same_bits() {
    let mut rng = rng();
    for (dtype, out) in types() {
        let all = instances(dtype, out);
        let kernels = Kernels::new(&all.iter().map(|(_, instance)| instance.clone()).collect::<Vec<_>>());
        let widest = all.last().expect("four");
        for instance in &all {
            let rows = instance.0 as usize;
            let edges = [([1, 1, 8], 1), ([rows, 128, 64], 1), ([rows - 1, 129, 264], 2)];
            let drawn = [1 + rng.below(rows), 1 + rng.below(300), 8 * (1 + rng.below(90))];
            for (shape, steps) in edges.into_iter().chain([(drawn, 1 + rng.below(24) as u32)]) {
                let case = Case::draw(&mut rng, dtype, out, shape);
                let found = in_every_order(|order| run(&case, &kernels, order, instance, steps));
                case.check(&found, &format!("{} parts of {steps}", instance.1.name));
                let other = run(&case, &kernels, Order::Forward, widest, steps);
                assert!(found == other, "{} differs from {}", widest.1.name, instance.1.name);
            }
        }
    }
}

/// A part adds its inputs as the products of many rows do.
#[test]
fn small_products_of_one_part_have_the_bits_of_many_rows() {
    let mut rng = rng();
    for (dtype, out) in types() {
        let (skinny, gemm) = (instances(dtype, out), manifest::gemm(Chip::SM_89, dtype, out, GemmTile::Small));
        let kernels = Kernels::new(&[skinny[2].1.clone(), gemm.clone()]);
        let case = Case::draw(&mut rng, dtype, out, [27, 140, 360]);
        let found = run(&case, &kernels, Order::Forward, &skinny[2], 12);
        let tile = GemmTile::Small.outputs(dtype);
        assert!(found == case.run(&kernels, Order::Forward, &gemm, |p| p.gemm_grid(tile)), "{}", gemm.name);
    }
}

#[test]
fn small_skinny_rows_have_the_same_bits_alone_and_among_others() {
    let mut rng = rng();
    for (dtype, out) in types() {
        let all = instances(dtype, out);
        let kernels = Kernels::new(&[all[0].1.clone(), all[3].1.clone()]);
        let k = 8 * (80 + rng.below(90));
        let case = Case::draw(&mut rng, dtype, out, [50, 24, k]);
        // No number of rows decides the parts.
        let parts = InputParts::new(WeightStage::DENSE, 24, k as u32, 132);
        assert!(parts.count > 1, "{parts:?}");
        let together = run(&case, &kernels, Order::Forward, &all[3], parts.steps);
        let row = rng.below(case.m);
        let alone = run(&row_of(&case, row), &kernels, Order::Reverse, &all[0], parts.steps);
        let stride = case.stride;
        assert!(together.bits(row * stride..(row + 1) * stride) == alone.bits(0..stride), "{dtype:?} row {row}");
    }
}

#[test]
fn small_skinny_nan_in_one_row_stays_there() {
    let mut rng = rng();
    for (dtype, out) in types() {
        for instance in &instances(dtype, out) {
            let kernels = Kernels::new(std::slice::from_ref(&instance.1));
            let case = Case::with_nan(&mut rng, dtype, out, [instance.0 as usize, 33, 80], 5);
            let found = run(&case, &kernels, Order::Forward, instance, 2);
            case.check_nan(&found, 5, &instance.1.name);
        }
    }
}

#[test]
fn skinny_products_meet_in_no_bank() {
    let rng = &mut rng();
    for instance in instances(Dtype::F16, Dtype::F16) {
        let kernels = Kernels::new(std::slice::from_ref(&instance.1));
        let case = Case::draw(rng, Dtype::F16, Dtype::F16, [instance.0 as usize, 128, 256]);
        let bank_use = kernels.bank_use(|| {
            run(&case, &kernels, Order::Forward, &instance, 8);
        });
        if let Some(bank_use) = bank_use {
            assert_eq!(bank_use.wavefronts, bank_use.phases, "{}: {bank_use:?}", instance.1.name);
        }
    }
}
