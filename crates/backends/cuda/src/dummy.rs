//! Made-up weights, written by the device itself: what the host would make takes minutes to compute and to copy.

use std::sync::Arc;

use octavo_kernels::manifest::{self, Dtype};
use octavo_kernels::params::FillParams;
use octavo_ops::dummy::DummyRule;
use octavo_ops::{BackendError, Program, WeightSource};

use crate::build::{Builder, Instances, KernelId, Kernels};
use crate::driver::Gpu;

/// Writes the values that a rule gives.
pub(crate) struct Fill {
    gpu: Arc<Gpu>,
    kernels: Kernels,
    ids: [(Dtype, KernelId); 2],
}

impl Fill {
    /// For a program's weights, if any of them are made up.
    pub(crate) fn new(
        builder: &Builder<'_>,
        dtype: Dtype,
        program: &Program,
        source: &dyn WeightSource,
    ) -> Result<Option<Self>, BackendError> {
        let parts = program.weights.iter().flat_map(|weight| &weight.parts);
        if parts.filter_map(|part| source.rule(&part.tensor)).next().is_none() {
            return Ok(None);
        }
        Self::of(builder, dtype).map(Some)
    }

    /// For elements of a type, and of f32.
    pub(crate) fn of(builder: &Builder<'_>, dtype: Dtype) -> Result<Self, BackendError> {
        let mut instances = Instances::default();
        let ids = [dtype, Dtype::F32].map(|dtype| (dtype, instances.id(manifest::fill(dtype))));
        Ok(Self { gpu: builder.gpu.clone(), kernels: builder.build(&instances)?, ids })
    }

    /// Writes `count` elements of a type.
    pub(crate) fn write(&self, at: u64, count: u64, dtype: Dtype, rule: &DummyRule) -> Result<(), BackendError> {
        let &DummyRule { seed, centre, spread } = rule;
        let id = self.ids.iter().find(|(known, _)| *known == dtype).map(|(_, id)| *id);
        let kernel = self.kernels.get(id.ok_or_else(|| crate::failed("no kernel fills such elements"))?);
        let params = FillParams { out: at, count, seed, centre, spread, reserved: 0 };
        let grid = params.grid(kernel.threads, self.gpu.info().processors);
        Ok(self.gpu.launch(kernel, grid, kernel.shared, &params)?)
    }
}
