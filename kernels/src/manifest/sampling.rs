//! From logits to tokens: `Sample`. The three kernels are launched in this order, a CTA a row.

use super::Instance;
use crate::params::SamplingParams;
use crate::sources;

/// Threads of a row.
const THREADS: u32 = 1024;

fn instance(name: &str, call: &str) -> Instance {
    Instance::new::<SamplingParams>(sources::SAMPLING, name.into(), call.into(), THREADS).resident(1)
}

/// Bias, forbidden tokens, mask and penalties, for rows that have any.
pub fn sampling_adjust() -> Instance {
    instance("sampling_adjust", "adjust_rows")
}

/// The token of each row: given, most likely, or drawn.
pub fn sampling_draw() -> Instance {
    instance("sampling_draw", "draw_rows")
}

/// Log-probabilities of the raw distribution, for rows that report them.
pub fn sampling_logprobs() -> Instance {
    instance("sampling_logprobs", "report_rows")
}

pub(super) fn all() -> Vec<Instance> {
    vec![sampling_adjust(), sampling_draw(), sampling_logprobs()]
}
