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
/// Number of tokens that a CTA loads at once.
pub const SAMPLING_TILE: u32 = 1024;
/// Number of parts into which the tokens of a row are divided by their logits.
pub const SAMPLING_BINS: u32 = 1024;
/// Maximum number of tokens in a row's list.
pub const SAMPLING_LIST: u32 = 2048;

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

    /// What a launch leaves to the next about a row. The first two fields are places in the order of tokens
    /// (`include/sampling.h`).
    SamplingState {
        /// The most likely token after bias, masks and penalties.
        best: u64,
        /// The most likely token of the model, for rows with [`SAMPLING_LOGPROBS`].
        raw_best: u64,
        /// Sum of the weights of the bins before `k_bin`.
        mass_before_k: u64,
        /// Sum of the weights of the bins before `first`.
        mass_before: u64,
        /// Logarithm of the sum of the model's weights.
        log_sum: f64,
        /// Bin in which top-k ends, or [`SAMPLING_NONE`].
        k_bin: u32,
        /// Number of tokens of this bin that top-k keeps.
        k_rank: u32,
        /// First of the bins in one of which the kept tokens end.
        first: u32,
        /// Last of them.
        last: u32,
        /// Number of CTAs that are done; 0 between launches.
        ticket: u32,
        /// Number of entries of the row's list; 0 between launches.
        listed: u32,
    }

    /// Arrays of the sampling kernels, launched in the order of [`crate::manifest::sampling_adjust`] to
    /// [`crate::manifest::sampling_report`] with a CTA for each segment of each row. An array to which no row refers
    /// may be null.
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
        /// `[R]` of u32: the sampled or forced tokens; before `sampling_scan`, those of the preceding step.
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
        /// `[R]` of [`SamplingState`], zeros before the first launch.
        states: DevicePtr,
        /// `[R, 2, segments]` of u64: scratch memory.
        parts: DevicePtr,
        /// `[R, SAMPLING_BINS]` of u64: zeros before the first launch and after each.
        masses: DevicePtr,
        /// `[R, SAMPLING_BINS]` of u32: zeros before the first launch and after each.
        counts: DevicePtr,
        /// `[R, SAMPLING_LIST]` of u64: scratch memory.
        lists: DevicePtr,
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
        /// Number of tokens of a row that a CTA reads, a multiple of [`SAMPLING_TILE`]. Results do not depend on it.
        segment: u32,
    }
}

/// Minimum length of a segment: shorter ones would take as long.
pub const SAMPLING_MIN_SEGMENT: u32 = 2 * SAMPLING_TILE;

/// Number of CTAs beyond which segments are longer than the minimum: a few for each multiprocessor of a large GPU.
const SEGMENTS: u64 = 512;

impl SamplingParams {
    /// Number of bytes per row of memory that is zero before the first launch: `states`, `masses` and `counts`.
    pub const ZEROED_BYTES: usize =
        size_of::<SamplingState>() + SAMPLING_BINS as usize * (size_of::<u64>() + size_of::<u32>());

    /// Returns the number of bytes per row of other scratch memory, without `adjusted`: `lists` and `parts`.
    pub fn scratch_bytes(vocab: usize) -> usize {
        (SAMPLING_LIST as usize + 2 * vocab.div_ceil(SAMPLING_MIN_SEGMENT as usize)) * size_of::<u64>()
    }

    /// Returns the parameters with scratch memory for up to `room` rows.
    #[must_use]
    pub fn with_scratch(self, room: usize, zeroed: DevicePtr, scratch: DevicePtr) -> Self {
        let masses = zeroed + (room * size_of::<SamplingState>()) as u64;
        let counts = masses + (room * SAMPLING_BINS as usize * size_of::<u64>()) as u64;
        let parts = scratch + (room * SAMPLING_LIST as usize * size_of::<u64>()) as u64;
        Self { states: zeroed, masses, counts, lists: scratch, parts, ..self }
    }

    /// Returns the number of tokens of a row of `vocab` logits that a CTA reads, if there are `rows` rows.
    pub fn segment_for(rows: u32, vocab: u32) -> u32 {
        let share = (u64::from(rows) * u64::from(vocab)).div_ceil(SEGMENTS).min(u64::from(vocab)) as u32;
        share.max(SAMPLING_MIN_SEGMENT).next_multiple_of(SAMPLING_TILE)
    }

    /// Returns the grid of every launch.
    pub fn grid(&self) -> [u32; 3] {
        [self.vocab.div_ceil(self.segment), self.rows, 1]
    }
}

impl SamplingRow {
    /// Returns whether a token is drawn at random, for which `sampling_weigh` is launched.
    pub fn is_drawn(&self) -> bool {
        self.flags & SAMPLING_PADDING == 0 && self.forced == SAMPLING_NONE && self.temperature > 0.0
    }

    /// Returns whether it is drawn from the most likely tokens, for which `sampling_draw` is launched.
    pub fn is_filtered(&self, vocab: u32) -> bool {
        self.is_drawn() && ((self.top_k > 0 && self.top_k < vocab) || self.top_p < 1.0)
    }

    /// Returns whether the most likely tokens are reported, for which `sampling_report` is launched.
    pub fn reports_top(&self) -> bool {
        self.flags & SAMPLING_LOGPROBS != 0 && self.top > 0 && self.listed_start == self.listed_end
    }

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
