//! Instances for images: `Patches`, `EmbedTaps`, `MergeRows`, `StoreRows`, `InjectRows`.

use super::{Chip, Dtype, Instance};
use crate::params::{EmbedTapsParams, MeanRowsParams, MediaRowsParams, Params, PatchesParams};
use crate::sources;

/// Direction of rows that move between a buffer and the media cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaMove {
    /// A row of the cache becomes the row of the buffer.
    Store,
    /// A row of the buffer becomes the row of the cache.
    Replace,
    /// A row of the cache is added to the row of the buffer.
    Add,
}

impl MediaMove {
    const ALL: [Self; 3] = [Self::Store, Self::Replace, Self::Add];

    const fn c_name(self) -> &'static str {
        match self {
            Self::Store => "STORE",
            Self::Replace => "REPLACE",
            Self::Add => "ADD",
        }
    }
}

fn instance<P: Params>(name: String, call: String, dtype: Dtype) -> Instance {
    Instance::new::<P>(sources::IMAGES, name, call, 128).typed(dtype)
}

/// Returns the instance that normalises the bytes of patches.
pub fn patches(dtype: Dtype) -> Instance {
    instance::<PatchesParams>(format!("patches_{}", dtype.name()), format!("patches<{}>", dtype.c_name()), dtype)
}

/// Returns the instance that adds learned positions.
pub fn embed_taps(dtype: Dtype) -> Instance {
    instance::<EmbedTapsParams>(
        format!("embed_taps_{}", dtype.name()),
        format!("embed_taps<{}>", dtype.c_name()),
        dtype,
    )
}

/// Returns the instance that computes the means of consecutive rows.
pub fn mean_rows(dtype: Dtype) -> Instance {
    let (c_name, name) = (dtype.c_name(), format!("mean_rows_{}", dtype.name()));
    instance::<MeanRowsParams>(name, format!("mean_rows<{c_name}>"), dtype)
}

/// Returns the instance that moves rows to or from the media cache.
pub fn media_rows(dtype: Dtype, how: MediaMove) -> Instance {
    let (c_name, variant) = (dtype.c_name(), how.c_name());
    let name = format!("media_rows_{}_{}", variant.to_lowercase(), dtype.name());
    instance::<MediaRowsParams>(name, format!("media_rows<{c_name}, {variant}>"), dtype)
}

pub(super) fn all(chip: Chip) -> Vec<Instance> {
    let dtypes = Dtype::ALL.into_iter().filter(|&dtype| chip.has(dtype));
    let of = |dtype| {
        let moves = MediaMove::ALL.map(|how| media_rows(dtype, how));
        [patches(dtype), embed_taps(dtype), mean_rows(dtype)].into_iter().chain(moves)
    };
    dtypes.flat_map(of).collect()
}
