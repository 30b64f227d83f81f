//! Sampling of a step, and the masks of its constrained rows.

use super::EngineLoop;
use crate::mask_filler::MaskJob;
use crate::scheduler::StepRecord;
use crate::{ExecutorError, StepMasks};

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
                    let (key, mask) = (share.key, std::mem::take(mask));
                    self.masks.jobs.push(MaskJob { row, key, constraint, mask, unsatisfiable: false });
                }
            }
        }
        self.masks.fill();
        for MaskJob { row, key, constraint, mask, unsatisfiable } in self.masks.jobs.drain(..) {
            if let Some(sequence) = self.scheduler.sequence_mut(key) {
                sequence.constraint = Some(constraint);
                sequence.unsatisfiable = unsatisfiable;
            }
            masks.rows[row] = mask;
        }
        masks
    }
}
