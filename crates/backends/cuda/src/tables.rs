//! The block tables on the device, which stay from step to step.

use std::ops::Range;
use std::sync::Arc;

use octavo_kernels::params::TableRunsParams;
use octavo_ops::{BackendError, StepBatch, TableRevision};

use crate::build::KernelId;
use crate::driver::Gpu;
use crate::forward::Machine;
use crate::staged::Staged;

/// Location of the block tables on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablesAt {
    /// Address of the first group's.
    pub(crate) address: u64,
    /// Number of seats, and of entries of a table.
    pub(crate) seats: usize,
    pub(crate) stride: usize,
}

impl TablesAt {
    /// Returns the address of a group's tables.
    pub(crate) fn group(&self, group: usize) -> u64 {
        self.address + (group * self.seats * self.stride * size_of::<u32>()) as u64
    }
}

/// The block tables of a program. A step sends the entries that have changed since the device got the table of a sequence, so a
/// decode step looks at an entry for each sequence that begins a block, whatever the length of the contexts.
pub(crate) struct Tables {
    pub(crate) at: TablesAt,
    /// Address to which changes are copied.
    changes: u64,
    kernel: KernelId,
    staged: [Staged; 2],
    known: Known,
}

impl Tables {
    /// Creates the tables of a number of KV groups, of which nothing is known.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        groups: usize,
        at: TablesAt,
        changes: u64,
        kernel: KernelId,
    ) -> Result<Self, BackendError> {
        let words = change_words(groups, at.seats, at.stride);
        let staged = [Staged::new(gpu, words)?, Staged::new(gpu, words)?];
        Ok(Self { at, changes, kernel, staged, known: Known::new(groups, at.seats, at.stride) })
    }

    /// Writes what the tables of a step's sequences change, if anything. It is no part of a recorded step, in which the
    /// number of entries would be fixed.
    pub(crate) fn update(&mut self, machine: &Machine, batch: &StepBatch) -> Result<(), BackendError> {
        self.known.update(batch);
        let updated = self.send(machine);
        if updated.is_err() {
            self.known.forget();
        }
        updated
    }

    fn send(&mut self, machine: &Machine) -> Result<(), BackendError> {
        let Known { runs, values, .. } = &self.known;
        if runs.is_empty() {
            return Ok(());
        }
        self.staged.reverse();
        self.staged[0].send(self.changes, runs.len() + values.len(), |out| {
            let (first, second) = out.split_at_mut(runs.len());
            first.copy_from_slice(runs);
            second.copy_from_slice(values);
            runs.len() + values.len()
        })?;
        let params = TableRunsParams {
            tables: self.at.address,
            runs: self.changes,
            values: self.changes + size_of_val(&runs[..]) as u64,
            count: runs.len() as u32 / 3,
            reserved: 0,
        };
        machine.launch(self.kernel, params.grid(), &params)
    }
}

/// Returns the largest number of words of the changes of a step.
pub(crate) const fn change_words(groups: usize, seats: usize, stride: usize) -> usize {
    groups * seats * (3 + stride)
}

/// The entries that the device has, by KV group and seat, and those that a step changes.
#[derive(Debug, Default)]
struct Known {
    seats: usize,
    stride: usize,
    entries: Vec<Vec<u32>>,
    /// Revision of each table.
    revisions: Vec<TableRevision>,
    /// Number of entries that were looked at.
    looked_at: usize,
    /// Runs of new entries: first entry, first one of the values, number.
    runs: Vec<u32>,
    values: Vec<u32>,
}

impl Known {
    fn new(groups: usize, seats: usize, stride: usize) -> Self {
        let tables = groups * seats;
        let (entries, revisions) = (vec![Vec::new(); tables], vec![TableRevision::default(); tables]);
        Self { seats, stride, entries, revisions, ..Self::default() }
    }

    /// Finds the entries that the tables of a step's sequences change. They count as known from then on.
    fn update(&mut self, batch: &StepBatch) {
        self.runs.clear();
        self.values.clear();
        for (group, tables) in batch.block_tables.iter().enumerate() {
            for &seat in &batch.seats {
                let number = group * self.seats + seat as usize;
                let table = tables.get(seat);
                let table = &table[..table.len().min(self.stride)];
                let since = std::mem::replace(&mut self.revisions[number], tables.revision(seat));
                let known = self.entries[number].len();
                let changed = tables.changed_since(seat, since).filter(|changed| changed.start <= known);
                let changed = changed.unwrap_or_else(|| self.compare(number, table));
                self.add(number, changed, table);
            }
        }
    }

    /// Returns the entries of a table that are not known.
    fn compare(&mut self, number: usize, table: &[u32]) -> Range<usize> {
        let same = self.entries[number].iter().zip(table).take_while(|(known, entry)| known == entry).count();
        self.looked_at += table.len();
        same..table.len()
    }

    /// Adds entries of a table to those that are sent.
    fn add(&mut self, number: usize, changed: Range<usize>, table: &[u32]) {
        let changed = changed.start..changed.end.min(table.len());
        let known = &mut self.entries[number];
        let Some(new) = table.get(changed.clone()).filter(|new| !new.is_empty()) else { return };
        self.looked_at += new.len();
        let first = number * self.stride + changed.start;
        self.runs.extend([first as u32, self.values.len() as u32, new.len() as u32]);
        self.values.extend_from_slice(new);
        known.resize(known.len().max(changed.end), 0);
        known[changed].copy_from_slice(new);
    }

    /// Forgets what is known, after entries that may not have reached the device.
    fn forget(&mut self) {
        self.entries.iter_mut().for_each(Vec::clear);
        self.revisions.fill(TableRevision::default());
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::BlockTables;

    use super::*;

    fn batch(tables: &BlockTables, seats: &[u32]) -> StepBatch {
        StepBatch {
            block_tables: vec![tables.clone()],
            seq_lens: vec![1; seats.len()],
            seats: seats.to_vec(),
            ..StepBatch::default()
        }
    }

    #[test]
    fn only_new_entries_are_sent() {
        let mut tables: BlockTables = [vec![4, 5, 1], vec![2], vec![9, 3]].into_iter().collect();
        let mut known = Known::new(1, 3, 4);
        let mut changes = |tables: &BlockTables, seats: &[u32]| {
            known.update(&batch(tables, seats));
            (known.runs.clone(), known.values.clone())
        };
        assert_eq!(changes(&tables, &[2, 0]), (vec![8, 0, 2, 0, 2, 3], vec![9, 3, 4, 5, 1]));
        assert_eq!(changes(&tables, &[0, 1, 2]), (vec![4, 0, 1], vec![2]), "the others are known");
        assert_eq!(changes(&tables, &[0, 1, 2]), (vec![], vec![]));
        // One grows, another sequence takes a seat, and a third has its first blocks and fewer.
        assert!(tables.change(0, 3, [7]) && tables.change(1, 0, [6, 8]) && tables.change(2, 1, []));
        assert_eq!(changes(&tables, &[0, 1, 2]), (vec![3, 0, 1, 4, 1, 2], vec![7, 6, 8]));
        assert!(tables.change(2, 1, [5]));
        assert_eq!(changes(&tables, &[2]), (vec![9, 0, 1], vec![5]));
    }

    #[test]
    fn entries_behind_a_table_are_left_out_and_what_is_forgotten_is_sent_again() {
        let tables: BlockTables = [vec![1, 2, 3]].into_iter().collect();
        let mut known = Known::new(1, 1, 2);
        known.update(&batch(&tables, &[0]));
        assert_eq!((&known.runs[..], &known.values[..]), (&[0, 0, 2][..], &[1, 2][..]));
        known.update(&batch(&tables, &[0]));
        assert!(known.runs.is_empty());
        known.forget();
        known.update(&batch(&tables, &[0]));
        assert_eq!(known.values, [1, 2]);
    }

    #[test]
    fn the_work_of_a_decode_step_does_not_depend_on_the_length_of_the_context() {
        let mut works = Vec::new();
        for blocks in [64, 2048, 8192] {
            let mut tables: BlockTables =
                (0..8).map(|seat| (0..blocks).map(|at| 1 + 8 * at + seat).collect()).collect();
            let mut known = Known::new(1, 8, 2 * blocks as usize);
            let seats: Vec<u32> = (0..8).collect();
            known.update(&batch(&tables, &seats));
            let before = known.looked_at;
            for step in 0..16 {
                // Each step, another sequence begins a block.
                assert!(tables.change(step % 8, (blocks + step / 8) as usize, [7]));
                known.update(&batch(&tables, &seats));
                assert_eq!((known.runs.len(), &known.values[..]), (3, &[7][..]));
            }
            works.push(known.looked_at - before);
        }
        assert_eq!(works, [16; 3]);
    }

    #[test]
    fn tables_of_others_and_changes_that_were_missed_are_compared() {
        let first: BlockTables = [vec![1, 2, 3]].into_iter().collect();
        let mut second: BlockTables = [vec![1, 2, 4, 5]].into_iter().collect();
        let mut known = Known::new(1, 1, 8);
        let mut sent = |tables: &BlockTables| {
            known.update(&batch(tables, &[0]));
            (known.runs.clone(), known.values.clone())
        };
        assert_eq!(sent(&first), (vec![0, 0, 3], vec![1, 2, 3]));
        assert_eq!(sent(&second), (vec![2, 0, 2], vec![4, 5]));
        assert_eq!(sent(&first), (vec![2, 0, 1], vec![3]));
        for block in 6..12 {
            assert!(second.change(0, 3, [block]));
        }
        assert!(second.pass(0, 0..1));
        assert_eq!(sent(&second), (vec![0, 0, 4], vec![0, 2, 4, 11]));
        assert!(second.pass(0, 1..2) && second.change(0, 4, [13]));
        assert_eq!(sent(&second), (vec![1, 0, 4], vec![0, 4, 11, 13]));
        assert!(second.change(0, 2, []));
        assert_eq!(sent(&second), (vec![], vec![]));
        assert!(second.change(0, 2, [4]));
        assert_eq!(sent(&second), (vec![2, 0, 1], vec![4]));
    }
}
