//! The device thread: owns the backend and does all work of a step, in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use octavo_engine::{ExecutorError, InputToken, Logprobs, RowKind, StepMasks, StepOutput, StepPlan, TokenOutput};
use octavo_ops::sampling::{SampleBatch, SampleRow, SampledToken, TokenCounts};
use octavo_ops::{Backend, BackendError, Program, StepBatch};

use crate::adapters::PendingAdapters;
use crate::fill::{Drawn, Shape, fill};
use crate::images::Images;
use crate::meter::StepMeter;
use crate::seats::Seats;
use crate::{RunnerConfig, max_rows};

/// Number of tokens or sequences of a step for which memory is reserved at the start. The arrays grow on demand for
/// larger steps.
const RESERVED: usize = 1 << 16;

/// A command from the engine thread. A step is a `Forward`, then a `Sample`; a `Deliver` follows for each.
pub(crate) enum Command {
    /// Runs the forward pass of a plan.
    Forward(Box<StepPlan>),
    /// Samples the step's tokens into `tokens`, which is empty.
    Sample {
        /// Masks of the constrained rows.
        masks: StepMasks,
        /// Buffer of an earlier step's output.
        tokens: Vec<TokenOutput>,
    },
    /// The engine waits for the oldest step.
    Deliver,
}

/// Result of a step.
pub(crate) struct StepResult {
    pub(crate) output: Result<StepOutput, ExecutorError>,
    /// The masks of its rows, for reuse.
    pub(crate) masks: StepMasks,
    /// Memory of a plan, for reuse.
    pub(crate) plan: Box<StepPlan>,
}

/// State of the device thread.
///
/// A backend that works on the caller's thread has a step's tokens when it is sampled, and they are sent at once. A
/// backend that only launches work is asked for them when the engine waits or when the next step's sampling needs them;
/// until then it has already been given the next step. Tokens that only penalties need are counted by the backend.
pub(crate) struct Device {
    backend: Box<dyn Backend>,
    shape: Shape,
    seats: Seats,
    adapters: PendingAdapters,
    /// Encoder of images, if the model has one that is in use.
    images: Option<Images>,
    meter: StepMeter,
    batch: StepBatch,
    /// The step between its `Forward` and its `Sample`.
    step: Option<(Box<StepPlan>, Result<(), ExecutorError>)>,
    /// Time that the calls for its forward pass took.
    forward_time: Duration,
    /// Steps that are being sampled, oldest first.
    under_way: VecDeque<UnderWay>,
    /// Tokens sampled by the step that was sampled last.
    drawn: Drawn,
    /// Error of a backend that cannot be used again. Every remaining step ends with it.
    broken: Option<ExecutorError>,
    sampled: Vec<SampledToken>,
    /// Buffer; empty between steps.
    rows: Vec<SampleRow<'static>>,
    /// Counts of the rows that verify drafts under penalties.
    counts: Vec<TokenCounts>,
}

/// A step whose sampling has started.
struct UnderWay {
    plan: Box<StepPlan>,
    /// Tokens of the step, filled when they are taken from the backend.
    tokens: Vec<TokenOutput>,
    /// Vectors of the pooled rows, concatenated.
    vectors: Vec<f32>,
    masks: StepMasks,
    /// Time that the device worked on it: what the backend has measured, or what its calls took.
    busy: Duration,
    state: State,
}

/// Progress of a step.
enum State {
    /// The backend has its tokens, or still computes it.
    Drawing,
    /// The tokens have been taken, or there are none.
    Complete,
    /// The step failed.
    Failed(ExecutorError),
}

/// Returns the error of a step that failed while the device continues.
fn lost(message: impl std::fmt::Display) -> ExecutorError {
    ExecutorError { message: message.to_string(), fatal: false }
}

/// Returns the error of a step that the backend failed. It is fatal if the device is lost.
fn refused(error: BackendError) -> ExecutorError {
    ExecutorError { message: error.to_string(), fatal: matches!(error, BackendError::DeviceLost { .. }) }
}

impl Device {
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        program: &Program,
        config: &RunnerConfig,
        images: Option<Images>,
        meter: StepMeter,
    ) -> Self {
        let groups = program.kv_groups.len();
        let (tokens, sequences) = (config.max_num_batched_tokens.min(RESERVED), config.max_num_seqs.min(RESERVED));
        let rows = max_rows(sequences, program.vocab_size);
        Self {
            backend,
            shape: Shape::new(program, config.block_size),
            seats: Seats::new(config.max_num_seqs),
            adapters: PendingAdapters::default(),
            images,
            meter,
            batch: StepBatch::with_capacity(tokens, sequences, rows, groups),
            step: None,
            forward_time: Duration::ZERO,
            under_way: VecDeque::with_capacity(2),
            drawn: Drawn { ids: Vec::with_capacity(rows), on_device: 0 },
            broken: None,
            sampled: Vec::with_capacity(rows),
            rows: Vec::with_capacity(rows),
            counts: Vec::new(),
        }
    }

    /// Serves commands until the engine has ended or the backend cannot be used again.
    pub(crate) fn run(mut self, commands: &Receiver<Command>, results: &SyncSender<StepResult>) {
        let launches_only = self.backend.max_in_flight() > 1;
        for command in commands {
            match command {
                Command::Forward(plan) => {
                    let outcome = self.attempt(|device| device.forward(&plan));
                    self.step = Some((plan, outcome));
                    continue;
                }
                Command::Sample { masks, tokens } => {
                    self.start_sampling(masks, tokens);
                    if launches_only {
                        continue;
                    }
                }
                Command::Deliver => {}
            }
            // No step is under way if its tokens were sent earlier.
            let Some(result) = self.deliver() else { continue };
            let over = result.output.as_ref().is_err_and(|error| error.fatal);
            if results.send(result).is_err() || over {
                return;
            }
        }
    }

    /// Runs work that may fail or panic, unless the backend cannot be used again.
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
        plan.left.iter().for_each(|&seat| self.seats.leave(seat));
        for joined in &plan.joined {
            self.seats.join(plan.step, joined).map_err(malformed)?;
        }
        self.adapters.apply(&plan.adapters, &mut *self.backend);
        let Self { batch, seats, drawn, shape, .. } = self;
        fill(batch, plan, shape, drawn, &&*seats).map_err(malformed)?;
        let slots = batch.adapters.iter().filter_map(|adapter| adapter.checked_sub(1));
        if let Some(reason) = slots.into_iter().find_map(|slot| self.adapters.refused(slot)) {
            return Err(lost(reason));
        }
        if !plan.encode.is_empty() {
            let images =
                self.images.as_mut().ok_or_else(|| malformed("it has images, the runner has no encoder".into()))?;
            self.backend.encode(images.fill(&plan.encode).map_err(malformed)?).map_err(refused)?;
        }
        self.meter.begin(plan.step, &self.batch);
        let begun = Instant::now();
        let done = self.backend.forward(&self.batch).map_err(refused);
        self.forward_time = begun.elapsed();
        done
    }

    /// Starts to sample the step that was computed last.
    fn start_sampling(&mut self, masks: StepMasks, tokens: Vec<TokenOutput>) {
        let none = || (Box::default(), Err(lost("no step was submitted")));
        let (plan, outcome) = self.step.take().unwrap_or_else(none);
        let (busy, state) = (std::mem::take(&mut self.forward_time), State::Complete);
        let mut step = UnderWay { plan, tokens, vectors: Vec::new(), masks, busy, state };
        if self.seats.needs_tokens(&step.plan) {
            // The backend counts the tokens of the latest step, which it has.
            let known = self.under_way.len() - usize::from(self.counts_on_device());
            self.take_tokens(known);
        }
        let mut drawing = false;
        let outcome = outcome.and_then(|()| {
            self.attempt(|device| {
                let begun = Instant::now();
                device.pool(&mut step)?;
                drawing = device.sample(&step.plan, &step.masks)?;
                step.busy += begun.elapsed();
                Ok(())
            })
        });
        self.drawn.ids.clear();
        self.drawn.on_device = if outcome.is_ok() { step.plan.token_rows() } else { 0 };
        step.state = match outcome {
            Ok(()) if drawing => State::Drawing,
            Ok(()) => State::Complete,
            Err(error) => State::Failed(error),
        };
        self.under_way.push_back(step);
    }

    /// Returns the result of the oldest step under way, once it is complete.
    fn deliver(&mut self) -> Option<StepResult> {
        self.take_tokens(1);
        let UnderWay { mut plan, tokens, vectors, masks, busy, state } = self.under_way.pop_front()?;
        let output = match state {
            State::Failed(error) => Err(error),
            State::Drawing | State::Complete => {
                self.meter.end(plan.step, busy, self.backend.step_counts());
                Ok(StepOutput { tokens, vectors, busy, plan: std::mem::take(&mut *plan) })
            }
        };
        Some(StepResult { output, masks, plan })
    }

    /// Returns whether the backend can count the tokens of the latest step under way, which then need not be known. It
    /// cannot if some of them may be those of rejected drafts.
    fn counts_on_device(&self) -> bool {
        let verifies = |step: &UnderWay| step.plan.rows.iter().any(|row| row.kind == RowKind::Verify);
        self.backend.max_in_flight() > 1 && self.under_way.back().is_some_and(|step| !verifies(step))
    }

    /// Waits for the tokens of the `steps` oldest steps and distributes them to rows and seats.
    fn take_tokens(&mut self, steps: usize) {
        for number in 0..steps.min(self.under_way.len()) {
            if !matches!(self.under_way[number].state, State::Drawing) {
                continue;
            }
            let rows = self.under_way[number].plan.token_rows();
            let taken = self.attempt(|device| {
                device.backend.take_tokens(&mut device.sampled).map_err(refused)?;
                let found = device.sampled.len();
                if found == rows { Ok(()) } else { Err(lost(format!("{found} tokens were drawn for {rows} rows"))) }
            });
            match taken {
                Ok(()) => {
                    if let Some(measured) = self.backend.step_time() {
                        self.under_way[number].busy = measured;
                    }
                    self.give_out(number);
                }
                Err(error) => self.under_way[number].state = State::Failed(error),
            }
        }
    }

    /// Distributes the tokens that were taken to the rows of a step under way and to its seats.
    fn give_out(&mut self, number: usize) {
        let latest = number + 1 == self.under_way.len();
        let UnderWay { plan, tokens, state, .. } = &mut self.under_way[number];
        let rows = plan.rows.iter().filter(|row| row.kind.gives_token());
        // The token that the row before drew, if it counts.
        let mut before = None;
        for (row, token) in rows.zip(self.sampled.drain(..)) {
            let accepted = || before.is_some_and(|id| plan.token(row) == Some(InputToken::Id(id)));
            let counts = row.kind == RowKind::Draw || (row.kind == RowKind::Verify && accepted());
            before = counts.then_some(token.id);
            if let (true, Some(sequence)) = (counts, plan.sequence(row)) {
                self.seats.push(plan.step, sequence.seat, token.id);
            }
            let logprobs = token.logprobs.map(|l| Logprobs { logprob: l.logprob, rank: l.rank, top: l.top });
            tokens.push(TokenOutput { id: token.id, logprobs });
        }
        if latest {
            self.drawn.ids.extend(tokens.iter().map(|token| token.id));
        }
        *state = State::Complete;
    }

    /// Fetches the vectors of a step's pooled rows, before the next forward pass overwrites them.
    fn pool(&mut self, step: &mut UnderWay) -> Result<(), ExecutorError> {
        let rows = step.plan.pooled_rows();
        if rows == 0 {
            return Ok(());
        }
        self.backend.embeddings(&mut step.vectors).map_err(refused)?;
        let values = step.vectors.len();
        if values == 0 || !values.is_multiple_of(rows) {
            return Err(lost(format!("{values} values of hidden states for {rows} rows")));
        }
        Ok(())
    }

    /// Starts to sample a step. Returns whether tokens are to be taken, if only to wait for a step without any.
    fn sample(&mut self, plan: &StepPlan, masks: &StepMasks) -> Result<bool, ExecutorError> {
        let malformed = |reason: String| lost(format!("step {} is malformed: {reason}", plan.step));
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut self.rows);
        let mut masks = masks.rows.iter().map(Vec::as_slice);
        self.seats.count_drafts(plan, &mut self.counts);
        let drawing = self.under_way.back().filter(|step| matches!(step.state, State::Drawing));
        let mut counts = self.counts.iter();
        for row in plan.rows.iter().filter(|row| row.kind.gives_token()) {
            let sequence = plan.sequence(row);
            let seat = sequence.ok_or_else(|| malformed(format!("a row is of sequence {}", row.sequence)))?.seat;
            let mask = match row.kind.draws() && self.seats.constrained(seat) {
                true => Some(masks.next().ok_or_else(|| malformed("a mask is missing".into()))?),
                false => None,
            };
            let counts = if self.seats.counts_drafts(seat, row) { counts.next() } else { None };
            let pending = drawing.and_then(|step| self.seats.drawn_row(&step.plan, seat));
            rows.push(self.seats.row(seat, row, mask, counts, pending).map_err(malformed)?);
        }
        let draws = !rows.is_empty() || self.backend.max_in_flight() > 1;
        if draws {
            self.backend.start_sampling(&SampleBatch { rows: &rows }).map_err(refused)?;
        }
        self.rows = emptied(rows);
        Ok(draws)
    }
}

/// Clears the rows and keeps their allocation, which then borrows nothing.
fn emptied(rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    // The standard library collects in place.
    rows.into_iter().map_while(|_| None).collect()
}

/// Turns a panic into a fatal error, because the state of the backend's memory is then unknown.
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
