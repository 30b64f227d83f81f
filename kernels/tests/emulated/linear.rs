//! Compares dense products with f64.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Chip, Dtype, GemmTile, Instance};
use octavo_kernels::params::LinearParams;
use octavo_ops::testing::TestRng;

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, dtypes, has_sm80};
use crate::support::{Array, Tolerance, pick, uniform};

/// A product with all options.
pub(crate) struct Case {
    out: Dtype,
    pub(crate) m: usize,
    n: usize,
    k: usize,
    /// Number of elements between rows of the output.
    pub(crate) stride: usize,
    input: Array,
    weight: Array,
    bias: Option<Vec<f32>>,
    add: Option<Array>,
    /// Whether the addend is the former content of the output.
    in_place: bool,
    scale: f32,
    softcap: f32,
}

impl Case {
    pub(crate) fn draw(rng: &mut TestRng, dtype: Dtype, out: Dtype, [m, n, k]: [usize; 3]) -> Self {
        let stride = n + rng.below(3) * rng.below(9);
        let bias = (rng.below(2) == 0).then(|| (0..n).map(|_| rng.signed()).collect());
        let add = (rng.below(2) == 0).then(|| uniform(out, m * stride, 2.0, rng));
        let capped = rng.below(3) == 0;
        Self {
            out,
            m,
            n,
            k,
            stride,
            input: uniform(dtype, m * k, 1.0, rng),
            weight: uniform(dtype, n * k, 1.0, rng),
            bias,
            in_place: add.is_some() && rng.below(2) == 0,
            add,
            scale: pick(rng, &[1.0, 0.25, -0.5]),
            softcap: if capped { 3.0 } else { 0.0 },
        }
    }

    /// Draws a case with NaN in one row of the input, without an addend.
    pub(crate) fn with_nan(rng: &mut TestRng, dtype: Dtype, out: Dtype, shape: [usize; 3], row: usize) -> Self {
        let mut case = Self { add: None, in_place: false, ..Self::draw(rng, dtype, out, shape) };
        case.input.set(row * case.k + 7, f64::NAN);
        case
    }

    /// Checks that this row, and no other, is NaN.
    pub(crate) fn check_nan(&self, found: &Array, row: usize, context: &str) {
        for (i, values) in found.values().chunks(self.stride).enumerate() {
            assert!(values[..self.n].iter().all(|x| x.is_nan() == (i == row)), "{context} row {i}");
        }
    }

    fn params(&self, out: &mut Array) -> LinearParams {
        LinearParams {
            input: self.input.ptr(),
            weight: self.weight.ptr(),
            bias: self.bias.as_ref().map_or(0, |bias| address(bias)),
            add: if self.in_place { out.ptr_mut() } else { self.add.as_ref().map_or(0, Array::ptr) },
            out: out.ptr_mut(),
            m: self.m as u32,
            n: self.n as u32,
            k: self.k as u32,
            out_stride: self.stride as u32,
            scale: self.scale,
            softcap: self.softcap,
        }
    }

    /// Returns the content of the output after a launch.
    pub(crate) fn run(
        &self,
        kernels: &Kernels,
        order: Order,
        instance: &Instance,
        grid: impl Fn(&LinearParams) -> [u32; 3],
    ) -> Array {
        self.run_with(|params| launch(kernels, order, instance, grid(params), params))
    }

    /// Returns the content of the output after `launch` with the parameters.
    pub(crate) fn run_with(&self, launch: impl FnOnce(&LinearParams)) -> Array {
        let mut out = match &self.add {
            Some(add) if self.in_place => add.clone(),
            _ => Array::poisoned(self.out, self.m * self.stride),
        };
        launch(&self.params(&mut out));
        out
    }

    pub(crate) fn check(&self, found: &Array, context: &str) {
        let context = format!("{context} m {} n {} k {} stride {}", self.m, self.n, self.k, self.stride);
        let (input, weight) = (self.input.values(), self.weight.values());
        let (mut near, mut expected) = (Vec::new(), Vec::new());
        for i in 0..self.m {
            for j in 0..self.stride {
                let at = i * self.stride + j;
                let add = self.add.as_ref().map(|add| add.get(at));
                if j >= self.n {
                    let untouched = if self.in_place { add == Some(found.get(at)) } else { found.get(at).is_nan() };
                    assert!(untouched, "{context}: wrote beyond the columns, row {i} column {j}");
                    continue;
                }
                let (row, column) = (&input[i * self.k..][..self.k], &weight[j * self.k..][..self.k]);
                let sum: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[j]));
                let value = (sum + bias) * f64::from(self.scale) + add.unwrap_or(0.0);
                let cap = f64::from(self.softcap);
                expected.push(if cap == 0.0 { value } else { cap * (value / cap).tanh() });
                near.push(found.get(at));
            }
        }
        assert_near(&near, &expected, Tolerance::Product.bound(self.out), &context);
    }
}

/// Returns every pair of an element type and a result type.
fn types() -> Vec<(Dtype, Dtype)> {
    use Dtype::{Bf16, F16, F32};
    let all = [(F32, F32), (F16, F16), (F16, F32), (Bf16, Bf16), (Bf16, F32)];
    all.into_iter().filter(|(dtype, _)| dtypes().contains(dtype)).collect()
}

/// Returns the chips with different kernels, and the types that they support.
fn gemm_types() -> Vec<(Chip, Dtype, Dtype)> {
    let volta = types().into_iter().filter(|t| t.0 == Dtype::F16).map(|(dtype, out)| (Chip::SM_70, dtype, out));
    let ampere = types()
        .into_iter()
        .filter(|(dtype, _)| has_sm80() || *dtype == Dtype::F32)
        .map(|(dtype, out)| (Chip::SM_89, dtype, out));
    ampere.chain(volta).collect()
}

fn gemm_grid(dtype: Dtype, tile: GemmTile) -> impl Fn(&LinearParams) -> [u32; 3] {
    move |p| p.gemm_grid(tile.outputs(dtype))
}

#[test]
fn gemm_of_drawn_shapes_is_near_f64_and_tiles_give_the_same_bits() {
    let mut rng = rng();
    for (chip, dtype, out) in gemm_types() {
        let [large, small] = [GemmTile::Large, GemmTile::Small].map(|tile| manifest::gemm(chip, dtype, out, tile));
        let kernels = Kernels::new(&[large.clone(), small.clone()]);
        let edges = [[1, 1, 8], [129, 130, 32], [16, 64, 104]];
        let drawn = [(); 3].map(|()| [1 + rng.below(150), 1 + rng.below(200), 8 * (1 + rng.below(30))]);
        for shape in edges.into_iter().chain(drawn) {
            let case = Case::draw(&mut rng, dtype, out, shape);
            let grid = gemm_grid(dtype, GemmTile::Large);
            let found = in_every_order(|order| case.run(&kernels, order, &large, &grid));
            case.check(&found, &large.name);
            let grid = gemm_grid(dtype, GemmTile::Small);
            let other = in_every_order(|order| case.run(&kernels, order, &small, &grid));
            assert!(found == other, "{} differs from {}", small.name, large.name);
        }
    }
}

#[test]
fn gemv_of_drawn_shapes_is_near_f64_and_instances_give_the_same_bits() {
    let mut rng = rng();
    for (dtype, out) in types() {
        let instances = [1, 2, 4, 8, 16].map(|rows| manifest::gemv(dtype, out, rows));
        let kernels = Kernels::new(&instances);
        for (rows, instance) in [1, 2, 4, 8, 16].into_iter().zip(&instances) {
            assert_eq!(manifest::gemv_rows(rows), Some(rows as u32));
            for _ in 0..2 {
                let m = rows - rng.below(rows.div_ceil(2));
                let shape = [m, 1 + rng.below(40), 8 * (1 + rng.below(300))];
                let case = Case::draw(&mut rng, dtype, out, shape);
                let run = |order| case.run(&kernels, order, instance, LinearParams::gemv_grid);
                let found = in_every_order(run);
                case.check(&found, &instance.name);
                let widest = case.run(&kernels, Order::Forward, &instances[4], LinearParams::gemv_grid);
                assert!(found == widest, "{} differs from {}", instances[4].name, instance.name);
            }
        }
    }
}

/// Checks products of few rows, and of some more.
pub(crate) fn check_vectors() {
    for rows in [2, 8] {
        let instance = manifest::gemv(Dtype::F16, Dtype::F16, rows);
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let case = Case::draw(&mut rng(), Dtype::F16, Dtype::F16, [rows as usize, 19, 264]);
        case.check(
            &in_every_order(|order| case.run(&kernels, order, &instance, LinearParams::gemv_grid)),
            &instance.name,
        );
    }
}

/// Computes the grid of a launch.
type Grid = Box<dyn Fn(&LinearParams) -> [u32; 3]>;

/// Returns a case with a single row of the input and of the addend.
pub(crate) fn row_of(case: &Case, row: usize) -> Case {
    let cut = |array: &Array, cols: usize| Array::new(array.dtype, &array.range(row * cols..(row + 1) * cols));
    Case {
        m: 1,
        input: cut(&case.input, case.k),
        weight: case.weight.clone(),
        bias: case.bias.clone(),
        add: case.add.as_ref().map(|add| cut(add, case.stride)),
        ..*case
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let mut rng = rng();
    let gemms = gemm_types().into_iter().map(|(chip, dtype, out)| {
        let grid: Grid = Box::new(gemm_grid(dtype, GemmTile::Large));
        (manifest::gemm(chip, dtype, out, GemmTile::Large), dtype, out, 70, grid)
    });
    let gemvs = types().into_iter().map(|(dtype, out)| {
        let grid: Grid = Box::new(LinearParams::gemv_grid);
        (manifest::gemv(dtype, out, 8), dtype, out, 8, grid)
    });
    for (instance, dtype, out, rows, grid) in gemms.chain(gemvs) {
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let k = 8 * (1 + rng.below(40));
        let case = Case::draw(&mut rng, dtype, out, [rows, 24, k]);
        let all = case.run(&kernels, Order::Forward, &instance, &grid);
        let row = rng.below(rows);
        let alone = row_of(&case, row).run(&kernels, Order::Forward, &instance, &grid);
        let stride = case.stride;
        assert!(all.bits(row * stride..(row + 1) * stride) == alone.bits(0..stride), "{} row {row}", instance.name);
    }
}

#[test]
fn small_nan_in_one_row_stays_there() {
    let mut rng = rng();
    for (chip, dtype, out) in gemm_types() {
        let instance = manifest::gemm(chip, dtype, out, GemmTile::Small);
        let kernels = Kernels::new(std::slice::from_ref(&instance));
        let case = Case::with_nan(&mut rng, dtype, out, [20, 33, 48], 5);
        let found = case.run(&kernels, Order::Forward, &instance, gemm_grid(dtype, GemmTile::Small));
        case.check_nan(&found, 5, &instance.name);
    }
}
