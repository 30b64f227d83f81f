//! The flat arrays of one step.

use crate::Program;

/// The block tables of one KV group: row s holds the blocks of sequence s, padded with the null block 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTables {
    /// Entries of a row.
    pub stride: usize,
    /// `[S, stride]`.
    pub ids: Vec<u32>,
}

impl BlockTables {
    /// The blocks of sequence `s`, padding included.
    pub fn row(&self, s: usize) -> &[u32] {
        &self.ids[s * self.stride..(s + 1) * self.stride]
    }
}

/// What a step runs on. T = tokens of the step, S = sequences, R = rows that reach the head, E = rows whose hidden state is
/// returned. Device code sees only these arrays, never a request.
///
/// Sequence s owns the rows `query_start[s] .. query_start[s + 1]`; a decode is a sequence of one row, a prefill chunk
/// one of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// `[T]`: ids, or [`StepBatch::drawn`] where the id is still on the device.
    pub token_ids: Vec<u32>,
    /// `[P,T]`: positions of each token for the rotary embedding, as many as [`Program::position_streams`] says. The first is its
    /// place in the sequence, but for tokens of images.
    pub positions: Vec<u32>,
    /// Per KV group `[T]`: `block · block_size + offset` that the token's key and value are written to.
    pub slot_mapping: Vec<Vec<u32>>,
    /// Per KV group.
    pub block_tables: Vec<BlockTables>,
    /// `[S + 1]`, first element 0, last T.
    pub query_start: Vec<u32>,
    /// `[S]`: tokens whose keys exist after this step's writes, this step's included.
    pub seq_lens: Vec<u32>,
    /// `[R]`: rows of `[T]` that reach the head, ascending.
    pub sampled_rows: Vec<u32>,
    /// `[E]`: rows of `[T]` whose hidden state is returned, ascending.
    pub pooled_rows: Vec<u32>,
    /// `[S]`: the stable slot of each sequence (index into persistent buffers).
    pub slots: Vec<u32>,
}

impl StepBatch {
    /// What [`StepBatch::drawn`] sets. No vocabulary is that large.
    pub const DRAWN: u32 = 1 << 31;

    /// Stands in [`StepBatch::token_ids`] for the token that row `row` of the step before drew.
    pub const fn drawn(row: u32) -> u32 {
        Self::DRAWN | row
    }

    /// An empty batch with memory for steps of that many tokens and sequences, and `rows` rows that reach the head; block
    /// tables grow as they are filled.
    pub fn with_capacity(tokens: usize, sequences: usize, rows: usize, kv_groups: usize) -> Self {
        Self {
            token_ids: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            // Not `vec![..; n]`: clones have no spare capacity.
            slot_mapping: (0..kv_groups).map(|_| Vec::with_capacity(tokens)).collect(),
            block_tables: vec![BlockTables::default(); kv_groups],
            query_start: Vec::with_capacity(sequences + 1),
            seq_lens: Vec::with_capacity(sequences),
            sampled_rows: Vec::with_capacity(rows),
            pooled_rows: Vec::with_capacity(sequences),
            slots: Vec::with_capacity(sequences),
        }
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// S.
    pub fn sequences(&self) -> usize {
        self.seq_lens.len()
    }

    /// The rows of sequence `s`.
    pub fn query_range(&self, s: usize) -> std::ops::Range<usize> {
        self.query_start[s] as usize..self.query_start[s + 1] as usize
    }

    /// The places in their sequence of the rows of sequence `s`.
    pub fn places(&self, s: usize) -> std::ops::Range<usize> {
        let end = self.seq_lens[s] as usize;
        end - self.query_range(s).len()..end
    }

    /// Empties the arrays and keeps their memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.slot_mapping.iter_mut().for_each(Vec::clear);
        self.block_tables.iter_mut().for_each(|t| t.ids.clear());
        self.query_start.clear();
        self.seq_lens.clear();
        self.sampled_rows.clear();
        self.pooled_rows.clear();
        self.slots.clear();
    }

    /// That every index is in range and every array has its length, so that a defect of the caller is an error and not a
    /// write to someone else's block; what is wrong, if anything. `kv` has tokens a block and blocks of each KV group; `drawn`
    /// is how many rows of the step before tokens may be named by.
    pub fn check(&self, program: &Program, kv: &[(usize, usize)], drawn: usize) -> Result<(), &'static str> {
        let (tokens, sequences) = (self.tokens(), self.sequences());
        let require = |holds: bool, what| if holds { Ok(()) } else { Err(what) };
        require(self.positions.len() == program.position_streams() * tokens, "positions")?;
        require(self.query_start.len() == sequences + 1, "query starts")?;
        require(self.query_start.first() == Some(&0), "the first query start")?;
        require(self.query_start.last().map(|&end| end as usize) == Some(tokens), "the last query start")?;
        require(self.query_start.is_sorted(), "the order of query starts")?;
        let rows = self.token_ids.iter().filter(|&id| id & Self::DRAWN != 0).map(|id| id & !Self::DRAWN);
        require(rows.max().is_none_or(|row| (row as usize) < drawn), "a token that was not drawn")?;
        let known = |&id: &u32| id & Self::DRAWN != 0 || (id as usize) < program.vocab_size;
        require(self.token_ids.iter().all(known), "a token id beyond the vocabulary")?;
        require(self.sampled_rows.iter().all(|&row| (row as usize) < tokens), "a sampled row")?;
        require(self.pooled_rows.iter().all(|&row| (row as usize) < tokens), "a pooled row")?;
        require(self.pooled_rows.is_empty() || program.embedding().is_some(), "a pooled row of a model without any")?;
        let whole = |s| self.query_range(s).len() <= self.seq_lens[s] as usize;
        require((0..sequences).all(whole), "a sequence shorter than its rows")?;
        let groups = program.kv_groups.len();
        require(kv.len() == groups, "no KV cache is allocated")?;
        require(self.slot_mapping.len() == groups && self.block_tables.len() == groups, "the number of KV groups")?;
        for ((&(size, blocks), slots), tables) in kv.iter().zip(&self.slot_mapping).zip(&self.block_tables) {
            require(slots.len() == tokens, "slot mapping")?;
            require(slots.iter().all(|&slot| (slot as usize) < blocks * size), "a slot beyond the KV cache")?;
            require(tables.ids.len() == sequences * tables.stride, "block tables")?;
            require(tables.ids.iter().all(|&id| (id as usize) < blocks), "a block beyond the KV cache")?;
            let covered = tables.stride * size;
            require(self.seq_lens.iter().all(|&len| len as usize <= covered), "a sequence longer than its table")?;
        }
        Ok(())
    }
}
