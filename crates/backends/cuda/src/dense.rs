//! Dense products: selection of the kernel by the number of rows.

use octavo_kernels::manifest::{self, Chip, Dtype, GemmTile};
use octavo_kernels::params::{LinearParams, SkinnyLinearParams};
use octavo_kernels::parts::{InputParts, PARTIAL_BYTES, WeightStage};
use octavo_ops::BackendError;
use serde::{Deserialize, Serialize};

use crate::build::{Instances, KernelId};
use crate::forward::Machine;
use crate::launcher::Launcher;
use crate::libraries::cublaslt::{WORKSPACE, bucket};
use crate::linear::{ProductPart, Setting, VECTOR_ROWS, for_rows};

// cuBLASLt and the products whose inputs are divided use the same memory, one after the other.
const _: () = assert!(PARTIAL_BYTES <= WORKSPACE);

/// A way to compute a dense product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// A GEMV: the weight is read once, without tensor cores.
    Vectors,
    /// The weight is read once, by tensor cores.
    Skinny,
    /// cuBLASLt.
    Library,
    /// Our own tiles for any number of rows.
    Tiles,
}

impl Way {
    /// All ways.
    pub(crate) const ALL: [Self; 4] = [Self::Vectors, Self::Skinny, Self::Library, Self::Tiles];
}

/// Numbers of rows for which a way is chosen; each stands for those between the one before and itself.
pub(crate) const TUNED_ROWS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// The way for each of [`TUNED_ROWS`]. The library computes more rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Choice {
    pub(crate) ways: [Way; TUNED_ROWS.len()],
}

impl Choice {
    /// Returns the choice by the cutoffs of the manifest.
    fn usual(chip: Chip, dtype: Dtype) -> Self {
        let (vectors, skinny) = (manifest::gemv_cutoff(chip, dtype), manifest::skinny_most(chip, dtype));
        let before_library = skinny.min(manifest::library_cutoff(chip));
        Self {
            ways: TUNED_ROWS.map(|rows| match rows {
                _ if rows <= vectors => Way::Vectors,
                _ if rows <= before_library => Way::Skinny,
                _ => Way::Library,
            }),
        }
    }

    /// Returns the way for a number of rows.
    pub(crate) fn way(&self, rows: u32) -> Way {
        TUNED_ROWS.into_iter().zip(self.ways).find(|(most, _)| rows <= *most).map_or(Way::Library, |(_, way)| way)
    }
}

/// Kernels of a dense product.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    /// Kernels without tensor cores, with their number of rows, ascending.
    vectors: Vec<(u32, KernelId)>,
    /// Kernels on tensor cores that read the weight once, with their number of rows, ascending.
    skinny: Vec<(u32, KernelId)>,
    small: KernelId,
    large: KernelId,
    pub(crate) choice: Choice,
    pub(crate) dtype: Dtype,
}

impl Dense {
    /// Chooses the kernels for outputs of type `out`. With `batch_invariant` one kernel computes any number of rows.
    pub(crate) fn new(setting: &Setting, out: Dtype, instances: &mut Instances) -> Self {
        let Setting { chip, dtype, batch_invariant, tune, .. } = *setting;
        let choice = match batch_invariant {
            true => Choice { ways: [Way::Tiles; TUNED_ROWS.len()] },
            false => Choice::usual(chip, dtype),
        };
        // Without measurements, kernels that are not chosen need not be compiled.
        let wanted = |way: Way, rows: u32| {
            let usual = choice.way(rows);
            // Skinny products also do what the library refuses.
            !batch_invariant && (tune || usual == way || (way == Way::Skinny && usual == Way::Library))
        };
        let vectors = VECTOR_ROWS.into_iter().filter(|rows| wanted(Way::Vectors, *rows));
        let vectors = vectors.map(|rows| (rows, instances.id(manifest::gemv(dtype, out, rows)))).collect();
        let most = manifest::skinny_most(chip, dtype);
        let skinny = manifest::SKINNY_TILES.into_iter().filter(|rows| *rows <= most && wanted(Way::Skinny, *rows));
        let skinny = skinny.map(|rows| (rows, instances.id(manifest::gemm_skinny(dtype, out, rows)))).collect();
        let mut gemm = |tile| instances.id(manifest::gemm(chip, dtype, out, tile));
        Self { vectors, skinny, small: gemm(GemmTile::Small), large: gemm(GemmTile::Large), choice, dtype }
    }

    /// Returns whether a GEMV may be chosen for a number of rows.
    pub(crate) fn has_vectors(&self, rows: u32) -> bool {
        self.vectors.iter().any(|(of, _)| *of == rows)
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches a product with this dense weight.
    pub(crate) fn dense(&self, part: &ProductPart, rows: u32, weight: u64) -> Result<(), BackendError> {
        let chosen = part.dense.choice.way(rows);
        // What the library refuses is done in another way, and tiles do everything.
        for way in [chosen, Way::Skinny, Way::Tiles] {
            if self.dense_by(part, rows, weight, way)? {
                break;
            }
        }
        Ok(())
    }

    /// Launches a product in this way. Returns `false` if that is not possible.
    pub(crate) fn dense_by(&self, part: &ProductPart, rows: u32, weight: u64, way: Way) -> Result<bool, BackendError> {
        let params = LinearParams { m: rows, weight, ..part.params };
        let dense = &part.dense;
        match way {
            Way::Vectors => {
                let Some(kernel) = for_rows(&dense.vectors, rows) else { return Ok(false) };
                self.launch(kernel, params.gemv_grid(), &params)?;
            }
            Way::Skinny => {
                let Some(kernel) = for_rows(&dense.skinny, rows) else { return Ok(false) };
                self.skinny(kernel, params)?;
            }
            Way::Library => {
                let Some((shape, bias)) = part.library else { return Ok(false) };
                return self.launcher.multiply(shape, bucket(rows), &part.operands(weight, bias));
            }
            Way::Tiles => {
                let tile = GemmTile::for_rows(rows as usize);
                let kernel = match tile {
                    GemmTile::Small => dense.small,
                    GemmTile::Large => dense.large,
                };
                self.launch(kernel, params.gemm_grid(tile.outputs(dense.dtype)), &params)?;
            }
        }
        Ok(true)
    }

    fn skinny(&self, kernel: KernelId, linear: LinearParams) -> Result<(), BackendError> {
        let InputParts { steps, .. } =
            InputParts::new(WeightStage::DENSE, linear.n, linear.k, self.launcher.processors());
        let (partial, tickets) = self.scratch.parts;
        let params = SkinnyLinearParams { partial, tickets, linear, steps, reserved: 0 };
        self.launch(kernel, params.grid(), &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::tests::setting;

    /// Returns the numbers of rows of the kernels of few rows, and the choice.
    fn rows(chip: Chip, dtype: Dtype, change: impl Fn(Setting) -> Setting) -> (Vec<u32>, Vec<u32>, Choice) {
        let setting = change(Setting { chip, ..setting(dtype) });
        let dense = Dense::new(&setting, dtype, &mut Instances::default());
        let of = |kernels: &[(u32, KernelId)]| kernels.iter().map(|(rows, _)| *rows).collect();
        (of(&dense.vectors), of(&dense.skinny), dense.choice)
    }

    #[test]
    fn few_rows_use_tensor_cores_where_vectors_take_too_many_instructions() {
        use Way::{Library, Skinny, Tiles, Vectors};
        let usual = |setting| setting;
        let of = |vectors: &[u32], skinny: &[u32], ways| (vectors.to_vec(), skinny.to_vec(), Choice { ways });
        let hopper = of(&[1, 2, 4], &[8, 16, 32, 64], [Vectors, Vectors, Vectors, Skinny, Skinny, Skinny, Library]);
        assert_eq!(rows(Chip::SM_90, Dtype::Bf16, usual), hopper);
        let ampere = [Vectors, Vectors, Vectors, Skinny, Skinny, Skinny, Skinny];
        assert_eq!(rows(Chip::SM_80, Dtype::F16, usual), of(&[1, 2, 4], &[8, 16, 32, 64], ampere));
        let ada = [Vectors, Vectors, Vectors, Vectors, Vectors, Skinny, Skinny];
        assert_eq!(rows(Chip::SM_89, Dtype::Bf16, usual), of(&[1, 2, 4, 8, 16], &[32, 64], ada));
        // Volta has no such kernel, and neither has f32.
        let others = of(&[1, 2, 4, 8, 16], &[], [Vectors, Vectors, Vectors, Vectors, Vectors, Library, Library]);
        assert_eq!(rows(Chip::SM_70, Dtype::F16, usual), others);
        assert_eq!(rows(Chip::SM_90, Dtype::F32, usual), others);
        let tiles = of(&[], &[], [Tiles; 7]);
        assert_eq!(rows(Chip::SM_90, Dtype::Bf16, |setting| Setting { batch_invariant: true, ..setting }), tiles);
        // All are compiled to be measured.
        let (vectors, skinny, choice) = rows(Chip::SM_90, Dtype::Bf16, |setting| Setting { tune: true, ..setting });
        assert_eq!((vectors, skinny, choice), (vec![1, 2, 4, 8, 16], vec![8, 16, 32, 64], hopper.2));
    }

    #[test]
    fn a_choice_stands_for_the_rows_up_to_its_own() {
        use Way::{Library, Skinny, Tiles, Vectors};
        let choice = Choice { ways: [Vectors, Skinny, Tiles, Skinny, Vectors, Tiles, Skinny] };
        let found = [1, 2, 3, 4, 5, 16, 17, 64, 65].map(|rows| choice.way(rows));
        assert_eq!(found, [Vectors, Skinny, Tiles, Tiles, Skinny, Vectors, Tiles, Skinny, Library]);
        let usual = Choice::usual(Chip::SM_90, Dtype::Bf16);
        assert_eq!([4, 5, 32, 33, 1000].map(|rows| usual.way(rows)), [Vectors, Skinny, Skinny, Library, Library]);
    }
}
