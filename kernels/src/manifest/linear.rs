//! Instances for matrix products (`Linear`, `Logits`) and for quantised weights.

use super::{Activation, Chip, Chips, Dtype, Instance};
use crate::params::{
    DequantizeParams, FUSED_CTAS, FusedLinearParams, LinearParams, QuantGluParams, QuantLinearParams, QuantPairParams,
    QuantizeParams, SkinnyLinearParams, SkinnyQuantParams,
};
use crate::parts::{SKINNY_OUTPUTS, SKINNY_ROWS};
use crate::quant::QuantFormat;
use crate::sources;

/// Number of inputs of 16-bit types that are staged at once.
pub const STAGE_INPUTS: usize = 32;

/// Tile of outputs that a CTA of [`gemm`] computes. Both tiles give the same bits, because the sum of an output adds
/// its inputs in order, independently of its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmTile {
    /// Tile for many rows.
    Large,
    /// Tile for few rows.
    Small,
}

impl GemmTile {
    /// Both tiles.
    pub const ALL: [Self; 2] = [Self::Large, Self::Small];

    /// Returns `[rows, outputs]` of a CTA, for [`LinearParams::gemm_grid`].
    pub const fn outputs(self, dtype: Dtype) -> [u32; 2] {
        match (self, dtype) {
            (Self::Large, Dtype::F32) => [64, 64],
            (Self::Large, _) => [128, 128],
            (Self::Small, _) => [16, 64],
        }
    }

    /// Returns the tile for this number of rows.
    pub const fn for_rows(rows: usize) -> Self {
        if rows <= 64 { Self::Small } else { Self::Large }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Large => "large",
            Self::Small => "small",
        }
    }

    /// Returns the number of stages in shared memory from sm_75 on.
    pub const fn stages(self) -> usize {
        match self {
            Self::Large => 3,
            Self::Small => 6,
        }
    }
}

/// Returns the chips with the tensor-core instructions of sm_80, or those that sm_75 has in their place, for a type.
pub(super) const fn tensor_chips(dtype: Dtype) -> Chips {
    if matches!(dtype, Dtype::F16) { Chips::FromSm75 } else { Chips::FromSm80 }
}

/// Returns `f16`, or `f16_f32` if the output has another type.
fn types(dtype: Dtype, out: Dtype) -> String {
    if dtype == out { dtype.name().into() } else { format!("{}_{}", dtype.name(), out.name()) }
}

/// Returns the instance for the dense product of `dtype` with outputs of type `out` (`dtype`, or f32 for logits), for
/// any number of rows.
pub fn gemm(chip: Chip, dtype: Dtype, out: Dtype, tile: GemmTile) -> Instance {
    let [tile_m, tile_n] = tile.outputs(dtype);
    let (kind, suffix) = (types(dtype, out), tile.name());
    if dtype == Dtype::F32 {
        let call = format!("gemm_f32<{tile_m}, {tile_n}>");
        let threads = tile_m * tile_n / 16;
        return Instance::new::<LinearParams>(sources::GEMM_F32, format!("gemm_{kind}_{suffix}"), call, threads);
    }
    // These are the rows and outputs of a warp.
    let (threads, warp) = match tile {
        GemmTile::Large => (256, "64, 32"),
        GemmTile::Small => (128, "16, 16"),
    };
    let stage_bytes = (tile_m + tile_n) as usize * STAGE_INPUTS * dtype.bytes();
    if chip.has_sm75() {
        let stages = tile.stages();
        let types = format!("{}, {}", dtype.c_name(), out.c_name());
        let call = format!("gemm_mma<{types}, {tile_m}, {tile_n}, {warp}, {stages}>");
        Instance::new::<LinearParams>(sources::GEMM_MMA, format!("gemm_mma_{kind}_{suffix}"), call, threads)
            .with_shared(stages * stage_bytes)
            .with_stages(stages)
            .on(tensor_chips(dtype))
    } else {
        let call = format!("gemm_volta<{}, {tile_m}, {tile_n}, {warp}>", out.c_name());
        Instance::new::<LinearParams>(sources::GEMM_VOLTA, format!("gemm_volta_{kind}_{suffix}"), call, threads)
            .with_shared(2 * stage_bytes)
            .on(Chips::BeforeSm75)
    }
}

/// Numbers of rows with [`gemv`] instances.
const GEMV_ROWS: [u32; 5] = [1, 2, 4, 8, 16];

/// Returns the number of rows of the [`gemv`] instance that computes `rows` rows; `None` if there are too many. A row's
/// bits are the same in all instances.
pub fn gemv_rows(rows: usize) -> Option<u32> {
    GEMV_ROWS.into_iter().find(|&r| rows <= r as usize)
}

/// Returns the instance for the dense product with at most `rows` rows (a result of [`gemv_rows`]).
pub fn gemv(dtype: Dtype, out: Dtype, rows: u32) -> Instance {
    let call = format!("gemv<{}, {}, {rows}>", dtype.c_name(), out.c_name());
    let name = format!("gemv_{}_m{rows}", types(dtype, out));
    let instance = Instance::new::<LinearParams>(sources::GEMV, name, call, 128).typed(dtype);
    // By default the compiler spills a little to fit one more CTA, on an sm_120 for four rows in f16, and on an sm_100 for eight in
    // bf16.
    match (dtype, rows) {
        (Dtype::F32, _) => instance.resident(1),
        (Dtype::F16, 4) => instance.resident(5),
        (Dtype::Bf16, 8) => instance.resident(4),
        _ => instance,
    }
}

/// Numbers of rows with [`gemv_fused`] instances.
pub const FUSED_ROWS: [u32; 3] = [1, 2, 4];

/// Maximum shared memory of a CTA of [`gemv_fused`] for the rows of its input, in bytes. A V100 holds [`FUSED_CTAS`] such CTAs.
pub const FUSED_SHARED: usize = 40 << 10;

/// What a pair of outputs of [`gemv_fused`] becomes, as a number for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Two outputs.
    Plain = 0,
    /// `silu(gate) · up`.
    Silu = 1,
    /// `gelu(gate) · up`.
    Gelu = 2,
    /// `gelu(gate) · up` with the tanh approximation.
    GeluTanh = 3,
}

impl Pairs {
    /// Returns the pairs of an activation, if the kernel has it.
    pub const fn of(activation: Activation) -> Option<Self> {
        match activation {
            Activation::Silu => Some(Self::Silu),
            Activation::Gelu => Some(Self::Gelu),
            Activation::GeluTanh => Some(Self::GeluTanh),
            Activation::Tanh | Activation::ClampedSwiglu => None,
        }
    }
}

/// Returns the instance for the dense product of 16-bit types with at most `rows` rows ([`FUSED_ROWS`]) together with the norm of
/// its input and the activation of its output. A row has the bits of [`norm`](super::norm), [`gemv`] and [`glu`](super::glu).
pub fn gemv_fused(dtype: Dtype, out: Dtype, rows: u32) -> Instance {
    let call = format!("gemv_fused<{}, {}, {rows}>", dtype.c_name(), out.c_name());
    let name = format!("gemv_fused_{}_m{rows}", types(dtype, out));
    Instance::new::<FusedLinearParams>(sources::GEMV_FUSED, name, call, 256)
        .typed(dtype)
        .with_shared(FUSED_SHARED)
        .resident(FUSED_CTAS)
}

/// Numbers of rows with [`gemm_skinny`] instances: tiles of eight, which tensor cores multiply at once.
pub const SKINNY_TILES: [u32; 4] = [8, 16, 32, SKINNY_ROWS];

/// Number of stages of [`gemm_skinny`] in shared memory. While one is multiplied, at least four are on their way: 32 KiB of the
/// weight for each CTA, where a multiprocessor of an H200 needs 25 to keep its share of the memory busy for 700 ns.
pub const SKINNY_STAGES: usize = 6;

/// Returns the number of rows of the [`gemm_skinny`] instance that computes `rows` rows; `None` if there are too many. A
/// row's bits are the same in all instances.
pub fn skinny_rows(rows: usize) -> Option<u32> {
    SKINNY_TILES.into_iter().find(|&r| rows <= r as usize)
}

/// Returns the maximum number of rows of [`gemm_skinny`] on a chip; 0 if there is no such kernel.
pub const fn skinny_most(chip: Chip, dtype: Dtype) -> u32 {
    if chip.has_sm80() && !matches!(dtype, Dtype::F32) { SKINNY_ROWS } else { 0 }
}

/// Returns the maximum number of rows for which [`gemv`] is to be preferred over the kernels for more rows.
///
/// An element of the weight is used in as many instructions as there are rows, and one of [`gemm_skinny`] is used in less than
/// one. So a GEMV is better only as long as the memory leaves time for its instructions: three quarters of what the
/// multiprocessors can issue while the weight is read at the full bandwidth. They issue 4 instructions in a cycle, in which an
/// H200 reads 18 bytes for each, an A100 13, a B200 28, and the chips with GDDR memory 2 to 5. For 1 KiB, which is 32 bytes of
/// each thread of a warp, that is 223, 305, 148, and more than 800 instructions; a GEMV takes 57 for one row, 93 for two, 155
/// for four, 300 for eight, 573 for sixteen. `tests/nvrtc` counts them.
pub const fn gemv_cutoff(chip: Chip, dtype: Dtype) -> u32 {
    match (chip.major, chip.minor) {
        (8, 0) | (9, _) if skinny_most(chip, dtype) > 0 => 4,
        (10 | 11, _) if skinny_most(chip, dtype) > 0 => 2,
        _ => GEMV_ROWS[GEMV_ROWS.len() - 1],
    }
}

/// Returns the maximum number of rows for which [`gemm_skinny`] is to be preferred over a library.
///
/// Each CTA reads all rows of the input beside its 128 outputs' weights, so 64 rows add half of the weight's bytes to what the
/// second-level cache delivers. Where that is not twice as fast as the memory, as with HBM3, a library whose CTAs share what they
/// read is better from there on. It also has the faster instructions of a warp group there.
pub const fn library_cutoff(chip: Chip) -> u32 {
    if chip.major == 9 || chip.major == 10 { 32 } else { SKINNY_ROWS }
}

/// Returns the instance for the dense product of 16-bit types with at most `rows` rows (a result of [`skinny_rows`]), whose
/// weight is read once.
pub fn gemm_skinny(dtype: Dtype, out: Dtype, rows: u32) -> Instance {
    let call = format!("gemm_skinny<{}, {}, {rows}, {SKINNY_STAGES}>", dtype.c_name(), out.c_name());
    let name = format!("gemm_skinny_{}_m{rows}", types(dtype, out));
    let stage_bytes = (SKINNY_OUTPUTS + rows) as usize * STAGE_INPUTS * dtype.bytes();
    Instance::new::<SkinnyLinearParams>(sources::GEMM_SKINNY, name, call, 128)
        .with_shared(SKINNY_STAGES * stage_bytes)
        .with_stages(SKINNY_STAGES)
        .on(Chips::FromSm80)
}

/// Number of inputs of a stage of [`gemm_skinny_quant`]: those that have a scale in common are at most twice as many.
pub const SKINNY_QUANT_INPUTS: u32 = 128;

/// Maximum dynamic shared memory of a CTA of [`gemm_skinny_quant`] in bytes: what sm_86 has, less an array of the kernel.
const SKINNY_QUANT_SHARED: usize = (99 << 10) - 128;

/// Returns the maximum number of rows for which [`gemm_skinny_quant`] is used on a chip for K inputs; 0 if there is no such kernel.
pub const fn skinny_quant_most(chip: Chip, dtype: Dtype, k: u32) -> u32 {
    if !k.is_multiple_of(2 * SKINNY_QUANT_INPUTS) {
        0
    } else if !chip.has_sm75() && matches!(dtype, Dtype::F16) {
        SKINNY_VOLTA_MOST
    } else {
        skinny_most(chip, dtype)
    }
}

/// Maximum number of rows for which a weight is not dequantised first on Volta. The values of a dequantised weight are written and
/// read again, which takes as long as the products of so many rows.
const SKINNY_VOLTA_MOST: u32 = 256;

/// Returns the maximum number of rows for which [`mmvq`] is to be preferred over [`gemm_skinny_quant`]: where the memory leaves no time
/// for the instructions of eight rows, as in [`gemv_cutoff`], four.
pub const fn mmvq_cutoff(chip: Chip, dtype: Dtype, k: u32) -> u32 {
    match chip.major {
        _ if skinny_quant_most(chip, dtype, k) == 0 => MMVQ_ROWS[MMVQ_ROWS.len() - 1],
        8 if chip.minor == 0 => 4,
        9..=11 => 4,
        _ => MMVQ_ROWS[MMVQ_ROWS.len() - 1],
    }
}

/// A CTA of [`gemm_skinny_quant`]: its sizes are those of the kernel's constants.
struct QuantTile {
    warps: usize,
    stages: usize,
    shared: usize,
}

impl QuantTile {
    /// Returns the tile for a format and a number of rows. Each CTA reads all rows of the input, so CTAs of many rows have more
    /// outputs. With codes of eight bits, the input has a small part in what they read.
    fn new(format: QuantFormat, rows: u32) -> Self {
        let (inputs, rows) = (SKINNY_QUANT_INPUTS as usize, rows as usize);
        let (groups, elements) = (inputs / 32, format.block_elements());
        let [codes, high, scales, deltas] = format.plane_bytes();
        let [codes, high] = [codes, high].map(|bytes| bytes * inputs / elements);
        // A stage has the scales of whole blocks, and at least a word of them.
        let of_blocks = |bytes: usize| (bytes * (inputs / elements).max(1)).next_multiple_of(4);
        let is_wide = codes == inputs;
        let code_row = if is_wide { codes + 16 } else { codes };
        let warps = if rows <= 16 || is_wide { 4 } else { 8 };
        let outputs = warps * 32;
        let stage = outputs * (code_row + high + of_blocks(scales) + of_blocks(deltas)) + rows * inputs * 2;
        // Scales and minima of each output, and sums of the inputs.
        let (scales, minima) = format.scales_of_group();
        let decoded = outputs * groups * 4 * (scales + 2 * minima) + 2 * minima * groups * (rows + 8) * 4;
        let stages = ((SKINNY_QUANT_SHARED - decoded) / stage).min(5);
        Self { warps, stages, shared: stages * stage + decoded }
    }
}

/// An instance for the product of 16-bit activations with a quantised weight of a multiple of 256 inputs.
#[derive(Clone, Debug)]
pub struct SkinnyQuant {
    /// The instance.
    pub instance: Instance,
    /// Numbers of rows and of outputs of a CTA.
    pub tile: [u32; 2],
}

/// Returns the numbers of rows with [`gemm_skinny_quant`] instances on a chip, in ascending order. Before sm_75, several CTAs may
/// share the rows; from sm_80 on, one has them all.
pub const fn skinny_quant_tiles(chip: Chip, format: QuantFormat) -> &'static [u32] {
    match chip.has_sm75() {
        true => &[8, 32, SKINNY_ROWS],
        // There are no registers for 32 rows beside what converts these codes.
        false if format.is_listed() || format.is_float() => &[16],
        false => &[16, 32],
    }
}

/// Returns the instance for the product of 16-bit activations with a quantised weight of a multiple of 256 inputs, with `rows`
/// rows for each CTA (one of [`skinny_quant_tiles`]) and outputs of this type or in f32. A row's bits are the same in all instances
/// of a chip.
pub fn gemm_skinny_quant(chip: Chip, format: QuantFormat, dtype: Dtype, rows: u32) -> SkinnyQuant {
    match chip.has_sm75() {
        true => skinny_quant_mma(format, dtype, rows),
        false => skinny_quant_volta(format, rows),
    }
}

fn skinny_quant_volta(format: QuantFormat, rows: u32) -> SkinnyQuant {
    let (threads, outputs, groups) = (128, 256, SKINNY_QUANT_INPUTS as usize / 32);
    let name = format!("gemm_skinny_volta_{}_m{rows}", format.name());
    let call = format!("gemm_skinny_volta<{}, {rows}>", format.c_name());
    // Those of a group. Integers have a minimum for each scale.
    let (scales, _) = format.scales_of_group();
    let minima = if format.is_listed() || format.is_float() { 0 } else { scales };
    // Two stages of the input, each with sums for every minimum, and the scales and minima of a stage of every output.
    let input = rows as usize * SKINNY_QUANT_INPUTS as usize * Dtype::F16.bytes();
    let sums = minima * groups * (rows as usize + 8) * size_of::<f32>();
    let factors = (scales + minima) * groups * outputs as usize * size_of::<f32>();
    let instance = Instance::new::<SkinnyQuantParams>(sources::GEMM_SKINNY_VOLTA, name, call, threads)
        .with_shared(2 * (input + sums) + factors)
        .decoding(&[format])
        // By default the compiler spills a little to fit a third CTA.
        .resident(if rows == 16 { 2 } else { 0 })
        .on(Chips::BeforeSm75);
    SkinnyQuant { instance, tile: [rows, outputs] }
}

fn skinny_quant_mma(format: QuantFormat, dtype: Dtype, rows: u32) -> SkinnyQuant {
    let QuantTile { warps, stages, shared } = QuantTile::new(format, rows);
    let call = format!("gemm_skinny_quant<{}, {}, {rows}, {warps}, {stages}>", format.c_name(), dtype.c_name());
    let name = format!("gemm_skinny_quant_{}_{}_m{rows}", format.name(), dtype.name());
    let instance = Instance::new::<SkinnyQuantParams>(sources::GEMM_SKINNY_QUANT, name, call, warps as u32 * 32)
        .with_shared(shared)
        .with_stages(stages)
        .decoding(&[format])
        .on(Chips::FromSm80);
    let instance = match format {
        QuantFormat::Q2K | QuantFormat::Q3K => instance,
        // By default the compiler spills a little to fit one more CTA, on one chip or another.
        _ if rows == 32 && warps == 8 => instance.resident(1),
        _ => instance,
    };
    SkinnyQuant { tile: [rows, instance.threads], instance }
}

/// Numbers of rows with [`mmvq`] instances.
const MMVQ_ROWS: [u32; 4] = [1, 2, 4, 8];

/// Returns the number of rows of the [`mmvq`] instance that computes `rows` rows; `None` if there are too many. A row's
/// bits are the same in all instances.
pub fn mmvq_rows(rows: usize) -> Option<u32> {
    MMVQ_ROWS.into_iter().find(|&r| rows <= r as usize)
}

/// Returns the instance for the product of quantised activations with a quantised weight, for at most `rows` rows (a
/// result of [`mmvq_rows`]).
pub fn mmvq(format: QuantFormat, out: Dtype, rows: u32) -> Instance {
    let call = format!("mmvq<{}, {}, {rows}>", format.c_name(), out.c_name());
    let name = format!("mmvq_{}_{}_m{rows}", format.name(), out.name());
    let instance =
        Instance::new::<QuantLinearParams>(sources::QUANTIZED, name, call, 128).typed(out).decoding(&[format]);
    // By default the compiler spills a little to fit one more CTA, on one chip or another.
    match (format, rows) {
        (_, 8) | (QuantFormat::Q5_1, 1) | (QuantFormat::Q2K, 4) => instance.resident(1),
        (QuantFormat::Q5_1 | QuantFormat::Int4, 2) | (QuantFormat::Q6K, 4) => instance.resident(5),
        _ => instance,
    }
}

/// Pairs of formats with [`mmvq_pair`] instances: those of q and k, and of v, in llama.cpp's Q4_K_M and Q5_K_M.
pub const MMVQ_PAIRS: [[QuantFormat; 2]; 2] =
    [[QuantFormat::Q4K, QuantFormat::Q6K], [QuantFormat::Q5K, QuantFormat::Q6K]];

/// Returns the instance for the products of quantised activations with two weights of the formats of one of [`MMVQ_PAIRS`], for at
/// most `rows` rows (a result of [`mmvq_rows`]). The bits are those of [`mmvq`].
pub fn mmvq_pair([first, second]: [QuantFormat; 2], out: Dtype, rows: u32) -> Instance {
    let call = format!("mmvq_pair<{}, {}, {}, {rows}>", first.c_name(), second.c_name(), out.c_name());
    let name = format!("mmvq_pair_{}_and_{}_{}_m{rows}", first.name(), second.name(), out.name());
    let instance = Instance::new::<QuantPairParams>(sources::QUANTIZED, name, call, 128).typed(out);
    let instance = instance.decoding(&[first, second]);
    // As in `mmvq`.
    match rows {
        8 => instance.resident(1),
        4 => instance.resident(5),
        _ => instance,
    }
}

/// Returns whether there are [`mmvq_glu`] instances for a type and an activation.
pub const fn has_mmvq_glu(dtype: Dtype, activation: Activation) -> bool {
    !matches!(dtype, Dtype::F32) && matches!(activation, Activation::Silu | Activation::GeluTanh)
}

/// Returns the instance for the product of one quantised row with a quantised weight whose outputs are gates, then ups, with the
/// gated activation and its rounding. The bits are those of [`mmvq`], [`glu`](super::glu) and [`quantize_activations`].
pub fn mmvq_glu(format: QuantFormat, dtype: Dtype) -> Instance {
    let call = format!("mmvq_glu<{}, {}, 1>", format.c_name(), dtype.c_name());
    let name = format!("mmvq_glu_{}_{}_m1", format.name(), dtype.name());
    // By default the compiler spills a little to fit one more CTA.
    Instance::new::<QuantGluParams>(sources::QUANTIZED, name, call, 256).typed(dtype).resident(3).decoding(&[format])
}

/// Returns the instance for the product of activations of type `dtype` with a weight whose codes are floating-point
/// numbers, for at most `rows` rows (a result of [`mmvq_rows`]).
pub fn gemv_quant(format: QuantFormat, dtype: Dtype, out: Dtype, rows: u32) -> Instance {
    let call = format!("gemv_quant<{}, {}, {}, {rows}>", format.c_name(), dtype.c_name(), out.c_name());
    let name = format!("gemv_quant_{}_{}_m{rows}", format.name(), types(dtype, out));
    let instance = Instance::new::<QuantLinearParams>(sources::QUANTIZED, name, call, 128).typed(dtype);
    let instance = instance.decoding(&[format]);
    // As in `mmvq`.
    match (format, dtype, rows) {
        (.., 8) => instance.resident(1),
        (QuantFormat::F8E4M3, Dtype::F32, 1) => instance.resident(7),
        (QuantFormat::F8E4M3, Dtype::F16 | Dtype::Bf16, 2) => instance.resident(9),
        _ => instance,
    }
}

/// Number of rows of a tile of [`gemm_quant`].
pub const GEMM_QUANT_ROWS: u32 = 32;

/// Maximum number of rows of a product for [`gemm_quant`].
pub const GEMM_QUANT_MOST: u32 = 64;

/// Returns the instance for the product of 16-bit activations with a quantised weight whose number of inputs
/// [`gemm_skinny_quant`] does not support.
pub fn gemm_quant(format: QuantFormat, dtype: Dtype, out: Dtype) -> Instance {
    let types_in_c = format!("{}, {}, {}", format.c_name(), dtype.c_name(), out.c_name());
    let call = format!("gemm_quant<{types_in_c}, {}>", GEMM_QUANT_ROWS / 16);
    let name = format!("gemm_quant_{}_{}_m{GEMM_QUANT_ROWS}", format.name(), types(dtype, out));
    let instance = Instance::new::<QuantLinearParams>(sources::GEMM_QUANT, name, call, 256).on(Chips::FromSm80);
    let instance = instance.decoding(&[format]);
    // By default the compiler spills a little to fit a fourth CTA.
    if format.is_float() { instance.resident(3) } else { instance }
}

/// `[rows, outputs]` of a CTA of [`gemm_f8`], for [`QuantLinearParams::tile_grid`].
pub const GEMM_F8_TILE: [u32; 2] = [128, 64];

/// Returns the instance for the product of activations rounded by [`quantize_f8`] with a weight of
/// [`QuantFormat::F8E4M3`], for any number of rows.
pub fn gemm_f8(out: Dtype) -> Instance {
    let [rows, outputs] = GEMM_F8_TILE;
    let stages = GemmTile::Large.stages();
    let call = format!("gemm_f8<{}, {rows}, {outputs}, 32, 32, {stages}>", out.c_name());
    // A row of a stage has 64 bytes.
    Instance::new::<QuantLinearParams>(sources::GEMM_F8, format!("gemm_f8_{}", out.name()), call, 256)
        .with_shared(stages * (rows + outputs) as usize * 64)
        .with_stages(stages)
        .on(Chips::Fp8Mma)
}

/// Returns the instance that rounds activations to e4m3 by rows, for [`gemm_f8`] or a library.
pub fn quantize_f8(dtype: Dtype) -> Instance {
    let call = format!("quantize_f8<{}>", dtype.c_name());
    let name = format!("quantize_f8_{}", dtype.name());
    Instance::new::<QuantizeParams>(sources::GEMM_F8, name, call, 128).on(Chips::Fp8)
}

/// Returns the instance that rounds activations to e4m3 by groups of 128, for a library.
pub fn quantize_f8_groups(dtype: Dtype) -> Instance {
    let call = format!("quantize_f8_groups<{}>", dtype.c_name());
    let name = format!("quantize_f8_groups_{}", dtype.name());
    Instance::new::<QuantizeParams>(sources::GEMM_F8, name, call, 128).on(Chips::Fp8)
}

/// Returns the instance that finishes the product of codes of e4m3, which a library has computed in f32.
pub fn scale_f8(out: Dtype) -> Instance {
    let call = format!("scale_f8<{}>", out.c_name());
    Instance::new::<QuantLinearParams>(sources::GEMM_F8, format!("scale_f8_{}", out.name()), call, 256).on(Chips::Fp8)
}

/// Returns the instance that rounds activations to 8 bits for [`mmvq`].
pub fn quantize_activations(dtype: Dtype) -> Instance {
    let call = format!("quantize_activations<{}>", dtype.c_name());
    let name = format!("quantize_activations_{}", dtype.name());
    Instance::new::<QuantizeParams>(sources::QUANTIZED, name, call, 128).typed(dtype)
}

/// Returns the instance that dequantises rows of a weight, for a dense product or an embedding.
pub fn dequantize(format: QuantFormat, dtype: Dtype) -> Instance {
    let call = format!("dequantize<{}, {}>", format.c_name(), dtype.c_name());
    let name = format!("dequantize_{}_{}", format.name(), dtype.name());
    Instance::new::<DequantizeParams>(sources::QUANTIZED, name, call, 128).typed(dtype).decoding(&[format])
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = Vec::new();
    for dtype in Dtype::ALL.into_iter().filter(|&d| chip.has(d)) {
        let outs = if dtype == Dtype::F32 { vec![dtype] } else { vec![dtype, Dtype::F32] };
        for out in outs {
            instances.extend(GemmTile::ALL.map(|tile| gemm(chip, dtype, out, tile)));
            instances.extend(GEMV_ROWS.map(|rows| gemv(dtype, out, rows)));
            if dtype != Dtype::F32 {
                instances.extend(FUSED_ROWS.map(|rows| gemv_fused(dtype, out, rows)));
            }
            if chip.has_sm80() && dtype != Dtype::F32 {
                instances.extend(SKINNY_TILES.map(|rows| gemm_skinny(dtype, out, rows)));
            }
        }
        instances.push(quantize_activations(dtype));
        for format in QuantFormat::ALL {
            if format.is_float() {
                let outs = if dtype == Dtype::F32 { vec![dtype] } else { vec![dtype, Dtype::F32] };
                let pairs = outs.into_iter().flat_map(|out| MMVQ_ROWS.map(|rows| (out, rows)));
                instances.extend(pairs.map(|(out, rows)| gemv_quant(format, dtype, out, rows)));
            } else {
                instances.extend(MMVQ_ROWS.map(|rows| mmvq(format, dtype, rows)));
                instances.extend(has_mmvq_glu(dtype, Activation::Silu).then(|| mmvq_glu(format, dtype)));
            }
            if chip.has_sm80() && dtype != Dtype::F32 {
                // The inputs of a format of super-blocks are whole ones.
                if format.block_elements() < 256 {
                    instances.extend([dtype, Dtype::F32].map(|out| gemm_quant(format, dtype, out)));
                }
            }
            if skinny_quant_most(chip, dtype, 2 * SKINNY_QUANT_INPUTS) > 0 {
                let of_rows = |rows: &u32| gemm_skinny_quant(chip, format, dtype, *rows).instance;
                instances.extend(skinny_quant_tiles(chip, format).iter().map(of_rows));
            }
            instances.push(dequantize(format, dtype));
        }
        for formats in MMVQ_PAIRS {
            instances.extend(MMVQ_ROWS.map(|rows| mmvq_pair(formats, dtype, rows)));
        }
        if chip.has_fp8_mma() {
            instances.push(gemm_f8(dtype));
        }
        if chip.has_fp8() && dtype != Dtype::F32 {
            instances.push(quantize_f8(dtype));
            // Where warps multiply FP8, no library does.
            instances.extend((!chip.has_fp8_mma()).then(|| quantize_f8_groups(dtype)));
        }
        if chip.has_fp8() && !chip.has_fp8_mma() {
            instances.push(scale_f8(dtype));
        }
    }
    instances
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_get_the_smallest_instance_that_holds_them() {
        assert_eq!([1, 2, 3, 5, 9, 16].map(|m| gemv_rows(m).expect("few rows")), [1, 2, 4, 8, 16, 16]);
        assert_eq!([1, 8, 9, 33].map(|m| skinny_rows(m).expect("few rows")), [8, 8, 16, 64]);
        assert_eq!([mmvq_rows(8), mmvq_rows(9), gemv_rows(17), skinny_rows(65)], [Some(8), None, None, None]);
    }

    /// Chips of sm_86, sm_89 and sm_120 have 99 KiB, those before sm_80 run none that need more than 48.
    #[test]
    fn shared_memory_fits_every_chip() {
        for chip in Chip::CHECKED {
            let most = if chip.has_sm80() { 99 } else { 48 };
            assert!(all(chip).iter().all(|i| i.dynamic_shared <= most << 10));
        }
    }
}
