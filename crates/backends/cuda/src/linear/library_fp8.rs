//! Products with FP8 weights by cuBLASLt, which multiplies codes and applies scales of several kinds.

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::{LinearParams, QuantLinearParams, QuantWeight, RoundedRows};
use octavo_ops::BackendError;

use super::{MOST_TILED_ROWS, ProductPart, Rounded, Rounding};
use crate::build::KernelId;
use crate::float8::Scaling;
use crate::forward::{Machine, Scratch};
use crate::launcher::Launcher;
use crate::libraries::cublaslt::{Operands, Shape, USUAL_ALIGNMENT, bucket};

/// An FP8 product by cuBLASLt.
#[derive(Clone, Copy, Debug)]
pub(super) struct LibraryFp8 {
    /// Kernels that round the input, by rows and by groups of 128.
    pub(super) kernels: [KernelId; 2],
    /// Kernel that applies scales of rows to the product of the codes.
    pub(super) scale: KernelId,
    /// Address of the weight's scales.
    pub(super) scales: u64,
    /// Which elements share them; `None` before the weight is loaded, and if they are not shared in a way that the library knows.
    pub(super) scaling: Option<Scaling>,
}

impl LibraryFp8 {
    /// Returns how the input is rounded.
    fn rounding(&self) -> Option<Rounding> {
        let [rows, groups] = self.kernels;
        Some(match self.scaling? {
            Scaling::Rows | Scaling::Afterwards => Rounding::Rows(rows),
            Scaling::Blocks => Rounding::Groups(groups),
        })
    }
}

/// How cuBLASLt multiplies in FP8.
pub(super) enum Fp8Way {
    /// With the scales.
    Scaled { shape: Shape, operands: Operands, rounding: Rounding },
    /// The codes alone.
    Apart { apart: Apart, rounding: Rounding },
}

/// The product of codes of e4m3 by cuBLASLt, in chunks of rows, to which a kernel applies the scales of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Apart {
    pub(super) shape: Shape,
    /// Maximum number of rows of a chunk, a [`bucket`].
    pub(super) chunk: u32,
    codes: u64,
    row_scales: u64,
    weight: u64,
    /// Scales of the weight's rows.
    scales: u64,
    /// Sums of a chunk in f32.
    sums: u64,
    kernel: KernelId,
}

impl Apart {
    /// Returns the chunks of so many rows, each by its first row and its number of rows.
    fn chunks(&self, rows: u32) -> impl Iterator<Item = (u32, u32)> + use<> {
        let chunk = self.chunk;
        (0..rows).step_by(chunk as usize).map(move |first| (first, chunk.min(rows - first)))
    }

    pub(super) fn operands(&self, first: u32) -> Operands {
        let input = self.codes + u64::from(first) * u64::from(self.shape.k);
        let (weight, out) = (self.weight, self.sums);
        Operands { input, weight, bias: 0, add: 0, out, scale: 1.0, scales: [0; 2] }
    }

    /// Returns the parameters of the kernel for a chunk of the product with these parameters.
    fn finish(&self, params: &LinearParams, out: Dtype, (first, count): (u32, u32)) -> QuantLinearParams {
        let LinearParams { bias, n, k, out_stride, scale, softcap, .. } = *params;
        let after = u64::from(first) * u64::from(out_stride) * out.bytes() as u64;
        QuantLinearParams {
            weight: QuantWeight { scales: self.scales, ..QuantWeight::default() },
            input: self.sums,
            scales: self.row_scales + u64::from(first) * size_of::<f32>() as u64,
            bias,
            add: if params.add == 0 { 0 } else { params.add + after },
            out: params.out + after,
            m: count,
            n,
            k,
            out_stride,
            scale,
            softcap,
        }
    }
}

impl ProductPart {
    /// Returns the shape, the operands and the rounding of the product in FP8 by cuBLASLt, if it may be used for so many rows.
    pub(super) fn fp8_by_library(&self, rows: u32, scratch: &Scratch) -> Option<(Shape, Operands, Rounding)> {
        let (quant, (shape, bias)) = (self.quant.as_ref()?, self.library?);
        let library = quant.fp8_library.filter(|_| rows > MOST_TILED_ROWS)?;
        let RoundedRows { codes: input, scales: input_scales } = scratch.rounded;
        let operands = self.operands(quant.weight.codes, bias);
        let operands = Operands { input, scales: [library.scales, input_scales], ..operands };
        Some((Shape { scaling: library.scaling, ..shape }, operands, library.rounding()?))
    }

    /// Returns the product of the codes by cuBLASLt, if the scales of rows may be applied to so many rows afterwards.
    pub(super) fn fp8_apart(&self, rows: u32, scratch: &Scratch) -> Option<Apart> {
        let quant = self.quant.as_ref()?;
        let fp8 = quant.fp8_library.filter(|fp8| rows > MOST_TILED_ROWS && fp8.scaling == Some(Scaling::Rows))?;
        let LinearParams { n, k, .. } = self.params;
        let (out, bias, alignment) = (Dtype::F32, false, USUAL_ALIGNMENT);
        let shape = Shape { n, k, stride: n, out, bias, scaling: Some(Scaling::Afterwards), alignment };
        // The memory of dequantised values, which are not needed, holds sums in f32 of k / 2 rows at least.
        let room = k / (Dtype::F32.bytes() / self.dense.dtype.bytes()) as u32;
        let step = (room.max(1).next_power_of_two() / 16).max(16);
        let chunk = room / step * step;
        let RoundedRows { codes, scales: row_scales } = scratch.rounded;
        let [weight, scales] = [quant.weight.codes, fp8.scales];
        (chunk > 0).then_some(Apart {
            shape,
            chunk,
            codes,
            row_scales,
            weight,
            scales,
            sums: scratch.values,
            kernel: fp8.scale,
        })
    }

    /// Returns how cuBLASLt multiplies so many rows in FP8; `None` if it does not.
    pub(super) fn fp8_way(
        &self,
        supports: impl Fn(Shape, u32) -> bool,
        rows: u32,
        scratch: &Scratch,
    ) -> Option<Fp8Way> {
        let (shape, operands, rounding) = self.fp8_by_library(rows, scratch)?;
        if supports(shape, bucket(rows)) {
            return Some(Fp8Way::Scaled { shape, operands, rounding });
        }
        let apart = self.fp8_apart(rows, scratch)?;
        let supported = apart.chunks(rows).all(|(_, count)| supports(apart.shape, bucket(count)));
        supported.then_some(Fp8Way::Apart { apart, rounding })
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches a product with an FP8 weight by cuBLASLt. Returns `false` if that does not multiply it in FP8.
    pub(super) fn fp8_by_library(
        &self,
        part: &ProductPart,
        rows: u32,
        rounded: &mut Rounded,
    ) -> Result<bool, BackendError> {
        let supports = |shape, rows| self.launcher.supports(shape, rows);
        match part.fp8_way(supports, rows, &self.scratch) {
            None => Ok(false),
            Some(Fp8Way::Scaled { shape, operands, rounding }) => {
                self.round(part, rounding, rows, rounded)?;
                self.launcher.multiply(shape, bucket(rows), &operands)
            }
            Some(Fp8Way::Apart { apart, rounding }) => {
                self.round(part, rounding, rows, rounded)?;
                for chunk in apart.chunks(rows) {
                    self.launcher.multiply(apart.shape, bucket(chunk.1), &apart.operands(chunk.0))?;
                    let params = apart.finish(&part.params, part.out, chunk);
                    let threads = self.launcher.threads(apart.kernel);
                    self.launch(apart.kernel, params.column_grid(threads), &params)?;
                }
                Ok(true)
            }
        }
    }
}
