//! Products, and those of quantised weights: selection of the kernel by the weight and the number of rows.

mod library_fp8;

use std::collections::HashMap;
use std::ops::RangeInclusive;

use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Dtype, SkinnyQuant};
use octavo_kernels::params::{
    DequantizeParams, LinearParams, QuantLinearParams, QuantPairParams, QuantWeight, QuantizeParams, RoundedRows,
    SkinnyQuantParams,
};
use octavo_kernels::parts::{InputParts, SKINNY_ROWS, WeightStage};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::BackendError;

use crate::build::{Instances, KernelId};
use crate::dense::Dense;
use crate::float8::Scaling;
use crate::forward::{Machine, Scratch};
use crate::launcher::Launcher;
use crate::libraries::cublaslt::{CublasLt, LEAST_ALIGNMENT, Operands, Shape, alignment_of, bucket, buckets};
use crate::rounded::{Gate, Prepared};
use crate::step::StepShape;
use library_fp8::{Fp8Way, LibraryFp8};

/// A lowered product, with one entry for each row part of the weight.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) parts: Vec<ProductPart>,
    /// Codes of the input that the stage before writes.
    pub(crate) prepared: Option<Prepared>,
    /// Activation of the output.
    pub(crate) gate: Option<Gate>,
}

/// A part of a product, which writes its own columns of the output.
#[derive(Clone, Debug)]
pub(crate) struct ProductPart {
    /// Parameters except `m` and, for a quantised weight, the address of its dequantised values.
    pub(crate) params: LinearParams,
    /// Shape and bias for cuBLASLt, if it can compute the product.
    pub(crate) library: Option<(Shape, u64)>,
    pub(crate) dense: Dense,
    /// Type of the output.
    out: Dtype,
    quant: Option<Quant>,
}

/// Kernels of a quantised weight.
#[derive(Clone, Debug)]
struct Quant {
    format: QuantFormat,
    weight: QuantWeight,
    /// Rounds the input for products of few rows; `None` if they take it as it is.
    quantize: Option<Rounding>,
    /// Kernels with their number of rows, ascending.
    vectors: Vec<(u32, KernelId)>,
    /// Those that multiply the next part too.
    pairs: Vec<(u32, KernelId)>,
    /// Kernels on tensor cores for weights as they are stored, with their maximum number of rows, ascending.
    skinny: Vec<(u32, Skinny)>,
    /// Kernel in their place for numbers of inputs that they do not support.
    tiles: Option<KernelId>,
    /// Kernels that round the input to FP8 and multiply it, for still more rows.
    fp8: Option<(Rounding, KernelId)>,
    /// The same by cuBLASLt.
    fp8_library: Option<LibraryFp8>,
    dequantize: KernelId,
}

/// A kernel of [`manifest::gemm_skinny_quant`].
#[derive(Clone, Copy, Debug)]
struct Skinny {
    kernel: KernelId,
    /// Numbers of rows and outputs of a CTA.
    tile: [u32; 2],
}

/// The kernel that rounds the input of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To integers, in blocks of 32.
    Blocks(KernelId),
    /// To FP8, in rows.
    Rows(KernelId),
    /// To FP8, in groups of 128, with scales as cuBLASLt takes them.
    Groups(KernelId),
}

/// Properties of a product that are known when a program is lowered.
pub(crate) struct Wanted {
    /// Parameters, as in [`ProductPart::params`].
    pub(crate) params: LinearParams,
    /// Address of the bias in the element type, or 0.
    pub(crate) narrow_bias: u64,
    /// Type of the output.
    pub(crate) out: Dtype,
    /// Planes of a quantised weight.
    pub(crate) quant: Option<(QuantFormat, QuantWeight)>,
    /// Address of the scales of an FP8 weight that cuBLASLt may multiply.
    pub(crate) scales: Option<u64>,
}

/// Numbers of rows for which there may be instances.
pub(crate) const VECTOR_ROWS: [u32; 5] = [1, 2, 4, 8, 16];

/// Maximum number of rows of an activation that is rounded.
pub(crate) const ROUNDED_ROWS: u64 = VECTOR_ROWS[VECTOR_ROWS.len() - 1] as u64;

impl Product {
    /// Joins the parts of a weight, of which two may be multiplied at once.
    pub(crate) fn new(mut parts: Vec<ProductPart>, instances: &mut Instances) -> Self {
        for at in 1..parts.len() {
            let [first, second] = [at - 1, at].map(|at| parts[at].format_of_few());
            let Some(formats) = first.zip(second).map(<[_; 2]>::from) else { continue };
            let out = parts[at].out;
            if let Some(quant) = parts[at - 1].quant.as_mut().filter(|_| manifest::MMVQ_PAIRS.contains(&formats)) {
                let pair = |&(rows, _): &(u32, KernelId)| (rows, instances.id(manifest::mmvq_pair(formats, out, rows)));
                quant.pairs = quant.vectors.iter().map(pair).collect();
            }
        }
        Self { parts, prepared: None, gate: None }
    }

    /// Returns how the input of few rows is rounded for weights of integers, and their maximum number.
    pub(crate) fn rounding_of_few(&self) -> Option<(Rounding, u32)> {
        self.parts.iter().find_map(|part| {
            let quant = part.quant.as_ref()?;
            Some((quant.quantize?, quant.vectors.last()?.0))
        })
    }
}

impl ProductPart {
    /// Chooses kernels. With `batch_invariant` one kernel computes any number of rows, so that a row's bits do not
    /// depend on it.
    pub(crate) fn new(wanted: &Wanted, setting: &Setting, instances: &mut Instances) -> Self {
        let Setting { chip, dtype, batch_invariant, .. } = *setting;
        let Wanted { params, out, quant, .. } = wanted;
        let dense = Dense::new(setting, *out, instances);
        let library = library_shape(wanted, dtype).filter(|_| !batch_invariant);
        let tiled = chip.has_sm80() && dtype != Dtype::F32 && !batch_invariant;
        let vectors = if batch_invariant { 0 } else { manifest::mmvq_cutoff(chip, dtype, params.k) };
        let skinny = if batch_invariant { 0 } else { manifest::skinny_quant_most(chip, dtype, params.k) };
        let exact = |rows: &u32| manifest::mmvq_rows(*rows as usize) == Some(*rows) && *rows <= vectors;
        let quant = quant.map(|(format, weight)| Quant {
            format,
            weight,
            pairs: Vec::new(),
            vectors: (VECTOR_ROWS.into_iter().filter(exact))
                .map(|rows| (rows, instances.id(few_rows(format, dtype, *out, rows))))
                .collect(),
            skinny: skinny_kernels(setting, format, vectors + 1..=skinny, instances),
            tiles: (tiled && skinny == 0).then(|| instances.id(manifest::gemm_quant(format, dtype, *out))),
            fp8: (format == QuantFormat::F8E4M3 && setting.rounds_to_fp8() && chip.has_fp8_mma()).then(|| {
                (Rounding::Rows(instances.id(manifest::quantize_f8(dtype))), instances.id(manifest::gemm_f8(*out)))
            }),
            fp8_library: wanted.scales.map(|scales| LibraryFp8 {
                kernels: [manifest::quantize_f8(dtype), manifest::quantize_f8_groups(dtype)]
                    .map(|instance| instances.id(instance)),
                scale: instances.id(manifest::scale_f8(*out)),
                scales,
                scaling: None,
            }),
            quantize: (!format.is_float())
                .then(|| Rounding::Blocks(instances.id(manifest::quantize_activations(dtype)))),
            dequantize: instances.id(manifest::dequantize(format, dtype)),
        });
        Self { params: *params, library, dense, out: *out, quant }
    }

    /// Returns whether the weight is dense.
    pub(crate) fn is_dense(&self) -> bool {
        self.quant.is_none()
    }

    /// Returns the type of the output.
    pub(crate) fn out(&self) -> Dtype {
        self.out
    }

    /// Returns the format of a weight of integers whose product with few rows is one of its own.
    pub(crate) fn format_of_few(&self) -> Option<QuantFormat> {
        let quant = self.quant.as_ref().filter(|quant| quant.quantize.is_some() && !quant.vectors.is_empty())?;
        Some(quant.format)
    }

    /// Returns a text that tells products apart whose times differ.
    pub(crate) fn shape_name(&self) -> String {
        let LinearParams { n, k, bias, add, .. } = self.params;
        let with = |address: u64, what: &'static str| if address == 0 { "" } else { what };
        format!("{n}x{k} to {}{}{}", self.out.name(), with(bias, ", bias"), with(add, ", add"))
    }

    /// Returns the size of a dense weight in bytes.
    pub(crate) fn weight_bytes(&self) -> u64 {
        u64::from(self.params.n) * u64::from(self.params.k) * self.dense.dtype.bytes() as u64
    }

    /// Returns the parameters of the product of an input, with its scales if it is rounded, and a quantised weight.
    fn quantised(&self, quant: &Quant, input: RoundedRows, rows: u32) -> QuantLinearParams {
        let RoundedRows { codes: input, scales } = input;
        let LinearParams { bias, add, out, n, k, out_stride, scale, softcap, .. } = self.params;
        let weight = quant.weight;
        QuantLinearParams { weight, input, scales, bias, add, out, m: rows, n, k, out_stride, scale, softcap }
    }

    /// Returns the input as it is.
    fn exact(&self) -> RoundedRows {
        RoundedRows { codes: self.params.input, scales: 0 }
    }

    /// Returns the shape and operands for cuBLASLt to plan, if it may be used. `values` is the address of a quantised
    /// weight's dequantised values.
    fn for_library(&self, values: u64) -> Option<(Shape, Operands)> {
        let weight = match &self.quant {
            None => self.params.weight,
            // Its values are never needed.
            Some(quant) if quant.fp8.is_some() => return None,
            Some(_) => values,
        };
        self.library.map(|(shape, bias)| (shape, self.operands(weight, bias)))
    }

    pub(crate) fn operands(&self, weight: u64, bias: u64) -> Operands {
        let LinearParams { input, add, out, scale, .. } = self.params;
        Operands { input, weight, bias, add, out, scale, scales: [0; 2] }
    }

    /// Lets cuBLASLt plan the product for at most `most` rows. `scalings` are those of the loaded weights.
    pub(crate) fn plan(
        &mut self,
        library: &mut CublasLt,
        scratch: &Scratch,
        most: u32,
        scalings: &HashMap<u64, Scaling>,
    ) {
        if let Some(fp8) = self.quant.as_mut().and_then(|quant| quant.fp8_library.as_mut()) {
            fp8.scaling = scalings.get(&fp8.scales).copied();
        }
        for rows in buckets(most) {
            if let Some((shape, operands, _)) = self.fp8_by_library(rows, scratch)
                && !library.prepare(shape, rows, Some(&operands))
                && let Some(apart) = self.fp8_apart(rows, scratch)
            {
                buckets(apart.chunk.min(rows)).for_each(|rows| {
                    library.prepare(apart.shape, rows, Some(&apart.operands(0)));
                });
            }
            let supports = |shape, rows| library.supports(shape, rows);
            let in_fp8 = self.fp8_way(supports, rows, scratch).is_some();
            if let Some((shape, operands)) = self.for_library(scratch.values).filter(|_| !in_fp8) {
                library.prepare(shape, rows, Some(&operands));
            }
        }
    }

    /// Returns the shape and the operands with which cuBLASLt computes the whole product of so many rows (a [`bucket`]); `None` if it
    /// does not.
    pub(crate) fn by_library(&self, library: &CublasLt, rows: u32, scratch: &Scratch) -> Option<(Shape, Operands)> {
        let of_few = |quant: &Quant| {
            let is_tiled = quant.tiles.is_some() && rows <= MOST_TILED_ROWS;
            is_tiled || for_rows(&quant.vectors, rows).is_some() || for_rows(&quant.skinny, rows).is_some()
        };
        if self.quant.as_ref().is_some_and(of_few) {
            return None;
        }
        let supports = |shape, rows| library.supports(shape, rows);
        match self.fp8_way(supports, rows, scratch) {
            Some(Fp8Way::Scaled { shape, operands, .. }) => Some((shape, operands)),
            Some(Fp8Way::Apart { .. }) => None,
            None => self.for_library(scratch.values).filter(|(shape, _)| library.supports(*shape, rows)),
        }
    }

    /// Returns whether an input of so many rows is rounded to FP8; `None` if no input may be.
    pub(crate) fn rounds_to_fp8(&self, launcher: &impl Launcher, rows: u32, scratch: &Scratch) -> Option<bool> {
        let quant = self.quant.as_ref().filter(|quant| quant.fp8.is_some() || quant.fp8_library.is_some())?;
        let supports = |shape, rows| launcher.supports(shape, rows);
        let by_library = || self.fp8_way(supports, rows, scratch).is_some();
        Some(rows > MOST_TILED_ROWS && (quant.fp8.is_some() || by_library()))
    }
}

/// Maximum number of rows of a product with a quantised weight that takes its input as it is, where there are tensor cores.
const MOST_TILED_ROWS: u32 = manifest::GEMM_QUANT_MOST;

// Both kernels are for equally many rows.
const _: () = assert!(MOST_TILED_ROWS == SKINNY_ROWS);

/// Returns the kernel of a product of a few rows with a quantised weight.
fn few_rows(format: QuantFormat, dtype: Dtype, out: Dtype, rows: u32) -> manifest::Instance {
    match format.is_float() {
        true => manifest::gemv_quant(format, dtype, out, rows),
        false => manifest::mmvq(format, out, rows),
    }
}

/// Returns the kernels on tensor cores for these numbers of rows. The last one may have several tiles of them.
fn skinny_kernels(
    setting: &Setting,
    format: QuantFormat,
    rows: RangeInclusive<u32>,
    instances: &mut Instances,
) -> Vec<(u32, Skinny)> {
    let Setting { chip, dtype, .. } = *setting;
    let wanted = manifest::skinny_quant_tiles(chip, format).iter().filter(|of_tile| rows.contains(of_tile));
    let mut kernels: Vec<_> = wanted
        .map(|of_tile| {
            let SkinnyQuant { instance, tile } = manifest::gemm_skinny_quant(chip, format, dtype, *of_tile);
            (*of_tile, Skinny { kernel: instances.id(instance), tile })
        })
        .collect();
    if let Some((most, _)) = kernels.last_mut() {
        *most = *rows.end();
    }
    kernels
}

/// Returns the shape of a product for cuBLASLt, and its bias, if the library supports it: no softcap, a bias of the
/// output's type that no factor applies to, and aligned addresses.
fn library_shape(wanted: &Wanted, dtype: Dtype) -> Option<(Shape, u64)> {
    let Wanted { params: LinearParams { n, k, out_stride: stride, scale, .. }, narrow_bias: bias, out, .. } = *wanted;
    // The address 0 means that nothing is added, and it is aligned.
    let alignment = alignment_of(wanted.params.out | wanted.params.add);
    let aligned = alignment >= LEAST_ALIGNMENT && alignment_of(bias) >= LEAST_ALIGNMENT;
    let fits_bias = bias == 0 || (out == dtype && scale == 1.0);
    let fits = wanted.params.softcap == 0.0 && fits_bias && dtype != Dtype::F32;
    (fits && aligned).then_some((Shape { n, k, stride, out, bias: bias != 0, scaling: None, alignment }, bias))
}

/// Settings shared by all products of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) chip: manifest::Chip,
    pub(crate) dtype: Dtype,
    /// Element type of the KV cache.
    pub(crate) cache: CacheType,
    pub(crate) batch_invariant: bool,
    /// Whether the program allows to round inputs to FP8.
    pub(crate) fp8_inputs: bool,
    /// Whether the kernels of dense products of few rows are chosen by measurements.
    pub(crate) tune: bool,
}

impl Setting {
    /// Returns the types of attention over the KV cache.
    pub(crate) const fn attention(&self) -> AttentionTypes {
        AttentionTypes { dtype: self.dtype, cache: self.cache }
    }

    /// Returns whether products of many rows with FP8 weights may round their input to FP8. Products of few rows do not, so
    /// this is not invariant to the batch.
    pub(crate) fn rounds_to_fp8(&self) -> bool {
        self.fp8_inputs && self.chip.has_fp8() && self.dtype != Dtype::F32 && !self.batch_invariant
    }

    /// Returns whether cuBLASLt may multiply FP8 weights in FP8, because warps do not.
    pub(crate) fn multiplies_fp8_by_library(&self) -> bool {
        self.rounds_to_fp8() && !self.chip.has_fp8_mma()
    }
}

/// Returns the first kernel for at least this number of rows.
pub(crate) fn for_rows<K: Copy>(kernels: &[(u32, K)], rows: u32) -> Option<K> {
    kernels.iter().find(|(most, _)| rows <= *most).map(|(_, kernel)| *kernel)
}

/// How scratch memory has the input of a product, and where.
type Rounded = Option<(Rounding, RoundedRows)>;

impl<L: Launcher> Machine<L> {
    /// Launches a product on this number of rows of a step.
    pub(crate) fn product(&self, product: &Product, rows: u32, shape: &StepShape) -> Result<(), BackendError> {
        let prepared = product.prepared.filter(|prepared| prepared.is_written(rows, shape));
        // The parts of a fused weight share it.
        let mut rounded = prepared.map(|prepared| (prepared.rounding, prepared.at));
        let mut parts = &product.parts[..];
        while let [part, rest @ ..] = parts {
            parts = rest;
            let Some(quant) = &part.quant else {
                self.dense(part, rows, part.params.weight)?;
                continue;
            };
            if let Some(kernel) = for_rows(&quant.vectors, rows) {
                let input = match quant.quantize {
                    None => part.exact(),
                    Some(rounding) => self.round(part, rounding, rows, &mut rounded)?,
                };
                let params = part.quantised(quant, input, rows);
                let pair = || {
                    let (next, others) = rest.split_first()?;
                    Some((for_rows(&quant.pairs, rows)?, next.quantised(next.quant.as_ref()?, input, rows), others))
                };
                if let Some(gate) = product.gate.as_ref().filter(|gate| self.applies(gate, rows)) {
                    self.gated_product(gate, params)?;
                } else if let Some((kernel, second, others)) = pair() {
                    let params = QuantPairParams { first: params, second };
                    self.launch(kernel, params.grid(), &params)?;
                    parts = others;
                } else {
                    self.launch(kernel, params.grid(), &params)?;
                }
            } else if let Some(kernel) = for_rows(&quant.skinny, rows) {
                self.skinny_quant(kernel, part, quant, rows)?;
            } else if let Some(kernel) = quant.tiles.filter(|_| rows <= MOST_TILED_ROWS) {
                let params = part.quantised(quant, part.exact(), rows);
                self.launch(kernel, params.gemm_grid(), &params)?;
            } else if let Some((rounding, kernel)) = quant.fp8 {
                let input = self.round(part, rounding, rows, &mut rounded)?;
                let params = part.quantised(quant, input, rows);
                self.launch(kernel, params.tile_grid(manifest::GEMM_F8_TILE), &params)?;
            } else if !self.fp8_by_library(part, rows, &mut rounded)? {
                self.values(part, quant)?;
                self.dense(part, rows, self.scratch.values)?;
            }
        }
        Ok(())
    }

    /// Launches a product with a quantised weight on tensor cores, which read it once for [`SKINNY_ROWS`] rows.
    fn skinny_quant(&self, skinny: Skinny, part: &ProductPart, quant: &Quant, rows: u32) -> Result<(), BackendError> {
        let Skinny { kernel, tile } = skinny;
        let whole = part.quantised(quant, part.exact(), rows);
        let stage = WeightStage::quantised(quant.format);
        let InputParts { steps, .. } = InputParts::new(stage, whole.n, whole.k, self.launcher.processors());
        let (partial, tickets) = self.scratch.parts;
        let out_f32 = u32::from(part.out == Dtype::F32);
        for first in (0..rows).step_by(SKINNY_ROWS as usize) {
            let product = whole.rows_from(first, SKINNY_ROWS, [self.dtype, part.out]);
            let params = SkinnyQuantParams { partial, tickets, product, steps, out_f32 };
            self.launch(kernel, params.grid(tile), &params)?;
        }
        Ok(())
    }

    /// Returns the rounded input of a quantised product. It is not rounded again if it is `rounded` so.
    fn round(
        &self,
        part: &ProductPart,
        rounding: Rounding,
        rows: u32,
        rounded: &mut Rounded,
    ) -> Result<RoundedRows, BackendError> {
        if let Some((_, at)) = rounded.filter(|known| known.0 == rounding) {
            return Ok(at);
        }
        let RoundedRows { codes, scales } = self.scratch.rounded;
        let (input, k) = (part.params.input, part.params.k);
        // Scales of groups have the distance of the rows that are planned.
        let params = QuantizeParams { input, codes, scales, m: rows, k, stride: bucket(rows), reserved: 0 };
        match rounding {
            Rounding::Blocks(kernel) | Rounding::Groups(kernel) => {
                self.launch(kernel, params.grid(self.launcher.threads(kernel)), &params)?;
            }
            Rounding::Rows(kernel) => self.launch(kernel, params.row_grid(), &params)?,
        }
        *rounded = Some((rounding, self.scratch.rounded));
        Ok(self.scratch.rounded)
    }

    /// Dequantises a weight.
    fn values(&self, part: &ProductPart, quant: &Quant) -> Result<(), BackendError> {
        let params = DequantizeParams {
            weight: quant.weight,
            row_ids: 0,
            drawn: 0,
            out: self.scratch.values,
            rows: part.params.n,
            k: part.params.k,
            n: part.params.n,
            scale: 1.0,
        };
        // Rows are counted in the grid's second dimension, which has 16 bits.
        let threads = self.launcher.threads(quant.dequantize);
        self.launch(quant.dequantize, params.grid(threads), &params)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use octavo_kernels::manifest::Chip;

    use super::*;

    /// Returns settings of an sm_90.
    pub(crate) fn setting(dtype: Dtype) -> Setting {
        let cache = CacheType::Activation;
        Setting { chip: Chip::SM_90, dtype, cache, batch_invariant: false, fp8_inputs: false, tune: false }
    }

    #[test]
    fn inputs_are_rounded_to_fp8_where_it_is_multiplied() {
        let with = |chip, dtype, batch_invariant| {
            let setting = Setting { chip, batch_invariant, fp8_inputs: true, ..setting(dtype) };
            (setting.rounds_to_fp8(), setting.multiplies_fp8_by_library())
        };
        assert_eq!(with(Chip::SM_89, Dtype::Bf16, false), (true, false));
        assert_eq!(with(Chip::SM_90, Dtype::F16, false), (true, true));
        for (chip, dtype, invariant) in
            [(Chip::SM_90, Dtype::Bf16, true), (Chip::SM_90, Dtype::F32, false), (Chip::SM_86, Dtype::Bf16, false)]
        {
            assert_eq!(with(chip, dtype, invariant), (false, false), "{chip:?}");
        }
        assert!(!setting(Dtype::Bf16).rounds_to_fp8(), "the checkpoint is not made for it");
    }
}
