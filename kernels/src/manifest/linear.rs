//! Matrix products: `Linear`, `Logits`, and everything about quantised weights.

use super::{Chip, Chips, Dtype, Instance};
use crate::params::{DequantizeParams, LinearParams, QuantLinearParams, QuantizeParams};
use crate::quant::QuantFormat;
use crate::sources;

/// Inputs that are staged at once, of 16-bit types.
const STAGE_INPUTS: usize = 32;

/// Which outputs a CTA of [`gemm`] computes. Both tiles give the same bits: the sum of an output runs over its inputs in order,
/// whatever its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmTile {
    /// For many rows.
    Large,
    /// For few rows.
    Small,
}

impl GemmTile {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Large, Self::Small];

    /// `[rows, outputs]` of a CTA: what [`LinearParams::gemm_grid`] needs.
    pub const fn outputs(self, dtype: Dtype) -> [u32; 2] {
        match (self, dtype) {
            (Self::Large, Dtype::F32) => [64, 64],
            (Self::Large, _) => [128, 128],
            (Self::Small, _) => [16, 64],
        }
    }

    /// The tile for that many rows.
    pub const fn for_rows(rows: usize) -> Self {
        if rows <= 64 { Self::Small } else { Self::Large }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Large => "large",
            Self::Small => "small",
        }
    }
}

/// `f16`, or `f16_f32` where the output is of another type.
fn types(dtype: Dtype, out: Dtype) -> String {
    if dtype == out { dtype.name().into() } else { format!("{}_{}", dtype.name(), out.name()) }
}

/// The dense product of `dtype` with outputs of type `out` (`dtype`, or f32 for logits), for any number of rows.
pub fn gemm(chip: Chip, dtype: Dtype, out: Dtype, tile: GemmTile) -> Instance {
    let [tile_m, tile_n] = tile.outputs(dtype);
    let (kind, suffix) = (types(dtype, out), tile.name());
    if dtype == Dtype::F32 {
        let call = format!("gemm_f32<{tile_m}, {tile_n}>");
        let threads = tile_m * tile_n / 16;
        return Instance::new::<LinearParams>(sources::GEMM_F32, format!("gemm_{kind}_{suffix}"), call, threads);
    }
    // Rows and outputs of a warp.
    let (threads, warp) = match tile {
        GemmTile::Large => (256, "64, 32"),
        GemmTile::Small => (128, "16, 16"),
    };
    let stage_bytes = (tile_m + tile_n) as usize * STAGE_INPUTS * dtype.bytes();
    if chip.has_sm80() {
        let stages = match tile {
            GemmTile::Large => 3,
            GemmTile::Small => 6,
        };
        let types = format!("{}, {}", dtype.c_name(), out.c_name());
        let call = format!("gemm_mma<{types}, {tile_m}, {tile_n}, {warp}, {stages}>");
        Instance::new::<LinearParams>(sources::GEMM_MMA, format!("gemm_mma_{kind}_{suffix}"), call, threads)
            .with_shared(stages * stage_bytes)
            .on(Chips::FromSm80)
    } else {
        let call = format!("gemm_volta<{}, {tile_m}, {tile_n}, {warp}>", out.c_name());
        Instance::new::<LinearParams>(sources::GEMM_VOLTA, format!("gemm_volta_{kind}_{suffix}"), call, threads)
            .with_shared(2 * stage_bytes)
            .on(Chips::BeforeSm80)
    }
}

/// Rows that [`gemv`] has instances for.
const GEMV_ROWS: [u32; 5] = [1, 2, 4, 8, 16];

/// The rows of the [`gemv`] instance that computes `rows` rows; `None` if they are too many. A row's bits are the same whichever.
pub fn gemv_rows(rows: usize) -> Option<u32> {
    GEMV_ROWS.into_iter().find(|&r| rows <= r as usize)
}

/// The dense product for at most `rows` rows (one of what [`gemv_rows`] gives).
pub fn gemv(dtype: Dtype, out: Dtype, rows: u32) -> Instance {
    let call = format!("gemv<{}, {}, {rows}>", dtype.c_name(), out.c_name());
    let name = format!("gemv_{}_m{rows}", types(dtype, out));
    let instance = Instance::new::<LinearParams>(sources::GEMV, name, call, 128).of(dtype);
    // Left to itself the compiler spills a little for a CTA more.
    if dtype == Dtype::F32 { instance.resident(1) } else { instance }
}

/// Rows that [`mmvq`] has instances for.
const MMVQ_ROWS: [u32; 4] = [1, 2, 4, 8];

/// The rows of the [`mmvq`] instance that computes `rows` rows; `None` if they are too many. A row's bits are the same whichever.
pub fn mmvq_rows(rows: usize) -> Option<u32> {
    MMVQ_ROWS.into_iter().find(|&r| rows <= r as usize)
}

/// The product of quantised activations with a quantised weight, for at most `rows` rows (one of what [`mmvq_rows`] gives).
pub fn mmvq(format: QuantFormat, out: Dtype, rows: u32) -> Instance {
    let call = format!("mmvq<{}, {}, {rows}>", format.c_name(), out.c_name());
    let name = format!("mmvq_{}_{}_m{rows}", format.name(), out.name());
    let instance = Instance::new::<QuantLinearParams>(sources::QUANTIZED, name, call, 128).of(out);
    // Left to itself the compiler spills a little for a CTA more.
    let alone = rows == 8 || matches!((format, rows), (QuantFormat::Q5_1, 1) | (QuantFormat::Q2K, 4));
    if alone { instance.resident(1) } else { instance }
}

/// Rows of a tile of [`gemm_quant`], with the most rows of a product that it is for. A row's bits are the same whichever.
pub const GEMM_QUANT_TILES: [(u32, u32); 2] = [(16, 16), (32, 64)];

/// The product of activations of a 16-bit type with a quantised weight, in tiles of so many rows.
pub fn gemm_quant(format: QuantFormat, dtype: Dtype, out: Dtype, tile_rows: u32) -> Instance {
    let types_in_c = format!("{}, {}, {}", format.c_name(), dtype.c_name(), out.c_name());
    let call = format!("gemm_quant<{types_in_c}, {}>", tile_rows / 16);
    let name = format!("gemm_quant_{}_{}_m{tile_rows}", format.name(), types(dtype, out));
    Instance::new::<QuantLinearParams>(sources::GEMM_QUANT, name, call, 256).on(Chips::FromSm80)
}

/// Rounds activations to 8 bits, for [`mmvq`].
pub fn quantize_activations(dtype: Dtype) -> Instance {
    let call = format!("quantize_activations<{}>", dtype.c_name());
    let name = format!("quantize_activations_{}", dtype.name());
    Instance::new::<QuantizeParams>(sources::QUANTIZED, name, call, 128).of(dtype)
}

/// The values of rows of a quantised weight: for a dense product, or an embedding.
pub fn dequantize(format: QuantFormat, dtype: Dtype) -> Instance {
    let call = format!("dequantize<{}, {}>", format.c_name(), dtype.c_name());
    let name = format!("dequantize_{}_{}", format.name(), dtype.name());
    Instance::new::<DequantizeParams>(sources::QUANTIZED, name, call, 128).of(dtype)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = Vec::new();
    for dtype in Dtype::ALL.into_iter().filter(|&d| chip.has(d)) {
        let outs = if dtype == Dtype::F32 { vec![dtype] } else { vec![dtype, Dtype::F32] };
        for out in outs {
            instances.extend(GemmTile::ALL.map(|tile| gemm(chip, dtype, out, tile)));
            instances.extend(GEMV_ROWS.map(|rows| gemv(dtype, out, rows)));
        }
        instances.push(quantize_activations(dtype));
        for format in QuantFormat::ALL {
            instances.extend(MMVQ_ROWS.map(|rows| mmvq(format, dtype, rows)));
            if chip.has_sm80() && dtype != Dtype::F32 {
                let pairs =
                    [dtype, Dtype::F32].into_iter().flat_map(|out| GEMM_QUANT_TILES.map(|(rows, _)| (out, rows)));
                instances.extend(pairs.map(|(out, rows)| gemm_quant(format, dtype, out, rows)));
            }
            instances.push(dequantize(format, dtype));
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
        assert_eq!([mmvq_rows(8), mmvq_rows(9), gemv_rows(17)], [Some(8), None, None]);
    }

    #[test]
    fn shared_memory_needs_no_permission_beyond_48_kib() {
        for chip in Chip::CHECKED {
            assert!(all(chip).iter().all(|i| i.dynamic_shared <= 48 << 10));
        }
    }
}
