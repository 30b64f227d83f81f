//! Products: selection of the kernel by the weight and the number of rows.

use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Dtype, GemmTile};
use octavo_kernels::params::{DequantizeParams, LinearParams, QuantLinearParams, QuantWeight, QuantizeParams};
use octavo_kernels::quant::QuantFormat;
use octavo_ops::BackendError;

use crate::build::{Instances, KernelId};
use crate::forward::Machine;
use crate::libraries::cublaslt::{LEAST_ALIGNMENT, Operands, Shape, alignment_of, bucket};

/// A lowered product, with one entry for each row part of the weight.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) parts: Vec<ProductPart>,
}

/// A part of a product, which writes its own columns of the output.
#[derive(Clone, Debug)]
pub(crate) struct ProductPart {
    /// Parameters except `m` and, for a quantised weight, the address of its dequantised values.
    pub(crate) params: LinearParams,
    /// Shape and bias for cuBLASLt, if it can compute the product.
    library: Option<(Shape, u64)>,
    dense: Dense,
    quant: Option<Quant>,
}

/// Kernels of a dense product.
#[derive(Clone, Debug)]
struct Dense {
    /// Kernels with their number of rows, ascending.
    vectors: Vec<(u32, KernelId)>,
    small: KernelId,
    large: KernelId,
    dtype: Dtype,
}

/// Kernels of a quantised weight.
#[derive(Clone, Debug)]
struct Quant {
    weight: QuantWeight,
    /// Rounds the input for products of few rows; `None` if they take it as it is.
    quantize: Option<Rounding>,
    /// Kernels with their number of rows, ascending.
    vectors: Vec<(u32, KernelId)>,
    /// Kernels for more rows, with their number of rows and the number of rows in a tile.
    tiles: Vec<(u32, (KernelId, u32))>,
    /// Kernels that round the input to FP8 and multiply it, for still more rows.
    fp8: Option<(Rounding, KernelId)>,
    dequantize: KernelId,
}

/// The kernel that rounds the input of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rounding {
    /// To integers, in blocks of 32.
    Blocks(KernelId),
    /// To FP8, in rows.
    Rows(KernelId),
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
}

/// Numbers of rows for which there may be instances.
const VECTOR_ROWS: [u32; 5] = [1, 2, 4, 8, 16];

/// Maximum number of rows of an activation that is rounded.
pub(crate) const ROUNDED_ROWS: u64 = VECTOR_ROWS[VECTOR_ROWS.len() - 1] as u64;

impl ProductPart {
    /// Chooses kernels. With `batch_invariant` one kernel computes any number of rows, so that a row's bits do not
    /// depend on it.
    pub(crate) fn new(wanted: &Wanted, setting: &Setting, instances: &mut Instances) -> Self {
        let Setting { chip, dtype, batch_invariant, .. } = *setting;
        let Wanted { params, out, quant, .. } = wanted;
        let mut of_rows = |make: &dyn Fn(u32) -> manifest::Instance, known: &dyn Fn(usize) -> Option<u32>| {
            let rows = VECTOR_ROWS.into_iter().filter(|&rows| known(rows as usize) == Some(rows) && !batch_invariant);
            rows.map(|rows| (rows, instances.id(make(rows)))).collect::<Vec<_>>()
        };
        let vectors = of_rows(&|rows| manifest::gemv(dtype, *out, rows), &manifest::gemv_rows);
        let quant_vectors =
            quant.map(|(format, _)| of_rows(&|r| few_rows(format, dtype, *out, r), &manifest::mmvq_rows));
        let mut gemm = |tile| instances.id(manifest::gemm(chip, dtype, *out, tile));
        let dense = Dense { vectors, small: gemm(GemmTile::Small), large: gemm(GemmTile::Large), dtype };
        let library = library_shape(wanted, dtype).filter(|_| !batch_invariant);
        let tiled = chip.has_sm80() && dtype != Dtype::F32 && !batch_invariant;
        let quant = quant.map(|(format, weight)| Quant {
            weight,
            tiles: (manifest::GEMM_QUANT_TILES.into_iter().filter(|_| tiled))
                .map(|(rows, most)| (most, (instances.id(manifest::gemm_quant(format, dtype, *out, rows)), rows)))
                .collect(),
            fp8: (format == QuantFormat::F8E4M3 && setting.rounds_to_fp8()).then(|| {
                (Rounding::Rows(instances.id(manifest::quantize_f8(dtype))), instances.id(manifest::gemm_f8(*out)))
            }),
            quantize: (!format.is_float())
                .then(|| Rounding::Blocks(instances.id(manifest::quantize_activations(dtype)))),
            vectors: quant_vectors.unwrap_or_default(),
            dequantize: instances.id(manifest::dequantize(format, dtype)),
        });
        Self { params: *params, library, dense, quant }
    }

    /// Returns the parameters of the product of an input, with its scales if it is rounded, and a quantised weight.
    fn quantised(&self, quant: &Quant, (input, scales): (u64, u64), rows: u32) -> QuantLinearParams {
        let LinearParams { bias, add, out, n, k, out_stride, scale, softcap, .. } = self.params;
        let weight = quant.weight;
        QuantLinearParams { weight, input, scales, bias, add, out, m: rows, n, k, out_stride, scale, softcap }
    }

    /// Returns the shape and operands for cuBLASLt to plan, if it may be used. `values` is the address of a quantised
    /// weight's dequantised values.
    pub(crate) fn for_library(&self, values: u64) -> Option<(Shape, Operands)> {
        let weight = match &self.quant {
            None => self.params.weight,
            // Its values are never needed.
            Some(quant) if quant.fp8.is_some() => return None,
            Some(_) => values,
        };
        self.library.map(|(shape, bias)| (shape, self.operands(weight, bias)))
    }

    fn operands(&self, weight: u64, bias: u64) -> Operands {
        let LinearParams { input, add, out, scale, .. } = self.params;
        Operands { input, weight, bias, add, out, scale }
    }
}

/// Returns the kernel of a product of a few rows with a quantised weight.
fn few_rows(format: QuantFormat, dtype: Dtype, out: Dtype, rows: u32) -> manifest::Instance {
    match format.is_float() {
        true => manifest::gemv_quant(format, dtype, out, rows),
        false => manifest::mmvq(format, out, rows),
    }
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
    (fits && aligned).then_some((Shape { n, k, stride, out, bias: bias != 0, alignment }, bias))
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
}

impl Setting {
    /// Returns the types of attention over the KV cache.
    pub(crate) const fn attention(&self) -> AttentionTypes {
        AttentionTypes { dtype: self.dtype, cache: self.cache }
    }

    /// Returns whether products of many rows with FP8 weights round their input to FP8. Products of few rows do not, so
    /// this is not invariant to the batch.
    pub(crate) fn rounds_to_fp8(&self) -> bool {
        self.fp8_inputs && self.chip.has_fp8_mma() && self.dtype != Dtype::F32 && !self.batch_invariant
    }
}

/// Returns the first kernel for at least this number of rows.
fn for_rows<K: Copy>(kernels: &[(u32, K)], rows: u32) -> Option<K> {
    kernels.iter().find(|(most, _)| rows <= *most).map(|(_, kernel)| *kernel)
}

impl Machine {
    /// Launches a product on this number of rows.
    pub(crate) fn product(&self, product: &Product, rows: u32) -> Result<(), BackendError> {
        // How the scratch memory has the input, which the parts of a fused weight share.
        let mut rounded = None;
        for part in &product.parts {
            match &part.quant {
                None => self.dense(part, rows, part.params.weight)?,
                Some(quant) => {
                    if let Some(kernel) = for_rows(&quant.vectors, rows) {
                        let input = match quant.quantize {
                            None => (part.params.input, 0),
                            Some(rounding) => self.round(part, rounding, rows, &mut rounded)?,
                        };
                        let params = part.quantised(quant, input, rows);
                        self.launch(kernel, params.grid(), &params)?;
                    } else if let Some((kernel, tile_rows)) = for_rows(&quant.tiles, rows) {
                        let params = part.quantised(quant, (part.params.input, 0), rows);
                        self.launch(kernel, params.gemm_grid(tile_rows), &params)?;
                    } else if let Some((rounding, kernel)) = quant.fp8 {
                        let input = self.round(part, rounding, rows, &mut rounded)?;
                        let params = part.quantised(quant, input, rows);
                        self.launch(kernel, params.tile_grid(manifest::GEMM_F8_TILE), &params)?;
                    } else {
                        self.values(part, quant)?;
                        self.dense(part, rows, self.scratch.values)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn dense(&self, part: &ProductPart, rows: u32, weight: u64) -> Result<(), BackendError> {
        let params = LinearParams { m: rows, weight, ..part.params };
        if let Some(kernel) = for_rows(&part.dense.vectors, rows) {
            return self.launch(kernel, params.gemv_grid(), &params);
        }
        if let (Some(library), Some((shape, bias))) = (&self.cublaslt, part.library)
            && library.run(shape, bucket(rows), &part.operands(weight, bias))?
        {
            return Ok(());
        }
        let tile = GemmTile::for_rows(rows as usize);
        let kernel = match tile {
            GemmTile::Small => part.dense.small,
            GemmTile::Large => part.dense.large,
        };
        self.launch(kernel, params.gemm_grid(tile.outputs(part.dense.dtype)), &params)
    }

    /// Returns the rounded input of a quantised product, with its scales. It is not rounded again if it is `rounded` so.
    fn round(
        &self,
        part: &ProductPart,
        rounding: Rounding,
        rows: u32,
        rounded: &mut Option<Rounding>,
    ) -> Result<(u64, u64), BackendError> {
        let (codes, scales) = self.scratch.rounded;
        if *rounded != Some(rounding) {
            let params = QuantizeParams { input: part.params.input, codes, scales, m: rows, k: part.params.k };
            match rounding {
                Rounding::Blocks(kernel) => {
                    self.launch(kernel, params.grid(self.kernels.get(kernel).threads), &params)?;
                }
                Rounding::Rows(kernel) => self.launch(kernel, params.row_grid(), &params)?,
            }
            *rounded = Some(rounding);
        }
        Ok((codes, scales))
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
        let threads = self.kernels.get(quant.dequantize).threads;
        self.launch(quant.dequantize, params.grid(threads), &params)
    }
}
