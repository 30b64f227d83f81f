//! StepPlan to StepBatch to backend to sampled tokens: the engine's [`Executor`](octavo_engine::Executor).
//!
//! The [`Runner`] hands each [`StepPlan`](octavo_engine::StepPlan) to the device thread, which owns the backend. There the
//! plan becomes the flat arrays of a [`StepBatch`](octavo_ops::StepBatch), the program runs, and the rows are sampled with
//! what each slot's sequence asked for. The engine thread meanwhile delivers the tokens of the step before.
//!
//! **Invariant:** a step allocates nothing once the arrays have grown to its size, but for log-probabilities and
//! embeddings.

mod device;
mod fill;
mod memory;
mod meter;
mod runner;
mod slots;

pub use memory::{KvBudget, MemoryPlan, RunnerConfig, RunnerError};
pub use runner::Runner;
