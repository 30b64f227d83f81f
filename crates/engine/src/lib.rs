//! Requests, the scheduler, KV blocks, the prefix cache and the engine loop.
//!
//! **Invariant:** this crate knows no HTTP, no tensor and no model. It exchanges only tokens with an [`Executor`].
//!
//! Data flows from the caller to the device and back: [`EngineHandle::submit`] puts a [`Request`] into the bounded
//! inbox and returns a [`RequestStream`]. The thread of an [`Engine`] drains the inbox, lets the scheduler plan a step
//! over the KV blocks, submits the [`StepPlan`] to the [`Executor`] and sends the sampled tokens to the streams.

mod adapter;
mod clock;
mod config;
mod constraint;
mod draft;
mod engine;
mod engine_loop;
mod executor;
mod image;
mod inbox;
#[doc(hidden)]
pub mod internals;
mod kv;
mod lock;
mod mask_filler;
mod mask_pace;
pub mod mock;
mod plan;
mod request;
mod scheduler;
mod scores;
mod sequence;
mod status;
mod stop;
mod stream;
mod timeline;
mod token_set;

pub use adapter::Adapter;
pub use clock::{StepCost, StepWork};
pub use config::{EngineConfig, EngineError, SchedulingPolicy};
pub use constraint::Constraint;
pub use draft::Speculation;
pub use engine::{Engine, EngineHandle};
pub use executor::{Executor, ExecutorError, KvCacheSpec, KvGroupSpec, KvKind};
pub use image::{ImageHash, ImageInput, ImageSpan, ImageSpec, PromptImage};
pub use kv::{BlockHash, ExtraKey, KvEvent, KvEventSink};
pub use plan::{
    AdapterChange, AdapterSlot, InjectedTokens, InputToken, Joined, Logprobs, PassedBlocks, PlannedImage, PlannedRow,
    PlannedSequence, RowKind, Seat, StepId, StepMasks, StepOutput, StepPlan, TableChange, TokenOutput,
};
pub use request::{
    ClientId, FinishReason, Pooling, RepetitionDetection, Request, RequestEvent, SamplingParams, StageTimes,
    SubmitError, Task,
};
pub use status::{EngineState, EngineStatus};
pub use stream::RequestStream;
pub use token_set::TokenSet;
