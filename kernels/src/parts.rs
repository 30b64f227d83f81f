//! Division of the inputs of products of few rows among CTAs, for [`gemm_skinny`](crate::manifest::gemm_skinny) and
//! [`gemm_skinny_quant`](crate::manifest::gemm_skinny_quant).

use crate::manifest::{SKINNY_QUANT_INPUTS, STAGE_INPUTS};
use crate::quant::QuantFormat;

/// Number of outputs of a CTA of a dense product, and minimum number for a quantised weight.
pub const SKINNY_OUTPUTS: u32 = 128;

/// Maximum number of rows of a product.
pub const SKINNY_ROWS: u32 = 64;

/// Maximum number of CTAs of [`SKINNY_OUTPUTS`] outputs of a product whose inputs are divided.
pub const PARTED_CTAS: u32 = 1024;

/// Size in bytes of the sums of the parts of any product.
pub const PARTIAL_BYTES: u64 = PARTED_CTAS as u64 * SKINNY_OUTPUTS as u64 * SKINNY_ROWS as u64 * 4;

/// Minimum number of bytes of the weight in a part, so that its first loads take less time than the others.
const LEAST_BYTES: u64 = 64 << 10;

/// Maximum number of parts: the last CTA of a tile of outputs adds them all.
const MOST_PARTS: u32 = 16;

/// Number of rows whose sums count for the time that a CTA takes to write them and to read them again.
const MERGED_ROWS: u64 = 16;

/// The part of a weight that a CTA multiplies at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightStage {
    /// Number of outputs.
    pub outputs: u32,
    /// Number of inputs.
    pub inputs: u32,
    /// Size in bytes.
    pub bytes: u64,
}

impl WeightStage {
    /// The stage of a dense weight of 16-bit elements.
    pub const DENSE: Self = Self {
        outputs: SKINNY_OUTPUTS,
        inputs: STAGE_INPUTS as u32,
        bytes: SKINNY_OUTPUTS as u64 * STAGE_INPUTS as u64 * 2,
    };

    /// Returns the stage of a quantised weight, for the largest CTAs.
    pub const fn quantised(format: QuantFormat) -> Self {
        let (outputs, inputs) = (2 * SKINNY_OUTPUTS, SKINNY_QUANT_INPUTS);
        Self { outputs, inputs, bytes: format.bytes_of(outputs as u64 * inputs as u64) }
    }

    /// Returns the number of stages of all inputs.
    pub(crate) fn count(&self, k: u32) -> u32 {
        k.div_ceil(self.inputs).max(1)
    }
}

/// The equal parts into which the inputs of a product are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputParts {
    /// Number of stages of a part, of which the last part may have fewer.
    pub steps: u32,
    /// Number of parts.
    pub count: u32,
}

impl InputParts {
    /// Returns the parts for a weight `[n, k]` on a device of this many multiprocessors.
    ///
    /// Every multiprocessor has its share of the bandwidth, so the product takes the time in which the one with most CTAs
    /// reads their parts. More parts divide the tiles of outputs more evenly among the multiprocessors, and each costs time for
    /// its sums. The number of rows is not considered, so a row's sums are the same in every batch.
    pub fn new(stage: WeightStage, n: u32, k: u32, processors: u32) -> Self {
        let (tiles, stages) = (n.div_ceil(stage.outputs).max(1), stage.count(k));
        let least_steps = LEAST_BYTES.div_ceil(stage.bytes) as u32;
        let parted = PARTED_CTAS * SKINNY_OUTPUTS / stage.outputs;
        let most = (stages / least_steps).min(MOST_PARTS).min(parted / tiles).max(1);
        let parts = (1..=most).map(|count| {
            let steps = stages.div_ceil(count);
            Self { steps, count: stages.div_ceil(steps) }
        });
        let bytes = |parts: &Self| {
            let merge = if parts.count > 1 { u64::from(stage.outputs) * MERGED_ROWS * 4 * 2 } else { 0 };
            u64::from((tiles * parts.count).div_ceil(processors.max(1)))
                * (u64::from(parts.steps) * stage.bytes + merge)
        };
        parts.min_by_key(bytes).unwrap_or(Self { steps: stages, count: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of parts on an H200, and the share of its bandwidth that an even division leaves.
    fn parts(stage: WeightStage, n: u32, k: u32) -> (u32, u32) {
        let (parts, tiles) = (InputParts::new(stage, n, k, 132), n.div_ceil(stage.outputs));
        let busiest = (tiles * parts.count).div_ceil(132) * parts.steps;
        (parts.count, tiles * stage.count(k) * 100 / (busiest * 132))
    }

    #[test]
    fn the_weights_of_a_model_are_divided_evenly() {
        // Qwen3-8B: qkv, output, gate_up, down, head.
        let of_model = |stage| {
            [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)]
                .map(|(n, k)| parts(stage, n, k))
        };
        assert_eq!(of_model(WeightStage::DENSE), [(8, 96), (4, 96), (2, 96), (4, 96), (1, 99)]);
        let found = of_model(WeightStage::quantised(QuantFormat::Q4K));
        assert_eq!(found, [(5, 83), (8, 96), (4, 96), (8, 96), (1, 90)]);
    }

    #[test]
    fn parts_cover_the_inputs_and_are_not_empty() {
        let quantised = [QuantFormat::Q2K, QuantFormat::Q4K, QuantFormat::Q8_0].map(WeightStage::quantised);
        for stage in [WeightStage::DENSE].into_iter().chain(quantised) {
            for n in [1, 128, 576, 1000, 4096, 17_000, 151_936] {
                for k in (8..20_000).step_by(488) {
                    for processors in [1, 16, 58, 132, 188] {
                        let InputParts { steps, count } = InputParts::new(stage, n, k, processors);
                        let stages = stage.count(k);
                        assert!(steps * count >= stages && steps * (count - 1) < stages, "{n} x {k}");
                        let sums = n.div_ceil(stage.outputs) * stage.outputs * count * SKINNY_ROWS * 4;
                        let is_long = u64::from(steps) * stage.bytes >= LEAST_BYTES;
                        assert!(count == 1 || (is_long && u64::from(sums) <= PARTIAL_BYTES), "{n} x {k}");
                        // Tiles of Volta have at least 16 rows, and a ticket each.
                        let tickets = n.div_ceil(stage.outputs) * SKINNY_ROWS / 16;
                        assert!(count == 1 || stage == WeightStage::DENSE || tickets <= PARTED_CTAS, "{n} x {k}");
                        assert_eq!(stages.div_ceil(steps), count);
                    }
                }
            }
        }
    }
}
