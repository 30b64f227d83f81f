//! The rows of tokens and experts that have adapters.

use std::cell::RefCell;

use super::{ROWS, Tile};
use crate::experts::Threads;
use crate::memory::{Lines, Shared};

/// Number of words that describe a tile: its slot, its expert, its first place in the rows and its number of rows.
const WORDS: usize = 4;

thread_local! {
    /// Adapters, rows and tokens of an expert, while they are divided into tiles.
    static ORDER: RefCell<Vec<(u32, u32, u32)>> = RefCell::default();
}

/// Memory for the tiles of rows in the order of experts.
#[derive(Default)]
pub(super) struct RoutedRows {
    /// The number of tiles, and [`WORDS`] for each.
    tiles: Lines<u32>,
    /// Row and token, tile by tile.
    rows: Lines<u32>,
    shared: Option<(Shared<u32>, Shared<u32>)>,
}

/// Access to the tiles for the threads of a region.
#[derive(Clone, Copy)]
pub(super) struct RoutedTiles {
    tiles: Shared<u32>,
    rows: Shared<u32>,
    /// Whether the inputs are the rows of tokens.
    by_token: bool,
}

impl RoutedRows {
    /// Forgets what there was room for.
    pub(super) fn clear(&mut self) {
        self.shared = None;
    }

    /// Makes room for `rows` rows that have `kinds` pairs of adapter and expert at most. Returns the largest number of tiles.
    pub(super) fn reserve(&mut self, rows: usize, kinds: usize) -> usize {
        let tiles = rows.min(rows / ROWS + kinds);
        self.tiles.reserve_zeroed(1 + WORDS * tiles);
        self.rows.reserve_zeroed(2 * rows);
        self.shared = Some((Shared::new(&mut self.tiles), Shared::new(&mut self.rows)));
        tiles
    }

    pub(super) fn tiles(&self, by_token: bool) -> RoutedTiles {
        let (tiles, rows) = self.shared.unwrap_or_else(|| unreachable!("room was made for the tiles"));
        RoutedTiles { tiles, rows, by_token }
    }

    /// Divides the rows, if room was made for them. `adapters` has 1 + the slot of each token's adapter, or 0.
    ///
    /// # Safety
    /// The rows must be sorted, and no other thread may use the tiles during the call.
    pub(super) unsafe fn divide(&self, routing: &Threads, adapters: &[u32]) {
        let Some((tiles, rows)) = self.shared else { return };
        let (mut found, mut first) = (0, 0);
        // SAFETY: the caller guarantees this, here and below.
        let groups = unsafe { routing.groups() };
        ORDER.with_borrow_mut(|order| {
            for group in 0..groups {
                order.clear();
                // SAFETY: as above.
                let group = unsafe { routing.group(group) };
                for row in group.rows {
                    // SAFETY: as above.
                    let token = unsafe { routing.token(row) };
                    if adapters[token] > 0 {
                        order.push((adapters[token], row as u32, token as u32));
                    }
                }
                order.sort_unstable();
                for tile in order.chunk_by(|a, b| a.0 == b.0).flat_map(|same| same.chunks(ROWS)) {
                    let words = [tile[0].0 - 1, group.expert as u32, first as u32, tile.len() as u32];
                    // SAFETY: as above.
                    unsafe { tiles.part(1 + WORDS * found, WORDS).copy_from_slice(&words) };
                    for &(_, row, token) in tile {
                        // SAFETY: as above.
                        unsafe { rows.part(2 * first, 2).copy_from_slice(&[row, token]) };
                        first += 1;
                    }
                    found += 1;
                }
            }
        });
        // SAFETY: as above.
        unsafe { tiles.part(0, 1)[0] = found as u32 };
    }
}

impl RoutedTiles {
    /// # Safety
    /// The rows must be divided, and no thread may divide them during the call.
    pub(super) unsafe fn len(&self) -> usize {
        // SAFETY: the caller guarantees this.
        unsafe { self.tiles.view(0, 1)[0] as usize }
    }

    /// # Safety
    /// The conditions of `len` apply.
    pub(super) unsafe fn get(&self, index: usize) -> Tile {
        // SAFETY: the caller guarantees this.
        let (words, pairs) = unsafe {
            let words = self.tiles.view(1 + WORDS * index, WORDS);
            (words, self.rows.view(2 * words[2] as usize, 2 * words[3] as usize))
        };
        let count = words[3] as usize;
        // The rows after the last are computed and not used.
        let of = |kind: usize| std::array::from_fn(|row: usize| pairs[2 * row.min(count - 1) + kind] as usize);
        let rows = of(0);
        let sources = if self.by_token { of(1) } else { rows };
        Tile { index, slot: words[0] as usize, expert: words[1] as usize, rows, sources, count }
    }
}
