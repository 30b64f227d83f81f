//! Division of the inputs of products of few rows among CTAs, for [`gemm_skinny`](crate::manifest::gemm_skinny).

use crate::manifest::STAGE_INPUTS;

/// Number of outputs of a CTA.
pub const SKINNY_OUTPUTS: u32 = 128;

/// Maximum number of rows of a product.
pub const SKINNY_ROWS: u32 = 64;

/// Maximum number of CTAs of a product whose inputs are divided.
pub const PARTED_CTAS: u32 = 1024;

/// Size in bytes of the sums of the parts of any product.
pub const PARTIAL_BYTES: u64 = PARTED_CTAS as u64 * SKINNY_OUTPUTS as u64 * SKINNY_ROWS as u64 * 4;

/// Minimum number of stages of a part, so that its first loads take less time than the others.
const LEAST_STEPS: u32 = 8;

/// Maximum number of parts: the last CTA of a tile of outputs adds them all.
const MOST_PARTS: u32 = 16;

/// Size in bytes of a stage of the weight's inputs for the outputs of a CTA.
const STAGE_BYTES: u64 = SKINNY_OUTPUTS as u64 * STAGE_INPUTS as u64 * 2;

/// Number of bytes of the weight that a multiprocessor would read in the time that a CTA takes for its sums: 16 rows of them,
/// written and read again.
const MERGE_BYTES: u64 = SKINNY_OUTPUTS as u64 * 16 * 4 * 2;

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
    pub fn new(n: u32, k: u32, processors: u32) -> Self {
        let (tiles, stages) = (n.div_ceil(SKINNY_OUTPUTS).max(1), stages(k));
        let most = (stages / LEAST_STEPS).min(MOST_PARTS).min(PARTED_CTAS / tiles).max(1);
        let parts = (1..=most).map(|count| {
            let steps = stages.div_ceil(count);
            Self { steps, count: Self::count_of(k, steps) }
        });
        let bytes = |parts: &Self| {
            let merge = if parts.count > 1 { MERGE_BYTES } else { 0 };
            u64::from((tiles * parts.count).div_ceil(processors.max(1)))
                * (u64::from(parts.steps) * STAGE_BYTES + merge)
        };
        parts.min_by_key(bytes).unwrap_or(Self { steps: stages, count: 1 })
    }

    /// Returns the number of parts of this many stages.
    pub(crate) fn count_of(k: u32, steps: u32) -> u32 {
        stages(k).div_ceil(steps.max(1))
    }
}

/// Returns the number of stages of all inputs.
fn stages(k: u32) -> u32 {
    k.div_ceil(STAGE_INPUTS as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of parts on an H200, and the share of its bandwidth that an even division leaves.
    fn parts(n: u32, k: u32) -> (u32, u32) {
        let parts = InputParts::new(n, k, 132);
        let ctas = n.div_ceil(SKINNY_OUTPUTS) * parts.count;
        let busiest = ctas.div_ceil(132) * parts.steps;
        (parts.count, n.div_ceil(SKINNY_OUTPUTS) * stages(k) * 100 / (busiest * 132))
    }

    #[test]
    fn the_weights_of_a_model_are_divided_evenly() {
        // Qwen3-8B: qkv, output, gate_up, down, head.
        let found =
            [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)].map(|(n, k)| parts(n, k));
        assert_eq!(found, [(8, 96), (4, 96), (2, 96), (4, 96), (1, 99)]);
    }

    #[test]
    fn parts_cover_the_inputs_and_are_not_empty() {
        for n in [1, 128, 576, 1000, 4096, 17_000, 151_936] {
            for k in (8..20_000).step_by(488) {
                for processors in [1, 16, 58, 132, 188] {
                    let InputParts { steps, count } = InputParts::new(n, k, processors);
                    assert!(steps * count >= stages(k) && steps * (count - 1) < stages(k), "{n} x {k}");
                    assert!(count == 1 || (steps >= LEAST_STEPS && n.div_ceil(SKINNY_OUTPUTS) * count <= PARTED_CTAS));
                    assert_eq!(InputParts::count_of(k, steps), count);
                }
            }
        }
    }
}
