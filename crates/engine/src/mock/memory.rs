//! Fake KV blocks.

use std::ops::Range;
use std::sync::Arc;

use super::MockConfig;
use crate::{
    AdapterChange, AdapterSlot, ImageInput, Joined, KvKind, PassedBlocks, PlannedImage, PlannedSequence, PromptImage,
    SamplingParams, Seat, StepPlan, TableChange,
};

/// The state before the first token.
pub(super) const EMPTY: u64 = 0x0c7a_0000_0000_0001;

/// Returns the state after one more token. It depends on every earlier token, in order.
pub(super) fn extend(state: u64, token: u32) -> u64 {
    mix(state ^ (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns the state after these tokens.
pub(super) fn state_after(tokens: &[u32]) -> u64 {
    tokens.iter().fold(EMPTY, |state, &token| extend(state, token))
}

/// Returns the encoder's output for one token of an image. It depends on every byte of the image.
fn encoded(image: &ImageInput, token: usize) -> u32 {
    let bytes = (*image.patches).as_ref();
    let state = bytes.iter().fold(mix(u64::from(image.cols)), |state, &byte| mix(state ^ u64::from(byte)));
    mix(state ^ token as u64) as u32
}

/// Returns the input of the first layer for every token of a prompt: the encoder's output in place of tokens of images.
pub(super) fn contents(prompt: &[u32], images: &[PromptImage]) -> Vec<u32> {
    let mut contents = prompt.to_vec();
    for PromptImage { span, input, .. } in images {
        let tokens = &mut contents[span.start as usize..span.end() as usize];
        tokens.iter_mut().enumerate().for_each(|(index, content)| *content = encoded(input, index));
    }
    contents
}

/// Returns the input of the first layer of a sequence's first token with an adapter, on which all that follows depends.
pub(super) fn adapted(content: u32, adapter: u64) -> u32 {
    mix(u64::from(content) ^ mix(adapter)) as u32
}

/// Mixes all bits of `x`; a bijection.
pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Stands for the keys and values of a token.
#[derive(Clone, Copy)]
struct Cell {
    content: u32,
    /// State up to and including the token.
    state: u64,
}

/// A sequence in a seat.
pub(super) struct Occupant {
    pub(super) params: Arc<SamplingParams>,
    pub(super) prompt: Arc<[u32]>,
    /// Whether its tokens are drawn under masks.
    pub(super) constrained: bool,
    /// Tokens of the sequence that plans have mentioned.
    tokens: Vec<u32>,
    /// Their inputs of the first layer, which differ from the tokens in images.
    contents: Vec<u32>,
    images: Arc<[PromptImage]>,
    /// Slot and number of its adapter.
    adapter: Option<(AdapterSlot, u64)>,
}

impl Occupant {
    /// Returns the token at a position, unless it was a draft and has been forgotten.
    pub(super) fn token(&self, position: usize) -> Option<u32> {
        self.tokens.get(position).copied()
    }
}

/// The blocks, which the KV groups share, and the seats.
pub(super) struct Memory {
    block_size: usize,
    kinds: Vec<KvKind>,
    cells: Vec<Cell>,
    /// Rows of the media cache.
    media: Vec<u32>,
    seats: Vec<Option<Occupant>>,
    /// Numbers of the adapters by slot.
    adapters: Vec<Option<u64>>,
    /// Block tables by seat, one per KV group, whose memory is kept.
    tables: Vec<Vec<Vec<u32>>>,
}

impl Memory {
    pub(super) fn new(config: &MockConfig) -> Self {
        Self {
            block_size: config.block_size,
            kinds: config.kv_groups.clone(),
            cells: vec![Cell { content: u32::MAX, state: 0 }; config.blocks * config.block_size],
            media: vec![0; config.media_rows],
            seats: Vec::new(),
            adapters: vec![None; config.adapter_slots],
            tables: Vec::new(),
        }
    }

    /// Empties a seat.
    pub(super) fn leave(&mut self, seat: Seat) -> Result<(), String> {
        let left = self.seats.get_mut(seat as usize).and_then(Option::take);
        left.map(drop).ok_or_else(|| format!("seat {seat} is left by nobody"))
    }

    /// Puts an adapter into a slot.
    pub(super) fn change_adapter(&mut self, change: &AdapterChange) -> Result<(), String> {
        let slot = self.adapters.get_mut(change.slot as usize);
        *slot.ok_or_else(|| format!("there is no slot {} for adapters", change.slot))? = Some(change.adapter.number());
        Ok(())
    }

    /// Returns the number of the adapter in a slot.
    fn adapter(&self, slot: AdapterSlot) -> Result<u64, String> {
        let adapter = self.adapters.get(slot as usize).copied().flatten();
        adapter.ok_or_else(|| format!("there is no adapter in slot {slot}"))
    }

    /// Puts a sequence into a free seat.
    pub(super) fn join(&mut self, joined: &Joined) -> Result<(), String> {
        let seat = joined.seat as usize;
        if self.seats.len() <= seat {
            self.seats.resize_with(seat + 1, || None);
            self.tables.resize(seat + 1, vec![Vec::new(); self.kinds.len()]);
        }
        self.tables[seat].iter_mut().for_each(Vec::clear);
        if self.seats[seat].is_some() {
            return Err(format!("seat {seat} is taken"));
        }
        let mut tokens = Vec::with_capacity(joined.prompt.len() + joined.params.max_tokens.min(4096) as usize);
        tokens.extend(joined.prompt.iter().chain(&joined.output));
        let mut contents = Vec::with_capacity(tokens.capacity());
        contents.extend(self::contents(&joined.prompt, &joined.images));
        contents.extend(&joined.output);
        let adapter = joined.adapter.map(|slot| Ok::<_, String>((slot, self.adapter(slot)?))).transpose()?;
        if let Some((_, number)) = adapter {
            contents[0] = adapted(contents[0], number);
        }
        self.seats[seat] = Some(Occupant {
            params: joined.params.clone(),
            prompt: joined.prompt.clone(),
            constrained: joined.constrained,
            tokens,
            contents,
            images: joined.images.clone(),
            adapter,
        });
        Ok(())
    }

    /// Changes a block table.
    pub(super) fn change_table(&mut self, change: &TableChange, blocks: &[u32]) -> Result<(), String> {
        let TableChange { seat, group, start, .. } = *change;
        let table = self.tables.get_mut(seat as usize).and_then(|tables| tables.get_mut(group as usize));
        let table = table.ok_or_else(|| format!("seat {seat} has no table of KV group {group}"))?;
        let known = table.len();
        let blocks = blocks.get(change.blocks.clone()).filter(|_| start as usize <= known);
        let blocks = blocks.ok_or_else(|| format!("seat {seat} changes from block {start} on, of {known}"))?;
        table.truncate(start as usize);
        table.extend_from_slice(blocks);
        Ok(())
    }

    /// Takes blocks out of a table that no token to come sees.
    pub(super) fn pass(&mut self, passed: &PassedBlocks) -> Result<(), String> {
        let PassedBlocks { seat, group, blocks } = passed;
        let table = self.tables.get_mut(*seat as usize).and_then(|tables| tables.get_mut(*group as usize));
        let entries = table.and_then(|table| table.get_mut(blocks.start as usize..blocks.end as usize));
        let entries = entries.ok_or_else(|| format!("seat {seat} passes the blocks {blocks:?} of KV group {group}"))?;
        entries.fill(0);
        Ok(())
    }

    /// Forgets the tokens of a seat from a position on, which were drafts that were not drawn.
    pub(super) fn forget(&mut self, drafts: Option<(Seat, usize)>) {
        let Some((seat, position)) = drafts else { return };
        if let Some(occupant) = self.seats.get_mut(seat as usize).and_then(Option::as_mut) {
            occupant.tokens.truncate(position);
            occupant.contents.truncate(position);
        }
    }

    /// Checks that a step which ends at a position cuts no image.
    pub(super) fn check_whole(&self, seat: Seat, end: usize) -> Result<(), String> {
        let is_cut = |image: &&PromptImage| (image.span.start as usize) < end && end < image.span.end() as usize;
        match self.occupant(seat)?.images.iter().find(is_cut) {
            Some(image) => Err(format!("a step of seat {seat} ends at {end}, in the image at {}", image.span.start)),
            None => Ok(()),
        }
    }

    /// Encodes an image into its rows.
    pub(super) fn encode(&mut self, planned: &PlannedImage) -> Result<(), String> {
        let rows = planned.media.iter().cloned().flatten();
        for (token, row) in rows.enumerate() {
            let row = self.media.get_mut(row as usize).ok_or_else(|| format!("media row {row} does not exist"))?;
            *row = encoded(&planned.image, token);
        }
        Ok(())
    }

    /// Returns the input of the first layer at a position: a row of the media cache if the plan injects one, else the
    /// token.
    pub(super) fn content(
        &self,
        plan: &StepPlan,
        sequence: &PlannedSequence,
        position: usize,
        token: u32,
    ) -> Result<u32, String> {
        let content = self.plain_content(plan, sequence, position as u32, token)?;
        let Some((slot, number)) = self.occupant(sequence.seat)?.adapter else { return Ok(content) };
        let found = self.adapter(slot)?;
        if found != number {
            return Err(format!("seat {} runs with adapter {found} instead of {number}", sequence.seat));
        }
        Ok(if position == 0 { adapted(content, number) } else { content })
    }

    /// Returns the same without the adapter.
    fn plain_content(
        &self,
        plan: &StepPlan,
        sequence: &PlannedSequence,
        position: u32,
        token: u32,
    ) -> Result<u32, String> {
        let covers =
            |run: &&crate::InjectedTokens| (run.position..run.position + run.media.len() as u32).contains(&position);
        let Some(run) = plan.injected[sequence.injected.clone()].iter().find(covers) else { return Ok(token) };
        let row = run.media.start + position - run.position;
        self.media.get(row as usize).copied().ok_or_else(|| format!("media row {row} does not exist"))
    }

    fn cell_index(&self, table: &[u32], position: usize) -> Result<usize, String> {
        match table.get(position / self.block_size) {
            Some(0) | None => Err(format!("position {position} has no block")),
            Some(&block) => Ok(block as usize * self.block_size + position % self.block_size),
        }
    }

    /// Returns the state after `position` as the token at `reader` sees it, read from the blocks. Every group that sees it must
    /// have the same. If there is none, it is computed from the sequence's tokens.
    pub(super) fn read(&self, seat: Seat, position: usize, reader: usize) -> Result<u64, String> {
        let occupant = self.occupant(seat)?;
        let tables = self.kinds.iter().zip(&self.tables[seat as usize]);
        let seen = tables.filter(|(kind, _)| kind.first_seen(reader) <= position);
        let mut states = seen.map(|(_, table)| {
            let index = self.cell_index(table, position)?;
            self.cells.get(index).map(|cell| cell.state).ok_or_else(|| format!("position {position}: no such block"))
        });
        let Some(first) = states.next() else { return Ok(state_after(&occupant.contents[..=position])) };
        let first = first?;
        for state in states {
            if state? != first {
                return Err(format!("position {position} of seat {seat} differs between KV groups"));
            }
        }
        Ok(first)
    }

    pub(super) fn occupant(&self, seat: Seat) -> Result<&Occupant, String> {
        self.seats.get(seat as usize).and_then(Option::as_ref).ok_or_else(|| format!("nobody sits in seat {seat}"))
    }

    /// Computes one token, whose input of the first layer is `content`, from the block content of its predecessor.
    pub(super) fn write(&mut self, seat: Seat, position: usize, (token, content): (u32, u32)) -> Result<(), String> {
        let known = self.occupant(seat)?.tokens.len();
        if position > known {
            return Err(format!("seat {seat} jumps to position {position} with {known} tokens known"));
        }
        let before = if position == 0 { EMPTY } else { self.read(seat, position - 1, position)? };
        let state = extend(before, content);
        for group in 0..self.kinds.len() {
            let index = self.cell_index(&self.tables[seat as usize][group], position)?;
            let cell = self.cells.get_mut(index).ok_or_else(|| format!("position {position}: no such block"))?;
            *cell = Cell { content, state };
        }
        if let Some(occupant) = &mut self.seats[seat as usize] {
            match occupant.tokens.get(position) {
                Some(&told) if told != token => {
                    return Err(format!("seat {seat} gets token {token} at position {position}, which is {told}"));
                }
                Some(_) if occupant.contents[position] != content => {
                    return Err(format!("seat {seat} gets another image's row at position {position}"));
                }
                Some(_) => {}
                None => {
                    occupant.tokens.push(token);
                    occupant.contents.push(content);
                }
            }
        }
        Ok(())
    }

    /// Checks that every position that a step's tokens see holds the sequence's own token, in the state that its predecessors
    /// lead to, and that no group holds a block that they do not see.
    pub(super) fn verify(&self, seat: Seat, step: Range<usize>) -> Result<(), String> {
        let occupant = self.occupant(seat)?;
        for (group, (kind, table)) in self.kinds.iter().zip(&self.tables[seat as usize]).enumerate() {
            let first = kind.first_seen(step.start);
            if table.iter().take(first / self.block_size).any(|&block| block != 0) {
                return Err(format!("seat {seat}, KV group {group}: a block before position {first} is held"));
            }
            let mut state = EMPTY;
            for (position, &content) in occupant.contents[..step.end].iter().enumerate() {
                state = extend(state, content);
                if position < first {
                    continue;
                }
                let cell = self.cells[self.cell_index(table, position)?];
                if cell.content != content || cell.state != state {
                    let found = cell.content;
                    return Err(format!(
                        "seat {seat}, KV group {group}: position {position} holds {found} instead of {content}"
                    ));
                }
            }
        }
        Ok(())
    }
}
