//! The device thread: owns the backend and does all that a step needs, in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender};

use octavo_engine::{ExecutorError, Logprobs, StepMasks, StepOutput, StepPlan, TokenOutput};
use octavo_ops::sampling::{SampleBatch, SampleRow, SampledToken};
use octavo_ops::{Backend, BackendError, StepBatch};

use crate::RunnerConfig;
use crate::fill::fill;
use crate::meter::StepMeter;
use crate::slots::Slots;

/// Tokens or sequences of a step for which memory is taken at the start; the arrays of larger steps grow when they come.
const RESERVED: usize = 1 << 16;

/// What the engine thread asks for. A step is a `Forward`, then a `Sample`.
pub(crate) enum Command {
    /// Run the forward pass of a plan.
    Forward(StepPlan),
    /// Draw the step's tokens into `rows`, which is empty.
    Sample {
        /// For the constrained rows.
        masks: StepMasks,
        /// Memory of an earlier step's output.
        rows: Vec<TokenOutput>,
    },
}

/// What comes back for each step.
pub(crate) type StepResult = Result<StepOutput, ExecutorError>;

/// The state of the device thread.
pub(crate) struct Device {
    backend: Box<dyn Backend>,
    block_size: usize,
    groups: usize,
    slots: Slots,
    meter: StepMeter,
    batch: StepBatch,
    /// The step between its `Forward` and its `Sample`.
    step: Option<(StepPlan, Result<(), ExecutorError>)>,
    /// The tokens of the latest step's rows.
    drawn: Vec<u32>,
    sampled: Vec<SampledToken>,
    /// Hidden states of the step, one after the other.
    hidden: Vec<f32>,
    /// Kept for its memory; empty between steps.
    rows: Vec<SampleRow<'static>>,
}

/// A step that failed; the device goes on.
fn lost(message: impl std::fmt::Display) -> ExecutorError {
    ExecutorError { message: message.to_string(), fatal: false }
}

/// A step that the backend failed at; the device goes on, unless it is gone.
fn refused(error: BackendError) -> ExecutorError {
    ExecutorError { message: error.to_string(), fatal: matches!(error, BackendError::DeviceLost { .. }) }
}

impl Device {
    pub(crate) fn new(backend: Box<dyn Backend>, groups: usize, config: &RunnerConfig, meter: StepMeter) -> Self {
        let (tokens, sequences) = (config.max_num_batched_tokens.min(RESERVED), config.max_num_seqs.min(RESERVED));
        let rows = sequences + StepPlan::MAX_SCORED_ROWS;
        Self {
            backend,
            block_size: config.block_size,
            groups,
            slots: Slots::new(config.max_num_seqs),
            meter,
            batch: StepBatch::with_capacity(tokens, sequences, rows, groups),
            step: None,
            drawn: Vec::with_capacity(rows),
            sampled: Vec::with_capacity(rows),
            hidden: Vec::new(),
            rows: Vec::with_capacity(rows),
        }
    }

    /// Serves commands until the engine has gone, or the backend is beyond repair.
    pub(crate) fn run(mut self, commands: &Receiver<Command>, results: &SyncSender<StepResult>) {
        for command in commands {
            let result = match command {
                Command::Forward(plan) => {
                    let outcome = guard(|| self.forward(&plan));
                    self.step = Some((plan, outcome));
                    continue;
                }
                Command::Sample { masks, rows } => self.finish(&masks, rows),
            };
            let over = result.as_ref().is_err_and(|error| error.fatal);
            if results.send(result).is_err() || over {
                return;
            }
        }
    }

    fn forward(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let malformed = |reason: String| lost(format!("step {} is malformed: {reason}", plan.step));
        for joined in &plan.joined {
            self.slots.join(joined).map_err(malformed)?;
        }
        fill(&mut self.batch, plan, self.block_size, self.groups, &self.drawn).map_err(malformed)?;
        self.meter.begin(plan.step, &self.batch);
        self.backend.forward(&self.batch).map_err(refused)
    }

    /// Samples the step that was computed last.
    fn finish(&mut self, masks: &StepMasks, mut rows: Vec<TokenOutput>) -> StepResult {
        let (plan, outcome) = self.step.take().ok_or_else(|| lost("no step was submitted"))?;
        self.drawn.clear();
        self.sampled.clear();
        outcome.and_then(|()| guard(|| self.sample(&plan, masks)))?;
        let mut embeddings = Vec::new();
        if plan.sequences.iter().any(|sequence| sequence.pools) {
            guard(|| self.pool(&plan, &mut embeddings))?;
        }
        let mut sampled = self.sampled.drain(..);
        for sequence in &plan.sequences {
            for (index, token) in sampled.by_ref().take(sequence.rows()).enumerate() {
                if index == sequence.scores.len() {
                    self.slots.push(sequence.slot, token.id);
                }
                self.drawn.push(token.id);
                let logprobs = token.logprobs.map(|l| Logprobs { logprob: l.logprob, rank: l.rank, top: l.top });
                rows.push(TokenOutput { id: token.id, logprobs });
            }
        }
        drop(sampled);
        self.meter.end(plan.step, self.backend.step_counts());
        Ok(StepOutput { rows, embeddings, plan })
    }

    /// Fetches the hidden states of the sequences that want them.
    fn pool(&mut self, plan: &StepPlan, embeddings: &mut Vec<Vec<f32>>) -> Result<(), ExecutorError> {
        self.backend.embeddings(&mut self.hidden).map_err(refused)?;
        let rows = plan.pooled_rows();
        let width = self.hidden.len() / rows.max(1);
        if width == 0 || self.hidden.len() != rows * width {
            return Err(lost(format!("{} values of hidden states for {rows} rows", self.hidden.len())));
        }
        embeddings.extend(self.hidden.chunks_exact(width).map(<[f32]>::to_vec));
        Ok(())
    }

    fn sample(&mut self, plan: &StepPlan, masks: &StepMasks) -> Result<(), ExecutorError> {
        let malformed = |reason: &str| lost(format!("step {} is malformed: {reason}", plan.step));
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut self.rows);
        let mut masks = masks.bits.chunks_exact(masks.words.max(1));
        for sequence in &plan.sequences {
            for position in sequence.scores.clone() {
                rows.push(self.slots.score(sequence.slot, position).map_err(|reason| malformed(&reason))?);
            }
            if !sequence.samples {
                continue;
            }
            let mask = match sequence.constrained {
                true => Some(masks.next().ok_or_else(|| malformed("a mask is missing"))?),
                false => None,
            };
            rows.push(self.slots.row(sequence, mask).map_err(|reason| malformed(&reason))?);
        }
        if !rows.is_empty() {
            self.backend.sample(&SampleBatch { rows: &rows }, &mut self.sampled).map_err(refused)?;
        }
        if self.sampled.len() != rows.len() {
            return Err(lost(format!("{} tokens were drawn for {} rows", self.sampled.len(), rows.len())));
        }
        self.rows = emptied(rows);
        Ok(())
    }
}

/// The memory of the rows without the rows, and so without what they borrow.
fn emptied(rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    // Collected in place.
    rows.into_iter().map_while(|_| None).collect()
}

/// Turns a panic into a fatal error: what the backend was about to write is unknown.
fn guard(work: impl FnOnce() -> Result<(), ExecutorError>) -> Result<(), ExecutorError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<&str>().copied();
        let message = message.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let message = format!("the device thread panicked: {}", message.unwrap_or("no message"));
        Err(ExecutorError { message, fatal: true })
    })
}

#[cfg(test)]
mod tests {
    use octavo_ops::sampling::SampleParams;

    use super::*;

    #[test]
    fn the_memory_of_rows_is_kept() {
        let params = SampleParams::default();
        let mut rows = Vec::with_capacity(100);
        rows.push(SampleRow::new(&params));
        let memory = rows.as_ptr() as usize;
        let rows = emptied(rows);
        assert_eq!((rows.len(), rows.capacity(), rows.as_ptr() as usize), (0, 100, memory));
    }
}
