//! Instances for `Sample`, in the order of their launches. Each has a CTA for each segment of each row.

use super::Instance;
use crate::params::SamplingParams;
use crate::sources::{self, Source};

/// Number of threads of a CTA.
const THREADS: u32 = 256;

fn instance(source: Source, name: &str, call: &str) -> Instance {
    Instance::new::<SamplingParams>(source, name.into(), call.into(), THREADS).resident(4)
}

/// Returns the instance for bias, forbidden tokens, mask and penalties, for rows that have any.
pub fn sampling_adjust() -> Instance {
    instance(sources::SAMPLING, "sampling_adjust", "adjust_rows")
}

/// Returns the instance that finds the most likely token of each row, which is its token if none is drawn.
pub fn sampling_scan() -> Instance {
    instance(sources::SAMPLING, "sampling_scan", "scan_rows").resident(6)
}

/// Returns the instance that draws the tokens of rows without top-k and top-p, and sizes the bins of others.
pub fn sampling_weigh() -> Instance {
    instance(sources::SAMPLING, "sampling_weigh", "weigh_rows")
}

/// Returns the instance that draws the tokens of rows with top-k or top-p.
pub fn sampling_draw() -> Instance {
    instance(sources::SAMPLING, "sampling_draw", "draw_rows")
}

/// Returns the instance for the log-probability and the rank of each row's token in the raw distribution, and for tokens that
/// are named, for rows that report them.
pub fn sampling_rank() -> Instance {
    instance(sources::LOGPROBS, "sampling_rank", "rank_rows")
}

/// Returns the instance for the most likely tokens of the raw distribution, for rows that report them.
pub fn sampling_report() -> Instance {
    instance(sources::LOGPROBS, "sampling_report", "report_rows")
}

pub(super) fn all() -> Vec<Instance> {
    vec![sampling_adjust(), sampling_scan(), sampling_weigh(), sampling_draw(), sampling_rank(), sampling_report()]
}
