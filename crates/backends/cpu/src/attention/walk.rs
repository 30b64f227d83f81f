//! The loop over the keys of a block of rows.

/// Distance of the prefetched keys from the keys that are read, in blocks.
pub(super) const AHEAD: usize = 2;

/// Number of rows up to which memory limits the speed, as in decoding.
pub(super) const FEW_ROWS: usize = 4;

/// The loop over a block's keys, which is the same for f32 and bf16 and for every width of registers: `$score` processes
/// `$blocks` blocks of keys, or fewer at the end, `$weigh` the weights of all rows, `$narrow` those of a row, `$gather` values of a tile
/// of keys, from a key on. It is a macro because the compiler does not always inline closures that hold registers.
macro_rules! walk {
    ($isa:expr, $block:ident, $rows:ident, $blocks:expr, $score:expr, $weigh:expr, $narrow:expr, $gather:expr) => {{
        let Block { mut keys, sees, starts, softcap, weights, narrow_weights, out, partial, .. } = $block;
        let count = sees.len();
        // Rows that do not exist repeat the first.
        let sees: [(usize, usize); $rows] = std::array::from_fn(|r| sees[if r < count { r } else { 0 }]);
        let first = sees.iter().map(|see| see.0).min().unwrap_or(0);
        let last = sees.iter().map(|see| see.1).max().unwrap_or(0);
        debug_assert!(last < keys.len, "rows see keys that exist");
        let mut running: [Running; $rows] = std::array::from_fn(|r| starts[if r < count { r } else { 0 }]);
        out.fill(0.0);
        for tile in first / KEYS..=last / KEYS {
            let blocks = tile * (KEYS / BLOCK)..((tile + 1) * (KEYS / BLOCK)).min(last / BLOCK + 1);
            keys.enter($isa, blocks.clone());
            let (mut tile_keys, mut values): ([&[u32]; KEYS / BLOCK], [&[u32]; KEYS / BLOCK]) = Default::default();
            for ((tile_keys, values), block) in tile_keys.iter_mut().zip(&mut values).zip(blocks.clone()) {
                (*tile_keys, *values) = keys.block(block);
            }
            let tile_keys = &tile_keys[..blocks.len()];
            for (index, some) in tile_keys.chunks($blocks).enumerate() {
                let (at, next) = (index * $blocks, index * $blocks + $crate::attention::walk::AHEAD);
                let mut ahead = (some[0], values[at]);
                if $rows <= $crate::attention::walk::FEW_ROWS {
                    let later = || keys.block((blocks.start + next).min(last / BLOCK)).0;
                    // Values are needed after all keys of the tile.
                    ahead.0 = tile_keys.get(next).copied().unwrap_or_else(later);
                }
                $score(some, ahead, &mut *weights, at * BLOCK);
            }
            let len = blocks.len() * BLOCK;
            for r in 0..$rows {
                let scores = &mut weights[r][..len];
                if let Some((scales, _)) = keys.scales() {
                    $isa.multiply(scores, scales);
                }
                if let Some(cap) = softcap {
                    $isa.softcap(scores, cap);
                }
                visible(scores, tile * KEYS, sees[r]);
            }
            let fades: [f32; $rows] = $weigh(&mut *weights, len, &mut running);
            for r in 0..$rows {
                let scores = &mut weights[r][..len];
                if let Some((_, scales)) = keys.scales() {
                    $isa.multiply(scores, scales);
                }
                $narrow(&*scores, &mut narrow_weights[r]);
            }
            // Only the last block of a sequence may not be full.
            values[blocks.len() - 1] = whole(&keys, blocks.end - 1, partial);
            // With few rows, values come from memory, which is read in sequence.
            let at_once = if $rows <= $crate::attention::walk::FEW_ROWS { 1 } else { KEYS / BLOCK };
            for (index, values) in values[..blocks.len()].chunks(at_once).enumerate() {
                if at_once == 1 {
                    // Kernels that prefetch values do so while scores are computed, so memory has little else to do here.
                    keys.prefetch(blocks.start + index + KEYS / BLOCK, last / BLOCK);
                }
                let (at, fades) = (index * at_once * BLOCK, if index == 0 { fades } else { [1.0; $rows] });
                $gather(values, &*weights, &*narrow_weights, at, &fades, count, &mut *out);
            }
        }
        let width = out.len() / count;
        for (out, running) in out.chunks_mut(width).zip(&running) {
            $isa.scale(out, 1.0 / running.sum);
        }
    }};
}

/// Returns a function that converts a tile's scores to weights, row by row, and returns the factors for the values accumulated
/// before.
macro_rules! each_row {
    ($weigh:path, $rows:ident) => {
        |weights: &mut [[f32; KEYS]; ROWS], len: usize, running: &mut [Running; $rows]| {
            let mut fades = [0.0; $rows];
            for r in 0..$rows {
                fades[r] = $weigh(&mut weights[r][..len], &mut running[r]);
            }
            fades
        }
    };
}

/// Calls a kernel for the number of rows of a block, which is at most `$most`. Between six and that, it is called for the numbers that
/// are given, with the counts of rows for which it is.
macro_rules! by_rows {
    ($rows:ident, $block:ident, $most:expr $(, $counts:pat => $some:literal)*) => {
        match $block.sees.len() {
            1 => $rows::<1>($block),
            2 => $rows::<2>($block),
            3 => $rows::<3>($block),
            4 => $rows::<4>($block),
            5 | 6 => $rows::<6>($block),
            $($counts => $rows::<$some>($block),)*
            _ => $rows::<{ $most }>($block),
        }
    };
}

/// Returns the queries of `R` rows, of which `count` exist. Rows that do not exist repeat the first.
pub(super) fn queries<T, const R: usize>(q: &[T], count: usize) -> [&[T]; R] {
    let width = q.len() / count;
    std::array::from_fn(|r| &q[if r < count { r } else { 0 } * width..][..width])
}

pub(super) use {by_rows, each_row, walk};
