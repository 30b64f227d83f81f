//! The rows of the media cache.

use std::ops::Range;

/// Free rows of the media cache, as maximal runs in ascending order.
#[derive(Debug)]
pub(super) struct FreeRows {
    runs: Vec<Range<u32>>,
    free: usize,
}

impl FreeRows {
    pub(super) fn new(rows: usize) -> Self {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        let runs = (rows > 0).then_some(0..rows).into_iter().collect();
        Self { runs, free: rows as usize }
    }

    /// Returns the number of free rows.
    pub(super) fn len(&self) -> usize {
        self.free
    }

    /// Takes `rows` rows in as few runs as the lowest free ones allow. Takes nothing if too few are free.
    pub(super) fn take(&mut self, rows: usize) -> Option<Vec<Range<u32>>> {
        if rows > self.free {
            return None;
        }
        // A run that is long enough keeps the image in one piece.
        if let Some(run) = self.runs.iter_mut().find(|run| run.len() >= rows) {
            let taken = run.start..run.start + rows as u32;
            run.start = taken.end;
            self.runs.retain(|run| !run.is_empty());
            self.free -= rows;
            return Some(Vec::from([taken]));
        }
        let mut taken = Vec::new();
        let mut missing = rows;
        while missing > 0 {
            let run = self.runs.first_mut()?;
            let part = run.start..run.start + missing.min(run.len()) as u32;
            run.start = part.end;
            if run.start == run.end {
                self.runs.remove(0);
            }
            missing -= part.len();
            taken.push(part);
        }
        self.free -= rows;
        Some(taken)
    }

    /// Gives rows back.
    pub(super) fn give_back(&mut self, runs: &[Range<u32>]) {
        for run in runs.iter().filter(|run| !run.is_empty()) {
            let at = self.runs.partition_point(|other| other.start < run.start);
            self.free += run.len();
            self.runs.insert(at, run.clone());
        }
        self.runs.dedup_by(|next, run| {
            debug_assert!(run.end <= next.start, "rows were given back twice");
            let adjacent = run.end == next.start;
            if adjacent {
                run.end = next.end;
            }
            adjacent
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_are_taken_once_and_all_come_back(
            total in 0..60usize,
            acts in prop::collection::vec((0..20usize, any::<bool>()), 0..60),
        ) {
            let mut rows = FreeRows::new(total);
            let mut held: Vec<Vec<Range<u32>>> = Vec::new();
            for (number, back) in acts {
                if back && !held.is_empty() {
                    rows.give_back(&held.swap_remove(number % held.len()));
                } else {
                    let free = rows.len();
                    let taken = rows.take(number);
                    prop_assert_eq!(taken.is_some(), number <= free);
                    if let Some(taken) = taken {
                        prop_assert_eq!(taken.iter().map(|run| run.len()).sum::<usize>(), number);
                        held.push(taken);
                    }
                }
                let mut seen: Vec<u32> = held.iter().flatten().chain(&rows.runs).cloned().flatten().collect();
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..total as u32).collect::<Vec<_>>());
                prop_assert!(rows.runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
            held.iter().for_each(|taken| rows.give_back(taken));
            prop_assert_eq!(rows.runs.len(), usize::from(total > 0));
        }
    }
}
