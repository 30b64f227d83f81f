//! Instances for mixtures of experts: `Route`, `ExpertLinear`, `ExpertSum`, `GateRows`.

use super::linear::{GemmTile, STAGE_INPUTS, tensor_chips};
use super::{Chip, Chips, Dtype, Instance};
use crate::params::{
    EXPERT_ROWS, ExpertLinearParams, ExpertSumParams, GateRowsParams, Params, RouteParams, SortExpertsParams,
};
use crate::quant::QuantFormat;
use crate::sources;

fn instance<P: Params>(template: &str, dtype: Dtype) -> Instance {
    let (name, call) = (format!("{template}_{}", dtype.name()), format!("{template}<{}>", dtype.c_name()));
    Instance::new::<P>(sources::EXPERTS, name, call, 128).typed(dtype)
}

/// Returns the instance that chooses the experts of each token.
pub fn route(dtype: Dtype) -> Instance {
    instance::<RouteParams>("route", dtype)
}

/// Returns the instance that orders pairs of tokens and experts by expert.
pub fn sort_experts() -> Instance {
    Instance::new::<SortExpertsParams>(sources::EXPERTS, "sort_experts".into(), "sort_pairs".into(), 256)
}

/// A product with the weights of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertProduct {
    /// The kernel.
    pub instance: Instance,
    /// Numbers of pairs and of outputs of a CTA, for [`ExpertLinearParams::grid`].
    pub cta: [u32; 2],
}

/// Returns the product for few pairs of an expert; `format` is that of a quantised weight. Each CTA reads the rows of the
/// weight for [`EXPERT_ROWS`] pairs.
pub fn expert_gemv(format: Option<QuantFormat>, dtype: Dtype) -> ExpertProduct {
    // Four warps of two outputs each.
    let cta = [EXPERT_ROWS, 8];
    let Some(format) = format else {
        return ExpertProduct { instance: instance::<ExpertLinearParams>("expert_gemv", dtype), cta };
    };
    let name = format!("expert_gemv_{}_{}", format.name(), dtype.name());
    let call = format!("expert_gemv_quant<{}, {}>", format.c_name(), dtype.c_name());
    // By default the compiler spills a little to fit one more CTA.
    let instance = Instance::new::<ExpertLinearParams>(sources::EXPERTS, name, call, 128).typed(dtype).resident(1);
    let instance = instance.decoding(&[format]);
    ExpertProduct { instance, cta }
}

/// Tiles of pairs of one expert. The number of pairs per expert decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertTiles {
    /// Tiles of [`EXPERT_ROWS`] pairs, for [`expert_gemv`].
    Few,
    /// Tiles for [`expert_gemm`].
    Gemm(GemmTile),
}

impl ExpertTiles {
    /// All of them, in ascending order.
    pub const ALL: [Self; 3] = [Self::Few, Self::Gemm(GemmTile::Small), Self::Gemm(GemmTile::Large)];

    /// Returns the tiles for `pairs` pairs of `experts` experts. Up to [`EXPERT_ROWS`] pairs per expert on average,
    /// [`expert_gemv`] reads most weights once.
    pub const fn for_pairs(pairs: u32, experts: u32) -> Self {
        match pairs.div_ceil(if experts == 0 { 1 } else { experts }) {
            0..=EXPERT_ROWS => Self::Few,
            rows => Self::Gemm(GemmTile::for_rows(rows as usize)),
        }
    }

    /// Returns the maximum number of pairs of a tile.
    pub const fn rows(self) -> u32 {
        match self {
            Self::Few => EXPERT_ROWS,
            Self::Gemm(tile) => gemm_cta(tile)[0],
        }
    }
}

/// Returns the numbers of pairs and of outputs of a CTA of the dense [`expert_gemm`].
const fn gemm_cta(tile: GemmTile) -> [u32; 2] {
    match tile {
        GemmTile::Large => [128, 128],
        GemmTile::Small => [32, 64],
    }
}

/// Returns the product on tensor cores for many pairs of an expert, if the chip has it for this type; `format` is that of
/// a quantised weight. Of a dense weight, both tiles give the same bits.
pub fn expert_gemm(chip: Chip, format: Option<QuantFormat>, dtype: Dtype, tile: GemmTile) -> Option<ExpertProduct> {
    match format {
        _ if dtype == Dtype::F32 || !chip.has(dtype) => None,
        None => Some(expert_gemm_dense(chip, dtype, tile)),
        Some(format) if chip.has_sm80() => Some(expert_gemm_quant(format, dtype, tile)),
        Some(format) if !chip.has_sm75() => Some(expert_volta_quant(format, tile)),
        Some(_) => None,
    }
}

/// Returns the number of threads of a CTA and the numbers of pairs and outputs of a warp.
const fn gemm_warps(tile: GemmTile) -> (u32, &'static str) {
    match tile {
        GemmTile::Large => (256, "64, 32"),
        GemmTile::Small => (128, "16, 32"),
    }
}

fn expert_gemm_dense(chip: Chip, dtype: Dtype, tile: GemmTile) -> ExpertProduct {
    let (cta @ [rows, outputs], (threads, warp)) = (gemm_cta(tile), gemm_warps(tile));
    let stage_bytes = (rows + outputs) as usize * STAGE_INPUTS * dtype.bytes();
    let (template, source, arguments, stages, chips) = if chip.has_sm75() {
        let stages = tile.stages();
        let arguments = format!("{}, {rows}, {outputs}, {warp}, {stages}", dtype.c_name());
        ("expert_mma", sources::EXPERT_MMA, arguments, stages, tensor_chips(dtype))
    } else {
        let arguments = format!("{rows}, {outputs}, {warp}");
        ("expert_volta", sources::GEMM_VOLTA, arguments, VOLTA_STAGES, Chips::BeforeSm75)
    };
    let (name, call) = (format!("{template}_{}_{}", dtype.name(), tile.name()), format!("{template}<{arguments}>"));
    let instance = Instance::new::<ExpertLinearParams>(source, name, call, threads);
    ExpertProduct { instance: instance.with_shared(stages * stage_bytes).on(chips), cta }
}

/// Number of stages of a tile on Volta.
const VOLTA_STAGES: usize = 2;

fn expert_volta_quant(format: QuantFormat, tile: GemmTile) -> ExpertProduct {
    let (cta @ [rows, outputs], (threads, warp)) = (gemm_cta(tile), gemm_warps(tile));
    let name = format!("expert_volta_{}_{}_{}", format.name(), Dtype::F16.name(), tile.name());
    let call = format!("expert_volta_quant<{}, {rows}, {outputs}, {warp}>", format.c_name());
    let shared = VOLTA_STAGES * (rows + outputs) as usize * STAGE_INPUTS * Dtype::F16.bytes();
    let instance = Instance::new::<ExpertLinearParams>(sources::GEMM_VOLTA, name, call, threads);
    ExpertProduct { instance: instance.with_shared(shared).on(Chips::BeforeSm75).decoding(&[format]), cta }
}

/// Few pairs take the weight straight to registers, whose reads are many at a time; many decode it to shared memory once.
fn expert_gemm_quant(format: QuantFormat, dtype: Dtype, tile: GemmTile) -> ExpertProduct {
    use QuantFormat::{Fp4, Int4, Nvfp4, Q2K, Q5_0, Q8_0};
    // By default the compiler spills a little to fit a fourth CTA on an sm_100 or an sm_120, or a third one.
    let resident = match format {
        Fp4 | Int4 | Q2K | Q5_0 | Q8_0 => 3,
        Nvfp4 => 2,
        _ => 0,
    };
    let (format_in_c, dtype_in_c) = (format.c_name(), dtype.c_name());
    let name = format!("expert_mma_{}_{}_{}", format.name(), dtype.name(), tile.name());
    let (instance, cta) = match tile {
        GemmTile::Small => {
            let call = format!("expert_gemm_quant<{format_in_c}, {dtype_in_c}, 2>");
            let instance = Instance::new::<ExpertLinearParams>(sources::GEMM_QUANT, name, call, 256);
            (instance.resident(resident), [32, 16])
        }
        GemmTile::Large => {
            let (cta @ [rows, outputs], (threads, warp)) = (gemm_cta(tile), gemm_warps(tile));
            let stages = tile.stages();
            let call = format!("expert_mma_quant<{format_in_c}, {dtype_in_c}, {rows}, {outputs}, {warp}, {stages}>");
            let stage_bytes = (rows + outputs) as usize * STAGE_INPUTS * dtype.bytes();
            let instance = Instance::new::<ExpertLinearParams>(sources::EXPERT_MMA, name, call, threads);
            (instance.with_shared(stages * stage_bytes), cta)
        }
    };
    ExpertProduct { instance: instance.on(Chips::FromSm80).decoding(&[format]), cta }
}

/// Returns the instance for the weighted sum over the experts of each token.
pub fn expert_sum(dtype: Dtype) -> Instance {
    instance::<ExpertSumParams>("expert_sum", dtype)
}

/// Returns the instance that multiplies rows with the sigmoid of their gate.
pub fn gate_rows(dtype: Dtype) -> Instance {
    instance::<GateRowsParams>("gate_rows", dtype)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = vec![sort_experts()];
    for dtype in Dtype::ALL.into_iter().filter(|&dtype| chip.has(dtype)) {
        instances.extend([route(dtype), expert_sum(dtype), gate_rows(dtype)]);
        for format in std::iter::once(None).chain(QuantFormat::ALL.map(Some)) {
            let large = GemmTile::ALL.into_iter().filter_map(|tile| expert_gemm(chip, format, dtype, tile));
            instances.extend(std::iter::once(expert_gemv(format, dtype)).chain(large).map(|product| product.instance));
        }
    }
    instances
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_the_number_of_pairs_of_an_expert() {
        let rows = |pairs, experts| ExpertTiles::for_pairs(pairs, experts).rows();
        assert_eq!([rows(1, 128), rows(16 * 8, 128), rows(64 * 8, 128)], [4, 4, 4], "most experts have few pairs");
        assert_eq!([rows(16 * 2, 8), rows(17 * 2, 8), rows(65 * 8, 128)], [4, 32, 32]);
        assert_eq!([rows(512, 8), rows(513, 8), rows(1, 0)], [32, 128, 4]);
    }

    #[test]
    fn a_tile_is_of_whole_ctas() {
        for chip in Chip::CHECKED {
            for (tiles, format) in ExpertTiles::ALL.into_iter().flat_map(|t| [(t, None), (t, Some(QuantFormat::Q4K))]) {
                let gemm = match tiles {
                    ExpertTiles::Few => None,
                    ExpertTiles::Gemm(tile) => expert_gemm(chip, format, Dtype::F16, tile),
                };
                let rows = gemm.unwrap_or_else(|| expert_gemv(format, Dtype::F16)).cta[0];
                assert!(tiles.rows().is_multiple_of(rows), "{tiles:?} by {rows}");
            }
        }
    }
}
