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

/// Divides sequences into steps as an engine would: allocates blocks and writes [`StepBatch`]es. Every row is sampled
/// and returned.
#[derive(Clone, Debug)]
pub struct PagedBatches {
    block_size: usize,
    /// Free blocks per KV group, in random order.
    free: Vec<Vec<u32>>,
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
    /// Creates an empty set of sequences and `blocks` blocks in each of `groups` KV groups, including the null block.
    pub fn new(block_size: usize, groups: usize, blocks: usize, rng: &mut TestRng) -> Self {
        let shuffled = |_| {
            let mut ids: Vec<u32> = (1..blocks as u32).collect();
            for i in (1..ids.len()).rev() {
                ids.swap(i, rng.below(i + 1));
            }
            ids
        };
        Self {
            block_size,
            free: (0..groups).map(shuffled).collect(),
            streams: 1,
            has_spans: false,
            sequences: Vec::new(),
        }
    }

    /// Creates the same for a program, with its KV groups and its number of positions per token.
    pub fn of(program: &Program, block_size: usize, blocks: usize, rng: &mut TestRng) -> Self {
        let streams = program.position_streams();
        let has_spans = program.has_spans();
        Self { streams, has_spans, ..Self::new(block_size, program.kv_groups.len(), blocks, rng) }
    }

    /// Adds a sequence without computed tokens and returns its number.
    pub fn add(&mut self, tokens: Vec<u32>) -> usize {
        self.sequences.push(Sequence { tokens, computed: 0, tables: vec![Vec::new(); self.free.len()] });
        self.sequences.len() - 1
    }

    /// Adds a sequence that shares its first blocks with sequence `of`, as after a prefix-cache hit, and returns its
    /// number. The shared blocks are the whole blocks that both have in common and `of` has computed, without the last
    /// token of `tokens`.
    pub fn add_sharing(&mut self, of: usize, tokens: Vec<u32>) -> usize {
        let other = &self.sequences[of];
        let common = other.tokens[..other.computed].iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let common = match self.has_spans {
            true => common.min(whole_spans_of(other.tokens.len())).min(whole_spans_of(tokens.len())),
            false => common,
        };
        let blocks = common.min(tokens.len() - 1) / self.block_size;
        let tables = other.tables.iter().map(|table| table[..blocks].to_vec()).collect();
        self.sequences.push(Sequence { tokens, computed: blocks * self.block_size, tables });
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

    /// Returns a step that computes the next `count` tokens of each `(sequence, count)`.
    ///
    /// # Panics
    /// Panics if blocks run out or a sequence has too few tokens.
    pub fn step(&mut self, parts: &[(usize, usize)]) -> StepBatch {
        let groups = self.free.len();
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
                    table.push(self.free[group].pop().expect("a free block"));
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
