//! Parameters of the sampling kernels, which implement `octavo_ops::sampling`. R = rows, V = vocabulary.

use super::{DevicePtr, params};

/// Flag of a [`SamplingRow`] with a bias, forbidden tokens, a mask or counts.
pub const SAMPLING_ADJUST: u32 = 1;
/// Flag of a [`SamplingRow`] that reports log-probabilities.
pub const SAMPLING_LOGPROBS: u32 = 2;
/// Flag of a [`SamplingRow`] for which nothing is computed or written: the padding of a captured graph.
pub const SAMPLING_PADDING: u32 = 4;
/// Status of a row without a token above −∞, for which the most likely allowed one was taken.
pub const SAMPLING_STATUS_EXHAUSTED: u32 = 1;
/// Value for no token or no row.
pub const SAMPLING_NONE: u32 = u32::MAX;
/// Maximum number of tokens that a row may report beside its own.
pub const SAMPLING_MAX_TOP: u32 = 1024;

params! {
    /// Parameters of one row for the sampler, based on [`SamplingRow::GREEDY`]. Its lists are ranges of the flat arrays
    /// of [`SamplingParams`].
    SamplingRow {
        /// Seed, which with `output_position` determines the random number.
        seed: u64,
        /// Index of the output token in its sequence.
        output_position: u32,
        /// Flags: [`SAMPLING_ADJUST`], [`SAMPLING_LOGPROBS`], [`SAMPLING_PADDING`].
        flags: u32,
        /// Temperature; 0, negative or NaN means greedy.
        temperature: f32,
        /// Number of most likely tokens to keep; 0 keeps all.
        top_k: u32,
        /// Cumulative probability of the tokens to keep; 1 keeps all.
        top_p: f32,
        /// Minimum probability relative to the most likely token; 0 keeps all.
        min_p: f32,
        /// Penalty subtracted once from the logit of a generated token.
        presence_penalty: f32,
        /// Penalty subtracted for each time a token was generated.
        frequency_penalty: f32,
        /// Factor that divides positive and multiplies negative logits of counted tokens.
        repetition_penalty: f32,
        /// Forced token, or [`SAMPLING_NONE`].
        forced: u32,
        /// Row of `masks`, or [`SAMPLING_NONE`].
        mask_row: u32,
        /// First entry in `bias_ids` and `bias_values`.
        bias_start: u32,
        /// End of these entries.
        bias_end: u32,
        /// First entry in `forbidden_ids`.
        forbidden_start: u32,
        /// End of these entries.
        forbidden_end: u32,
        /// First entry in `count_ids` and `count_times`.
        counts_start: u32,
        /// End of these entries.
        counts_end: u32,
        /// First entry in `listed_ids`: the tokens to report instead of the most likely ones, unless the list is empty.
        /// There are at most [`SAMPLING_MAX_TOP`].
        listed_start: u32,
        /// End of these entries.
        listed_end: u32,
        /// Number of most likely tokens to report, at most [`SAMPLING_MAX_TOP`].
        top: u32,
        /// Row of the preceding step whose token is counted once more, or [`SAMPLING_NONE`]. The row has [`SAMPLING_ADJUST`].
        pending: u32,
        /// Padding, 0.
        reserved: u32,
    }

    /// Arrays of `sampling_adjust`, `sampling_draw` and `sampling_logprobs`, launched in this order with one block per
    /// row. An array to which no row refers may be null.
    SamplingParams {
        /// `[R, V]` of f32 with rows `row_stride` apart, from the model.
        logits: DevicePtr,
        /// Scratch memory of the same shape; rows with [`SAMPLING_ADJUST`] are written and read.
        adjusted: DevicePtr,
        /// `[R]` of [`SamplingRow`].
        rows_of: DevicePtr,
        /// `[., mask_words]` of u32: bit `id % 32` of word `id / 32` allows a token.
        masks: DevicePtr,
        /// Tokens whose logits are changed by `bias_values`.
        bias_ids: DevicePtr,
        /// f32: values added to these logits.
        bias_values: DevicePtr,
        /// Tokens that are never sampled.
        forbidden_ids: DevicePtr,
        /// Tokens of prompt or output, each once per row.
        count_ids: DevicePtr,
        /// u32: number of times generated; 0 for a token that is only in the prompt.
        count_times: DevicePtr,
        /// Tokens to report.
        listed_ids: DevicePtr,
        /// `[R]` of u32: the sampled or forced tokens; before `sampling_draw`, those of the preceding step.
        ids: DevicePtr,
        /// `[R]` of u32: 0 or [`SAMPLING_STATUS_EXHAUSTED`].
        status: DevicePtr,
        /// `[R]` of f32: the token's log-probability. This and the following arrays are written for rows with
        /// [`SAMPLING_LOGPROBS`].
        logprobs: DevicePtr,
        /// `[R]` of u32: the token's rank, 1 for the most likely.
        ranks: DevicePtr,
        /// `[R]` of u32: number of tokens reported.
        top_counts: DevicePtr,
        /// `[R, top_stride]` of u32: these tokens, most likely first, ties by id.
        top_ids: DevicePtr,
        /// `[R, top_stride]` of f32: their log-probabilities.
        top_logprobs: DevicePtr,
        /// R.
        rows: u32,
        /// V.
        vocab: u32,
        /// Number of elements from one row of logits to the next, a multiple of 4.
        row_stride: u32,
        /// Number of words in a mask: ⌈V / 32⌉.
        mask_words: u32,
        /// Number of entries in a row of `top_ids`.
        top_stride: u32,
        /// Padding, 0.
        reserved: u32,
    }
}

impl SamplingParams {
    /// Returns the grid of each of the three launches.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl SamplingRow {
    /// A row that takes the most likely token, without lists and log-probabilities.
    pub const GREEDY: Self = Self {
        seed: 0,
        output_position: 0,
        flags: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        forced: SAMPLING_NONE,
        mask_row: SAMPLING_NONE,
        bias_start: 0,
        bias_end: 0,
        forbidden_start: 0,
        forbidden_end: 0,
        counts_start: 0,
        counts_end: 0,
        listed_start: 0,
        listed_end: 0,
        top: 0,
        pending: SAMPLING_NONE,
        reserved: 0,
    };
}
