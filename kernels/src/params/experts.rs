//! Parameters of the kernels for mixtures of experts: `cuda/experts.cu`. A pair `t · chosen + j` is the j-th expert of
//! token t.

use super::{DevicePtr, QuantWeight, params};

params! {
    /// Chooses the experts of each token from the logits `input · weightᵀ + bias`. Grid: one CTA per token.
    RouteParams {
        /// T `[tokens, cols]`.
        input: DevicePtr,
        /// f32 `[experts, cols]`.
        weight: DevicePtr,
        /// f32 `[experts]`, or null.
        bias: DevicePtr,
        /// f32 `[experts]`, added to the scores for the choice alone; or null.
        correction: DevicePtr,
        /// f32 `[tokens, experts]`, added to the logits and set to 0 again; or null.
        deltas: DevicePtr,
        /// u32 `[tokens, chosen]`, ascending for each token.
        picked: DevicePtr,
        /// f32 `[tokens, chosen]`.
        weights: DevicePtr,
        /// Number of tokens.
        tokens: u32,
        /// Number of columns: the hidden size.
        cols: u32,
        /// Number of experts, at most [`MAX_EXPERTS`].
        experts: u32,
        /// Number of experts of a token.
        chosen: u32,
        /// 1: scores are sigmoids of the logits; 0: their softmax.
        sigmoid: u32,
        /// Number of groups of experts; 0 means no groups.
        groups: u32,
        /// Number of groups from which experts are chosen.
        kept_groups: u32,
        /// 1: the value of a group is the sum of its best two scores; 0: its best score.
        best_two: u32,
        /// 1: weights are divided by their sum.
        normalise: u32,
        /// Factor of the weights.
        scale: f32,
    }

    /// Orders the pairs by expert and divides those of an expert into tiles. Grid: one CTA.
    SortExpertsParams {
        /// u32 `[pairs]`.
        picked: DevicePtr,
        /// u32 `[pairs]`: the pairs by expert.
        order: DevicePtr,
        /// u32 `[1 + 3 · `[`expert_tiles`]`]`: the number of tiles; then for each its expert, its first place in `order` and its
        /// number of pairs.
        tiles: DevicePtr,
        /// Number of pairs.
        pairs: u32,
        /// Number of experts, at most [`MAX_EXPERTS`].
        experts: u32,
        /// Maximum number of pairs of a tile.
        tile_rows: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Computes the row of each pair by the weight of its expert. Grid: [`ExpertLinearParams::grid`].
    ExpertLinearParams {
        /// `[experts · n, k]`, for a quantised weight.
        quant: QuantWeight,
        /// T `[experts · n, k]`, for a plain weight.
        weight: DevicePtr,
        /// T `[pairs / share, k]`, rows `input_stride` apart.
        input: DevicePtr,
        /// T `[pairs, ·]`, rows `out_stride` apart.
        out: DevicePtr,
        /// f32, rows of `out_stride` by expert; or null.
        bias: DevicePtr,
        /// u32 `[pairs]`, from [`SortExpertsParams`].
        order: DevicePtr,
        /// u32, from [`SortExpertsParams`].
        tiles: DevicePtr,
        /// Number of outputs.
        n: u32,
        /// Number of inputs, a multiple of 8 and of the format's block.
        k: u32,
        /// Number of pairs that read one row of the input: 1, or the experts of a token.
        share: u32,
        /// First column of `out` and of a row of `bias`.
        column: u32,
        /// Number of elements from one row of `input` to the next.
        input_stride: u32,
        /// Number of elements from one row of `out` to the next, and from the bias of one expert to the next.
        out_stride: u32,
        /// Number of heads, if the experts are heads: each has a pair of every token, `token · heads + head`. With 0,
        /// `order` and `tiles` have the pairs.
        heads: u32,
        /// Number of tokens, if the experts are heads.
        tokens: u32,
        /// Maximum number of pairs of a tile: a multiple of the rows of a CTA.
        tile_rows: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Computes `out = scale · Σ weight · input + add` over the pairs of each token, rounded once. Grid: one CTA per token.
    ExpertSumParams {
        /// T `[tokens, cols]`; may be `add`.
        out: DevicePtr,
        /// T `[tokens · chosen, cols]`.
        input: DevicePtr,
        /// f32 `[tokens, chosen]`.
        weights: DevicePtr,
        /// T `[tokens, cols]`, or null.
        add: DevicePtr,
        /// Number of tokens.
        tokens: u32,
        /// Number of columns.
        cols: u32,
        /// Number of experts of a token.
        chosen: u32,
        /// Factor of the sum.
        scale: f32,
    }

    /// Computes `out = sigmoid(gate) · out`. Grid: one CTA per row.
    GateRowsParams {
        /// T `[rows, cols]`, updated in place.
        out: DevicePtr,
        /// T `[rows]`.
        gate: DevicePtr,
        /// Number of rows.
        rows: u32,
        /// Number of columns.
        cols: u32,
    }
}

/// Maximum number of experts, whose scores are in shared memory.
pub const MAX_EXPERTS: usize = 1024;

/// Number of pairs of a CTA of the products of few rows, the least number of pairs of a tile.
pub const EXPERT_ROWS: u32 = 4;

/// Returns the maximum number of tiles of so many pairs, of which a tile has at most `tile_rows`.
pub const fn expert_tiles(pairs: u32, experts: u32, tile_rows: u32) -> u32 {
    pairs / tile_rows + if experts < pairs { experts } else { pairs }
}

impl RouteParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, 1, 1]
    }
}

impl ExpertLinearParams {
    /// Returns the grid of a launch for so many pairs of `experts` experts, by CTAs of `rows` pairs and `outputs` outputs.
    pub fn grid(&self, pairs: u32, experts: u32, cta: [u32; 2]) -> [u32; 3] {
        self.grid_of(expert_tiles(pairs, experts, self.tile_rows), cta)
    }

    /// Returns the grid of a launch for heads, by CTAs of `rows` pairs and `outputs` outputs.
    pub fn head_grid(&self, cta: [u32; 2]) -> [u32; 3] {
        self.grid_of(self.heads * self.tokens.div_ceil(self.tile_rows), cta)
    }

    fn grid_of(&self, tiles: u32, [rows, outputs]: [u32; 2]) -> [u32; 3] {
        [tiles, self.n.div_ceil(outputs), self.tile_rows.div_ceil(rows)]
    }
}

impl ExpertSumParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.tokens, 1, 1]
    }
}

impl GateRowsParams {
    /// Returns the grid of the launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_steps_have_grids_that_can_be_launched() {
        // A step of 32768 tokens of Qwen3 30B A3B.
        let params = |tile_rows| ExpertLinearParams { n: 768, tile_rows, ..ExpertLinearParams::default() };
        let grid = params(4).grid(32_768 * 8, 128, [4, 8]);
        assert_eq!(grid, [65_664, 96, 1], "only the first number may exceed 65535");
        assert_eq!(params(128).grid(32_768 * 8, 128, [32, 16]), [2176, 48, 4], "a tile has four parts");
        assert_eq!([expert_tiles(8, 128, 4), expert_tiles(9, 2, 4), expert_tiles(0, 4, 4)], [10, 4, 0]);
    }
}
