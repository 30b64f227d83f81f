//! Steps over paged sequences.

use super::TestRng;
use crate::{BlockTables, Program, StepBatch};

/// Returns position number `stream` of the token at index `place` of its sequence. Positions after the first differ
/// from it and repeat, as in an image.
pub fn position(place: usize, stream: usize) -> u32 {
    let position = match stream {
        0 => place,
        1 => place / 3,
        _ => place % 3,
    };
    position as u32
}

/// Returns the place after the last key that the token at a place of a sequence of `len` tokens sees if the sequence has
/// spans: of each 11 places, those from the fourth to the eighth are one.
pub fn seen_end(place: usize, len: usize) -> usize {
    match place % 11 {
        offset @ 3..8 => (place - offset + 8).min(len),
        _ => place + 1,
    }
}

/// Returns the number of tokens before the span that a sequence of `len` tokens cuts off: only those see the same in a
/// longer one.
fn whole_spans_of(len: usize) -> usize {
    match (0..len).find(|&place| seen_end(place, usize::MAX) > len) {
        Some(place) => place,
        None => len,
    }
}

/// Gives a batch of one KV group the same for `groups` of them. Each has `blocks` blocks of its own, which follow those of
/// the group before.
pub fn in_each_group(batch: &mut StepBatch, groups: usize, blocks: usize, block_size: usize) {
    let (slots, tables) = (batch.slot_mapping.swap_remove(0), batch.block_tables.swap_remove(0));
    batch.slot_mapping.clear();
    batch.block_tables.clear();
    for group in 0..groups {
        let first = (group * blocks) as u32;
        batch.slot_mapping.push(slots.iter().map(|slot| slot + first * block_size as u32).collect());
        let mut moved = BlockTables::default();
        for &seat in &batch.seats {
            moved.change(seat, 0, tables.get(seat).iter().map(|block| block + first));
        }
        batch.block_tables.push(moved);
    }
}

/// Divides sequences into steps as an engine would: allocates blocks and writes [`StepBatch`]es. Every row is sampled
/// and returned.
#[derive(Clone, Debug)]
pub struct PagedBatches {
    block_size: usize,
    /// Free blocks, in random order.
    free: Vec<u32>,
    /// Number of tables that hold each block.
    holders: Vec<u32>,
    /// Window of each KV group. The groups share the blocks.
    windows: Vec<Option<usize>>,
    /// Number of positions per token.
    streams: usize,
    /// Whether the sequences have spans.
    has_spans: bool,
    sequences: Vec<Sequence>,
}

#[derive(Clone, Debug)]
struct Sequence {
    tokens: Vec<u32>,
    computed: usize,
    /// Block tables per KV group.
    tables: Vec<Vec<u32>>,
}

impl PagedBatches {
    /// Creates an empty set of sequences and `blocks` blocks, including the null block, for `groups` KV groups.
    pub fn new(block_size: usize, groups: usize, blocks: usize, rng: &mut TestRng) -> Self {
        let mut free: Vec<u32> = (1..blocks as u32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, rng.below(i + 1));
        }
        let holders = vec![0; blocks];
        let windows = vec![None; groups];
        Self { block_size, free, holders, windows, streams: 1, has_spans: false, sequences: Vec::new() }
    }

    /// Creates the same for a program, with its KV groups and its number of positions per token. A block that is behind the
    /// windows of all tokens to come is free for others, and the null block takes its place.
    pub fn for_program(program: &Program, block_size: usize, blocks: usize, rng: &mut TestRng) -> Self {
        let windows: Vec<_> = program.kv_groups.iter().map(|group| group.window).collect();
        let streams = program.position_streams();
        let has_spans = program.has_spans();
        Self { streams, has_spans, ..Self::new(block_size, windows.len(), blocks, rng).with_windows(windows) }
    }

    fn with_windows(self, windows: Vec<Option<usize>>) -> Self {
        Self { windows, ..self }
    }

    /// Returns the index of the first block of a group that a token from `position` on sees.
    fn first_block(&self, group: usize, position: usize) -> usize {
        self.windows[group].map_or(0, |window| (position + 1).saturating_sub(window) / self.block_size)
    }

    /// Adds a sequence without computed tokens and returns its number.
    pub fn add(&mut self, tokens: Vec<u32>) -> usize {
        self.sequences.push(Sequence { tokens, computed: 0, tables: vec![Vec::new(); self.windows.len()] });
        self.sequences.len() - 1
    }

    /// Adds a sequence that shares its first blocks with sequence `of`, as after a prefix-cache hit, and returns its
    /// number. The shared blocks are the whole blocks that both have in common and `of` has computed, without the last
    /// token of `tokens`, as far as `of` still has what a continuation sees.
    pub fn add_sharing(&mut self, of: usize, tokens: Vec<u32>) -> usize {
        let other = &self.sequences[of];
        let common = other.tokens[..other.computed].iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let common = match self.has_spans {
            true => common.min(whole_spans_of(other.tokens.len())).min(whole_spans_of(tokens.len())),
            false => common,
        };
        let most = common.min(tokens.len() - 1) / self.block_size;
        let serves = |blocks: &usize| {
            let first = |group| self.first_block(group, blocks * self.block_size);
            other.tables.iter().enumerate().all(|(group, table)| table[first(group)..*blocks].iter().all(|id| *id != 0))
        };
        let blocks = (0..=most).rev().find(serves).unwrap_or(0);
        let computed = blocks * self.block_size;
        let tables = other.tables.iter().enumerate().map(|(group, table)| {
            let first = self.first_block(group, computed);
            (0..blocks).map(|block| if block < first { 0 } else { table[block] }).collect()
        });
        let tables: Vec<Vec<u32>> = tables.collect();
        tables.iter().flatten().for_each(|&id| self.holders[id as usize] += 1);
        self.sequences.push(Sequence { tokens, computed, tables });
        self.sequences.len() - 1
    }

    /// Returns the tokens of a sequence.
    pub fn tokens(&self, sequence: usize) -> &[u32] {
        &self.sequences[sequence].tokens
    }

    /// Returns the number of tokens of a sequence that are not computed yet.
    pub fn left(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens.len() - self.sequences[sequence].computed
    }

    /// Returns the number of tokens of a sequence that have been computed.
    pub fn computed(&self, sequence: usize) -> usize {
        self.sequences[sequence].computed
    }

    /// Returns a number of tokens near `count` after which a step of a sequence may end: a span is not cut.
    pub fn whole_spans(&self, sequence: usize, count: usize) -> usize {
        let Sequence { tokens, computed, .. } = &self.sequences[sequence];
        match self.has_spans && count > 0 {
            true => seen_end(computed + count - 1, tokens.len()) - computed,
            false => count,
        }
    }

    /// Takes the blocks out of a sequence's tables that no token to come sees.
    fn pass(&mut self, index: usize) {
        let position = self.sequences[index].computed;
        for group in 0..self.windows.len() {
            let first = self.first_block(group, position);
            for id in self.sequences[index].tables[group].iter_mut().take(first).filter(|id| **id != 0) {
                self.holders[*id as usize] -= 1;
                if self.holders[*id as usize] == 0 {
                    self.free.push(*id);
                }
                *id = 0;
            }
        }
    }

    /// Returns a step that computes the next `count` tokens of each `(sequence, count)`.
    ///
    /// # Panics
    /// Panics if blocks run out or a sequence has too few tokens.
    pub fn step(&mut self, parts: &[(usize, usize)]) -> StepBatch {
        for &(index, _) in parts {
            self.pass(index);
        }
        let groups = self.windows.len();
        let mut batch = StepBatch {
            slot_mapping: vec![Vec::new(); groups],
            block_tables: vec![BlockTables::default(); groups],
            query_start: vec![0],
            ..StepBatch::default()
        };
        for &(index, count) in parts {
            let sequence = &mut self.sequences[index];
            let positions = sequence.computed..sequence.computed + count;
            sequence.computed = positions.end;
            batch.token_ids.extend_from_slice(&sequence.tokens[positions.clone()]);
            batch.query_start.push(batch.token_ids.len() as u32);
            batch.seq_lens.push(positions.end as u32);
            if self.has_spans {
                let len = sequence.tokens.len();
                batch.seen_ends.extend(positions.clone().map(|place| seen_end(place, len) as u32));
            }
            batch.seats.push(index as u32);
            for (group, table) in sequence.tables.iter_mut().enumerate() {
                while table.len() * self.block_size < positions.end {
                    let id = self.free.pop().expect("a free block");
                    self.holders[id as usize] = 1;
                    table.push(id);
                }
                let slot = |p: usize| table[p / self.block_size] as usize * self.block_size + p % self.block_size;
                batch.slot_mapping[group].extend(positions.clone().map(|p| slot(p) as u32));
            }
        }
        for stream in 0..self.streams {
            for sequence in 0..batch.sequences() {
                let places = batch.places(sequence);
                batch.positions.extend(places.map(|place| position(place, stream)));
            }
        }
        batch.sampled_rows = (0..batch.token_ids.len() as u32).collect();
        batch.pooled_rows.clone_from(&batch.sampled_rows);
        for (group, tables) in batch.block_tables.iter_mut().enumerate() {
            for &(index, _) in parts {
                tables.change(index as u32, 0, self.sequences[index].tables[group].iter().copied());
            }
        }
        batch
    }
}
