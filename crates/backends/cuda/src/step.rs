//! The arrays of a step, as one block of words that is copied at once.

use octavo_kernels::params::{DRAWN_TOKEN, NO_SLOT};
use octavo_kernels::plan::{DecodePlan, PrefillPlan, split_tokens};
use octavo_ops::{EncodeBatch, ProgramKind, Rows, StepBatch, TAPS};

use crate::lora::{Adapted, AdaptedRows};
use crate::lower::{Attention, Stage};

/// Sizes that determine the layout of a step's block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepShape {
    /// Number of tokens T.
    pub(crate) tokens: usize,
    /// Number of sequences S.
    pub(crate) sequences: usize,
    /// Number of rows R that reach the head.
    pub(crate) sampled: usize,
    /// Number of rows E whose hidden state is returned.
    pub(crate) pooled: usize,
    /// E if rows are reduced to one, else 0.
    pub(crate) reduced: usize,
    /// T if tokens have types, else 0.
    pub(crate) typed: usize,
    /// T if the program has spans, else 0.
    pub(crate) spanned: usize,
    /// Number of rows of the media cache that are read or written.
    pub(crate) media: usize,
    /// Number of merged rows M of an encoder.
    pub(crate) merged: usize,
    /// Number of patches with learned positions.
    pub(crate) tapped: usize,
    /// Number of channels of a patch.
    pub(crate) channels: usize,
    /// Number of KV groups.
    pub(crate) groups: usize,
    /// Number of positions P of a token.
    pub(crate) streams: usize,
    /// Number of tiles of prefill attention.
    pub(crate) tiles: usize,
    /// Number of splits of decode attention.
    pub(crate) splits: usize,
    /// Rows with adapters: of the step, and of those that reach the head.
    pub(crate) adapted: [Adapted; 2],
}

// Token ids are copied unchanged.
const _: () = assert!(StepBatch::DRAWN == DRAWN_TOKEN);
// Taps are aligned, and the kernel reads four.
const _: () = assert!(TAPS == ALIGNMENT);

/// Alignment of arrays in words: 16 bytes.
const ALIGNMENT: usize = 4;

const fn aligned(words: usize) -> usize {
    words.next_multiple_of(ALIGNMENT)
}

/// Start of each array in words.
impl StepShape {
    pub(crate) const fn token_ids(&self) -> usize {
        0
    }

    pub(crate) const fn positions(&self) -> usize {
        aligned(self.tokens)
    }

    /// Returns the number of words from one stream of positions to the next.
    pub(crate) const fn position_stride(&self) -> usize {
        aligned(self.tokens)
    }

    pub(crate) const fn slots(&self, group: usize) -> usize {
        (1 + self.streams + group) * aligned(self.tokens)
    }

    pub(crate) const fn query_start(&self) -> usize {
        self.slots(self.groups)
    }

    pub(crate) const fn seq_lens(&self) -> usize {
        self.query_start() + aligned(self.sequences + 1)
    }

    pub(crate) const fn sampled_rows(&self) -> usize {
        self.seq_lens() + aligned(self.sequences)
    }

    pub(crate) const fn pooled_rows(&self) -> usize {
        self.sampled_rows() + aligned(self.sampled)
    }

    pub(crate) const fn pooled_lens(&self) -> usize {
        self.pooled_rows() + aligned(self.pooled)
    }

    pub(crate) const fn token_types(&self) -> usize {
        self.pooled_lens() + aligned(self.reduced)
    }

    pub(crate) const fn seen_ends(&self) -> usize {
        self.token_types() + aligned(self.typed)
    }

    /// Returns the start of the rows of the media cache.
    pub(crate) const fn media_rows(&self) -> usize {
        self.seen_ends() + aligned(self.spanned)
    }

    /// Returns the start of the step's rows that belong to those of the media cache.
    pub(crate) const fn injected_rows(&self) -> usize {
        self.media_rows() + aligned(self.media)
    }

    pub(crate) const fn tap_rows(&self) -> usize {
        self.injected_rows() + aligned(self.media)
    }

    pub(crate) const fn tap_weights(&self) -> usize {
        self.tap_rows() + self.tapped * TAPS
    }

    /// Returns the start of the channels, each of which is a shift and a divisor.
    pub(crate) const fn channels(&self) -> usize {
        self.tap_weights() + self.tapped * TAPS
    }

    /// Returns the start of the tiles of rows with adapters, of the step (0) or of those that reach the head (1).
    pub(crate) const fn adapted_tiles(&self, kind: usize) -> usize {
        let start = self.channels() + aligned(2 * self.channels);
        if kind == 0 { start } else { self.adapted_rows(0) + aligned(self.adapted[0].rows) }
    }

    /// Returns the start of the rows with adapters in the order of their tiles.
    pub(crate) const fn adapted_rows(&self, kind: usize) -> usize {
        self.adapted_tiles(kind) + aligned(self.adapted[kind].tile_words())
    }

    /// Returns the start of the sequences' seats.
    pub(crate) const fn seats(&self) -> usize {
        self.adapted_rows(1) + aligned(self.adapted[1].rows)
    }

    pub(crate) const fn prefill_plan(&self) -> usize {
        self.seats() + aligned(self.sequences)
    }

    /// Returns the start of the last array. A step copies only the used part of a graph's splits.
    pub(crate) const fn decode_plan(&self) -> usize {
        self.prefill_plan() + aligned(PrefillPlan::len(self.tiles))
    }

    /// Returns the number of words of the whole block.
    pub(crate) const fn words(&self) -> usize {
        self.decode_plan() + aligned(DecodePlan::len(self.splits))
    }
}

/// Sizes of the arrays that only an encoder has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImageShape {
    /// Number of positions of a patch.
    pub(crate) streams: usize,
    pub(crate) merged: usize,
    pub(crate) tapped: usize,
    pub(crate) channels: usize,
}

/// Writes the arrays that only an encoder has: those of the patches `rows` of a batch, whose merged rows are `merged`.
pub(crate) fn write_image(
    batch: &EncodeBatch,
    rows: std::ops::Range<usize>,
    merged: std::ops::Range<usize>,
    shape: &StepShape,
    out: &mut [u32],
) {
    out[shape.media_rows()..][..merged.len()].copy_from_slice(&batch.store_rows[merged]);
    if shape.tapped > 0 {
        for (i, tap) in batch.taps[rows].iter().flatten().enumerate() {
            out[shape.tap_rows() + i] = tap.row;
            out[shape.tap_weights() + i] = tap.weight.to_bits();
        }
    }
    for (i, channel) in batch.channels.iter().enumerate() {
        out[shape.channels() + 2 * i] = channel.shift.to_bits();
        out[shape.channels() + 2 * i + 1] = channel.divisor.to_bits();
    }
}

/// Plans of attention that a program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plans {
    /// None.
    None,
    /// Of sequences that decode or prefill, the latter in tiles of at most so many queries.
    Sequences { queries: u32 },
    /// The tiles of all sequences.
    Tiles { queries: u32 },
    /// The tiles of the segments of an encoder.
    Segments { queries: u32 },
}

impl Plans {
    /// Returns the plans that the stages of a program read.
    pub(crate) fn of(stages: &[Stage], kind: ProgramKind) -> Self {
        let plans = |attention: &Attention| match attention {
            Attention::Plain { .. } => None,
            Attention::Tiled { prefill, .. } if kind == ProgramKind::Encoder => {
                Some(Self::Segments { queries: prefill.tile.queries })
            }
            Attention::Tiled { prefill, .. } => Some(Self::Tiles { queries: prefill.tile.queries }),
            Attention::Planned { prefill, .. } => Some(Self::Sequences { queries: prefill.tile.queries }),
        };
        stages.iter().filter_map(Stage::attention).find_map(plans).unwrap_or(Self::None)
    }
}

/// Writes steps into blocks and reuses its memory.
#[derive(Debug, Default)]
pub(crate) struct Filler {
    prefill: Vec<u32>,
    decode: Vec<u32>,
    /// Rows with adapters: of the step, and of those that reach the head.
    adapted: [AdaptedRows; 2],
}

impl Filler {
    /// Creates a filler with memory for steps with these numbers of tiles and splits.
    pub(crate) fn with_capacity(tiles: usize, splits: usize) -> Self {
        Self {
            prefill: Vec::with_capacity(PrefillPlan::len(tiles)),
            decode: Vec::with_capacity(DecodePlan::len(splits)),
            ..Self::default()
        }
    }

    /// Plans a batch and returns its exact shape.
    pub(crate) fn plan(&mut self, batch: &StepBatch, streams: usize, plans: Plans) -> StepShape {
        self.prefill.clear();
        self.decode.clear();
        let [all, sampled] = &mut self.adapted;
        let adapted = [all.divide(batch, Rows::Tokens), sampled.divide(batch, Rows::Sampled)];
        let (mut tiles, mut splits) = (0, 0);
        match plans {
            Plans::None => {}
            Plans::Sequences { queries } => {
                let plan = PrefillPlan::write(&batch.query_start, &batch.seq_lens, queries, &mut self.prefill);
                tiles = plan.tiles as usize;
                let plan = DecodePlan::write(&batch.query_start, &batch.seq_lens, split_tokens, &mut self.decode);
                splits = plan.splits as usize;
            }
            Plans::Tiles { queries } => {
                let plan = PrefillPlan::write_all(&batch.query_start, &batch.seq_lens, queries, &mut self.prefill);
                tiles = plan.tiles as usize;
            }
            Plans::Segments { queries } => {
                let plan = PrefillPlan::write_segments(&batch.query_start, queries, &mut self.prefill);
                tiles = plan.tiles as usize;
            }
        }
        StepShape {
            tokens: batch.tokens(),
            sequences: batch.sequences(),
            sampled: batch.sampled_rows.len(),
            pooled: batch.pooled_rows.len(),
            reduced: batch.pooled_lens.len(),
            typed: batch.token_types.len(),
            spanned: batch.seen_ends.len(),
            media: batch.injected.len(),
            groups: batch.block_tables.len(),
            streams,
            tiles,
            splits,
            adapted,
            ..StepShape::default()
        }
    }

    /// Plans a step over the rows of one image and returns its shape. `images` are the arrays that only an encoder has.
    pub(crate) fn plan_image(&mut self, batch: &StepBatch, images: ImageShape, plans: Plans) -> StepShape {
        let ImageShape { streams, merged, tapped, channels } = images;
        let shape = self.plan(batch, streams, plans);
        StepShape { media: merged, merged, tapped, channels, ..shape }
    }

    /// Writes the batch that was planned last into a block of the given shape, which must have room for it, and returns
    /// the number of words in use. The remaining room is padding: sequences of one row that reads nothing and is
    /// written nowhere.
    ///
    /// Padding requires one row per sequence, all of which are sampled.
    pub(crate) fn write(&self, batch: &StepBatch, shape: &StepShape, out: &mut [u32]) -> usize {
        let padding = shape.sequences - batch.sequences();
        debug_assert_eq!(shape.tokens, batch.tokens() + padding);
        debug_assert_eq!(shape.sampled, batch.sampled_rows.len() + padding);
        let mut array = |at: usize, values: &[u32], len: usize, rest: u32| {
            out[at..at + values.len()].copy_from_slice(values);
            out[at + values.len()..at + len].fill(rest);
        };
        array(shape.token_ids(), &batch.token_ids, shape.tokens, 0);
        for stream in 0..shape.streams {
            let positions = &batch.positions[stream * batch.tokens()..][..batch.tokens()];
            array(shape.positions() + stream * shape.position_stride(), positions, shape.tokens, 0);
        }
        for (group, slots) in batch.slot_mapping.iter().enumerate() {
            array(shape.slots(group), slots, shape.tokens, NO_SLOT);
        }
        array(shape.query_start(), &batch.query_start, batch.sequences() + 1, 0);
        array(shape.seq_lens(), &batch.seq_lens, shape.sequences, 0);
        array(shape.sampled_rows(), &batch.sampled_rows, batch.sampled_rows.len(), 0);
        array(shape.pooled_rows(), &batch.pooled_rows, shape.pooled, 0);
        array(shape.pooled_lens(), &batch.pooled_lens[..shape.reduced], shape.reduced, 0);
        array(shape.token_types(), &batch.token_types[..shape.typed], shape.typed, 0);
        array(shape.seen_ends(), &batch.seen_ends, shape.spanned, 0);
        for (at, injected) in batch.injected.iter().enumerate() {
            array(shape.media_rows() + at, &[injected.media], 1, 0);
            array(shape.injected_rows() + at, &[injected.row], 1, 0);
        }
        for (kind, AdaptedRows { tiles, rows, .. }) in self.adapted.iter().enumerate() {
            if shape.adapted[kind].tiles > 0 {
                array(shape.adapted_tiles(kind), tiles, tiles.len(), 0);
                array(shape.adapted_rows(kind), rows, rows.len(), 0);
            }
        }
        array(shape.seats(), &batch.seats, shape.sequences, 0);
        array(shape.prefill_plan(), &self.prefill, self.prefill.len(), 0);
        array(shape.decode_plan(), &self.decode, self.decode.len(), 0);
        for extra in 0..padding {
            let row = batch.tokens() + extra;
            out[shape.query_start() + batch.sequences() + 1 + extra] = row as u32 + 1;
            out[shape.sampled_rows() + batch.sampled_rows.len() + extra] = row as u32;
        }
        // If all sequences have tiles, those of padding write zeros.
        for tile in self.prefill.len() / PrefillPlan::len(1)..shape.tiles {
            let at = shape.prefill_plan() + PrefillPlan::len(tile);
            out[at..at + PrefillPlan::len(1)].copy_from_slice(&[tile as u32, 0, 1]);
        }
        shape.decode_plan() + self.decode.len()
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::BlockTables;

    use super::*;

    fn decodes() -> StepBatch {
        StepBatch {
            token_ids: vec![5, 6, 7],
            positions: vec![40, 3, 31],
            slot_mapping: vec![vec![24, 35, 63]],
            block_tables: vec![BlockTables::from_iter([vec![4, 5, 1], vec![2], vec![9, 3]])],
            query_start: vec![0, 1, 2, 3],
            seq_lens: vec![41, 4, 32],
            sampled_rows: vec![0, 1, 2],
            pooled_rows: vec![],
            pooled_lens: vec![],
            token_types: vec![],
            seen_ends: vec![],
            seats: vec![2, 0, 1],
            adapters: vec![],
            injected: vec![],
        }
    }

    #[test]
    fn arrays_follow_each_other() {
        let shape = StepShape {
            tokens: 5,
            sequences: 2,
            sampled: 3,
            pooled: 1,
            reduced: 1,
            typed: 5,
            spanned: 5,
            media: 2,
            merged: 0,
            tapped: 1,
            channels: 3,
            groups: 2,
            streams: 2,
            tiles: 1,
            splits: 2,
            adapted: [Adapted { rows: 5, tiles: 2 }, Adapted { rows: 1, tiles: 1 }],
        };
        let starts = [
            shape.token_ids(),
            shape.positions(),
            shape.slots(0),
            shape.slots(1),
            shape.query_start(),
            shape.seq_lens(),
            shape.sampled_rows(),
            shape.pooled_rows(),
            shape.pooled_lens(),
            shape.token_types(),
            shape.seen_ends(),
            shape.media_rows(),
            shape.injected_rows(),
            shape.tap_rows(),
            shape.tap_weights(),
            shape.channels(),
            shape.adapted_tiles(0),
            shape.adapted_rows(0),
            shape.adapted_tiles(1),
            shape.adapted_rows(1),
            shape.seats(),
            shape.prefill_plan(),
            shape.decode_plan(),
            shape.words(),
        ];
        let expected =
            [0, 8, 24, 32, 40, 44, 48, 52, 56, 60, 68, 76, 80, 84, 88, 92, 100, 112, 120, 128, 132, 136, 140, 152];
        assert_eq!(starts, expected);
    }

    #[test]
    fn a_batch_is_written_as_it_is() {
        let (batch, mut filler) = (decodes(), Filler::default());
        let shape = filler.plan(&batch, 1, Plans::Sequences { queries: 64 });
        assert_eq!((shape.splits, shape.tiles), (3, 0));
        let mut block = vec![77; shape.words()];
        let used = filler.write(&batch, &shape, &mut block);
        assert_eq!(used, shape.decode_plan() + DecodePlan::len(3));
        assert_eq!(block[shape.token_ids()..][..3], [5, 6, 7]);
        assert_eq!(block[shape.positions()..][..3], [40, 3, 31]);
        assert_eq!(block[shape.slots(0)..][..3], [24, 35, 63]);
        assert_eq!(block[shape.query_start()..][..4], [0, 1, 2, 3]);
        assert_eq!(block[shape.seq_lens()..][..3], [41, 4, 32]);
        assert_eq!(block[shape.sampled_rows()..][..3], [0, 1, 2]);
        assert_eq!(block[shape.seats()..][..3], [2, 0, 1]);
        assert_eq!(block[shape.decode_plan()], 3);
    }

    #[test]
    fn texts_have_lengths_types_and_plans_of_all_lengths() {
        let texts = StepBatch {
            token_ids: vec![5, 6, 7],
            positions: vec![0, 0, 1],
            query_start: vec![0, 1, 3],
            seq_lens: vec![1, 2],
            pooled_rows: vec![0, 2],
            pooled_lens: vec![1, 2],
            token_types: vec![0, 1, 1],
            seats: vec![0, 1],
            ..StepBatch::default()
        };
        let mut batch = StepBatch::default();
        assert_eq!(texts.in_own_blocks(16, &mut batch), 2);
        let mut filler = Filler::default();
        let shape = filler.plan(&batch, 1, Plans::Segments { queries: 64 });
        assert_eq!((shape.reduced, shape.typed, shape.tiles, shape.splits), (2, 3, 2, 0));
        let mut block = vec![77; shape.words()];
        filler.write(&batch, &shape, &mut block);
        assert_eq!(block[shape.pooled_lens()..][..2], [1, 2]);
        assert_eq!(block[shape.token_types()..][..3], [0, 1, 1]);
        assert_eq!(block[shape.prefill_plan()..][..6], [1, 0, 2, 0, 0, 1]);
    }

    #[test]
    fn padding_has_tiles_if_every_sequence_has() {
        let (batch, mut filler) = (decodes(), Filler::default());
        let exact = filler.plan(&batch, 1, Plans::Tiles { queries: 64 });
        assert_eq!((exact.splits, exact.tiles), (0, 3));
        let shape = StepShape { tokens: 5, sequences: 5, sampled: 5, tiles: 5, ..exact };
        let mut block = vec![77; shape.words()];
        filler.write(&batch, &shape, &mut block);
        let plan = &block[shape.prefill_plan()..][..PrefillPlan::len(5)];
        assert_eq!(plan, [0, 0, 1, 2, 0, 1, 1, 0, 1, 3, 0, 1, 4, 0, 1]);
    }

    #[test]
    fn padding_reads_and_writes_nothing() {
        let (batch, mut filler) = (decodes(), Filler::default());
        let exact = filler.plan(&batch, 1, Plans::Sequences { queries: 64 });
        let shape = StepShape { tokens: 5, sequences: 5, sampled: 5, splits: 20, ..exact };
        let mut block = vec![77; shape.words()];
        let used = filler.write(&batch, &shape, &mut block);
        assert_eq!(used, shape.decode_plan() + DecodePlan::len(3), "not the room for more splits");
        assert_eq!(block[shape.slots(0)..][..5], [24, 35, 63, NO_SLOT, NO_SLOT]);
        assert_eq!(block[shape.query_start()..][..6], [0, 1, 2, 3, 4, 5]);
        assert_eq!(block[shape.seq_lens()..][..5], [41, 4, 32, 0, 0]);
        assert_eq!(block[shape.sampled_rows()..][..5], [0, 1, 2, 3, 4]);
        assert_eq!(block[shape.seats()..][..5], [2, 0, 1, 0, 0]);
    }
}
