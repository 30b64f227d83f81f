//! Conversion of the chosen sequences into the flat arrays of a [`StepPlan`].

use super::{Chosen, Scheduler, StepRecord, StepRow};
use crate::sequence::{Answer, Residence, Sequence};
use crate::{InputToken, Joined, PlannedSequence, Slot, StepId, StepPlan};

impl Scheduler {
    /// Writes the chosen sequences' shares and counts them as submitted.
    pub(super) fn write_plan(&mut self, step: StepId, plan: &mut StepPlan, record: &mut StepRecord) {
        plan.clear();
        plan.step = step;
        record.rows.clear();
        record.step = step;
        record.sampling = false;
        self.images.write_encoded(plan);
        record.image_tokens = plan.encode.iter().flat_map(|planned| &planned.media).map(|rows| rows.len()).sum();
        let mut rows = 0;
        for &Chosen { key, tokens, scores, .. } in &self.chosen {
            let Some(sequence) = self.sequences.get_mut(key) else { continue };
            let Residence::Running(slot) = sequence.residence else {
                debug_assert!(false, "a victim was taken out of the step");
                continue;
            };
            if !sequence.joined {
                plan.joined.push(joined(sequence, slot));
                sequence.joined = true;
            }
            let first = sequence.submitted;
            let end = first + tokens;
            let answer = (end == sequence.total()).then_some(sequence.answer);
            let samples = answer == Some(Answer::Token);
            let constrained = samples && sequence.constraint.is_some();
            let injected = plan.injected.len();
            self.images.write_injected(&sequence.images, first..end, plan);
            self.images.release_until(&mut sequence.images, end);
            let scored = sequence.scores_until(end);
            let pools = sequence.pools_until(end);
            debug_assert_eq!(scored.len(), scores);
            plan.sequences.push(PlannedSequence {
                slot,
                tokens: plan.tokens.len()..plan.tokens.len() + tokens,
                first_position: first as u32,
                tables: plan.tables.len()..plan.tables.len() + sequence.kv.tables.len(),
                scores: scored.start as u32..scored.end as u32,
                samples,
                pools,
                output_position: (sequence.history.output.len() + sequence.pending) as u32,
                constrained,
                injected: injected..plan.injected.len(),
            });
            write_tokens(plan, sequence, first, end);
            for table in &sequence.kv.tables {
                plan.tables.push(plan.blocks.len()..plan.blocks.len() + table.len());
                plan.blocks.extend_from_slice(table);
            }
            let prompt_tokens = end.min(sequence.prompt_len()).saturating_sub(first);
            let preemptions = sequence.preemptions;
            record.rows.push(StepRow {
                key,
                preemptions,
                first,
                tokens,
                prompt_tokens,
                scores,
                answer,
                pools,
                constrained,
            });
            sequence.submitted = end;
            sequence.served = step;
            sequence.scored = scored.end;
            sequence.pending += usize::from(answer.is_some());
            rows += scored.len() as u32;
            if samples {
                sequence.drawn_row = rows;
                rows += 1;
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
        images: sequence.images.all().clone(),
        second_text: sequence.second_text,
    }
}

/// Writes the tokens at `first..end`. At most one lies beyond the known ones: the token that the step in flight
/// samples.
fn write_tokens(plan: &mut StepPlan, sequence: &Sequence, first: usize, end: usize) {
    let known = sequence.history.len();
    debug_assert!(end <= known || (end == known + 1 && sequence.pending == 1));
    plan.tokens.extend(sequence.history.span(first.min(known)..end.min(known)).iter().map(InputToken::Id));
    if end > known {
        plan.tokens.push(InputToken::Drawn { row: sequence.drawn_row });
    }
}
