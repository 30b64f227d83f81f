//! Parameters of every kernel: the structs of `include/params.h` in Rust. A kernel has one parameter, its struct by
//! value.
//!
//! T in the comments is the element type of activations, weights and cache: `f32`, `f16` or `bf16`, the same for a
//! whole program.

mod attention;
mod experts;
mod fill;
mod images;
mod linear;
mod lora;
mod rows;
mod sampling;

pub use attention::{
    AttentionParams, FusedDecodeParams, LATENT_ROWS, LatentPostParams, MAX_HEAD_SIZE, MAX_LATENT_ROTATED,
    MAX_LATENT_SIZE, MAX_SPLIT_TOKENS, PagedDecodeParams, QKV_POST_HEADS, QkvPostParams,
};
pub use experts::{
    EXPERT_ROWS, ExpertLinearParams, ExpertSumParams, GateRowsParams, MAX_EXPERTS, RouteParams, SortExpertsParams,
    expert_tiles,
};
pub use fill::{FILL_CTAS, FillParams};
pub use images::{EmbedTapsParams, MeanRowsParams, MediaRowsParams, PatchesParams};
pub use linear::{
    DequantizeParams, FUSED_CTAS, FusedLinearParams, GLU_COLUMNS, LinearParams, QuantGluParams, QuantLinearParams,
    QuantPairParams, QuantWeight, QuantizeParams, RoundedRows, SkinnyLinearParams, SkinnyQuantParams,
};
pub use lora::{
    LORA_COLUMNS, LORA_MAX_RANK, LORA_OUTPUTS, LORA_PAIRS_THREADS, LORA_PIECE, LORA_ROWS, LORA_TILE_WORDS,
    LoraPairsParams, LoraParams, LoraPart, lora_splits,
};
pub use rows::{
    ActParams, CopyBlocksParams, EmbedParams, GatherColumnsParams, GatherRowsParams, GluCodesParams, GluParams,
    MAX_NORM_COLS, NormCodesParams, NormParams, PoolRowsParams, TableRunsParams,
};
pub use sampling::{
    SAMPLING_ADJUST, SAMPLING_BINS, SAMPLING_LIST, SAMPLING_LOGPROBS, SAMPLING_MAX_TOP, SAMPLING_MIN_SEGMENT,
    SAMPLING_NONE, SAMPLING_PADDING, SAMPLING_STATUS_EXHAUSTED, SAMPLING_TILE, SamplingParams, SamplingRow,
    SamplingState,
};

/// A device address; 0 is null.
pub type DevicePtr = u64;

/// Number of tokens in a KV block.
pub const KV_BLOCK: usize = 16;

/// Slot of a token whose key and value are not written: a padding row of a captured graph.
pub const NO_SLOT: u32 = u32::MAX;

/// Bit of a token id that refers to the row of the preceding step which sampled the token. The other bits are the row.
pub const DRAWN_TOKEN: u32 = 1 << 31;

/// A parameter struct with the data for launches and for the test of its layout.
///
/// # Safety
/// The type must be `repr(C)`, have no padding and contain only plain numbers: [`Params::bytes`] reads all of it.
pub unsafe trait Params: Copy {
    /// Name of the struct, here and in C.
    const NAME: &'static str;
    /// Every field with its offset in bytes.
    const FIELDS: &'static [(&'static str, usize)];

    /// Returns the struct as passed to a launch.
    fn bytes(&self) -> &[u8] {
        // SAFETY: the trait guarantees that every byte of the struct is initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Defines parameter structs: `repr(C)` with public fields and an implementation of [`Params`]. Padding is a compile
/// error.
macro_rules! params {
    ($($(#[$struct_doc:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$struct_doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        const _: () = assert!(0 $(+ size_of::<$type>())* == size_of::<$name>(), "hidden padding");

        // SAFETY: the struct is `repr(C)`, the assertion above shows that there is no padding, and fields are numbers
        // or such structs.
        unsafe impl $crate::params::Params for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($field), std::mem::offset_of!($name, $field))),*];
        }
    )*};
}
pub(crate) use params;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_fields_in_order() {
        let params = GatherRowsParams { out: 1, input: 2, row_index: 3, count: 4, cols: 5 };
        let expected = [1u64, 2, 3].iter().flat_map(|x| x.to_le_bytes()).chain([4, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(params.bytes(), expected.collect::<Vec<u8>>());
        assert_eq!(GatherRowsParams::FIELDS[3], ("count", 24));
    }
}
