//! Dense products: selection of the kernel by the number of rows.

use octavo_kernels::manifest::{self, Dtype, GemmTile};
use octavo_kernels::params::{LinearParams, SkinnyLinearParams};
use octavo_kernels::parts::{InputParts, PARTIAL_BYTES};
use octavo_ops::BackendError;

use crate::build::{Instances, KernelId};
use crate::forward::Machine;
use crate::libraries::cublaslt::{WORKSPACE, bucket};
use crate::linear::{ProductPart, Setting, VECTOR_ROWS, for_rows};

// cuBLASLt and the products whose inputs are divided use the same memory, one after the other.
const _: () = assert!(PARTIAL_BYTES <= WORKSPACE);

/// Kernels of a dense product.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    /// Kernels without tensor cores, with their number of rows, ascending.
    vectors: Vec<(u32, KernelId)>,
    /// Kernels on tensor cores that read the weight once, with their number of rows, ascending.
    skinny: Vec<(u32, KernelId)>,
    /// Maximum number of rows for which cuBLASLt is not asked.
    pub(crate) before_library: u32,
    small: KernelId,
    large: KernelId,
    pub(crate) dtype: Dtype,
}

impl Dense {
    /// Chooses the kernels for outputs of type `out`. With `batch_invariant` one kernel computes any number of rows.
    pub(crate) fn new(setting: &Setting, out: Dtype, instances: &mut Instances) -> Self {
        let Setting { chip, dtype, batch_invariant, .. } = *setting;
        let cutoff = if batch_invariant { 0 } else { manifest::gemv_cutoff(chip, dtype) };
        let vectors = VECTOR_ROWS.into_iter().filter(|rows| *rows <= cutoff);
        let vectors = vectors.map(|rows| (rows, instances.id(manifest::gemv(dtype, out, rows)))).collect();
        let most = if batch_invariant { 0 } else { manifest::skinny_most(chip, dtype) };
        let skinny = manifest::SKINNY_TILES.into_iter().filter(|rows| (cutoff + 1..=most).contains(rows));
        let skinny = skinny.map(|rows| (rows, instances.id(manifest::gemm_skinny(dtype, out, rows)))).collect();
        let mut gemm = |tile| instances.id(manifest::gemm(chip, dtype, out, tile));
        let (small, large) = (gemm(GemmTile::Small), gemm(GemmTile::Large));
        let before_library = cutoff.max(most.min(manifest::library_cutoff(chip)));
        Self { vectors, skinny, before_library, small, large, dtype }
    }
}

impl Machine {
    /// Launches a product with this dense weight.
    pub(crate) fn dense(&self, part: &ProductPart, rows: u32, weight: u64) -> Result<(), BackendError> {
        let params = LinearParams { m: rows, weight, ..part.params };
        let dense = &part.dense;
        if let Some(kernel) = for_rows(&dense.vectors, rows) {
            return self.launch(kernel, params.gemv_grid(), &params);
        }
        if rows > dense.before_library
            && let (Some(library), Some((shape, bias))) = (&self.cublaslt, part.library)
            && library.run(shape, bucket(rows), &part.operands(weight, bias))?
        {
            return Ok(());
        }
        if let Some(kernel) = for_rows(&dense.skinny, rows) {
            return self.skinny(kernel, params);
        }
        let tile = GemmTile::for_rows(rows as usize);
        let kernel = match tile {
            GemmTile::Small => dense.small,
            GemmTile::Large => dense.large,
        };
        self.launch(kernel, params.gemm_grid(tile.outputs(dense.dtype)), &params)
    }

    fn skinny(&self, kernel: KernelId, linear: LinearParams) -> Result<(), BackendError> {
        let InputParts { steps, .. } = InputParts::new(linear.n, linear.k, self.gpu.info().processors);
        let (partial, tickets) = self.scratch.parts;
        let params = SkinnyLinearParams { partial, tickets, linear, steps, reserved: 0 };
        self.launch(kernel, params.grid(), &params)
    }
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::Chip;

    use super::*;
    use crate::linear::tests::setting;

    /// Returns the numbers of rows of the kernels of few rows, and the most for which cuBLASLt is not asked.
    fn rows(chip: Chip, dtype: Dtype, batch_invariant: bool) -> (Vec<u32>, Vec<u32>, u32) {
        let setting = Setting { chip, batch_invariant, ..setting(dtype) };
        let dense = Dense::new(&setting, dtype, &mut Instances::default());
        let of = |kernels: &[(u32, KernelId)]| kernels.iter().map(|(rows, _)| *rows).collect();
        (of(&dense.vectors), of(&dense.skinny), dense.before_library)
    }

    #[test]
    fn few_rows_use_tensor_cores_where_vectors_take_too_many_instructions() {
        assert_eq!(rows(Chip::SM_90, Dtype::Bf16, false), (vec![1, 2, 4], vec![8, 16, 32, 64], 32));
        assert_eq!(rows(Chip::SM_80, Dtype::F16, false), (vec![1, 2, 4], vec![8, 16, 32, 64], 64));
        assert_eq!(rows(Chip::SM_89, Dtype::Bf16, false), (vec![1, 2, 4, 8, 16], vec![32, 64], 64));
        // Volta has vectors alone, and so has f32.
        assert_eq!(rows(Chip::SM_70, Dtype::F16, false), (vec![1, 2, 4, 8, 16], vec![], 16));
        assert_eq!(rows(Chip::SM_90, Dtype::F32, false), (vec![1, 2, 4, 8, 16], vec![], 16));
        assert_eq!(rows(Chip::SM_90, Dtype::Bf16, true), (vec![], vec![], 0));
    }
}
