//! Inputs of a product in the order of its weight's columns.

use crate::program::{BufferId, WeightId};

/// `input[.,K] → out[.,K]`: `out[., j] = input[., order[j]]`.
///
/// GPTQ with `desc_act` gives inputs to groups by their importance. The columns of such a weight are kept in the order of their
/// groups, so that they fill whole blocks, and its input is brought into the same order.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherColumns {
    /// Vector `[K]`: the input column of each output column. Indices below 2²⁴ are exact as f32.
    pub order: WeightId,
    /// Input `[.,K]`.
    pub input: BufferId,
    /// Output `[.,K]`, another buffer than the input.
    pub out: BufferId,
}
