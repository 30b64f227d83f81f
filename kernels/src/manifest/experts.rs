//! Instances for mixtures of experts: `Route`, `ExpertLinear`, `ExpertSum`, `GateRows`.

use super::{Chip, Dtype, Instance};
use crate::params::{ExpertLinearParams, ExpertSumParams, GateRowsParams, Params, RouteParams, SortExpertsParams};
use crate::quant::QuantFormat;
use crate::sources;

fn instance<P: Params>(template: &str, dtype: Dtype) -> Instance {
    let (name, call) = (format!("{template}_{}", dtype.name()), format!("{template}<{}>", dtype.c_name()));
    Instance::new::<P>(sources::EXPERTS, name, call, 128).of(dtype)
}

/// Returns the instance that chooses the experts of each token.
pub fn route(dtype: Dtype) -> Instance {
    instance::<RouteParams>("route", dtype)
}

/// Returns the instance that orders pairs of tokens and experts by expert.
pub fn sort_experts() -> Instance {
    Instance::new::<SortExpertsParams>(sources::EXPERTS, "sort_experts".into(), "sort_pairs".into(), 256)
}

/// Returns the instance for products with the weights of experts; `format` is that of quantised ones.
pub fn expert_linear(format: Option<QuantFormat>, dtype: Dtype) -> Instance {
    let Some(format) = format else { return instance::<ExpertLinearParams>("expert_gemv", dtype) };
    let name = format!("expert_gemv_{}_{}", format.name(), dtype.name());
    let call = format!("expert_gemv_quant<{}, {}>", format.c_name(), dtype.c_name());
    // By default the compiler spills a little to fit one more CTA.
    Instance::new::<ExpertLinearParams>(sources::EXPERTS, name, call, 128).of(dtype).resident(1)
}

/// Returns the instance for the weighted sum over the experts of each token.
pub fn expert_sum(dtype: Dtype) -> Instance {
    instance::<ExpertSumParams>("expert_sum", dtype)
}

/// Returns the instance that multiplies rows with the sigmoid of their gate.
pub fn gate_rows(dtype: Dtype) -> Instance {
    instance::<GateRowsParams>("gate_rows", dtype)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = vec![sort_experts()];
    for dtype in Dtype::ALL.into_iter().filter(|&dtype| chip.has(dtype)) {
        instances.extend([route(dtype), expert_sum(dtype), gate_rows(dtype), expert_linear(None, dtype)]);
        instances.extend(QuantFormat::ALL.map(|format| expert_linear(Some(format), dtype)));
    }
    instances
}
