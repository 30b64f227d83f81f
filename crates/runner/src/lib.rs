//! The engine's [`Executor`](octavo_engine::Executor): it turns a StepPlan into a StepBatch, runs it on a backend and
//! samples tokens.
//!
//! The [`Runner`] hands each [`StepPlan`](octavo_engine::StepPlan) to the device thread, which owns the backend. The
//! device thread turns the plan into the flat arrays of a [`StepBatch`](octavo_ops::StepBatch), runs the program and
//! samples the rows with the parameters of each seat's sequence. Meanwhile the engine thread delivers the tokens of the
//! step before.
//!
//! **Invariant:** once the arrays have grown to its size, a step allocates only for log-probabilities and embeddings.

mod adapters;
mod cost;
mod device;
mod fill;
mod images;
mod memory;
mod meter;
mod runner;
mod seats;

pub use adapters::{AdapterLimits, AdapterWeights};
pub use images::ImageConfig;
pub use memory::{KvBudget, MemoryPlan, RunnerConfig, RunnerError, kv_cache_spec, max_rows};
pub use runner::Runner;
