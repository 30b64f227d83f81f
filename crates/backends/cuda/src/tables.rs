//! The block tables on the device, which stay from step to step.

use std::sync::Arc;

use octavo_kernels::params::TableRunsParams;
use octavo_ops::{BackendError, StepBatch};

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

/// The block tables of a program. The sequences of a step are compared with what the device has, so a decode step sends an
/// entry for each sequence that begins a block, whatever the length of the contexts.
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
        self.known.compare(batch);
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
    /// Runs of new entries: first entry, first one of the values, number.
    runs: Vec<u32>,
    values: Vec<u32>,
}

impl Known {
    fn new(groups: usize, seats: usize, stride: usize) -> Self {
        Self { seats, stride, entries: vec![Vec::new(); groups * seats], ..Self::default() }
    }

    /// Finds the entries that the tables of a step's sequences change. They count as known from then on.
    fn compare(&mut self, batch: &StepBatch) {
        self.runs.clear();
        self.values.clear();
        for group in 0..batch.block_tables.len() {
            let tables = batch.tables(group);
            for (sequence, &seat) in batch.seats.iter().enumerate() {
                let table = tables.row(sequence);
                let table = &table[..table.len().min(self.stride)];
                let number = group * self.seats + seat as usize;
                let known = &mut self.entries[number];
                // Most tables grow at their end or not at all.
                let same = match known.len() <= table.len() && *known == table[..known.len()] {
                    true => known.len(),
                    false => known.iter().zip(table).take_while(|(a, b)| a == b).count(),
                };
                if same < table.len() {
                    let new = &table[same..];
                    let first = number * self.stride + same;
                    self.runs.extend([first as u32, self.values.len() as u32, new.len() as u32]);
                    self.values.extend_from_slice(new);
                    known.truncate(same);
                    known.extend_from_slice(new);
                }
            }
        }
    }

    /// Forgets what is known, after entries that may not have reached the device.
    fn forget(&mut self) {
        self.entries.iter_mut().for_each(Vec::clear);
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
            known.compare(&batch(tables, seats));
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
        known.compare(&batch(&tables, &[0]));
        assert_eq!((&known.runs[..], &known.values[..]), (&[0, 0, 2][..], &[1, 2][..]));
        known.compare(&batch(&tables, &[0]));
        assert!(known.runs.is_empty());
        known.forget();
        known.compare(&batch(&tables, &[0]));
        assert_eq!(known.values, [1, 2]);
    }
}
