//! The `Sample` op: its inputs, its result and the scalar definition that every backend must reproduce.
//!
//! The operations on a row of logits have this order: log-probabilities are taken from the raw row; then come logit
//! bias, forbidden tokens and the grammar mask, penalties, temperature, min-p, top-k, top-p and the random choice.
//! Temperature 0 takes the arg-max after masks and penalties, with the lowest id among equals. A row with a forced
//! token only computes its log-probabilities.
//!
//! Every row yields a token, whatever it holds: NaN counts as −∞, and if masks and filters leave nothing, the most
//! likely allowed token is taken (see [`Sampler`]).

mod philox;
mod reference;
mod types;

pub use philox::{philox4x32, uniform};
pub use reference::{Sampler, largest, largest_value};
pub use types::{CountsId, SampleBatch, SampleParams, SampleRow, SampledToken, TokenCounts, TokenLogprobs};
