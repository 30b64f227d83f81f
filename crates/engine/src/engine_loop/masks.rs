//! Sampling of a step, and the constraints of its rows.

use super::EngineLoop;
use crate::mask_filler::{MaskJob, MaskTask};
use crate::scheduler::StepRecord;
use crate::{ExecutorError, StepMasks, TokenOutput};

impl EngineLoop {
    pub(super) fn sample_unless_constrained(&mut self) -> Result<(), ExecutorError> {
        match self.in_flight.back() {
            Some(record) if record.masks() == 0 => self.sample_newest(),
            _ => Ok(()),
        }
    }

    /// Starts the sampling of the newest step unless it has been started. If rows are constrained, the tokens of the
    /// step before must be known.
    pub(super) fn sample_newest(&mut self) -> Result<(), ExecutorError> {
        let Some(mut record) = self.in_flight.pop_back() else { return Ok(()) };
        if record.sampling {
            self.in_flight.push_back(record);
            return Ok(());
        }
        record.sampling = true;
        let masks = self.fill_masks(&record);
        match self.executor.sample(record.step, masks) {
            Ok(()) => {
                self.in_flight.push_back(record);
                Ok(())
            }
            Err(error) => self.fail_step(record, error),
        }
    }

    /// Fills the masks of a step's constrained rows, on several threads, while the device computes the step. A sequence that
    /// has ended may draw any token.
    fn fill_masks(&mut self, record: &StepRecord) -> StepMasks {
        let rows = record.masks();
        if rows == 0 {
            return StepMasks::default();
        }
        let words = self.executor.vocab_size().div_ceil(32);
        let mut masks = self.executor.spare_masks();
        masks.rows.resize_with(rows, Vec::new);
        let constrained = record.shares.iter().filter(|share| share.masks() > 0);
        for (row, (share, mask)) in constrained.zip(&mut masks.rows).enumerate() {
            mask.resize(words, u32::MAX);
            let sequence = self.scheduler.sequence_mut(share.key);
            match sequence.and_then(|sequence| sequence.constraint.take()) {
                None => mask.fill(u32::MAX),
                Some(constraint) => {
                    let task = MaskTask::Fill { row, mask: std::mem::take(mask), unsatisfiable: false };
                    self.masks.jobs.push(MaskJob { key: share.key, constraint, task });
                }
            }
        }
        self.masks.run();
        for MaskJob { key, constraint, task } in self.masks.jobs.drain(..) {
            let MaskTask::Fill { row, mask, unsatisfiable } = task else { continue };
            if let Some(sequence) = self.scheduler.sequence_mut(key) {
                sequence.constraint = Some(constraint);
                sequence.unsatisfiable = unsatisfiable;
            }
            masks.rows[row] = mask;
        }
        masks
    }

    /// Advances the constraints of a step's rows by the tokens that were drawn, on several threads. Whether each was accepted is
    /// told when the token is taken.
    pub(super) fn advance_constraints(&mut self, record: &StepRecord, tokens: &[TokenOutput]) {
        let mut rest = tokens;
        for share in &record.shares {
            let (own, others) = rest.split_at(share.rows.tokens());
            rest = others;
            // A row under a mask verifies no draft.
            let Some(token) = own.last().filter(|_| share.masks() > 0) else { continue };
            let sequence = self.scheduler.sequence_mut(share.key);
            if let Some(constraint) = sequence.and_then(|sequence| sequence.constraint.take()) {
                let task = MaskTask::Accept { token: token.id, accepted: false };
                self.masks.jobs.push(MaskJob { key: share.key, constraint, task });
            }
        }
        self.masks.run();
        for MaskJob { key, constraint, task } in self.masks.jobs.drain(..) {
            let MaskTask::Accept { accepted, .. } = task else { continue };
            if let Some(sequence) = self.scheduler.sequence_mut(key) {
                sequence.constraint = Some(constraint);
                sequence.rejected = !accepted;
            }
        }
    }
}
