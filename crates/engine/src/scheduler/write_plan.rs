//! Conversion of the chosen shares into the flat arrays of a [`StepPlan`].

use std::iter::repeat;

use super::{Scheduler, Share, StepRecord};
use crate::kv::KvLayout;
use crate::sequence::{Residence, Sequence};
use crate::{
    InputToken, Joined, PassedBlocks, PlannedRow, PlannedSequence, RowKind, Seat, StepId, StepPlan, TableChange,
};

impl Scheduler {
    /// Writes the chosen shares and counts their tokens as submitted.
    pub(super) fn write_plan(&mut self, step: StepId, plan: &mut StepPlan, record: &mut StepRecord) {
        plan.clear();
        plan.step = step;
        if !self.chosen.is_empty() {
            plan.left.append(&mut self.left);
            self.adapters.write(&mut plan.adapters);
        }
        record.shares.clear();
        record.step = step;
        record.sampling = false;
        self.images.write_encoded(plan);
        record.image_tokens = plan.encode.iter().flat_map(|planned| &planned.media).map(|rows| rows.len()).sum();
        let mut token_rows = 0;
        for share in &self.chosen {
            let Some(sequence) = self.sequences.get_mut(share.key) else { continue };
            let Residence::Running(seat) = sequence.residence else {
                debug_assert!(false, "a victim was taken out of the step");
                continue;
            };
            if !sequence.joined {
                plan.joined.push(joined(sequence, seat));
                sequence.joined = true;
            }
            let (first, end) = (share.first, share.end());
            let injected = plan.injected.len();
            self.images.write_injected(&sequence.images, first..end, plan);
            self.images.release_until(&mut sequence.images, end);
            write_rows(plan, sequence, share);
            plan.sequences.push(PlannedSequence {
                seat,
                tokens: plan.tokens.len()..plan.tokens.len() + share.tokens,
                first_position: first as u32,
                injected: injected..plan.injected.len(),
            });
            write_tokens(plan, sequence, first, end);
            write_tables(plan, sequence, seat, self.kv.layout());
            if let Some(drafter) = &mut sequence.drafter {
                drafter.truncate(share.rows.drafts());
            }
            record.shares.push(*share);
            sequence.submitted = end;
            sequence.served = step;
            sequence.scores.plan(end);
            sequence.pending += usize::from(share.rows.completes);
            token_rows += share.rows.tokens() as u32;
            if share.rows.draws > 0 {
                sequence.drawn_row = token_rows - 1;
            }
        }
    }
}

fn joined(sequence: &Sequence, seat: Seat) -> Joined {
    Joined {
        seat,
        params: sequence.params.clone(),
        prompt: sequence.history.prompt.clone(),
        output: sequence.history.output.clone(),
        constrained: sequence.constraint.is_some(),
        images: sequence.images.all().clone(),
        second_text: sequence.second_text,
        adapter: sequence.adapter_slot,
    }
}

/// Writes the blocks of a sequence that the executor does not know, and those that it no longer needs to know.
fn write_tables(plan: &mut StepPlan, sequence: &mut Sequence, seat: Seat, layout: &KvLayout) {
    let (start, before) = sequence.kv.tell();
    for (group, (table, kind)) in (0..).zip(sequence.kv.tables.iter().zip(layout.kinds())) {
        let [first, end] = [before, sequence.kv.position()].map(|position| layout.first_block(*kind, position));
        if first < end.min(start) {
            plan.passed.push(PassedBlocks { seat, group, blocks: first as u32..end.min(start) as u32 });
        }
        let blocks = plan.blocks.len()..plan.blocks.len() + table.len() - start;
        if !blocks.is_empty() {
            plan.blocks.extend_from_slice(&table[start..]);
            plan.tables.push(TableChange { seat, group, start: start as u32, blocks });
        }
    }
}

/// Writes the rows of the next sequence that give an output.
fn write_rows(plan: &mut StepPlan, sequence: &Sequence, share: &Share) {
    let (number, end) = (plan.sequences.len() as u32, share.end());
    let row = |position: usize, kind| PlannedRow { sequence: number, position: position as u32, kind };
    let scores = sequence.scores.until(end);
    debug_assert_eq!(scores.len(), share.rows.scores);
    plan.rows.extend(scores.map(|position| row(position, RowKind::Score)));
    let drawing = (end - share.rows.draws..end).zip(std::iter::once(RowKind::Draw).chain(repeat(RowKind::Verify)));
    plan.rows.extend(drawing.map(|(position, kind)| row(position, kind)));
    plan.rows.extend((end - share.rows.vectors..end).map(|position| row(position, RowKind::Pool)));
}

/// Writes the tokens at `first..end`. Beyond the known ones lies at most the token that the step in flight draws, or
/// drafts.
fn write_tokens(plan: &mut StepPlan, sequence: &Sequence, first: usize, end: usize) {
    let known = sequence.history.len();
    plan.tokens.extend(sequence.history.span(first.min(known)..end.min(known)).iter().map(InputToken::Id));
    let beyond = end.saturating_sub(known);
    if sequence.pending > 0 {
        debug_assert!(beyond <= 1 && sequence.pending == 1, "a token that nobody draws");
        plan.tokens.extend((0..beyond).map(|_| InputToken::Drawn { row: sequence.drawn_row }));
    } else {
        plan.tokens.extend(sequence.drafts()[..beyond].iter().copied().map(InputToken::Id));
    }
}
