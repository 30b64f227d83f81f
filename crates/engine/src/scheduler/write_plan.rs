//! From what was chosen to the flat arrays of a [`StepPlan`].

use super::{Chosen, Scheduler, StepRecord, StepRow};
use crate::sequence::{Residence, Sequence};
use crate::{InputToken, Joined, PlannedSequence, Slot, StepId, StepPlan};

impl Scheduler {
    /// Writes the chosen sequences' shares and counts them as submitted.
    pub(super) fn write_plan(&mut self, step: StepId, plan: &mut StepPlan, record: &mut StepRecord) {
        plan.clear();
        plan.step = step;
        record.rows.clear();
        record.step = step;
        record.sampling = false;
        for &key in &self.admitted {
            if let Some(sequence) = self.sequences.get(key)
                && let Residence::Running(slot) = sequence.residence
            {
                plan.joined.push(joined(sequence, slot));
            }
        }
        let mut sampled_rows = 0;
        for &Chosen { key, tokens } in &self.chosen {
            let Some(sequence) = self.sequences.get_mut(key) else { continue };
            let Residence::Running(slot) = sequence.residence else {
                debug_assert!(false, "a victim was taken out of the step");
                continue;
            };
            let first = sequence.submitted;
            let end = first + tokens;
            let samples = end == sequence.total();
            let constrained = samples && sequence.constraint.is_some();
            plan.sequences.push(PlannedSequence {
                slot,
                tokens: plan.tokens.len()..plan.tokens.len() + tokens,
                first_position: first as u32,
                tables: plan.tables.len()..plan.tables.len() + sequence.kv.tables.len(),
                samples,
                output_position: (sequence.history.output.len() + sequence.pending) as u32,
                constrained,
            });
            write_tokens(plan, sequence, first, end);
            for table in &sequence.kv.tables {
                plan.tables.push(plan.blocks.len()..plan.blocks.len() + table.len());
                plan.blocks.extend_from_slice(table);
            }
            let prompt_tokens = end.min(sequence.prompt_len()).saturating_sub(first);
            let preemptions = sequence.preemptions;
            record.rows.push(StepRow { key, preemptions, first, tokens, prompt_tokens, samples, constrained });
            sequence.submitted = end;
            if samples {
                sequence.pending += 1;
                sequence.drawn_row = sampled_rows;
                sampled_rows += 1;
            }
        }
    }
}

fn joined(sequence: &Sequence, slot: Slot) -> Joined {
    Joined {
        slot,
        params: sequence.params.clone(),
        prompt: sequence.history.prompt.clone(),
        output: sequence.history.output.clone(),
    }
}

/// The tokens at `first..end`. Beyond the known ones there is at most one, which the step in flight draws.
fn write_tokens(plan: &mut StepPlan, sequence: &Sequence, first: usize, end: usize) {
    let known = sequence.history.len();
    debug_assert!(end <= known || (end == known + 1 && sequence.pending == 1));
    plan.tokens.extend(sequence.history.span(first.min(known)..end.min(known)).iter().map(InputToken::Id));
    if end > known {
        plan.tokens.push(InputToken::Drawn { row: sequence.drawn_row });
    }
}
