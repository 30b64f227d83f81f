//! Parameters of the sampling kernels, which do what `octavo_ops::sampling` defines. R = rows, V = vocabulary.

use super::{DevicePtr, params};

/// A [`SamplingRow`] has a bias, forbidden tokens, a mask or counts.
pub const SAMPLING_ADJUST: u32 = 1;
/// A [`SamplingRow`] reports log-probabilities.
pub const SAMPLING_LOGPROBS: u32 = 2;
/// Nothing is computed and nothing is written for a [`SamplingRow`]: the padding of a captured graph.
pub const SAMPLING_PADDING: u32 = 4;
/// A status: no token was left above −∞, so the most likely allowed one was taken.
pub const SAMPLING_STATUS_EXHAUSTED: u32 = 1;
/// No token, no row.
pub const SAMPLING_NONE: u32 = u32::MAX;
/// Most tokens that a row may report beside its own.
pub const SAMPLING_MAX_TOP: u32 = 1024;

params! {
    /// What one row asks of the sampler; start from [`SamplingRow::GREEDY`]. Its lists are ranges of the flat arrays of
    /// [`SamplingParams`].
    SamplingRow {
        /// With `output_position`, the key of the draw.
        seed: u64,
        /// Index of the output token in its sequence.
        output_position: u32,
        /// [`SAMPLING_ADJUST`], [`SAMPLING_LOGPROBS`], [`SAMPLING_PADDING`].
        flags: u32,
        /// 0, negative or NaN: greedy.
        temperature: f32,
        /// 0 keeps all.
        top_k: u32,
        /// 1 keeps all.
        top_p: f32,
        /// 0 keeps all.
        min_p: f32,
        /// Subtracted once from the logit of a generated token.
        presence_penalty: f32,
        /// Subtracted for each time that a token was generated.
        frequency_penalty: f32,
        /// Divides positive and multiplies negative logits of counted tokens.
        repetition_penalty: f32,
        /// The token that is given, or [`SAMPLING_NONE`].
        forced: u32,
        /// Row of `masks`, or [`SAMPLING_NONE`].
        mask_row: u32,
        /// First entry in `bias_ids` and `bias_values`.
        bias_start: u32,
        /// End of those.
        bias_end: u32,
        /// First entry in `forbidden_ids`.
        forbidden_start: u32,
        /// End of those.
        forbidden_end: u32,
        /// First entry in `count_ids` and `count_times`.
        counts_start: u32,
        /// End of those.
        counts_end: u32,
        /// First entry in `listed_ids`: the tokens to report in place of the most likely ones, unless it is empty. At most
        /// [`SAMPLING_MAX_TOP`].
        listed_start: u32,
        /// End of those.
        listed_end: u32,
        /// Most likely tokens to report, at most [`SAMPLING_MAX_TOP`].
        top: u32,
    }

    /// The arrays of `sampling_adjust`, `sampling_draw` and `sampling_logprobs`, launched in this order with one block a row.
    /// An array that no row points into may be null.
    SamplingParams {
        /// `[R, V]` of f32, rows `row_stride` apart, as the model gave them.
        logits: DevicePtr,
        /// Scratch of the same shape; rows with [`SAMPLING_ADJUST`] are written and read.
        adjusted: DevicePtr,
        /// `[R]` of [`SamplingRow`].
        rows_of: DevicePtr,
        /// `[., mask_words]` of u32: bit `id % 32` of word `id / 32` set means allowed.
        masks: DevicePtr,
        /// Tokens whose logits are changed.
        bias_ids: DevicePtr,
        /// f32, added to them.
        bias_values: DevicePtr,
        /// Tokens that are never drawn.
        forbidden_ids: DevicePtr,
        /// Tokens of prompt or output, each once in a row.
        count_ids: DevicePtr,
        /// u32: times generated; 0 for one that is in the prompt alone.
        count_times: DevicePtr,
        /// Tokens to report.
        listed_ids: DevicePtr,
        /// `[R]` of u32: the token drawn, or given.
        ids: DevicePtr,
        /// `[R]` of u32: 0 or [`SAMPLING_STATUS_EXHAUSTED`].
        status: DevicePtr,
        /// `[R]` of f32: the token's log-probability; written for rows with [`SAMPLING_LOGPROBS`], as what follows.
        logprobs: DevicePtr,
        /// `[R]` of u32: the token's rank, 1 for the most likely.
        ranks: DevicePtr,
        /// `[R]` of u32: tokens reported.
        top_counts: DevicePtr,
        /// `[R, top_stride]` of u32: these tokens, most likely first, ties by id.
        top_ids: DevicePtr,
        /// `[R, top_stride]` of f32: their log-probabilities.
        top_logprobs: DevicePtr,
        /// R.
        rows: u32,
        /// V.
        vocab: u32,
        /// Elements from one row of logits to the next, a multiple of 4.
        row_stride: u32,
        /// ⌈V / 32⌉.
        mask_words: u32,
        /// Entries of a row of `top_ids`.
        top_stride: u32,
        /// 0.
        reserved: u32,
    }
}

impl SamplingParams {
    /// CTAs of each of the three launches.
    pub fn grid(&self) -> [u32; 3] {
        [self.rows, 1, 1]
    }
}

impl SamplingRow {
    /// The most likely token, no lists, no log-probabilities.
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
    };
}
