//! The `Sample` op: its inputs, its result, and the scalar definition that every backend must reproduce.
//!
//! Order of operations on a row of logits: log-probabilities are taken from the raw row; then logit bias, forbidden
//! tokens and the grammar mask, penalties, temperature, min-p, top-k, top-p, draw. Temperature 0 takes the arg-max
//! after masks and penalties, the lowest id among equals. A row whose token is forced has its log-probabilities alone.
//!
//! Whatever the row holds, a token comes out: NaN counts as −∞, and where masks and filters leave nothing, the most
//! likely allowed token is taken (see [`Sampler`]).

mod philox;
mod reference;
mod types;

pub use philox::{philox4x32, uniform};
pub use reference::{Sampler, largest, largest_value};
pub use types::{SampleBatch, SampleParams, SampleRow, SampledToken, TokenCounts, TokenLogprobs};
