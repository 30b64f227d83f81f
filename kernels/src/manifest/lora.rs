//! Instances for adapters (`Lora`).

use super::{Chip, Dtype, Instance};
use crate::params::{LORA_PAIRS_THREADS, LoraPairsParams, LoraParams};
use crate::sources;

/// Returns the instance that multiplies activations of type `dtype` with the matrices A.
pub fn lora_shrink(dtype: Dtype) -> Instance {
    let (call, name) = (format!("lora_shrink<{}>", dtype.c_name()), format!("lora_shrink_{}", dtype.name()));
    Instance::new::<LoraParams>(sources::LORA, name, call, 128).typed(dtype)
}

/// Returns the instance that multiplies the results with the matrices B, of type `dtype`, and adds to an output of type
/// `out` (`dtype`, or f32 for logits).
pub fn lora_expand(dtype: Dtype, out: Dtype) -> Instance {
    let types = if dtype == out { dtype.name().into() } else { format!("{}_{}", dtype.name(), out.name()) };
    let call = format!("lora_expand<{}, {}>", dtype.c_name(), out.c_name());
    Instance::new::<LoraParams>(sources::LORA, format!("lora_expand_{types}"), call, 128).typed(dtype)
}

/// Returns the instance that multiplies rows of a table A with B and adds to embeddings.
pub fn lora_expand_table(dtype: Dtype) -> Instance {
    let (c_name, name) = (dtype.c_name(), dtype.name());
    let call = format!("lora_expand<{c_name}, {c_name}, FROM_TABLE>");
    Instance::new::<LoraParams>(sources::LORA, format!("lora_expand_table_{name}"), call, 128).typed(dtype)
}

/// Returns the instance that divides pairs of tokens and experts into tiles.
pub fn lora_pairs() -> Instance {
    Instance::new::<LoraPairsParams>(sources::LORA, "lora_pairs".into(), "divide_pairs".into(), LORA_PAIRS_THREADS)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let of = |dtype: Dtype| {
        let logits = (dtype != Dtype::F32).then(|| lora_expand(dtype, Dtype::F32));
        [lora_shrink(dtype), lora_expand(dtype, dtype), lora_expand_table(dtype)].into_iter().chain(logits)
    };
    Dtype::ALL.into_iter().filter(|&dtype| chip.has(dtype)).flat_map(of).chain([lora_pairs()]).collect()
}
