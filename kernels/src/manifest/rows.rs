//! Instances for single rows: `Embed`, `Norm`, `Glu`, `Act`, `GatherRows`, `GatherColumns`, `PoolRows`, and the copy of KV blocks.

use super::{Chip, Dtype, Instance};
use crate::params::{
    ActParams, CopyBlocksParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluCodesParams, GluParams,
    MAX_NORM_COLS, NormCodesParams, NormParams, Params, PoolRowsParams, TableRunsParams,
};
use crate::sources;

/// Mean that a norm subtracts from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormMean {
    /// RMS norm, which subtracts none.
    Rms,
    /// Layer norm, which subtracts the arithmetic mean.
    Layer,
}

/// Activation, of a gate or alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit by the error function.
    Gelu,
    /// Gaussian error linear unit by its tanh approximation.
    GeluTanh,
    /// Hyperbolic tangent; without a gate only.
    Tanh,
    /// `x · sigmoid(alpha · x)` of a limited gate, times the limited up plus 1; with a gate only.
    ClampedSwiglu,
}

/// Reduction of rows to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// The first row.
    First,
    /// The mean of all rows.
    Mean,
}

impl Pool {
    const ALL: [Self; 2] = [Self::First, Self::Mean];

    const fn c_name(self) -> &'static str {
        match self {
            Self::First => "FIRST",
            Self::Mean => "MEAN",
        }
    }
}

impl NormMean {
    const ALL: [Self; 2] = [Self::Rms, Self::Layer];

    const fn c_name(self) -> &'static str {
        match self {
            Self::Rms => "RMS",
            Self::Layer => "LAYER",
        }
    }
}

impl Activation {
    /// Activations that need no gate.
    const PLAIN: [Self; 4] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::Tanh];
    /// Activations of a gate.
    const GATED: [Self; 4] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::ClampedSwiglu];

    const fn c_name(self) -> &'static str {
        match self {
            Self::Silu => "SILU",
            Self::Gelu => "GELU",
            Self::GeluTanh => "GELU_TANH",
            Self::Tanh => "TANH",
            Self::ClampedSwiglu => "CLAMPED_SWIGLU",
        }
    }
}

fn instance<P: Params>(template: &str, dtype: Dtype, variant: &str, threads: u32) -> Instance {
    let (c_name, name) = (dtype.c_name(), dtype.name());
    let [call, name] = match variant {
        "" => [format!("{template}<{c_name}>"), format!("{template}_{name}")],
        _ => [format!("{template}<{c_name}, {variant}>"), format!("{template}_{}_{name}", variant.to_lowercase())],
    };
    Instance::new::<P>(sources::ROWS, name, call, threads).typed(dtype)
}

/// Returns the instance for rows of a dense embedding table.
pub fn embed(dtype: Dtype) -> Instance {
    instance::<EmbedParams>("embed", dtype, "", 128)
}

/// Returns the instance that adds rows of a dense table to the output.
pub fn embed_add(dtype: Dtype) -> Instance {
    instance::<EmbedParams>("embed", dtype, "ADD", 128)
}

/// Returns the instance for RMS norm or layer norm, which first adds the residual if there is one.
pub fn norm(dtype: Dtype, mean: NormMean) -> Instance {
    let shared = NormParams::dynamic_shared(MAX_NORM_COLS);
    instance::<NormParams>("norm", dtype, mean.c_name(), 256).with_shared(shared)
}

/// Returns the instance for a norm that also rounds its output for [`mmvq`](super::mmvq).
pub fn norm_codes(dtype: Dtype, mean: NormMean) -> Instance {
    let shared = NormParams::dynamic_shared(MAX_NORM_COLS);
    instance::<NormCodesParams>("norm_codes", dtype, mean.c_name(), 256).with_shared(shared)
}

/// Returns the instance for the gated activation.
pub fn glu(dtype: Dtype, activation: Activation) -> Instance {
    instance::<GluParams>("glu", dtype, activation.c_name(), 128)
}

/// Returns the instance for a gated activation that also rounds its output for [`mmvq`](super::mmvq).
pub fn glu_codes(dtype: Dtype, activation: Activation) -> Instance {
    instance::<GluCodesParams>("glu_codes", dtype, activation.c_name(), 128)
}

/// Returns the instance for an activation that needs no gate.
pub fn act(dtype: Dtype, activation: Activation) -> Instance {
    instance::<ActParams>("act", dtype, activation.c_name(), 128)
}

/// Returns the instance that gathers rows by index.
pub fn gather_rows(dtype: Dtype) -> Instance {
    instance::<GatherRowsParams>("gather_rows", dtype, "", 128)
}

/// Returns the instance that gathers columns by index.
pub fn gather_columns(dtype: Dtype) -> Instance {
    instance::<GatherColumnsParams>("gather_columns", dtype, "", 128)
}

/// Returns the instance that reduces rows to one.
pub fn pool_rows(dtype: Dtype, pool: Pool) -> Instance {
    instance::<PoolRowsParams>("pool_rows", dtype, pool.c_name(), 64)
}

/// Returns the instance that copies whole KV blocks of any element type.
pub fn copy_blocks() -> Instance {
    Instance::new::<CopyBlocksParams>(sources::ROWS, "copy_blocks".into(), "copy_pairs".into(), 256)
}

/// Returns the instance that changes entries of the block tables.
pub fn table_runs() -> Instance {
    Instance::new::<TableRunsParams>(sources::ROWS, "table_runs".into(), "write_runs".into(), 64)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let mut instances = vec![copy_blocks(), table_runs()];
    for dtype in Dtype::ALL.into_iter().filter(|&d| chip.has(d)) {
        instances.extend([embed(dtype), embed_add(dtype), gather_rows(dtype), gather_columns(dtype)]);
        instances.extend(Pool::ALL.map(|pool| pool_rows(dtype, pool)));
        instances.extend(NormMean::ALL.into_iter().flat_map(|mean| [norm(dtype, mean), norm_codes(dtype, mean)]));
        instances.extend(Activation::GATED.into_iter().flat_map(|gate| [glu(dtype, gate), glu_codes(dtype, gate)]));
        instances.extend(Activation::PLAIN.map(|activation| act(dtype, activation)));
    }
    instances
}
