//! The contract between models and backends.
//!
//! A model computes nothing itself: it emits a [`Program`], a flat list of fused [`Op`]s over buffers with a symbolic
//! row count. A [`Backend`] runs a program on a [`StepBatch`]. Every op knows its bytes and FLOPs ([`cost`]), from
//! which the cost of a program is computed.
//!
//! **Invariant:** this crate depends on no other crate of the workspace and touches no device.

mod adapter;
mod attention;
mod backend;
mod batch;
mod columns;
pub mod cost;
pub mod datasheet;
pub mod dummy;
mod encode;
pub mod error;
mod experts;
mod latent;
mod op;
mod program;
pub mod sampling;
mod storage;
#[cfg(feature = "testing")]
pub mod testing;

pub use adapter::{AdapterSource, Lora, LoraInput, LoraMatrices, Site, SiteId, SiteKind};
pub use attention::{KvPlace, PagedAttention, QkNorm, QkvPost, Rope, RopeStyle, SegmentAttention, Sight};
pub use backend::{
    Backend, DeviceProfile, TensorData, WeightSource, check_adapter, check_block_size, check_encoder, check_sites,
};
pub use batch::{BlockTables, InjectedRow, Limits, SequenceTables, StepBatch, TableRevision};
pub use columns::GatherColumns;
pub use encode::{Channel, EncodeBatch, TAPS, Tap};
pub use error::{BackendError, ProgramError, WeightError};
pub use experts::{
    ChoiceScratch, ExpertGroups, ExpertLinear, ExpertSum, GateRows, GroupScore, Route, RouteScores, expected_experts,
};
pub use latent::{HeadLinear, LatentPost};
pub use op::{
    Act, Embed, EmbedIds, EmbedTaps, Glu, GluKind, InjectMode, InjectRows, Linear, Logits, MergeKind, MergeRows,
    NormKind, NormOp, Op, PoolKind, PoolRows, Residual,
};
pub use program::{
    Buffer, BufferId, Element, HeadShape, KvGroup, KvScales, Program, ProgramBuilder, ProgramKind, Rows, Slab, Values,
    Weight, WeightId, WeightPart,
};
pub use storage::{
    Decoder, E2M1_DOUBLED, FP4_VALUES, IQ4_VALUES, NF4_VALUES, StorageType, e4m3, e8m0_halved, iq4_xs_factor,
    nvfp4_scale, to_e4m3,
};
