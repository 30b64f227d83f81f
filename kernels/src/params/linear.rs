//! Parameters of the matrix products. M = rows, N = outputs, K = inputs; T is the element type of activations.

use super::{DevicePtr, params};
use crate::manifest::{Dtype, GEMM_QUANT_ROWS, SKINNY_QUANT_INPUTS};
use crate::parts::WeightStage;

params! {
    /// Computes `out[i, j] = softcap(scale · (Σ_c input[i, c] · weight[j, c] + bias[j]) + add[i, j])` with `gemm_mma`,
    /// `gemm_volta`, `gemm_f32` or `gemv`. O is T, or f32 for the logits.
    LinearParams {
        /// `[M, K]` of T.
        input: DevicePtr,
        /// `[N, K]` of T.
        weight: DevicePtr,
        /// `[N]` of f32, or null.
        bias: DevicePtr,
        /// `[M, N]` of O, rows `out_stride` apart, or null. May be `out` itself.
        add: DevicePtr,
        /// `[M, N]` of O, rows `out_stride` apart.
        out: DevicePtr,
        /// M.
        m: u32,
        /// N.
        n: u32,
        /// K, a multiple of 8.
        k: u32,
        /// Number of elements from one row of `out` and `add` to the next; more than N if `out` holds the parts of a
        /// fused weight.
        out_stride: u32,
        /// Factor of the sum with its bias.
        scale: f32,
        /// Cap of the result: `cap · tanh(x / cap)`; 0 means none.
        softcap: f32,
    }

    /// Does the same for few rows with `gemm_skinny`, with the inputs divided into parts
    /// ([`InputParts`](crate::parts::InputParts)).
    SkinnyLinearParams {
        /// f32: sums of the parts of every tile of outputs. Not read with one part.
        partial: DevicePtr,
        /// u32, one for each tile of outputs, zero before the first launch, and left zero. Not read with one part.
        tickets: DevicePtr,
        /// The product; M is at most the number of rows of the instance.
        linear: LinearParams,
        /// Number of stages of 32 inputs in a part.
        steps: u32,
        /// Unused.
        reserved: u32,
    }

    /// Does the same for few rows with `gemv_fused`, together with the RMS norm of the input and the activation of the output.
    FusedLinearParams {
        /// f32 `[K]`: weight of the norm; null if the input is not normalised.
        norm_weight: DevicePtr,
        /// The product, of the input before the norm. With an activation, the first half of the N outputs are gates, the others
        /// ups, `out` is T `[M, N / 2]`, and there is neither an addend nor a cap.
        linear: LinearParams,
        /// Value added under the root of the norm.
        eps: f32,
        /// Value added to the weight of the norm.
        weight_offset: f32,
        /// What a pair of outputs becomes: a [`Pairs`](crate::manifest::Pairs).
        pairs: u32,
        /// Unused.
        reserved: u32,
    }

    /// Addresses of the planes of a repacked weight, see [`QuantLayout`](crate::quant::QuantLayout), which also fills
    /// it. Planes that the format lacks are null.
    QuantWeight {
        /// Codes, or their lower bits.
        codes: DevicePtr,
        /// Upper bits of the codes.
        high: DevicePtr,
        /// Factors, or factors and minima, of a super-block's groups.
        scales: DevicePtr,
        /// f16 scales, or scales and minima.
        deltas: DevicePtr,
    }

    /// Rows that are rounded to 8 bits in blocks of 32, as `quantize_activations` does.
    RoundedRows {
        /// i8 `[rows, cols]`.
        codes: DevicePtr,
        /// f32 `[rows, cols / 32, 2]`: a block's scale, and the scale times the sum of its codes.
        scales: DevicePtr,
    }

    /// Rounds activations to 8 bits: to integers in blocks of 32 with `quantize_activations`, or to e4m3 with one scale
    /// for a row with `quantize_f8` and one for a group of 128 with `quantize_f8_groups`.
    QuantizeParams {
        /// `[M, K]` of T.
        input: DevicePtr,
        /// `[M, K]` of bytes.
        codes: DevicePtr,
        /// `[M, K / 32, 2]` of f32: a block's scale, and the scale times the sum of its codes. `[M]` of f32 for
        /// `quantize_f8`, `[⌈K / 128⌉, stride]` for `quantize_f8_groups`.
        scales: DevicePtr,
        /// M.
        m: u32,
        /// K, a multiple of 32.
        k: u32,
        /// Number of scales from one group of 128 to the next for `quantize_f8_groups`, at least M.
        stride: u32,
        /// Unused.
        reserved: u32,
    }

    /// Does the same as [`LinearParams`] for a quantised weight: with quantised activations by `mmvq` or `gemm_f8`, with
    /// activations of T by `gemm_quant`, with sums of codes that a library has computed by `scale_f8`.
    QuantLinearParams {
        /// `[N, K]`.
        weight: QuantWeight,
        /// `[M, K]` of codes from `quantize_activations` or `quantize_f8`; of T for `gemm_quant`; sums `[M, N]` of f32 for
        /// `scale_f8`, whose weight has no planes but the scales of rows, `[N]` of f32.
        input: DevicePtr,
        /// Scales from `quantize_activations` or `quantize_f8`; null for `gemm_quant`.
        scales: DevicePtr,
        /// `[N]` of f32, or null.
        bias: DevicePtr,
        /// `[M, N]` of O, rows `out_stride` apart, or null. May be `out` itself.
        add: DevicePtr,
        /// `[M, N]` of O, rows `out_stride` apart.
        out: DevicePtr,
        /// M; for `mmvq` at most the number of rows of the instance.
        m: u32,
        /// N.
        n: u32,
        /// K, a multiple of the format's block.
        k: u32,
        /// Number of elements from one row of `out` and `add` to the next.
        out_stride: u32,
        /// Factor of the sum with its bias.
        scale: f32,
        /// Cap of the result: `cap · tanh(x / cap)`; 0 means none.
        softcap: f32,
    }

    /// Does the same for few rows of T with `gemm_skinny_quant`, with the inputs divided into parts
    /// ([`InputParts`](crate::parts::InputParts)).
    SkinnyQuantParams {
        /// f32: sums of the parts of every tile of outputs. Not read with one part.
        partial: DevicePtr,
        /// u32, one for each tile of outputs, zero before the first launch, and left zero. Not read with one part.
        tickets: DevicePtr,
        /// The product; M is at most [`SKINNY_ROWS`](crate::parts::SKINNY_ROWS), from sm_80 on at most the number of rows of the
        /// instance, and K a multiple of 256.
        product: QuantLinearParams,
        /// Number of stages of 128 inputs in a part.
        steps: u32,
        /// 1 means outputs in f32, 0 in T.
        out_f32: u32,
    }

    /// Multiplies one input with two weights of different formats, by `mmvq_pair`.
    QuantPairParams {
        /// The product whose CTAs come first.
        first: QuantLinearParams,
        /// The other.
        second: QuantLinearParams,
    }

    /// Computes `out = act(gate) · up` of a product whose outputs are gates, then ups, by `mmvq_glu`. Gate and up are rounded to T,
    /// as if they had been stored.
    QuantGluParams {
        /// The output, rounded.
        rounded: RoundedRows,
        /// The product. `out` is T `[M, N / 2]`, nothing is added, and N is a multiple of 64.
        product: QuantLinearParams,
        /// 1 means GELU by its tanh approximation, 0 SiLU.
        gelu_tanh: u32,
        /// Unused.
        reserved: u32,
    }

    /// Computes `out[i, c] = scale · weight[r, c]` with `r = row_ids[i]`, by `dequantize`: a weight for a dense
    /// product, or the rows of an embedding table.
    DequantizeParams {
        /// `[N, K]`.
        weight: QuantWeight,
        /// `[rows]` of u32, or null for `r = i`; [`DRAWN_TOKEN`](super::DRAWN_TOKEN) | d means `drawn[d]`.
        row_ids: DevicePtr,
        /// u32: the tokens sampled by the preceding step, by row.
        drawn: DevicePtr,
        /// `[rows, K]` of T.
        out: DevicePtr,
        /// Number of rows of `out`.
        rows: u32,
        /// K, a multiple of the format's block.
        k: u32,
        /// N.
        n: u32,
        /// Factor of the values.
        scale: f32,
    }
}

/// Number of outputs of a CTA of [`gemv`](crate::manifest::gemv) and [`mmvq`](crate::manifest::mmvq).
const VECTOR_OUTPUTS: u32 = 8;

/// Number of columns of the output of a CTA of [`mmvq_glu`](crate::manifest::mmvq_glu).
pub const GLU_COLUMNS: u32 = 32;

/// Number of outputs of a CTA of [`gemm_quant`](crate::manifest::gemm_quant).
const GEMM_QUANT_OUTPUTS: u32 = 16;

impl LinearParams {
    /// Returns the grid of a launch of [`gemm`](crate::manifest::gemm) with tiles of `[tile_m, tile_n]` outputs.
    pub fn gemm_grid(&self, [tile_m, tile_n]: [u32; 2]) -> [u32; 3] {
        // CTAs adjacent in x share rows of the weight, which is the larger operand if there are few rows.
        [self.m.div_ceil(tile_m), self.n.div_ceil(tile_n), 1]
    }

    /// Returns the grid of a launch of [`gemv`](crate::manifest::gemv).
    pub fn gemv_grid(&self) -> [u32; 3] {
        [self.n.div_ceil(VECTOR_OUTPUTS), 1, 1]
    }
}

impl SkinnyLinearParams {
    /// Returns the grid of a launch of [`gemm_skinny`](crate::manifest::gemm_skinny).
    pub fn grid(&self) -> [u32; 3] {
        let (stage, LinearParams { n, k, .. }) = (WeightStage::DENSE, self.linear);
        [n.div_ceil(stage.outputs), stage.count(k).div_ceil(self.steps.max(1)), 1]
    }
}

impl SkinnyQuantParams {
    /// Returns the grid of a launch of [`gemm_skinny_quant`](crate::manifest::gemm_skinny_quant) with the instance's tile.
    pub fn grid(&self, [rows, outputs]: [u32; 2]) -> [u32; 3] {
        let QuantLinearParams { m, n, k, .. } = self.product;
        let parts = k.div_ceil(SKINNY_QUANT_INPUTS).div_ceil(self.steps.max(1));
        [n.div_ceil(outputs) * m.div_ceil(rows), parts, 1]
    }
}

/// Number of CTAs of [`gemv_fused`](crate::manifest::gemv_fused) that a multiprocessor holds at once at least.
pub const FUSED_CTAS: u32 = 2;

impl FusedLinearParams {
    /// Returns the grid of a launch of [`gemv_fused`](crate::manifest::gemv_fused) with `threads` threads per CTA on a device of this
    /// many multiprocessors: all CTAs run at once and have the same number of outputs.
    pub fn grid(&self, threads: u32, processors: u32) -> [u32; 3] {
        let (pairs, warps) = (self.linear.n.div_ceil(2), threads / 32);
        let rounds = pairs.div_ceil(warps * processors.max(1) * FUSED_CTAS).max(1);
        [pairs.div_ceil(warps * rounds), 1, 1]
    }

    /// Returns the dynamic shared memory in bytes of a launch of the instance for `rows` rows of elements of this size.
    pub fn dynamic_shared(&self, rows: u32, element: usize) -> usize {
        rows as usize * self.linear.k as usize * element
    }
}

impl QuantizeParams {
    /// Returns the grid of a launch of [`quantize_f8`](crate::manifest::quantize_f8).
    pub fn row_grid(&self) -> [u32; 3] {
        [self.m, 1, 1]
    }

    /// Returns the grid of the launch with `threads` threads per CTA; a thread processes 8 elements.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        [self.m, (self.k / 8).div_ceil(threads), 1]
    }
}

impl QuantLinearParams {
    /// Returns the grid of a launch of [`mmvq`](crate::manifest::mmvq).
    pub fn grid(&self) -> [u32; 3] {
        [self.n.div_ceil(VECTOR_OUTPUTS), 1, 1]
    }

    /// Returns the grid of a launch of [`gemm_quant`](crate::manifest::gemm_quant).
    pub fn gemm_grid(&self) -> [u32; 3] {
        [self.n.div_ceil(GEMM_QUANT_OUTPUTS), self.m.div_ceil(GEMM_QUANT_ROWS), 1]
    }

    /// Returns the product of at most `most` rows from `first` on, with inputs and outputs of these types.
    pub fn rows_from(&self, first: u32, most: u32, [input, out]: [Dtype; 2]) -> Self {
        let bytes = |elements: u32, dtype: Dtype| u64::from(first) * u64::from(elements) * dtype.bytes() as u64;
        let (read, written) = (bytes(self.k, input), bytes(self.out_stride, out));
        let add = if self.add == 0 { 0 } else { self.add + written };
        Self { input: self.input + read, out: self.out + written, add, m: most.min(self.m - first), ..*self }
    }
}

impl QuantPairParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.first.grid()[0] + self.second.grid()[0], 1, 1]
    }
}

impl QuantGluParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.product.n / 2 / GLU_COLUMNS, 1, 1]
    }
}

impl QuantLinearParams {
    /// Returns the grid of a launch of [`scale_f8`](crate::manifest::scale_f8) with `threads` threads per CTA.
    pub fn column_grid(&self, threads: u32) -> [u32; 3] {
        [self.m, self.n.div_ceil(threads), 1]
    }

    /// Returns the grid of a launch of [`gemm_f8`](crate::manifest::gemm_f8) with tiles of `[tile_m, tile_n]` outputs.
    pub fn tile_grid(&self, [tile_m, tile_n]: [u32; 2]) -> [u32; 3] {
        [self.m.div_ceil(tile_m), self.n.div_ceil(tile_n), 1]
    }
}

impl DequantizeParams {
    /// Returns the grid of the launch with `threads` threads per CTA; a thread processes 32 elements.
    pub fn grid(&self, threads: u32) -> [u32; 3] {
        [self.rows, (self.k / 32).div_ceil(threads), 1]
    }
}
