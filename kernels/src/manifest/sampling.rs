//! Instances for `Sample`. The three kernels are launched in this order, with one CTA per row.

use super::Instance;
use crate::params::SamplingParams;
use crate::sources;

/// Number of threads per row.
const THREADS: u32 = 1024;

fn instance(name: &str, call: &str) -> Instance {
    Instance::new::<SamplingParams>(sources::SAMPLING, name.into(), call.into(), THREADS).resident(1)
}

/// Returns the instance for bias, forbidden tokens, mask and penalties, for rows that have any.
pub fn sampling_adjust() -> Instance {
    instance("sampling_adjust", "adjust_rows")
}

/// Returns the instance that selects the token of each row: forced, most likely, or sampled.
pub fn sampling_draw() -> Instance {
    instance("sampling_draw", "draw_rows")
}

/// Returns the instance for log-probabilities of the raw distribution, for rows that report them.
pub fn sampling_logprobs() -> Instance {
    instance("sampling_logprobs", "report_rows")
}

pub(super) fn all() -> Vec<Instance> {
    vec![sampling_adjust(), sampling_draw(), sampling_logprobs()]
}
