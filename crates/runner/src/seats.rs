//! State that the sampler needs of each running sequence.

use std::sync::Arc;

use octavo_engine::{
    AdapterSlot, InputToken, Joined, PlannedRow, PromptImage, RowKind, SamplingParams, Seat, StepId, StepPlan,
};
use octavo_models::{ImagePositions, ImageSpan};
use octavo_ops::sampling::{SampleParams, SampleRow, TokenCounts};

use crate::fill::SeatInputs;

/// Running sequences by seat.
pub(crate) struct Seats {
    /// State of each seat, up to the highest seat ever taken.
    states: Vec<Option<SeatState>>,
    /// Number of seats.
    limit: usize,
}

struct SeatState {
    /// Step in which the sequence took the seat.
    since: StepId,
    requested: Arc<SamplingParams>,
    params: SampleParams,
    /// Parameters of the rows that score the prompt.
    scoring: SampleParams,
    prompt: Arc<[u32]>,
    constrained: bool,
    /// Counts of the tokens seen; `None` without penalties.
    counts: Option<TokenCounts>,
    /// End-of-sequence and stop ids, which are not sampled before `min_tokens` tokens exist.
    ends: Vec<u32>,
    /// Positions of the tokens; `None` if the prompt has no images.
    images: Option<ImagePositions>,
    /// Position of the first token of the second text of a pair.
    second_text: Option<u32>,
    /// Slot of the adapter.
    adapter: Option<AdapterSlot>,
}

impl<'a> SeatInputs<'a> for &'a Seats {
    fn images(&self, seat: Seat) -> Option<&'a ImagePositions> {
        self.state(seat).ok()?.images.as_ref()
    }

    fn second_text(&self, seat: Seat) -> Option<u32> {
        self.state(seat).ok()?.second_text
    }

    fn adapter(&self, seat: Seat) -> Option<AdapterSlot> {
        self.state(seat).ok()?.adapter
    }
}

impl Seats {
    /// Creates `limit` empty seats.
    pub(crate) fn new(limit: usize) -> Self {
        Self { states: Vec::new(), limit }
    }

    /// Empties a seat.
    pub(crate) fn leave(&mut self, seat: Seat) {
        if let Some(state) = self.states.get_mut(seat as usize) {
            *state = None;
        }
    }

    /// Assigns a seat to a sequence and replaces its former one.
    pub(crate) fn join(&mut self, step: StepId, joined: &Joined) -> Result<(), String> {
        let seat = joined.seat as usize;
        if seat >= self.limit {
            return Err(format!("seat {seat} of {}", self.limit));
        }
        if seat >= self.states.len() {
            self.states.resize_with(seat + 1, || None);
        }
        self.states[seat] = Some(SeatState::new(step, joined));
        Ok(())
    }

    /// Writes the counts for the rows of a plan that verify drafts under penalties, in order. They include the drafts.
    pub(crate) fn count_drafts(&self, plan: &StepPlan, out: &mut Vec<TokenCounts>) {
        out.clear();
        let mut before = None;
        for row in &plan.rows {
            let (RowKind::Verify, Some(sequence), Some(InputToken::Id(draft))) =
                (row.kind, plan.sequence(row), plan.token(row))
            else {
                continue;
            };
            let Some(counts) = self.state(sequence.seat).ok().and_then(|state| state.counts.as_ref()) else { continue };
            let known = out.last().filter(|_| before == Some(row.sequence)).unwrap_or(counts);
            let counts = known.with(draft);
            before = Some(row.sequence);
            out.push(counts);
        }
    }

    /// Returns whether a row verifies a draft under penalties, so that it has counts of its own.
    pub(crate) fn counts_drafts(&self, seat: Seat, row: &PlannedRow) -> bool {
        row.kind == RowKind::Verify && self.state(seat).is_ok_and(|state| state.counts.is_some())
    }

    /// Returns the sampler's row of a planned row that gives a token. `counts` are those of a row that has its own,
    /// and `pending` is the row of the step before whose token is not in them yet.
    pub(crate) fn row<'a>(
        &'a self,
        seat: Seat,
        row: &PlannedRow,
        mask: Option<&'a [u32]>,
        counts: Option<&'a TokenCounts>,
        pending: Option<u32>,
    ) -> Result<SampleRow<'a>, String> {
        let state = self.state(seat)?;
        let after = row.position as usize + 1;
        if row.kind == RowKind::Score {
            let next = state.prompt.get(after).copied();
            let next =
                next.ok_or_else(|| format!("seat {seat} scores position {}, its prompt ends there", row.position))?;
            return Ok(SampleRow { forced: Some(next), ..SampleRow::new(&state.scoring) });
        }
        let number = after.checked_sub(state.prompt.len());
        let number = number.ok_or_else(|| format!("seat {seat} draws in its prompt, at position {}", row.position))?;
        let output_position = number as u32;
        let ending = output_position >= state.requested.min_tokens;
        Ok(SampleRow {
            params: &state.params,
            output_position,
            seat,
            counts: counts.or(state.counts.as_ref()),
            pending: pending.filter(|_| state.counts.is_some()),
            logit_bias: &state.requested.logit_bias,
            forbidden: if ending { &[] } else { &state.ends },
            mask,
            forced: None,
            logprob_ids: &state.requested.logprob_token_ids,
        })
    }

    /// Returns whether tokens are drawn for a seat under masks.
    pub(crate) fn constrained(&self, seat: Seat) -> bool {
        self.state(seat).is_ok_and(|state| state.constrained)
    }

    fn state(&self, seat: Seat) -> Result<&SeatState, String> {
        let state = self.states.get(seat as usize).and_then(Option::as_ref);
        state.ok_or_else(|| format!("nobody has seat {seat}"))
    }

    /// Returns whether a step draws for a seat that needs every token drawn for it before.
    pub(crate) fn needs_tokens(&self, plan: &StepPlan) -> bool {
        let counts = |seat| self.state(seat).is_ok_and(|state| state.counts.is_some());
        let mut drawing = plan.rows.iter().filter(|row| row.kind.draws());
        drawing.any(|row| plan.sequence(row).is_some_and(|sequence| counts(sequence.seat)))
    }

    /// Returns the row of a step under way that draws a token for the sequence of a seat, counted among those that give
    /// tokens.
    pub(crate) fn drawn_row(&self, plan: &StepPlan, seat: Seat) -> Option<u32> {
        let since = self.state(seat).ok()?.since;
        let mut rows = plan.rows.iter().filter(|row| row.kind.gives_token());
        let draws = |row: &PlannedRow| {
            row.kind == RowKind::Draw && plan.sequence(row).is_some_and(|sequence| sequence.seat == seat)
        };
        rows.position(draws).filter(|_| since <= plan.step).map(|row| row as u32)
    }

    /// Records a token that a step sampled for a seat. It is ignored if the step is older than the seat's current
    /// sequence.
    pub(crate) fn push(&mut self, step: StepId, seat: Seat, token: u32) {
        let state = self.states.get_mut(seat as usize).and_then(Option::as_mut).filter(|state| state.since <= step);
        if let Some(counts) = state.and_then(|state| state.counts.as_mut()) {
            counts.push(token);
        }
    }
}

impl SeatState {
    fn new(since: StepId, joined: &Joined) -> Self {
        let requested = &joined.params;
        let params = SampleParams {
            temperature: requested.temperature,
            top_k: requested.top_k,
            top_p: requested.top_p,
            min_p: requested.min_p,
            presence_penalty: requested.presence_penalty,
            frequency_penalty: requested.frequency_penalty,
            repetition_penalty: requested.repetition_penalty,
            seed: requested.seed,
            logprobs: requested.logprobs,
        };
        let counts = params.needs_counts().then(|| TokenCounts::new(&joined.prompt, &joined.output));
        // An end-of-sequence id is masked even if the request ignores it, as in vLLM. It may be a stop id too.
        let mut ends: Vec<u32> = match requested.min_tokens {
            0 => Vec::new(),
            _ => requested.eos_token_ids.iter().chain(&*requested.stop_token_ids).copied().collect(),
        };
        ends.sort_unstable();
        ends.dedup();
        let scoring = SampleParams { logprobs: requested.prompt_logprobs, ..SampleParams::default() };
        let span = |image: &PromptImage| {
            let octavo_engine::ImageSpan { start, rows, cols } = image.span;
            ImageSpan { start, rows, cols }
        };
        let images = ImagePositions::new(joined.images.iter().map(span));
        let images = (!joined.images.is_empty()).then_some(images);
        Self {
            since,
            requested: requested.clone(),
            params,
            scoring,
            prompt: joined.prompt.clone(),
            constrained: joined.constrained,
            counts,
            ends,
            images,
            second_text: joined.second_text,
            adapter: joined.adapter,
        }
    }
}
