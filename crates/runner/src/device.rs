//! The device thread: owns the backend and does all that a step needs, in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender};

use octavo_engine::{ExecutorError, Logprobs, StepMasks, StepOutput, StepPlan, TokenOutput};
use octavo_ops::sampling::{SampleBatch, SampleRow, SampledToken};
use octavo_ops::{Backend, BackendError, Program, StepBatch};

use crate::RunnerConfig;
use crate::fill::{Drawn, fill};
use crate::meter::StepMeter;
use crate::slots::Slots;

/// Tokens or sequences of a step for which memory is taken at the start; the arrays of larger steps grow when they come.
const RESERVED: usize = 1 << 16;

/// What the engine thread asks for. A step is a `Forward`, then a `Sample`; somebody waits for each.
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
    /// The engine waits for the oldest step.
    Deliver,
}

/// What comes back for each step.
pub(crate) type StepResult = Result<StepOutput, ExecutorError>;

/// The state of the device thread.
///
/// A backend that works on the caller's thread has a step's tokens when it is sampled, and they leave at once. One that only
/// launches is asked for them when the engine waits, or when the next step's sampling needs them: until then it has been
/// given what comes next.
pub(crate) struct Device {
    backend: Box<dyn Backend>,
    block_size: usize,
    groups: usize,
    /// Positions of a token.
    streams: usize,
    slots: Slots,
    meter: StepMeter,
    batch: StepBatch,
    /// The step between its `Forward` and its `Sample`.
    step: Option<(StepPlan, Result<(), ExecutorError>)>,
    /// Steps that are being sampled, oldest first.
    under_way: VecDeque<UnderWay>,
    /// What the rows of the step that was sampled last have drawn.
    drawn: Drawn,
    /// Why the backend is beyond repair: every step that is still to end, ends with it.
    broken: Option<ExecutorError>,
    sampled: Vec<SampledToken>,
    /// Hidden states of the step, one after the other.
    hidden: Vec<f32>,
    /// Kept for its memory; empty between steps.
    rows: Vec<SampleRow<'static>>,
}

/// A step whose sampling was started.
struct UnderWay {
    plan: StepPlan,
    /// Filled when the tokens are taken from the backend.
    rows: Vec<TokenOutput>,
    embeddings: Vec<Vec<f32>>,
    state: State,
}

/// How far a step is.
enum State {
    /// The backend has its tokens.
    Drawing,
    /// They have been taken, or it has none.
    Complete,
    /// It is lost.
    Failed(ExecutorError),
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
    pub(crate) fn new(backend: Box<dyn Backend>, program: &Program, config: &RunnerConfig, meter: StepMeter) -> Self {
        let groups = program.kv_groups.len();
        let (tokens, sequences) = (config.max_num_batched_tokens.min(RESERVED), config.max_num_seqs.min(RESERVED));
        let rows = sequences + StepPlan::MAX_SCORED_ROWS;
        Self {
            backend,
            block_size: config.block_size,
            groups,
            streams: program.position_streams(),
            slots: Slots::new(config.max_num_seqs),
            meter,
            batch: StepBatch::with_capacity(tokens, sequences, rows, groups),
            step: None,
            under_way: VecDeque::with_capacity(2),
            drawn: Drawn { ids: Vec::with_capacity(rows), on_device: 0 },
            broken: None,
            sampled: Vec::with_capacity(rows),
            hidden: Vec::new(),
            rows: Vec::with_capacity(rows),
        }
    }

    /// Serves commands until the engine has gone, or the backend is beyond repair.
    pub(crate) fn run(mut self, commands: &Receiver<Command>, results: &SyncSender<StepResult>) {
        let launches_only = self.backend.max_in_flight() > 1;
        for command in commands {
            match command {
                Command::Forward(plan) => {
                    let outcome = self.attempt(|device| device.forward(&plan));
                    self.step = Some((plan, outcome));
                    continue;
                }
                Command::Sample { masks, rows } => {
                    self.start_sampling(&masks, rows);
                    if launches_only {
                        continue;
                    }
                }
                Command::Deliver => {}
            }
            // Nothing is under way if the tokens have left already.
            let Some(result) = self.deliver() else { continue };
            let over = result.as_ref().is_err_and(|error| error.fatal);
            if results.send(result).is_err() || over {
                return;
            }
        }
    }

    /// Does something that may fail or panic, unless the backend is beyond repair.
    fn attempt(&mut self, work: impl FnOnce(&mut Self) -> Result<(), ExecutorError>) -> Result<(), ExecutorError> {
        let result = match self.broken.clone() {
            None => guard(|| work(self)),
            Some(error) => Err(error),
        };
        if let Err(error) = &result
            && error.fatal
        {
            self.broken = Some(error.clone());
        }
        result
    }

    fn forward(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let malformed = |reason: String| lost(format!("step {} is malformed: {reason}", plan.step));
        for joined in &plan.joined {
            self.slots.join(plan.step, joined).map_err(malformed)?;
        }
        fill(&mut self.batch, plan, self.block_size, (self.groups, self.streams), &self.drawn).map_err(malformed)?;
        self.meter.begin(plan.step, &self.batch);
        self.backend.forward(&self.batch).map_err(refused)
    }

    /// Starts to sample the step that was computed last.
    fn start_sampling(&mut self, masks: &StepMasks, rows: Vec<TokenOutput>) {
        let none = || (StepPlan::default(), Err(lost("no step was submitted")));
        let (plan, outcome) = self.step.take().unwrap_or_else(none);
        let mut step = UnderWay { plan, rows, embeddings: Vec::new(), state: State::Complete };
        if step.plan.sequences.iter().any(|sequence| sequence.samples && self.slots.counts(sequence.slot)) {
            self.take_tokens(self.under_way.len());
        }
        let outcome = outcome.and_then(|()| {
            self.attempt(|device| {
                device.pool(&mut step)?;
                device.sample(&step.plan, masks)
            })
        });
        self.drawn.ids.clear();
        self.drawn.on_device = if outcome.is_ok() { step.plan.rows() } else { 0 };
        step.state = match outcome {
            Ok(()) if step.plan.rows() > 0 => State::Drawing,
            Ok(()) => State::Complete,
            Err(error) => State::Failed(error),
        };
        self.under_way.push_back(step);
    }

    /// The result of the oldest step that is under way, once it is there.
    fn deliver(&mut self) -> Option<StepResult> {
        self.take_tokens(1);
        let UnderWay { plan, rows, embeddings, state } = self.under_way.pop_front()?;
        Some(match state {
            State::Failed(error) => Err(error),
            State::Drawing | State::Complete => {
                self.meter.end(plan.step, self.backend.step_counts());
                Ok(StepOutput { rows, embeddings, plan })
            }
        })
    }

    /// Waits for the tokens of the oldest steps, so many, and gives them to their rows and slots.
    fn take_tokens(&mut self, steps: usize) {
        for number in 0..steps.min(self.under_way.len()) {
            if !matches!(self.under_way[number].state, State::Drawing) {
                continue;
            }
            let rows = self.under_way[number].plan.rows();
            let taken = self.attempt(|device| {
                device.backend.take_tokens(&mut device.sampled).map_err(refused)?;
                let found = device.sampled.len();
                if found == rows { Ok(()) } else { Err(lost(format!("{found} tokens were drawn for {rows} rows"))) }
            });
            match taken {
                Ok(()) => self.give_out(number),
                Err(error) => self.under_way[number].state = State::Failed(error),
            }
        }
    }

    /// Gives the tokens that were taken to the rows of a step that is under way, and to its slots.
    fn give_out(&mut self, number: usize) {
        let latest = number + 1 == self.under_way.len();
        let step = &mut self.under_way[number];
        let mut sampled = self.sampled.drain(..);
        for sequence in &step.plan.sequences {
            for (index, token) in sampled.by_ref().take(sequence.rows()).enumerate() {
                if index == sequence.scores.len() {
                    self.slots.push(step.plan.step, sequence.slot, token.id);
                }
                let logprobs = token.logprobs.map(|l| Logprobs { logprob: l.logprob, rank: l.rank, top: l.top });
                step.rows.push(TokenOutput { id: token.id, logprobs });
            }
        }
        if latest {
            self.drawn.ids.extend(step.rows.iter().map(|row| row.id));
        }
        step.state = State::Complete;
    }

    /// Fetches the hidden states of the sequences that want them: the next forward pass takes their place.
    fn pool(&mut self, step: &mut UnderWay) -> Result<(), ExecutorError> {
        if !step.plan.sequences.iter().any(|sequence| sequence.pools) {
            return Ok(());
        }
        self.backend.embeddings(&mut self.hidden).map_err(refused)?;
        let rows = step.plan.pooled_rows();
        let width = self.hidden.len() / rows.max(1);
        if width == 0 || self.hidden.len() != rows * width {
            return Err(lost(format!("{} values of hidden states for {rows} rows", self.hidden.len())));
        }
        step.embeddings.extend(self.hidden.chunks_exact(width).map(<[f32]>::to_vec));
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
            self.backend.start_sampling(&SampleBatch { rows: &rows }).map_err(refused)?;
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
