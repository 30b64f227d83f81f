//! Cases of products, dense and quantised.

use octavo_kernels::manifest::{self, Dtype, GemmTile, Instance, SkinnyQuant};
use octavo_kernels::params::{
    DequantizeParams, LinearParams, QuantLinearParams, QuantWeight, QuantizeParams, SkinnyLinearParams,
    SkinnyQuantParams,
};
use octavo_kernels::parts::{InputParts, SKINNY_OUTPUTS, SKINNY_ROWS, WeightStage};
use octavo_kernels::quant::{QuantFormat, QuantLayout};

use super::At;
use super::cases::{Cases, Tables, Work, counted};
use crate::arena::{Plan, Region};
use crate::float8::{SIDE, Scaling, most_scales};
use crate::libraries::cublaslt::{Operands, Shape, USUAL_ALIGNMENT, bucket};

/// A weight `[n, k]`.
#[derive(Clone, Copy)]
struct Weight {
    name: &'static str,
    n: usize,
    k: usize,
    /// Type of the output.
    out: Dtype,
}

impl Weight {
    /// Returns the parameters of the product of `rows` rows with this quantised weight, for the addresses of planes,
    /// input and output. The scales of a rounded input are not set.
    fn product(&self, layout: QuantLayout, [planes, input, out]: [u64; 3], rows: usize) -> QuantLinearParams {
        let (n, k) = (self.n as u32, self.k as u32);
        QuantLinearParams {
            weight: layout.planes(planes),
            input,
            out,
            m: rows as u32,
            n,
            k,
            out_stride: n,
            scale: 1.0,
            ..QuantLinearParams::default()
        }
    }
}

/// Locations of the operands of a dense product.
#[derive(Clone, Copy)]
struct Dense {
    input: Region,
    weight: Region,
    out: Region,
}

impl Work {
    /// Adds the memory of a product whose inputs are divided: the sums of its parts, and a ticket for each tile. A tile has so many
    /// rows and outputs.
    fn add_parts(&mut self, parts: InputParts, [m, n]: [usize; 2], [rows, outputs]: [u32; 2]) -> (Region, usize) {
        let tiles = m.div_ceil(rows as usize) * n.div_ceil(outputs as usize);
        let sums = tiles * parts.count as usize * (outputs * rows) as usize;
        let partial = self.plan.take((sums * size_of::<f32>()) as u64);
        (partial, self.tables.add(std::iter::repeat_n(0, tiles)))
    }
}

impl Cases<'_> {
    fn weights(&self) -> [Weight; 5] {
        let (bench, dtype) = (self.bench, self.dtype);
        let weight = |name, n, k, out| Weight { name, n, k, out };
        [
            weight("qkv", bench.heads.qkv_cols(), bench.hidden, dtype),
            weight("output", bench.hidden, bench.heads.q_cols(), dtype),
            weight("gate_up", 2 * bench.inner, bench.hidden, dtype),
            weight("down", bench.hidden, bench.inner, dtype),
            weight("head", bench.vocab_size, bench.hidden, Dtype::F32),
        ]
    }

    pub(super) fn products(&mut self, with_library: bool) {
        for weight in self.weights() {
            for rows in self.row_counts() {
                // In a prefill, only one row reaches the head.
                if weight.name != "head" || self.bench.batch_sizes.contains(&rows) {
                    self.dense(weight, rows, with_library);
                }
            }
        }
        let [_, _, gate_up, ..] = self.weights();
        for format in QuantFormat::ALL {
            if let Some(layout) = QuantLayout::new(format, gate_up.n, gate_up.k) {
                self.quantised(gate_up, format, layout);
            }
        }
        for rows in self.bench.batch_sizes.clone() {
            self.round(gate_up.k, rows);
        }
        if let Some(layout) = QuantLayout::new(QuantFormat::F8E4M3, gate_up.n, gate_up.k)
            && self.chip().has_fp8()
            && self.dtype != Dtype::F32
        {
            for rows in self.row_counts() {
                self.fp8(gate_up, layout, rows, with_library);
            }
        }
    }

    fn dense_work(&self, weight: Weight, rows: usize) -> (Work, Dense) {
        let Weight { name, n, k, out } = weight;
        let size = self.size();
        // cuBLASLt computes a few surplus rows.
        let room = bucket(rows as u32) as usize;
        let mut plan = Plan::default();
        let mut take = |elements: usize, size: usize| plan.take((elements * size) as u64);
        let dense = Dense { weight: take(n * k, size), input: take(room * k, size), out: take(room * n, out.bytes()) };
        let bytes = (n * k + rows * k) * size + rows * n * out.bytes();
        let what = format!("{name} {n}x{k}, {}", counted(rows, "row"));
        (Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() }, dense)
    }

    fn dense(&mut self, weight: Weight, rows: usize, with_library: bool) {
        let Weight { n, k, out, .. } = weight;
        let params = move |at: At, dense: Dense| LinearParams {
            input: at.data(dense.input),
            weight: at.data(dense.weight),
            out: at.data(dense.out),
            m: rows as u32,
            n: n as u32,
            k: k as u32,
            out_stride: n as u32,
            scale: 1.0,
            ..LinearParams::default()
        };
        let dtype = self.dtype;
        if let Some(instance) = manifest::gemv_rows(rows).map(|most| manifest::gemv(dtype, out, most)) {
            let (work, dense) = self.dense_work(weight, rows);
            self.kernel(instance, work, move |at, _| {
                let params = params(at, dense);
                (params, params.gemv_grid())
            });
        }
        if manifest::skinny_most(self.chip(), dtype) > 0
            && let Some(most) = manifest::skinny_rows(rows)
        {
            let (mut work, dense) = self.dense_work(weight, rows);
            let parts = InputParts::new(WeightStage::DENSE, n as u32, k as u32, self.device.processors);
            let steps = parts.steps;
            let (partial, tickets) = work.add_parts(parts, [rows, n], [most, SKINNY_OUTPUTS]);
            self.kernel(manifest::gemm_skinny(dtype, out, most), work, move |at, _| {
                let (linear, partial, tickets) = (params(at, dense), at.data(partial), at.table(tickets));
                let params = SkinnyLinearParams { partial, tickets, linear, steps, reserved: 0 };
                (params, params.grid())
            });
        }
        let (work, dense) = self.dense_work(weight, rows);
        let tile = GemmTile::for_rows(rows);
        self.kernel(manifest::gemm(self.chip(), dtype, out, tile), work, move |at, _| {
            let params = params(at, dense);
            (params, params.gemm_grid(tile.outputs(dtype)))
        });
        if with_library {
            let (work, dense) = self.dense_work(weight, rows);
            let (n, k, alignment) = (n as u32, k as u32, USUAL_ALIGNMENT);
            let shape = Shape { n, k, stride: n, out, bias: false, scaling: None, alignment };
            self.library(shape, rows as u32, work, move |at| Operands {
                input: at.data(dense.input),
                weight: at.data(dense.weight),
                bias: 0,
                add: 0,
                out: at.data(dense.out),
                scale: 1.0,
                scales: [0; 2],
            });
        }
    }

    fn quantised(&mut self, weight: Weight, format: QuantFormat, layout: QuantLayout) {
        let Weight { name, n, k, .. } = weight;
        let (dtype, size) = (self.dtype, self.size());
        for rows in self.bench.batch_sizes.clone() {
            self.exact(weight, format, layout, rows);
            let Some(most) = manifest::mmvq_rows(rows).filter(|_| !format.is_float()) else { continue };
            let mut plan = Plan::default();
            let planes = plan.take(layout.bytes() as u64);
            let codes = plan.take((rows * k) as u64);
            let scales = plan.take((rows * k / 32 * 2 * size_of::<f32>()) as u64);
            let out = plan.take((rows * n * size) as u64);
            let bytes = layout.bytes() + rows * k + rows * k / 4 + rows * n * size;
            let what = format!("{name} {n}x{k}, {}", counted(rows, "row"));
            let work = Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() };
            self.kernel(manifest::mmvq(format, dtype, most), work, move |at, _| {
                let scales = at.data(scales);
                let params = weight.product(layout, [planes, codes, out].map(|region| at.data(region)), rows);
                (QuantLinearParams { scales, ..params }, params.grid())
            });
        }
        let mut plan = Plan::default();
        let planes = plan.take(layout.bytes() as u64);
        let out = plan.take((n * k * size) as u64);
        let bytes = layout.bytes() + n * k * size;
        let work = Work { what: format!("{name} {n}x{k}"), bytes, flops: n * k, plan, tables: Tables::default() };
        self.kernel(manifest::dequantize(format, dtype), work, move |at, threads| {
            let params = DequantizeParams {
                weight: layout.planes(at.data(planes)),
                row_ids: 0,
                drawn: 0,
                out: at.data(out),
                rows: n as u32,
                k: k as u32,
                n: n as u32,
                scale: 1.0,
            };
            (params, params.grid(threads))
        });
    }

    /// Adds the products of exact activations with a quantised weight for which there are kernels for this number of rows.
    fn exact(&mut self, weight: Weight, format: QuantFormat, layout: QuantLayout, rows: usize) {
        let dtype = self.dtype;
        if let Some(most) = manifest::mmvq_rows(rows).filter(|_| format.is_float()) {
            self.exact_by(
                manifest::gemv_quant(format, dtype, dtype, most),
                weight,
                layout,
                rows,
                QuantLinearParams::grid,
            );
        }
        if rows as u32 <= manifest::skinny_quant_most(self.chip(), dtype, weight.k as u32).min(SKINNY_ROWS) {
            self.skinny_quant(weight, format, layout, rows);
        } else if self.chip().has_sm80() && dtype != Dtype::F32 && rows as u32 <= manifest::GEMM_QUANT_MOST {
            let instance = manifest::gemm_quant(format, dtype, dtype);
            self.exact_by(instance, weight, layout, rows, QuantLinearParams::gemm_grid);
        }
    }

    /// Returns the work of a product of exact activations, and the regions of planes, input and output.
    fn exact_work(&self, weight: Weight, layout: QuantLayout, rows: usize) -> (Work, [Region; 3]) {
        let (Weight { name, n, k, .. }, size) = (weight, self.size());
        let mut plan = Plan::default();
        let planes = plan.take(layout.bytes() as u64);
        let [input, out] = [k, n].map(|cols| plan.take((rows * cols * size) as u64));
        let bytes = layout.bytes() + rows * (k + n) * size;
        let what = format!("{name} {n}x{k}, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() };
        (work, [planes, input, out])
    }

    fn exact_by(
        &mut self,
        instance: Instance,
        weight: Weight,
        layout: QuantLayout,
        rows: usize,
        grid: fn(&QuantLinearParams) -> [u32; 3],
    ) {
        let (work, regions) = self.exact_work(weight, layout, rows);
        self.kernel(instance, work, move |at, _| {
            let params = weight.product(layout, regions.map(|region| at.data(region)), rows);
            (params, grid(&params))
        });
    }

    fn skinny_quant(&mut self, weight: Weight, format: QuantFormat, layout: QuantLayout, rows: usize) {
        let tiles = manifest::skinny_quant_tiles(self.chip(), format);
        // Tiles of the last one share the rows.
        let of_tile = tiles.iter().find(|of_tile| rows as u32 <= **of_tile).unwrap_or(&tiles[tiles.len() - 1]);
        let SkinnyQuant { instance, tile } = manifest::gemm_skinny_quant(self.chip(), format, self.dtype, *of_tile);
        let Weight { n, k, .. } = weight;
        let (mut work, regions) = self.exact_work(weight, layout, rows);
        let parts = InputParts::new(WeightStage::quantised(format), n as u32, k as u32, self.device.processors);
        let steps = parts.steps;
        let (partial, tickets) = work.add_parts(parts, [rows, n], tile);
        self.kernel(instance, work, move |at, _| {
            let product = weight.product(layout, regions.map(|region| at.data(region)), rows);
            let (partial, tickets) = (at.data(partial), at.table(tickets));
            let params = SkinnyQuantParams { partial, tickets, product, steps, out_f32: 0 };
            (params, params.grid(tile))
        });
    }

    /// Adds the product of activations in FP8 with an FP8 weight, by the kernel or by the library that does it, and their
    /// rounding.
    fn fp8(&mut self, weight: Weight, layout: QuantLayout, rows: usize, with_library: bool) {
        self.round_fp8(weight.k, rows, Scaling::Rows);
        if self.chip().has_fp8_mma() {
            self.fp8_product(weight, layout, rows);
            return;
        }
        self.round_fp8(weight.k, rows, Scaling::Blocks);
        for scaling in [Scaling::Rows, Scaling::Blocks, Scaling::Afterwards].into_iter().filter(|_| with_library) {
            self.fp8_library(weight, rows, scaling);
        }
        self.scale_fp8(weight, rows);
    }

    fn fp8_library(&mut self, weight: Weight, rows: usize, scaling: Scaling) {
        let Weight { name, n, k, out } = weight;
        let out = if scaling == Scaling::Afterwards { Dtype::F32 } else { out };
        // cuBLASLt computes a few surplus rows.
        let room = bucket(rows as u32) as usize;
        let (floats, input_scales) = (size_of::<f32>(), room * k.div_ceil(SIDE));
        let mut plan = Plan::default();
        let [codes, scales, input, of_input, to] =
            [n * k, most_scales(n, k) * floats, room * k, input_scales * floats, room * n * out.bytes()]
                .map(|bytes| plan.take(bytes as u64));
        let scales_of = match scaling {
            Scaling::Rows => "with scales of rows",
            Scaling::Blocks => "with scales of blocks",
            Scaling::Afterwards => "without scales",
        };
        let what = format!("{name} {n}x{k} in FP8 {scales_of}, {}", counted(rows, "row"));
        let bytes = n * k + rows * (k + n * out.bytes());
        let work = Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() };
        let (n, k, alignment) = (n as u32, k as u32, USUAL_ALIGNMENT);
        let shape = Shape { n, k, stride: n, out, bias: false, scaling: Some(scaling), alignment };
        self.library(shape, rows as u32, work, move |at| Operands {
            input: at.data(input),
            weight: at.data(codes),
            bias: 0,
            add: 0,
            out: at.data(to),
            scale: 1.0,
            scales: [at.data(scales), at.data(of_input)],
        });
    }

    /// Adds the kernel that applies the scales of rows to the product of codes.
    fn scale_fp8(&mut self, weight: Weight, rows: usize) {
        let Weight { name, n, out, .. } = weight;
        let mut plan = Plan::default();
        let [sums, of_rows, of_weight, to] =
            [rows * n * size_of::<f32>(), rows * size_of::<f32>(), n * size_of::<f32>(), rows * n * out.bytes()]
                .map(|bytes| plan.take(bytes as u64));
        let bytes = rows * n * (size_of::<f32>() + out.bytes()) + (rows + n) * size_of::<f32>();
        let what = format!("{name} {n} columns in FP8, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 2 * rows * n, plan, tables: Tables::default() };
        self.kernel(manifest::scale_f8(out), work, move |at, threads| {
            let (m, n, scale) = (rows as u32, n as u32, 1.0);
            let [input, scales, of_weight, out] = [sums, of_rows, of_weight, to].map(|region| at.data(region));
            let weight = QuantWeight { scales: of_weight, ..QuantWeight::default() };
            let sizes = QuantLinearParams { m, n, out_stride: n, scale, ..QuantLinearParams::default() };
            let params = QuantLinearParams { weight, input, scales, out, ..sizes };
            (params, params.column_grid(threads))
        });
    }

    fn fp8_product(&mut self, weight: Weight, layout: QuantLayout, rows: usize) {
        let Weight { name, n, k, .. } = weight;
        let (dtype, size) = (self.dtype, self.size());
        let mut plan = Plan::default();
        let [planes, codes, scales, out] =
            [layout.bytes(), rows * k, rows * size_of::<f32>(), rows * n * size].map(|bytes| plan.take(bytes as u64));
        let bytes = layout.bytes() + rows * (k + size_of::<f32>() + n * size);
        let what = format!("{name} {n}x{k}, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() };
        self.kernel(manifest::gemm_f8(dtype), work, move |at, _| {
            let params = weight.product(layout, [planes, codes, out].map(|region| at.data(region)), rows);
            let params = QuantLinearParams { scales: at.data(scales), ..params };
            (params, params.tile_grid(manifest::GEMM_F8_TILE))
        });
    }

    fn round_fp8(&mut self, k: usize, rows: usize, scaling: Scaling) {
        let (instance, count) = match scaling {
            Scaling::Rows | Scaling::Afterwards => (manifest::quantize_f8(self.dtype), 1),
            Scaling::Blocks => (manifest::quantize_f8_groups(self.dtype), k.div_ceil(SIDE)),
        };
        let mut plan = Plan::default();
        let [input, codes, scales] =
            [rows * k * self.size(), rows * k, rows * count * size_of::<f32>()].map(|bytes| plan.take(bytes as u64));
        let bytes = rows * (k * (self.size() + 1) + count * size_of::<f32>());
        let what = format!("{k} columns, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 3 * rows * k, plan, tables: Tables::default() };
        self.kernel(instance, work, move |at, threads| {
            let [input, codes, scales] = [input, codes, scales].map(|region| at.data(region));
            let (m, k) = (rows as u32, k as u32);
            let params = QuantizeParams { input, codes, scales, m, k, stride: m, reserved: 0 };
            (params, if scaling == Scaling::Rows { params.row_grid() } else { params.grid(threads) })
        });
    }

    fn round(&mut self, k: usize, rows: usize) {
        if !k.is_multiple_of(32) || manifest::mmvq_rows(rows).is_none() {
            return;
        }
        let mut plan = Plan::default();
        let input = plan.take((rows * k * self.size()) as u64);
        let codes = plan.take((rows * k) as u64);
        let scales = plan.take((rows * k / 32 * 2 * size_of::<f32>()) as u64);
        let bytes = rows * k * (self.size() + 1) + rows * k / 4;
        let what = format!("{k} columns, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 3 * rows * k, plan, tables: Tables::default() };
        self.kernel(manifest::quantize_activations(self.dtype), work, move |at, threads| {
            let params = QuantizeParams {
                input: at.data(input),
                codes: at.data(codes),
                scales: at.data(scales),
                m: rows as u32,
                k: k as u32,
                ..QuantizeParams::default()
            };
            (params, params.grid(threads))
        });
    }
}
