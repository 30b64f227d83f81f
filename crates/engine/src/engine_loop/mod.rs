//! The engine thread: waits for the device, reads the inbox, delivers tokens, plans and submits the next step.
//!
//! With one step in flight, a turn submits step n, wakes the readers of n − 1 and fills the masks of n while the device
//! works, starts the sampling of n and waits for n. With two steps in flight, the engine plans and submits n + 1 before
//! it waits for n; the inputs of n + 1 refer to tokens of n that the engine has not seen yet. Masks of n + 1 need the
//! tokens of n, so the sampling of n + 1 starts after that wait.

#[cfg(test)]
mod command_tests;
#[cfg(test)]
mod draft_tests;
#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod image_tests;
mod masks;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod sharing_properties;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use octavo_telemetry::{EngineMetrics, StepStats};

use crate::clock::StepClock;
use crate::engine::Shared;
use crate::inbox::{Command, End, Mail, Reply};
use crate::mask_filler::MaskFiller;
use crate::scheduler::{ExecutorMemory, Scheduler, Share, StepRecord};
use crate::sequence::{LastOutput, SequenceKey};
use crate::stop::stop_reason;
use crate::stream::Ending;
use crate::{
    EngineConfig, EngineState, Executor, ExecutorError, FinishReason, KvEventSink, StepId, StepOutput, StepPlan,
    TokenOutput,
};

/// Reason why the engine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// A caller asked it to stop.
    Stopped,
    /// The executor failed for good.
    Failed,
}

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There may be more work.
    Again,
    /// No step is in flight, and there is nothing to plan until a message arrives.
    Idle,
    /// The engine has ended.
    Over(Exit),
}

/// A step that the device has completed.
struct CompletedStep {
    record: StepRecord,
    result: Result<StepOutput, ExecutorError>,
    /// Time of its completion, which is the time of its tokens.
    at: Instant,
}

/// The state of the engine thread.
pub(crate) struct EngineLoop {
    shared: Arc<Shared>,
    executor: Box<dyn Executor>,
    metrics: EngineMetrics,
    scheduler: Scheduler,
    /// Estimate of the time of steps, if the executor has a cost model.
    clock: Option<StepClock>,
    /// Time at which the latest step completed.
    last_end: Option<Instant>,
    /// Receiver of the changes of the prefix cache.
    kv_events: Option<Box<dyn KvEventSink>>,
    /// Maximum number of steps in flight.
    depth: usize,
    /// Steps in flight, oldest first. Only the newest may wait for its masks.
    in_flight: VecDeque<StepRecord>,
    next_step: StepId,
    /// The last attempt found nothing to submit; steps in flight must complete first.
    starved: bool,
    /// A step failed. No step is submitted until all steps in flight have completed, because its inputs could refer to
    /// the failed one.
    recovering: bool,
    /// No step is planned until a command ends the freeze.
    frozen: bool,
    /// Callers that wait until the engine is idle.
    idle_waiters: Vec<Reply>,
    mail: Mail,
    /// Readers to wake once the device is busy.
    wakers: Vec<Waker>,
    masks: MaskFiller,
    spare_plans: Vec<StepPlan>,
    spare_records: Vec<StepRecord>,
}

impl EngineLoop {
    pub(crate) fn new(
        shared: Arc<Shared>,
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: EngineMetrics,
        kv_events: Option<Box<dyn KvEventSink>>,
    ) -> Self {
        // The number of tokens that a step with drafts gives is not known before it is back.
        let depth = if config.speculation.is_some() { 1 } else { executor.max_in_flight().clamp(1, 2) };
        let wakers = Vec::with_capacity(config.max_num_seqs);
        let clock = executor.step_cost().map(|cost| StepClock::new(cost, config.max_step));
        let adapter_slots = executor.adapter_slots();
        let memory =
            ExecutorMemory { kv: executor.kv_cache_spec(), images: executor.image_spec(), adapters: adapter_slots };
        let mut scheduler = Scheduler::new(config, memory, executor.max_rows());
        if adapter_slots > 0 {
            metrics.adapters(adapter_slots, &[], &[]);
        }
        if kv_events.is_some() {
            scheduler.kv_mut().record_events();
        }
        Self {
            shared,
            metrics,
            wakers,
            scheduler,
            clock,
            last_end: None,
            kv_events,
            executor,
            depth,
            in_flight: VecDeque::with_capacity(depth),
            next_step: 1,
            starved: false,
            recovering: false,
            frozen: false,
            idle_waiters: Vec::new(),
            mail: Mail::default(),
            masks: MaskFiller::new(),
            spare_plans: Vec::with_capacity(depth + 1),
            spare_records: Vec::with_capacity(depth + 1),
        }
    }

    /// Runs until the engine is stopped or fails. Blocks on the inbox while idle.
    pub(crate) fn run(mut self) -> Exit {
        loop {
            match self.turn() {
                Turn::Again => {}
                Turn::Idle => {
                    self.shared.status.idle();
                    self.shared.inbox.wait();
                }
                Turn::Over(exit) => return exit,
            }
        }
    }

    /// Runs one turn. Blocks only on the device.
    pub(crate) fn turn(&mut self) -> Turn {
        let completed = self.wait_for_oldest();
        self.shared.status.progress();
        self.shared.inbox.take(&mut self.mail);
        let worked = match self.read_mail() {
            Some(exit) => return Turn::Over(exit),
            None => self.work(completed),
        };
        debug_assert_eq!(self.scheduler.check_integrity(), Ok(()));
        self.publish_kv_events();
        match worked {
            Ok(()) if self.in_flight.is_empty() && (self.frozen || self.scheduler.is_idle()) => {
                self.report(StepStats::default());
                self.idle_waiters.drain(..).for_each(|reply| reply(true));
                Turn::Idle
            }
            Ok(()) => Turn::Again,
            Err(error) => Turn::Over(self.fail(&error)),
        }
    }

    /// Does the work of a turn between two waits. Any error is fatal.
    fn work(&mut self, completed: Option<CompletedStep>) -> Result<(), ExecutorError> {
        if let Some(CompletedStep { record, result, at }) = completed {
            match result {
                Ok(output) => self.retire(record, output, at)?,
                Err(error) => self.fail_step(record, error)?,
            }
        }
        self.sample_newest()?;
        if !self.recovering && !self.frozen {
            self.submit_next()?;
        }
        self.wake_readers();
        if self.in_flight.len() == 1 {
            self.sample_newest()?;
        }
        Ok(())
    }

    /// Waits for the oldest step if no other can be submitted before it is back.
    fn wait_for_oldest(&mut self) -> Option<CompletedStep> {
        if self.in_flight.len() < self.depth && !self.starved && !self.recovering && !self.frozen {
            return None;
        }
        let record = self.in_flight.pop_front()?;
        let result = self.executor.wait();
        let at = Instant::now();
        // The cost model knows nothing of images.
        if let (Some(clock), Some(begun), Ok(_), 0) = (&mut self.clock, record.begun, &result, record.image_tokens) {
            // A step begins on the device when the one before has ended.
            let begun = self.last_end.map_or(begun, |last| begun.max(last));
            clock.measure(&record.work, at - begun);
        }
        self.last_end = Some(at);
        Some(CompletedStep { record, result, at })
    }

    /// Applies new requests, aborts and stops. Ends take effect before the outputs of the step that has just completed.
    fn read_mail(&mut self) -> Option<Exit> {
        let mut mail = std::mem::take(&mut self.mail);
        for sequence in mail.arrivals.drain(..) {
            self.scheduler.enqueue(sequence);
        }
        let now = Instant::now();
        for (id, how) in mail.ends.drain(..) {
            let reason = match how {
                End::Abort => FinishReason::Abort,
                End::Stop => FinishReason::Stop { token: None },
            };
            if let Some(key) = self.scheduler.key(id) {
                self.end(key, Ending::default(), reason, now);
            }
        }
        if let Some(before) = mail.abort_before.take() {
            self.end_all(|id| id < before, &FinishReason::Abort);
        }
        mail.commands.drain(..).for_each(|command| self.obey(command));
        let stop = std::mem::take(&mut mail.stop);
        self.mail = mail;
        stop.then(|| self.shut_down())
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Freeze(frozen) => self.frozen = frozen,
            Command::WhenIdle(reply) => self.idle_waiters.push(reply),
            Command::ResetPrefixCache { preempt, reply } => reply(self.scheduler.reset_prefix_cache(preempt)),
        }
    }

    /// Plans a step and submits it, unless there is nothing to compute.
    fn submit_next(&mut self) -> Result<(), ExecutorError> {
        if self.in_flight.len() == self.depth {
            return Ok(());
        }
        let mut plan = self.spare_plans.pop().unwrap_or_default();
        let mut record = self.spare_records.pop().unwrap_or_default();
        self.scheduler.bound_masks(self.masks.pace.masks_in_a_step());
        self.scheduler.schedule(self.next_step, self.clock.as_ref(), &mut plan, &mut record);
        self.starved = plan.sequences.is_empty();
        if self.starved {
            self.spare_plans.push(plan);
            self.spare_records.push(record);
            return self.check_progress();
        }
        self.next_step += 1;
        self.note_admissions();
        record.begun = Some(Instant::now());
        self.expect(&record);
        match self.executor.submit(plan) {
            Ok(()) => self.in_flight.push_back(record),
            Err(error) => return self.fail_step(record, error),
        }
        self.sample_unless_constrained()
    }

    /// Extends the time after which the engine counts as stuck by what a step and those in flight may take.
    fn expect(&self, next: &StepRecord) {
        let Some(clock) = &self.clock else { return };
        let patience = |record: &StepRecord| clock.patience(&record.work, record.image_tokens);
        let sum = self.in_flight.iter().map(patience).fold(patience(next), Duration::saturating_add);
        self.shared.status.set_patience(sum);
    }

    /// Returns an error if there are requests, no step is in flight and nothing can be computed: no later turn would
    /// differ.
    fn check_progress(&self) -> Result<(), ExecutorError> {
        if self.in_flight.is_empty() && !self.scheduler.is_idle() {
            debug_assert!(false, "the scheduler is stuck");
            return Err(ExecutorError { message: "no request can be scheduled".into(), fatal: true });
        }
        Ok(())
    }

    fn note_admissions(&mut self) {
        let now = Instant::now();
        for at in 0..self.scheduler.admitted().len() {
            let caching = self.scheduler.kv().layout().caching();
            let key = self.scheduler.admitted()[at];
            let Some(sequence) = self.scheduler.sequence_mut(key) else { continue };
            // One that has no token in the step, or was preempted in it, is scheduled later.
            if sequence.joined && sequence.timeline.on_scheduled(now) {
                self.shared.inbox.leave_queue(sequence.prompt_len());
                // As in vLLM, a scored prompt does not count, because it is not looked up.
                if caching && !sequence.scores.requested() {
                    self.metrics.prefix_lookup(sequence.prompt_len() as u64, u64::from(sequence.cached_tokens));
                }
            }
        }
    }

    /// Delivers the output of a completed step, row by row.
    fn retire(&mut self, record: StepRecord, output: StepOutput, at: Instant) -> Result<(), ExecutorError> {
        let StepOutput { mut tokens, vectors, busy, plan } = output;
        self.masks.pace.worked(busy);
        let (expected, count) = record.outputs();
        let width = vectors.len() / count.max(1);
        if tokens.len() != expected || vectors.len() != width * count || (width == 0 && count > 0) {
            let found = (tokens.len(), vectors.len());
            let message = format!("step {} gave {found:?} tokens and values for {expected} rows", record.step);
            return self.fail_step(record, ExecutorError { message, fatal: true });
        }
        self.scheduler.images_mut().complete(record.step);
        self.advance_constraints(&record, &tokens);
        let mut stats = StepStats::default();
        let (mut drawn, mut rest) = (tokens.drain(..), vectors.as_slice());
        for share in &record.shares {
            let (own, others) = rest.split_at(share.rows.vectors * width);
            rest = others;
            self.take_scores(share, drawn.by_ref().take(share.rows.scores));
            if let Some(sequence) = self.scheduler.sequence_mut(share.key)
                && !own.is_empty()
            {
                sequence.keep_vectors(share.first, own, width);
            }
            let draws = share.rows.draws;
            let accepted = self.scheduler.accepted(share, drawn.as_slice()[..draws].iter().map(|token| token.id));
            let alive = self.scheduler.retire(share, accepted);
            stats.prompt_tokens += alive.unwrap_or(0) as u64;
            for (number, token) in drawn.by_ref().take(draws).enumerate() {
                if number <= accepted && self.take_token(share.key, token, at, number == 0) {
                    stats.generated_tokens += 1;
                }
            }
            if draws > 1 && alive.is_some() {
                self.metrics.verified(share.rows.drafts(), accepted);
                self.scheduler.commit(share);
            }
            if draws == 0 && share.rows.completes {
                self.take_answer(share.key, at);
            }
        }
        drop(drawn);
        self.executor.recycle(tokens);
        self.spare_plans.push(plan);
        self.spare_records.push(record);
        self.report(stats);
        self.recover();
        Ok(())
    }

    /// Stores the prompt's scores until the first event. Consumes every row, including rows of sequences that have
    /// ended.
    fn take_scores(&mut self, share: &Share, scores: impl Iterator<Item = TokenOutput>) {
        match self.scheduler.sequence_mut(share.key) {
            Some(sequence) => sequence.scores.receive(scores),
            None => scores.for_each(drop),
        }
    }

    /// Ends a sequence whose result is vectors or scores instead of a token.
    fn take_answer(&mut self, key: SequenceKey, now: Instant) {
        let Some(sequence) = self.scheduler.sequence_mut(key) else { return };
        let (prompt, cached) = (sequence.prompt_len() as u64, u64::from(sequence.cached_tokens));
        sequence.timeline.on_answer(now, prompt, cached, &self.metrics);
        let reason = match sequence.last_output {
            LastOutput::Vectors(_) => FinishReason::Stop { token: None },
            LastOutput::Token | LastOutput::Scores => FinishReason::Length,
        };
        let embedding = sequence.take_vectors();
        self.end(key, Ending { embedding, answered: true, ..Ending::default() }, reason, now);
    }

    /// Appends a drawn token to a sequence and ends the sequence if it was the last token. Only the `first` token of a step
    /// follows the one before after a gap. Returns `false` if the sequence has ended before.
    fn take_token(&mut self, key: SequenceKey, token: TokenOutput, now: Instant, first: bool) -> bool {
        let Some(sequence) = self.scheduler.sequence_mut(key) else { return false };
        if sequence.rejected {
            let reason = if sequence.unsatisfiable {
                FinishReason::Unsatisfiable
            } else {
                FinishReason::Error(format!("the grammar does not allow token {}, which was drawn", token.id).into())
            };
            self.end(key, Ending::default(), reason, now);
            return true;
        }
        sequence.history.output.push(token.id);
        self.metrics.generated(1);
        if first {
            let (prompt, cached) = (sequence.prompt_len() as u64, u64::from(sequence.cached_tokens));
            sequence.timeline.on_answer(now, prompt, cached, &self.metrics);
        }
        let repeats = sequence.repeats();
        let reason = stop_reason(&sequence.params, token.id, sequence.full());
        match reason.or(repeats.then_some(FinishReason::Repetition)) {
            Some(reason) => {
                self.end(key, Ending { token: Some(token), answered: true, ..Ending::default() }, reason, now)
            }
            None => {
                let first = sequence.first_event();
                let times = sequence.timeline.times();
                self.wakers.extend(sequence.sender.send(token, first, times));
            }
        }
        true
    }

    /// Ends a sequence and sends its one terminal event.
    fn end(&mut self, key: SequenceKey, mut ending: Ending, reason: FinishReason, now: Instant) {
        let Some(mut sequence) = self.scheduler.remove(key) else { return };
        if !sequence.timeline.was_scheduled() {
            self.shared.inbox.leave_queue(sequence.prompt_len());
        }
        if let FinishReason::Error(message) = &reason {
            tracing::debug!(request_id = sequence.name, %message, "request failed");
        }
        self.metrics.finished(&sequence.finished(&reason, now));
        ending.times = sequence.timeline.times();
        let first = if ending.answered { sequence.first_event() } else { None };
        self.wakers.extend(sequence.sender.finish(ending, first, reason));
    }

    fn end_all(&mut self, which: impl Fn(u64) -> bool, reason: &FinishReason) {
        let now = Instant::now();
        let keys: Vec<_> = self.scheduler.sequences().filter(|(_, s)| which(s.id)).map(|(key, _)| key).collect();
        for key in keys {
            self.end(key, Ending::default(), reason.clone(), now);
        }
    }

    /// Ends the requests of a step that failed, and those of the step after it that read what it was to write. Returns a
    /// fatal error to the caller.
    fn fail_step(&mut self, record: StepRecord, error: ExecutorError) -> Result<(), ExecutorError> {
        tracing::error!(step = record.step, fatal = error.fatal, "step failed: {error}");
        let now = Instant::now();
        let message: Arc<str> = error.message.as_str().into();
        for share in &record.shares {
            self.end(share.key, Ending::default(), FinishReason::Error(message.clone()), now);
        }
        for key in self.scheduler.withdraw(record.step) {
            self.end(key, Ending::default(), FinishReason::Error(message.clone()), now);
        }
        self.spare_records.push(record);
        self.recovering = true;
        self.recover();
        if error.fatal { Err(error) } else { Ok(()) }
    }

    /// Resumes after a failure once no step is in flight.
    fn recover(&mut self) {
        if self.in_flight.is_empty() {
            self.recovering = false;
        }
        self.starved = false;
    }

    fn publish_kv_events(&mut self) {
        let Some(sink) = &mut self.kv_events else { return };
        let events = self.scheduler.kv_mut().take_events();
        if !events.is_empty() {
            sink.publish(events);
        }
    }

    /// Updates gauges and status, and counts the step if it computed tokens.
    fn report(&mut self, stats: StepStats) {
        let (images, hits) = self.scheduler.images_mut().take_lookups();
        self.metrics.encoder_lookup(images, hits);
        if let Some([running, waiting]) = self.scheduler.take_adapter_names() {
            self.metrics.adapters(self.executor.adapter_slots(), &running, &waiting);
        }
        let kv = self.scheduler.kv();
        self.shared.status.set_load(self.scheduler.running(), self.scheduler.waiting_preempted(), kv.used());
        self.metrics.step(&StepStats {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            deferred: 0,
            kv_usage: kv.usage(),
            preempted: self.scheduler.take_preempted(),
            ..stats
        });
    }

    /// Ends every request with the error of an executor that has failed for good.
    fn fail(&mut self, error: &ExecutorError) -> Exit {
        // The inbox closes first, so that a caller who reads the error cannot submit to an engine that is gone.
        self.shared.status.set_state(EngineState::Failed);
        self.shared.inbox.close();
        self.end_all(|_| true, &FinishReason::Error(error.message.as_str().into()));
        self.leave();
        Exit::Failed
    }

    /// Aborts every request and waits for the steps in flight, so that the executor is idle when it is dropped.
    fn shut_down(&mut self) -> Exit {
        self.end_all(|_| true, &FinishReason::Abort);
        self.wake_readers();
        let mut result = self.sample_newest();
        while result.is_ok() && self.in_flight.pop_front().is_some() {
            result = self.executor.wait().map(drop);
        }
        if let Err(error) = result {
            tracing::warn!("the last step failed: {error}");
        }
        self.leave();
        Exit::Stopped
    }

    fn leave(&mut self) {
        self.report(StepStats::default());
        self.wake_readers();
    }

    fn wake_readers(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

impl Drop for EngineLoop {
    /// Wakes the readers of what was sent before a panic. The senders of the other requests wake theirs.
    fn drop(&mut self) {
        self.wake_readers();
    }
}
