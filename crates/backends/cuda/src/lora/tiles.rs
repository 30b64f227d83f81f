//! Division of the rows of a step into tiles that have the same adapter.

use octavo_kernels::params::{LORA_ROWS, LORA_TILE_WORDS};
use octavo_ops::{Rows, StepBatch};

/// Numbers of rows with adapters and of their tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Adapted {
    pub(crate) rows: usize,
    pub(crate) tiles: usize,
}

impl Adapted {
    /// Returns the number of words of the list of tiles: their number, and those of each.
    pub(crate) const fn tile_words(self) -> usize {
        if self.tiles == 0 { 0 } else { 1 + LORA_TILE_WORDS as usize * self.tiles }
    }
}

/// Returns the largest number of tiles of so many rows with adapters of so many slots.
pub(crate) const fn most_tiles(rows: usize, slots: usize) -> usize {
    let full = rows / LORA_ROWS as usize + slots;
    if full < rows { full } else { rows }
}

/// The rows of a kind that have adapters, divided into tiles.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdaptedRows {
    /// Slots and rows, in the order of the tiles.
    order: Vec<(u32, u32)>,
    /// The number of tiles; then for each its slot, 0, its first place in the rows and its number of rows.
    pub(crate) tiles: Vec<u32>,
    pub(crate) rows: Vec<u32>,
}

impl AdaptedRows {
    /// Divides the rows of a batch.
    pub(crate) fn divide(&mut self, batch: &StepBatch, kind: Rows) -> Adapted {
        self.order.clear();
        self.order.extend(batch.adapted(kind).map(|(row, adapter)| (adapter - 1, row)));
        self.order.sort_unstable();
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|&(_, row)| row));
        self.tiles.clear();
        self.tiles.push(0);
        let mut first = 0;
        for same in self.order.chunk_by(|a, b| a.0 == b.0) {
            for rows in same.chunks(LORA_ROWS as usize) {
                self.tiles.extend([rows[0].0, 0, first, rows.len() as u32]);
                first += rows.len() as u32;
                self.tiles[0] += 1;
            }
        }
        Adapted { rows: self.rows.len(), tiles: self.tiles[0] as usize }
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::testing::TestRng;

    use super::*;

    #[test]
    fn rows_of_one_adapter_are_together() {
        let batch = StepBatch {
            token_ids: vec![0; 14],
            query_start: vec![0, 1, 11, 12, 14],
            seq_lens: vec![1, 10, 1, 2],
            sampled_rows: vec![0, 10, 11, 13],
            adapters: vec![1, 3, 0, 1],
            ..StepBatch::default()
        };
        let mut divided = AdaptedRows::default();
        assert_eq!(divided.divide(&batch, Rows::Tokens), Adapted { rows: 13, tiles: 3 });
        assert_eq!(divided.tiles, [3, 0, 0, 0, 3, 2, 0, 3, 8, 2, 0, 11, 2]);
        assert_eq!(divided.rows, [0, 12, 13, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(divided.divide(&batch, Rows::Sampled), Adapted { rows: 3, tiles: 2 });
        assert_eq!((divided.tiles, divided.rows), (vec![2, 0, 0, 0, 2, 2, 0, 2, 1], vec![0, 3, 1]));
        let none = AdaptedRows::default().divide(&StepBatch { adapters: vec![], ..batch }, Rows::Tokens);
        assert_eq!((none, none.tile_words()), (Adapted::default(), 0));
    }

    #[test]
    fn there_is_room_for_every_division() {
        let mut rng = TestRng(3);
        for _ in 0..200 {
            let (sequences, slots) = (1 + rng.below(60), 1 + rng.below(9));
            let batch = StepBatch {
                token_ids: vec![0; sequences],
                query_start: (0..=sequences as u32).collect(),
                seq_lens: vec![1; sequences],
                adapters: (0..sequences).map(|_| rng.below(slots + 1) as u32).collect(),
                ..StepBatch::default()
            };
            let found = AdaptedRows::default().divide(&batch, Rows::Tokens);
            assert!(found.tiles <= most_tiles(sequences, slots), "{sequences} rows, {slots} slots: {found:?}");
        }
    }
}
