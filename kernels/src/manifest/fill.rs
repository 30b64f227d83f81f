//! Instances for dummy weights.

use super::{Chip, Dtype, Instance};
use crate::params::FillParams;
use crate::sources;

/// Returns the instance that writes values which depend only on their index.
pub fn fill(dtype: Dtype) -> Instance {
    let (call, name) = (format!("fill<{}>", dtype.c_name()), format!("fill_{}", dtype.name()));
    Instance::new::<FillParams>(sources::FILL, name, call, 256).typed(dtype)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    Dtype::ALL.into_iter().filter(|&dtype| chip.has(dtype)).map(fill).collect()
}
