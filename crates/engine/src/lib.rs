//! Requests, the scheduler, KV blocks, the prefix cache and the engine loop.
//!
//! **Invariant:** this crate knows no HTTP, no tensor and no model: tokens in, tokens out, through an [`Executor`].

mod constraint;
mod executor;
mod plan;
mod request;

pub use constraint::Constraint;
pub use executor::{Executor, ExecutorError, KvCacheSpec, KvGroupSpec};
pub use plan::{
    InputToken, Joined, Logprobs, PlannedSequence, Slot, StepId, StepMasks, StepOutput, StepPlan, TokenOutput,
};
pub use request::{FinishReason, Request, RequestEvent, SamplingParams, SubmitError};
