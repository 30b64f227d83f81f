//! The flat arrays of one step.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Program, Rows};

/// Number of changes of a table that are remembered.
const REMEMBERED: usize = 4;

/// State of a table. Tables of the same revision are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRevision(u64);

impl TableRevision {
    /// Returns a revision that no table has had.
    fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Relaxed) + 1)
    }
}

/// The table of a seat.
#[derive(Clone, Debug, Default)]
struct Table {
    blocks: Vec<u32>,
    /// Revisions after the latest changes, newest last, and the entries that each has changed.
    changes: [(TableRevision, Range<usize>); REMEMBERED],
}

impl Table {
    fn remember(&mut self, entries: Range<usize>) {
        self.changes.rotate_left(1);
        self.changes[REMEMBERED - 1] = (TableRevision::next(), entries);
    }
}

/// The block tables of one KV group by seat. They stay from step to step, so that a step changes only what is new.
#[derive(Clone, Debug, Default)]
pub struct BlockTables {
    tables: Vec<Table>,
    /// Largest block id that was ever in a table.
    highest: u32,
}

impl BlockTables {
    /// Returns the table of a seat. It may go on after the blocks of its sequence. Blocks that no row to come sees are the null
    /// block.
    pub fn get(&self, seat: u32) -> &[u32] {
        self.tables.get(seat as usize).map_or(&[], |table| &table.blocks)
    }

    /// Replaces all blocks of a seat after the first `start`. Returns `false` and changes nothing if there are fewer.
    pub fn change(&mut self, seat: u32, start: usize, blocks: impl IntoIterator<Item = u32>) -> bool {
        if start > self.get(seat).len() {
            return false;
        }
        if self.tables.len() <= seat as usize {
            self.tables.resize_with(seat as usize + 1, Table::default);
        }
        let (table, blocks) = (&mut self.tables[seat as usize], blocks.into_iter());
        table.blocks.truncate(start);
        let needed = start + blocks.size_hint().0;
        if needed > table.blocks.capacity() {
            // A step reads an entry of each table. With powers of two from one table to the next, those of equally long
            // sequences would fall into the same few sets of a cache.
            table.blocks.reserve_exact(needed - start + needed / 8 + 16);
        }
        table.blocks.extend(blocks);
        table.remember(start..table.blocks.len());
        self.highest = table.blocks[start..].iter().copied().fold(self.highest, u32::max);
        true
    }

    /// Replaces blocks of a seat by the null block, because no token to come sees them. Returns `false` and changes nothing
    /// if there are fewer.
    pub fn pass(&mut self, seat: u32, blocks: Range<usize>) -> bool {
        let Some(table) = self.tables.get_mut(seat as usize) else { return false };
        let Some(passed) = table.blocks.get_mut(blocks.clone()) else { return false };
        passed.fill(0);
        table.remember(blocks);
        true
    }

    /// Returns the revision of a seat's table.
    pub fn revision(&self, seat: u32) -> TableRevision {
        self.tables.get(seat as usize).map_or_else(TableRevision::default, |table| table.changes[REMEMBERED - 1].0)
    }

    /// Returns the entries of a seat's table beside which it is as it was at an earlier revision; entries behind its end have no
    /// meaning. `None` if too much has changed to know.
    pub fn changed_since(&self, seat: u32, revision: TableRevision) -> Option<Range<usize>> {
        if self.revision(seat) == revision {
            return Some(0..0);
        }
        let Table { blocks, changes } = self.tables.get(seat as usize)?;
        let seen = changes.iter().position(|(after, _)| *after == revision && revision != TableRevision::default())?;
        let later = changes[seen + 1..].iter().map(|(_, entries)| entries.start..entries.end.min(blocks.len()));
        let later = later.filter(|entries| !entries.is_empty());
        Some(later.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0))
    }
}

impl PartialEq for BlockTables {
    fn eq(&self, other: &Self) -> bool {
        let seats = self.tables.len().max(other.tables.len()) as u32;
        (0..seats).all(|seat| self.get(seat) == other.get(seat))
    }
}

impl Eq for BlockTables {}

impl FromIterator<Vec<u32>> for BlockTables {
    /// The tables of the seats 0, 1, 2, ….
    fn from_iter<T: IntoIterator<Item = Vec<u32>>>(tables: T) -> Self {
        let mut all = Self::default();
        for (seat, table) in (0..).zip(tables) {
            all.change(seat, 0, table);
        }
        all
    }
}

/// The block tables of the sequences of a step in one KV group.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTables<'a> {
    tables: &'a BlockTables,
    seats: &'a [u32],
}

impl<'a> SequenceTables<'a> {
    /// Returns the blocks of sequence `s`, which may be followed by others.
    pub fn row(&self, s: usize) -> &'a [u32] {
        self.tables.get(self.seats[s])
    }
}

/// Input of a step. T = tokens of the step, S = sequences, R = rows that reach the head, E = rows whose hidden state is
/// returned. Device code sees only these arrays, never a request.
///
/// Sequence s owns the rows `query_start[s] .. query_start[s + 1]`. A decode has one row, a prefill chunk many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Token ids `[T]`, or [`StepBatch::drawn`] where the id is still on the device.
    pub token_ids: Vec<u32>,
    /// Positions `[P,T]` of each token for the rotary embedding; [`Program::position_streams`] returns P. The first is
    /// the token's index in the sequence, except for tokens of images.
    pub positions: Vec<u32>,
    /// Slot `block · block_size + offset` to which each token's key and value are written, `[T]` per KV group.
    pub slot_mapping: Vec<Vec<u32>>,
    /// Block tables by seat, one per KV group. [`StepBatch::clear`] keeps them.
    pub block_tables: Vec<BlockTables>,
    /// First row of each sequence, `[S + 1]`; the first element is 0, the last T.
    pub query_start: Vec<u32>,
    /// Number of tokens of each sequence, `[S]`, whose keys exist after this step's writes.
    pub seq_lens: Vec<u32>,
    /// Rows of `[T]` that reach the head, `[R]`, ascending.
    pub sampled_rows: Vec<u32>,
    /// Rows of `[T]` whose hidden state is returned, `[E]`, ascending. Where rows are reduced to one
    /// ([`PoolRows`](crate::PoolRows)), these are the last of them.
    pub pooled_rows: Vec<u32>,
    /// Numbers of rows that are reduced to one, `[E]`; empty if the program reduces none.
    pub pooled_lens: Vec<u32>,
    /// Type of each token, `[T]`; empty if the program reads none.
    pub token_types: Vec<u32>,
    /// Seat of each sequence, `[S]`: its index in what is kept from step to step.
    pub seats: Vec<u32>,
    /// Adapter of each sequence, `[S]`: 0 for none, or 1 + its slot. Empty if no sequence has one.
    pub adapters: Vec<u32>,
    /// Rows of `[T]` that [`InjectRows`](crate::InjectRows) changes, ascending.
    pub injected: Vec<InjectedRow>,
    /// Place in its sequence after the last key that each row sees, `[T]`: after its own, or after the span that its
    /// token belongs to, such as an image. Empty if the program has no spans ([`Program::has_spans`]).
    pub seen_ends: Vec<u32>,
}

/// A row of the residual stream and the row of the media cache that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedRow {
    /// Row of the step.
    pub row: u32,
    /// Row of the media cache.
    pub media: u32,
}

/// Memory of a backend that a batch may refer to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Block size and number of blocks, which the KV groups share.
    pub kv: (usize, usize),
    /// Number of rows of the step before whose tokens may be referenced.
    pub drawn: usize,
    /// Number of rows of the media cache.
    pub media_rows: usize,
    /// Number of slots of adapters.
    pub adapters: usize,
}

impl StepBatch {
    /// Bit that marks the values of [`StepBatch::drawn`]. No vocabulary is that large.
    pub const DRAWN: u32 = 1 << 31;

    /// Returns the value that stands in [`StepBatch::token_ids`] for the token sampled by row `row` of the step before.
    pub const fn drawn(row: u32) -> u32 {
        Self::DRAWN | row
    }

    /// Creates an empty batch with memory for steps of the given numbers of tokens and sequences, and `rows` rows that
    /// reach the head. Block tables grow with their sequences.
    pub fn with_capacity(tokens: usize, sequences: usize, rows: usize, kv_groups: usize) -> Self {
        Self {
            token_ids: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            // `vec![..; n]` would not do: clones have no spare capacity.
            slot_mapping: (0..kv_groups).map(|_| Vec::with_capacity(tokens)).collect(),
            block_tables: vec![BlockTables::default(); kv_groups],
            query_start: Vec::with_capacity(sequences + 1),
            seq_lens: Vec::with_capacity(sequences),
            sampled_rows: Vec::with_capacity(rows),
            pooled_rows: Vec::with_capacity(sequences),
            pooled_lens: Vec::new(),
            token_types: Vec::new(),
            seats: Vec::with_capacity(sequences),
            adapters: Vec::new(),
            injected: Vec::new(),
            seen_ends: Vec::new(),
        }
    }

    /// Returns T.
    pub fn tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Returns S.
    pub fn sequences(&self) -> usize {
        self.seq_lens.len()
    }

    /// Returns the rows of sequence `s`.
    pub fn query_range(&self, s: usize) -> std::ops::Range<usize> {
        self.query_start[s] as usize..self.query_start[s + 1] as usize
    }

    /// Returns the positions of the rows of sequence `s` within it.
    pub fn places(&self, s: usize) -> std::ops::Range<usize> {
        let end = self.seq_lens[s] as usize;
        end - self.query_range(s).len()..end
    }

    /// Returns the rows of a buffer whose sequences have adapters, each with 1 + the slot of its adapter. `rows` are those of
    /// the step or the sampled ones.
    pub fn adapted(&self, rows: Rows) -> impl Iterator<Item = (u32, u32)> {
        let sampled: &[u32] = if rows == Rows::Sampled { &self.sampled_rows } else { &[] };
        let tokens = if rows == Rows::Tokens { self.adapters.len() } else { 0 };
        let all = (0..tokens).flat_map(move |s| self.query_range(s).map(move |row| (row as u32, self.adapters[s])));
        let sampled = sampled.iter().enumerate().filter(|_| !self.adapters.is_empty()).map(|(index, row)| {
            let sequence = self.query_start.partition_point(|start| start <= row) - 1;
            (index as u32, self.adapters[sequence])
        });
        all.chain(sampled).filter(|(_, adapter)| *adapter != 0)
    }

    /// Returns the block tables of the step's sequences in a KV group.
    pub fn tables(&self, group: usize) -> SequenceTables<'_> {
        SequenceTables { tables: &self.block_tables[group], seats: &self.seats }
    }

    /// Clears the arrays except the block tables, and keeps their memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.slot_mapping.iter_mut().for_each(Vec::clear);
        self.query_start.clear();
        self.seq_lens.clear();
        self.sampled_rows.clear();
        self.pooled_rows.clear();
        self.pooled_lens.clear();
        self.token_types.clear();
        self.seats.clear();
        self.adapters.clear();
        self.injected.clear();
        self.seen_ends.clear();
    }

    /// Checks that every index is in range and every array has its length, so that a defect of the caller is an error
    /// and not a write to another sequence's block. The error describes the defect.
    pub fn check(&self, program: &Program, limits: Limits) -> Result<(), &'static str> {
        let Limits { kv: (size, blocks), drawn, media_rows, adapters } = limits;
        self.check_rows(program)?;
        let (tokens, sequences) = (self.tokens(), self.sequences());
        let rows = self.token_ids.iter().filter(|&id| id & Self::DRAWN != 0).map(|id| id & !Self::DRAWN);
        require(rows.max().is_none_or(|row| (row as usize) < drawn), "a token that was not drawn")?;
        let known = |&id: &u32| id & Self::DRAWN != 0 || (id as usize) < program.vocab_size;
        require(self.token_ids.iter().all(known), "a token id beyond the vocabulary")?;
        require(self.sampled_rows.iter().all(|&row| (row as usize) < tokens), "a sampled row")?;
        require(self.pooled_rows.iter().all(|&row| (row as usize) < tokens), "a pooled row")?;
        require(self.pooled_rows.is_empty() || program.embedding().is_some(), "a pooled row of a model without any")?;
        self.check_texts(program)?;
        self.check_spans(program)?;
        require(self.injected.is_empty() || program.media_columns() > 0, "an image's row for a model without images")?;
        require(self.injected.iter().all(|injected| (injected.row as usize) < tokens), "an image's row")?;
        require(self.injected.is_sorted_by(|a, b| a.row < b.row), "the order of images' rows")?;
        let is_kept = |injected: &InjectedRow| (injected.media as usize) < media_rows;
        require(self.injected.iter().all(is_kept), "a row beyond the media cache")?;
        require(self.adapters.is_empty() || self.adapters.len() == sequences, "adapters")?;
        require(self.adapters.iter().all(|&slot| slot as usize <= adapters), "an adapter beyond the slots")?;
        let groups = program.kv_groups.len();
        require(groups == 0 || blocks > 0, "no KV cache is allocated")?;
        require(self.slot_mapping.len() == groups && self.block_tables.len() == groups, "the number of KV groups")?;
        for (slots, tables) in self.slot_mapping.iter().zip(&self.block_tables) {
            require(slots.len() == tokens, "slot mapping")?;
            require(slots.iter().all(|&slot| (slot as usize) < blocks * size), "a slot beyond the KV cache")?;
            require(self.seats.len() == sequences, "seats")?;
            require((tables.highest as usize) < blocks, "a block beyond the KV cache")?;
            let covers = |(&seat, &len): (&u32, &u32)| len as usize <= tables.get(seat).len() * size;
            require(self.seats.iter().zip(&self.seq_lens).all(covers), "a sequence longer than its table")?;
        }
        Ok(())
    }

    /// Checks that a program which needs whole sequences gets them, and what its tables are read by.
    fn check_texts(&self, program: &Program) -> Result<(), &'static str> {
        let sequences = self.sequences();
        if program.reduces_rows() {
            let is_whole = |s| self.query_range(s).len() == self.seq_lens[s] as usize;
            require((0..sequences).all(is_whole), "a part of a sequence")?;
            require(self.pooled_lens.len() == self.pooled_rows.len(), "the numbers of pooled rows")?;
            let reaches = |(&row, &len): (&u32, &u32)| (1..=row + 1).contains(&len);
            require(self.pooled_rows.iter().zip(&self.pooled_lens).all(reaches), "a number of pooled rows")?;
        }
        if let Some(limit) = program.learned_positions() {
            require(self.positions.iter().all(|&place| (place as usize) < limit), "a position beyond the table")?;
        }
        if program.token_types() > 0 {
            require(self.token_types.len() == self.tokens(), "token types")?;
            let known = |&kind: &u32| (kind as usize) < program.token_types();
            require(self.token_types.iter().all(known), "a token type beyond the table")?;
        }
        Ok(())
    }

    /// Checks that each row sees its own key, no key that does not exist, and all that the row before it sees.
    fn check_spans(&self, program: &Program) -> Result<(), &'static str> {
        if !program.has_spans() {
            return Ok(());
        }
        require(self.seen_ends.len() == self.tokens(), "the ends of spans")?;
        let is_sound = |s: usize| {
            let ends = &self.seen_ends[self.query_range(s)];
            let exist = ends.iter().zip(self.places(s)).all(|(&end, place)| place < end as usize);
            exist && ends.is_sorted() && ends.last().is_none_or(|&end| end <= self.seq_lens[s])
        };
        require((0..self.sequences()).all(is_sound), "the end of a span")
    }

    /// Writes the rows into `out` as a step over the paged memory of its keys and values: one KV group
    /// ([`Program::step_kv`]), in which each sequence owns consecutive blocks. Thus a backend runs an encoder with the
    /// kernels of its decoders. Returns the number of blocks.
    pub fn in_own_blocks(&self, block_size: usize, out: &mut StepBatch) -> usize {
        out.clear();
        out.token_ids.extend_from_slice(&self.token_ids);
        out.positions.extend_from_slice(&self.positions);
        out.query_start.extend_from_slice(&self.query_start);
        out.seq_lens.extend_from_slice(&self.seq_lens);
        out.pooled_rows.extend_from_slice(&self.pooled_rows);
        out.pooled_lens.extend_from_slice(&self.pooled_lens);
        out.token_types.extend_from_slice(&self.token_types);
        out.seats.extend(0..self.sequences() as u32);
        out.adapters.extend_from_slice(&self.adapters);
        out.slot_mapping.resize_with(1, Vec::new);
        out.block_tables.resize_with(1, BlockTables::default);
        let (slot_mapping, tables) = (&mut out.slot_mapping[0], &mut out.block_tables[0]);
        let blocks = |len: u32| (len as usize).div_ceil(block_size);
        let mut first = 0;
        for (seat, &len) in (0..).zip(&self.seq_lens) {
            let start = (first * block_size) as u32;
            slot_mapping.extend(start..start + len);
            tables.change(seat, 0, first as u32..(first + blocks(len)) as u32);
            first += blocks(len);
        }
        first
    }

    /// Checks the division of the rows into sequences, and their positions.
    pub(crate) fn check_rows(&self, program: &Program) -> Result<(), &'static str> {
        let (tokens, sequences) = (self.tokens(), self.sequences());
        require(self.positions.len() == program.position_streams() * tokens, "positions")?;
        require(self.query_start.len() == sequences + 1, "query starts")?;
        require(self.query_start.first() == Some(&0), "the first query start")?;
        require(self.query_start.last().map(|&end| end as usize) == Some(tokens), "the last query start")?;
        require(self.query_start.is_sorted(), "the order of query starts")?;
        let whole = |s| self.query_range(s).len() <= self.seq_lens[s] as usize;
        require((0..sequences).all(whole), "a sequence shorter than its rows")
    }
}

/// Returns the description of a defect unless a condition holds.
pub(crate) fn require(holds: bool, what: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(what) }
}
