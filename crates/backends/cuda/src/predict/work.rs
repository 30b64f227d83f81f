//! What the launches of products do: bytes, FLOPs, and what their CTAs ask for.
//!
//! Bytes and FLOPs of other ops are those of the cost model.

use std::any::Any;

use octavo_kernels::manifest::{Dtype, GemmTile, Instance, STAGE_INPUTS};
use octavo_kernels::params::{
    DequantizeParams, FusedLinearParams, GLU_COLUMNS, LinearParams, QuantGluParams, QuantLinearParams, QuantPairParams,
    QuantizeParams, SkinnyLinearParams, SkinnyQuantParams,
};
use octavo_kernels::parts::SKINNY_OUTPUTS;
use octavo_kernels::quant::QuantFormat;
use octavo_kernels::sources;
use octavo_ops::cost::Cost;

/// The work of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Number of bytes of weights, keys and values, which come from memory.
    pub(super) stored: u64,
    /// Number of bytes of activations that are read and written.
    pub(super) activations: u64,
    /// Number of bytes that all CTAs take from the second-level cache, those of a value that several need included; 0 if that is not
    /// known.
    pub(super) asked: u64,
    /// Number of floating-point operations.
    pub(super) flops: u64,
    /// Number of equal pieces of work, each of which a CTA does at once; 0 for one in each CTA.
    pub(super) tasks: u64,
    /// Number of iterations of the main loop of a piece; 0 for as many as its loads need.
    pub(super) iterations: u64,
}

impl Work {
    /// Returns the work of an op, whose main loops load everything once.
    pub(super) fn of_cost(cost: &Cost) -> Self {
        let stored = cost.weight_bytes + cost.kv_bytes;
        let asked = cost.read_bytes();
        Self { stored, activations: cost.activation_bytes, asked, flops: cost.flops, ..Self::default() }
    }

    /// Returns what is left of it after other work.
    pub(super) fn without(self, done: &Self) -> Self {
        Self {
            stored: self.stored.saturating_sub(done.stored),
            activations: self.activations.saturating_sub(done.activations),
            asked: self.asked.saturating_sub(done.asked),
            flops: self.flops.saturating_sub(done.flops),
            ..Self::default()
        }
    }

    /// Returns one of `count` equal parts.
    pub(super) fn share(self, count: u64) -> Self {
        let share = |n: u64| n.div_ceil(count.max(1));
        Self {
            stored: share(self.stored),
            activations: share(self.activations),
            asked: share(self.asked),
            flops: share(self.flops),
            ..Self::default()
        }
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.activations += other.activations;
        self.asked += other.asked;
        self.flops += other.flops;
    }
}

/// Sizes that the parameters of a product do not tell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Element type of activations and dense weights.
    pub(super) dtype: Dtype,
    /// Address of the values of a weight that was dequantised: it is no weight that is stored.
    pub(super) values: u64,
}

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    /// Number of bytes of the weight.
    pub(super) weight: u64,
    /// Size of an element of the output.
    pub(super) out: u64,
    /// Whether a matrix is added.
    pub(super) adds: bool,
}

impl Product {
    /// Returns its work, if its main loops load so many bytes in so many iterations. `is_stored` tells whether the weight is one of
    /// the model.
    pub(super) fn work(&self, element: u64, (asked, iterations): (u64, u64), is_stored: bool) -> Work {
        let [m, n, k] = [self.m, self.n, self.k].map(u64::from);
        let added = if self.adds { m * n * self.out } else { 0 };
        let activations = m * k * element + m * n * self.out + added;
        let (stored, again) = if is_stored { (self.weight, 0) } else { (0, self.weight) };
        Work { stored, activations: activations + again, asked, flops: 2 * m * n * k, tasks: 0, iterations }
    }

    pub(super) fn name(&self) -> String {
        format!("{}x{}", self.n, self.k)
    }
}

/// Returns the number of rows in the name of an instance, such as `gemv_bf16_m4`.
fn rows_of(instance: &Instance) -> u64 {
    instance.name.rsplit_once("_m").and_then(|(_, rows)| rows.parse().ok()).unwrap_or(1)
}

/// Returns the size of an element of the output of an instance, which has f32 in its name if it differs from activations.
fn out_bytes(instance: &Instance, dtype: Dtype) -> u64 {
    if instance.name.contains("_f32") { 4 } else { dtype.bytes() as u64 }
}

/// Returns the work of a launch and the sizes of the weight; `None` if it is no product and no part of one.
pub(super) fn of_product(
    instance: &Instance,
    grid: [u32; 3],
    params: &dyn Any,
    sizes: Sizes,
) -> Option<(Work, String)> {
    if let Some(params) = params.downcast_ref::<LinearParams>() {
        return Some(dense(instance, grid, params, (params.k.div_ceil(STAGE_INPUTS as u32), sizes)));
    }
    if let Some(params) = params.downcast_ref::<SkinnyLinearParams>() {
        return Some(dense(instance, grid, &params.linear, (params.steps, sizes)));
    }
    if let Some(params) = params.downcast_ref::<FusedLinearParams>() {
        return Some(fused(instance, grid, params, sizes));
    }
    if let Some(params) = params.downcast_ref::<QuantLinearParams>() {
        return Some(quantised(instance, grid, params, (*instance.formats.first()?, sizes)));
    }
    if let Some(params) = params.downcast_ref::<SkinnyQuantParams>() {
        let QuantLinearParams { m, n, .. } = params.product;
        let (mut work, name) = quantised(instance, grid, &params.product, (*instance.formats.first()?, sizes));
        if params.out_f32 == 1 {
            work.activations += u64::from(m) * u64::from(n) * (4 - sizes.dtype.bytes() as u64);
        }
        return Some((Work { iterations: params.steps.into(), ..work }, name));
    }
    if let Some(QuantPairParams { first, second }) = params.downcast_ref() {
        let [one, other] = instance.formats[..] else { return None };
        let (mut work, _) = quantised(instance, grid, first, (one, sizes));
        work += quantised(instance, grid, second, (other, sizes)).0;
        return Some((work, format!("{}x{}", first.n + second.n, first.k)));
    }
    if let Some(QuantGluParams { product, .. }) = params.downcast_ref() {
        let (work, name) = quantised(instance, grid, product, (*instance.formats.first()?, sizes));
        // Gates and ups stay in registers, and warps have several columns one after the other.
        let out = u64::from(product.m) * u64::from(product.n) * out_bytes(instance, sizes.dtype);
        let columns = u64::from(GLU_COLUMNS) / warps(instance);
        let (activations, iterations) = (work.activations - out / 2, work.iterations * columns);
        return Some((Work { activations, iterations, ..work }, name));
    }
    if let Some(params) = params.downcast_ref::<QuantizeParams>() {
        let read = u64::from(params.m) * u64::from(params.k) * sizes.dtype.bytes() as u64;
        // Codes of a byte, with two numbers for each 32.
        let written = u64::from(params.m) * u64::from(params.k) * 5 / 4;
        return Some((Work { activations: read + written, asked: read, ..Work::default() }, String::new()));
    }
    let params = params.downcast_ref::<DequantizeParams>().filter(|params| params.row_ids == 0)?;
    let (n, k) = (u64::from(params.n), u64::from(params.k));
    let stored = instance.formats.first().map_or(0, |format| format.bytes_of(n * k));
    let written = n * k * sizes.dtype.bytes() as u64;
    let work = Work { stored, activations: written, asked: stored, ..Work::default() };
    Some((work, format!("{n}x{k}")))
}

/// Returns the work of a dense product whose CTAs multiply so many stages, if they have stages.
fn dense(instance: &Instance, grid: [u32; 3], params: &LinearParams, (stages, sizes): (u32, Sizes)) -> (Work, String) {
    let element = sizes.dtype.bytes() as u64;
    let LinearParams { m, n, k, add, .. } = *params;
    let weight = u64::from(n) * u64::from(k) * element;
    let product = Product { m, n, k, weight, out: out_bytes(instance, sizes.dtype), adds: add != 0 };
    let row = u64::from(k) * element;
    let [x, y] = [grid[0], grid[1]].map(u64::from);
    let asked = match instance.source {
        // Each warp loads the rows of two outputs, and all rows of the input, which stay in the first-level cache: a lane has four
        // pieces of 16 bytes at once, or two with many rows.
        sources::GEMV => {
            let pieces = if rows_of(instance) <= 4 { 4 } else { 2 };
            (weight, row.div_ceil(32 * 16 * pieces))
        }
        // CTAs that share an output have a part of the inputs each.
        sources::GEMM_SKINNY => (x * row * (u64::from(SKINNY_OUTPUTS) + rows_of(instance)), stages.into()),
        _ => {
            let tile = if instance.name.ends_with("large") { GemmTile::Large } else { GemmTile::Small };
            let [rows, outputs] = tile.outputs(sizes.dtype);
            (x * y * row * u64::from(rows + outputs), stages.into())
        }
    };
    (product.work(element, asked, params.weight != sizes.values), product.name())
}

/// Returns the work of a product with the norm of its input and the activation of its output.
fn fused(instance: &Instance, grid: [u32; 3], params: &FusedLinearParams, sizes: Sizes) -> (Work, String) {
    let element = sizes.dtype.bytes() as u64;
    let LinearParams { m, n, k, add, weight: address, .. } = params.linear;
    let (row, pairs, ctas) = (u64::from(k) * element, u64::from(n.div_ceil(2)), u64::from(grid[0]));
    let weight = u64::from(n) * row;
    let norm = if params.norm_weight == 0 { 0 } else { u64::from(k) * 4 };
    // Each CTA loads the rows of the input and the weight of the norm, then its warps take turns at pairs of rows of the weight.
    let asked = weight + ctas * (u64::from(m) * row + norm);
    let iterations = pairs.div_ceil(ctas * warps(instance)) * row.div_ceil(32 * 16 * 4);
    let product = Product { m, n, k, weight, out: out_bytes(instance, sizes.dtype), adds: add != 0 };
    let mut work = product.work(element, (asked, iterations), address != sizes.values);
    if params.pairs != 0 {
        // One output takes the place of two.
        work.activations -= u64::from(m) * pairs * product.out;
    }
    (work, product.name())
}

fn warps(instance: &Instance) -> u64 {
    u64::from(instance.threads / 32)
}

fn quantised(
    instance: &Instance,
    grid: [u32; 3],
    params: &QuantLinearParams,
    (format, sizes): (QuantFormat, Sizes),
) -> (Work, String) {
    let QuantLinearParams { m, n, k, add, .. } = *params;
    let weight = format.bytes_of(u64::from(n) * u64::from(k));
    let product = Product { m, n, k, weight, out: out_bytes(instance, sizes.dtype), adds: add != 0 };
    let element = sizes.dtype.bytes() as u64;
    let (columns, row) = (u64::from(k), format.bytes_of(k.into()));
    let [x, y] = [grid[0], grid[1]].map(u64::from);
    let (groups, rows) = (columns / 32, rows_of(instance));
    let asked = match instance.source {
        // A lane multiplies a group of 32 of two outputs at a time, and for few rows two groups. Inputs stay in the first-level cache.
        sources::QUANTIZED if instance.name.starts_with("mmvq") => {
            (weight, groups.div_ceil(if rows <= 2 { 64 } else { 32 }))
        }
        sources::QUANTIZED => (weight, groups.div_ceil(32)),
        // Each CTA loads a part of the inputs of its outputs and of all rows.
        sources::GEMM_SKINNY_QUANT => (x * (u64::from(instance.threads) * row + rows * columns * element), 0),
        // Each lane has two outputs, and CTAs of the same outputs share the rows.
        sources::GEMM_SKINNY_VOLTA => (x * (2 * u64::from(instance.threads) * row + rows * columns * element), 0),
        // Warps take turns at pairs of groups of 16 outputs.
        sources::GEMM_QUANT => (x * y * (16 * row + rows * columns * element), groups.div_ceil(2 * warps(instance))),
        _ => (0, 0),
    };
    (product.work(element, asked, true), product.name())
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{self, Chip};

    use super::*;

    const SIZES: Sizes = Sizes { dtype: Dtype::Bf16, values: 7 };

    #[test]
    fn a_product_reads_its_weight_once() {
        let params = LinearParams { weight: 1, m: 2, n: 64, k: 1024, add: 5, ..LinearParams::default() };
        let instance = manifest::gemv(Dtype::Bf16, Dtype::F32, 2);
        let (work, name) = of_product(&instance, params.gemv_grid(), &params, SIZES).unwrap();
        let activations = 2 * 1024 * 2 + 2 * 64 * 4 * 2;
        let weight = 1 << 17;
        let expected = Work { stored: weight, activations, asked: weight, flops: 1 << 18, tasks: 0, iterations: 1 };
        assert_eq!(work, expected);
        assert_eq!(name, "64x1024");
        // A weight that was dequantised is no stored one.
        let params = LinearParams { weight: 7, ..params };
        let (work, _) = of_product(&instance, params.gemv_grid(), &params, SIZES).unwrap();
        assert_eq!((work.stored, work.activations), (0, activations + (1 << 17)));
    }

    #[test]
    fn a_quantised_weight_has_the_bytes_of_its_blocks() {
        let params = QuantLinearParams { m: 1, n: 8, k: 256, ..QuantLinearParams::default() };
        let instance = manifest::mmvq(QuantFormat::Q4K, Dtype::Bf16, 1);
        let (work, _) = of_product(&instance, params.grid(), &params, SIZES).unwrap();
        assert_eq!((work.stored, work.asked, work.iterations), (8 * 144, 8 * 144, 1));
    }

    /// The loads of machine code must give the CTAs what they ask for. That of skinny products has a load for each thread, also of
    /// rows that do not exist.
    #[test]
    fn iterations_load_what_is_asked_for() {
        let linear = LinearParams { weight: 1, m: 1, n: 4096, k: 8192, ..LinearParams::default() };
        let skinny = SkinnyLinearParams { linear, steps: 256, ..SkinnyLinearParams::default() };
        let tile = GemmTile::Large;
        for chip in [Chip::SM_89, Chip::SM_90] {
            let gemm = manifest::gemm(chip, Dtype::Bf16, Dtype::Bf16, tile);
            let grid = linear.gemm_grid(tile.outputs(Dtype::Bf16));
            let mut launches = vec![(gemm, grid, &linear as &dyn Any)];
            let of_rows =
                |rows| (manifest::gemm_skinny(Dtype::Bf16, Dtype::Bf16, rows), skinny.grid(), &skinny as &dyn Any);
            launches.extend(manifest::SKINNY_TILES.map(of_rows));
            for (instance, grid, params) in launches {
                let (work, _) = of_product(&instance, grid, params, SIZES).unwrap();
                let (_, code) = octavo_kernels::figures::of(chip, &instance.name).unwrap();
                let ctas: u64 = grid.into_iter().map(u64::from).product();
                let loaded = work.iterations * u64::from(code.loaded * instance.threads) * ctas;
                let share = work.asked as f64 / loaded as f64;
                assert!((0.8..=1.0).contains(&share), "{}: {share}", instance.name);
            }
        }
    }

    #[test]
    fn launches_of_several_products_do_the_work_of_all() {
        let first = QuantLinearParams { m: 1, n: 64, k: 512, ..QuantLinearParams::default() };
        let params = QuantPairParams { first, second: QuantLinearParams { n: 32, ..first } };
        let instance = manifest::mmvq_pair([QuantFormat::Q4K, QuantFormat::Q6K], Dtype::Bf16, 1);
        let (work, name) = of_product(&instance, params.grid(), &params, SIZES).unwrap();
        let weight = 64 * 2 * 144 + 32 * 2 * 210;
        assert_eq!((work.stored, work.asked, work.flops), (weight, weight, 2 * 96 * 512));
        assert_eq!((work.iterations, name.as_str()), (1, "96x512"));

        let params = QuantGluParams { product: first, ..QuantGluParams::default() };
        let instance = manifest::mmvq_glu(QuantFormat::Q4K, Dtype::Bf16);
        let (work, name) = of_product(&instance, params.grid(), &params, SIZES).unwrap();
        assert_eq!((work.stored, work.activations), (64 * 2 * 144, 512 * 2 + 32 * 2));
        assert_eq!((work.iterations, name.as_str()), (4, "64x512"));
    }

    #[test]
    fn other_launches_are_no_products() {
        let instance = manifest::copy_blocks();
        assert_eq!(of_product(&instance, [1; 3], &0u32, SIZES), None);
    }
}
