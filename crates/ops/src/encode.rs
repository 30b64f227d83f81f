//! The arrays of an encoder's step.

use crate::batch::require;
use crate::{Op, Program, StepBatch};

/// Normalisation of one channel: a byte x becomes `(x − shift) / divisor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channel {
    /// 255 times the mean.
    pub shift: f32,
    /// 255 times the standard deviation; not 0.
    pub divisor: f32,
}

/// A weighted row of a table of positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tap {
    /// Row of the table.
    pub row: u32,
    /// Factor of the row.
    pub weight: f32,
}

/// Number of taps of a row: the corners of a cell of the table.
pub const TAPS: usize = 4;

/// Input of an encoder's step. T = patches, M = T / [`Program::merge`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncodeBatch {
    /// The rows: each sequence is a segment, whose rows see each other and no others. Patches have the token id 0. There
    /// are no slots and no block tables.
    pub rows: StepBatch,
    /// Patches `[T,K]`, the channels of each one after the other.
    pub patches: Vec<u8>,
    /// Normalisation of each channel.
    pub channels: Vec<Channel>,
    /// Taps `[T]` of [`Op::EmbedTaps`]; empty if the program has no such op.
    pub taps: Vec<[Tap; TAPS]>,
    /// Row of the media cache for each merged row, `[M]`; each occurs once.
    pub store_rows: Vec<u32>,
}

impl EncodeBatch {
    /// Clears the arrays, except for the channels, and keeps their memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.patches.clear();
        self.taps.clear();
        self.store_rows.clear();
    }

    /// Appends a segment of `count` patches, without their positions and taps.
    pub fn push_segment(&mut self, count: usize) {
        let rows = &mut self.rows;
        if rows.query_start.is_empty() {
            rows.query_start.push(0);
        }
        rows.seats.push(rows.seq_lens.len() as u32);
        rows.token_ids.resize(rows.token_ids.len() + count, 0);
        rows.query_start.push(rows.token_ids.len() as u32);
        rows.seq_lens.push(count as u32);
    }

    /// Checks that every array has its length and every index is in range. `media_rows` is the size of the media cache.
    /// The error describes the defect.
    pub fn check(&self, program: &Program, media_rows: usize) -> Result<(), &'static str> {
        self.rows.check_rows(program)?;
        let (tokens, merge) = (self.rows.tokens(), program.merge());
        let is_whole = |s| self.rows.query_range(s).len() == self.rows.seq_lens[s] as usize;
        require((0..self.rows.sequences()).all(is_whole), "a segment longer than its rows")?;
        let merges = |s| self.rows.query_range(s).len().is_multiple_of(merge);
        require((0..self.rows.sequences()).all(merges), "a segment that cannot be merged")?;
        let mut stores = false;
        for op in &program.ops {
            match op {
                Op::Patches { out } => {
                    let cols = program.buffers[out.0].cols;
                    let channels = self.channels.len();
                    require(channels > 0 && cols.is_multiple_of(channels), "the number of channels")?;
                    require(self.channels.iter().all(|c| c.divisor != 0.0), "a channel's divisor")?;
                    require(self.patches.len() == tokens * cols, "patches")?;
                }
                Op::EmbedTaps(op) => {
                    require(self.taps.len() == tokens, "taps")?;
                    let rows = program.weights[op.table.0].rows;
                    require(self.taps.iter().flatten().all(|tap| (tap.row as usize) < rows), "a tap beyond the table")?;
                }
                Op::StoreRows { .. } => stores = true,
                _ => {}
            }
        }
        require(self.store_rows.len() == if stores { tokens / merge } else { 0 }, "rows to store")?;
        require(self.store_rows.iter().all(|&row| (row as usize) < media_rows), "a row beyond the media cache")?;
        let mut taken = vec![false; media_rows];
        let first = |&row: &u32| !std::mem::replace(&mut taken[row as usize], true);
        require(self.store_rows.iter().all(first), "a row that is stored twice")
    }
}
