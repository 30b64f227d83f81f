//! StepPlan to StepBatch to backend to sampled tokens: the engine's Executor.
