//! The counts of penalties on the device, which stay from step to step.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use octavo_kernels::params::TableRunsParams;
use octavo_ops::BackendError;
use octavo_ops::sampling::{CountsId, SampleRow, TokenCounts};

use crate::build::KernelId;
use crate::driver::Gpu;
use crate::forward::Machine;
use crate::layout::Limits;
use crate::staged::Staged;

/// Largest number of tokens of a sequence that are counted on the device. Texts of 32k tokens have about 5,000 that differ.
const MOST: usize = 8192;

/// Number of rows for whose counts there is room beside those of the seats.
const SPARE: usize = 64;

/// Number of words of changes for each seat: two tokens, each with two runs of a value.
const CHANGED: usize = 16;

/// Sizes of the counts. They are two arrays, tokens and how often each was generated, with `room` entries for each seat, then
/// entries for rows that are sent whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountsRoom {
    vocab: usize,
    seats: usize,
    room: usize,
    spare: usize,
}

impl CountsRoom {
    pub(crate) fn new(vocab: usize, limits: &Limits) -> Self {
        // A program without rows samples nothing.
        let room = if limits.rows == 0 { 0 } else { vocab.min(limits.positions).min(MOST) };
        Self { vocab, seats: limits.sequences, room, spare: limits.rows.min(SPARE) * room }
    }

    /// Returns the number of entries.
    fn entries(&self) -> usize {
        self.seats * self.room + self.spare
    }

    /// Returns the number of words of both arrays.
    pub(crate) fn words(&self) -> usize {
        2 * self.entries()
    }

    /// Returns the number of words of changes that are sent at once. There is room for all counts of a row.
    pub(crate) fn change_words(&self) -> usize {
        if self.room == 0 { 0 } else { self.seats * CHANGED + 2 * (self.room + 3) }
    }
}

/// What the device has of a seat.
#[derive(Debug, Default)]
struct Known {
    /// Counts that they are a part of.
    of: CountsId,
    /// Number of generated tokens that are counted.
    generated: usize,
    /// Entry of each token.
    entries: HashMap<u32, u32>,
    /// Token of each entry, and how often it was generated.
    counted: Vec<(u32, u32)>,
    /// Step that used it last.
    step: u64,
}

/// Runs of words to be written on the device.
#[derive(Debug, Default)]
struct Changes {
    runs: Vec<u32>,
    values: Vec<u32>,
}

impl Changes {
    fn words(&self) -> usize {
        self.runs.len() + self.values.len()
    }

    fn add(&mut self, first: usize, values: impl IntoIterator<Item = u32>) {
        let start = self.values.len();
        self.values.extend(values);
        let count = self.values.len() - start;
        if count > 0 {
            self.runs.extend([first as u32, start as u32, count as u32]);
        }
    }
}

/// The counts of penalties. A seat's are sent when its sequence draws for the first time, and then each token once the host
/// knows it, so the work of a step does not depend on the lengths of texts.
pub(crate) struct Counts {
    /// Address of the first array.
    address: u64,
    /// Address to which changes are copied.
    changes_at: u64,
    kernel: Option<KernelId>,
    staged: [Staged; 2],
    lists: Lists,
}

/// The part of [`Counts`] that needs no device.
#[derive(Debug)]
struct Lists {
    room: CountsRoom,
    known: Vec<Known>,
    step: u64,
    /// Entries of rows that are sent whole in this step.
    spare: usize,
    /// Changes of the step, each no larger than what is sent at once.
    changes: Vec<Changes>,
    /// Buffer: the entries that a row changes.
    touched: Vec<u32>,
}

impl Counts {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        room: CountsRoom,
        [address, changes_at]: [u64; 2],
        kernel: Option<KernelId>,
    ) -> Result<Self, BackendError> {
        let words = room.change_words();
        let staged = [Staged::new(gpu, words)?, Staged::new(gpu, words)?];
        Ok(Self { address, changes_at, kernel, staged, lists: Lists::new(room) })
    }

    /// Returns the addresses of tokens and of how often each was generated.
    pub(crate) fn arrays(&self) -> [u64; 2] {
        [self.address, self.address + (self.lists.room.entries() * size_of::<u32>()) as u64]
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self) {
        self.lists.begin();
    }

    /// Returns the entries of a row, which the device has once the changes are sent; `None` if there is no room.
    pub(crate) fn place(&mut self, row: &SampleRow<'_>) -> Option<Range<u32>> {
        match row.counts.filter(|_| row.params.needs_counts()) {
            Some(counts) => self.lists.place(row.seat, counts),
            None => Some(0..0),
        }
    }

    /// Writes the changes of the step on the device.
    pub(crate) fn send(&mut self, machine: &Machine) -> Result<(), BackendError> {
        for at in 0..self.lists.changes.len() {
            let sent = self.send_part(machine, at);
            if sent.is_err() {
                self.lists.forget();
                return sent;
            }
        }
        Ok(())
    }

    fn send_part(&mut self, machine: &Machine, at: usize) -> Result<(), BackendError> {
        let Changes { runs, values } = &self.lists.changes[at];
        let Some(kernel) = self.kernel.filter(|_| !runs.is_empty()) else { return Ok(()) };
        self.staged.reverse();
        let words = runs.len() + values.len();
        self.staged[0].send(self.changes_at, words, |out| {
            let (first, second) = out.split_at_mut(runs.len());
            first.copy_from_slice(runs);
            second.copy_from_slice(values);
            words
        })?;
        let params = TableRunsParams {
            tables: self.address,
            runs: self.changes_at,
            values: self.changes_at + size_of_val(&runs[..]) as u64,
            count: runs.len() as u32 / 3,
            reserved: 0,
        };
        machine.launch(kernel, params.grid(), &params)
    }
}

impl Lists {
    fn new(room: CountsRoom) -> Self {
        let known = (0..room.seats).map(|_| Known::default()).collect();
        Self { room, known, step: 0, spare: 0, changes: Vec::new(), touched: Vec::new() }
    }

    fn begin(&mut self) {
        self.step += 1;
        self.spare = 0;
        self.changes.truncate(1);
        for Changes { runs, values } in &mut self.changes {
            runs.clear();
            values.clear();
        }
    }

    /// Returns the changes to which a number of words can be added.
    fn changes(&mut self, words: usize) -> &mut Changes {
        let most = self.room.change_words();
        if self.changes.last().is_none_or(|last| last.words() + words > most) {
            self.changes.push(Changes::default());
        }
        let last = self.changes.len() - 1;
        &mut self.changes[last]
    }

    fn place(&mut self, seat: u32, counts: &TokenCounts) -> Option<Range<u32>> {
        let first = seat as usize * self.room.room;
        let range = |first: usize, len: usize| Some(first as u32..(first + len) as u32);
        // Another row of the step has the seat's entries, if it verifies a draft.
        let taken = self.known.get(seat as usize).is_none_or(|known| known.step == self.step);
        if taken {
            let len =
                self.whole(self.room.seats * self.room.room + self.spare, self.room.spare - self.spare, counts)?;
            self.spare += len;
            return range(self.room.seats * self.room.room + self.spare - len, len);
        }
        let known = &self.known[seat as usize];
        let same = counts.id() != CountsId::default() && known.of == counts.id();
        let len = match counts.generated().get(known.generated..) {
            Some(new) if same => self.append(seat as usize, new)?,
            _ => self.load(seat as usize, counts)?,
        };
        let (known, generated) = (&mut self.known[seat as usize], counts.generated().len());
        (known.of, known.generated, known.step) = (counts.id(), generated, self.step);
        range(first, len)
    }

    /// Sends all counts of a row to the entries from `first` on. Returns their number, or `None` if it is more than `room`.
    fn whole(&mut self, first: usize, room: usize, counts: &TokenCounts) -> Option<usize> {
        let (vocab, most, second) = (self.room.vocab, self.room.room, self.room.entries());
        let all = || listed(counts, vocab);
        let len = all().count();
        if len > room.min(most) {
            return None;
        }
        let changes = self.changes(2 * (len + 3));
        changes.add(first, all().map(|(id, _)| id));
        changes.add(second + first, all().map(|(_, times)| times));
        Some(len)
    }

    /// Sends all counts of a seat.
    fn load(&mut self, seat: usize, counts: &TokenCounts) -> Option<usize> {
        self.known[seat].of = CountsId::default();
        let len = self.whole(seat * self.room.room, self.room.room, counts)?;
        let (known, vocab) = (&mut self.known[seat], self.room.vocab);
        known.counted.clear();
        known.counted.extend(listed(counts, vocab));
        known.entries.clear();
        known.entries.extend(known.counted.iter().map(|(id, _)| *id).zip(0..));
        Some(len)
    }

    /// Sends what generated tokens change in a seat's counts.
    fn append(&mut self, seat: usize, new: &[u32]) -> Option<usize> {
        let (room, second) = (self.room.room, self.room.entries());
        let (known, vocab) = (&mut self.known[seat], self.room.vocab);
        let before = known.counted.len() as u32;
        self.touched.clear();
        for &id in new.iter().filter(|&&id| (id as usize) < vocab) {
            let entry = *known.entries.entry(id).or_insert(known.counted.len() as u32);
            if entry as usize == known.counted.len() {
                known.counted.push((id, 0));
            }
            known.counted[entry as usize].1 += 1;
            self.touched.push(entry);
        }
        let len = known.counted.len();
        if len > room {
            known.of = CountsId::default();
            return None;
        }
        self.touched.sort_unstable();
        self.touched.dedup();
        let touched = std::mem::take(&mut self.touched);
        for &entry in &touched {
            let at = seat * room + entry as usize;
            let (id, times) = self.known[seat].counted[entry as usize];
            let changes = self.changes(8);
            changes.add(second + at, [times]);
            if entry >= before {
                changes.add(at, [id]);
            }
        }
        self.touched = touched;
        Some(len)
    }

    /// Forgets what is known, after entries that may not have reached the device.
    fn forget(&mut self) {
        self.known.iter_mut().for_each(|known| known.of = CountsId::default());
    }
}

/// Returns the tokens of output and prompt, each once, with the number of times that it was generated.
fn listed(counts: &TokenCounts, vocab: usize) -> impl Iterator<Item = (u32, u32)> {
    let prompt = counts.prompt.iter().filter(|id| counts.output.binary_search_by_key(*id, |(id, _)| *id).is_err());
    let all = counts.output.iter().copied().chain(prompt.map(|&id| (id, 0)));
    all.filter(move |(id, _)| (*id as usize) < vocab)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: CountsRoom = CountsRoom { vocab: 40, seats: 2, room: 6, spare: 6 };

    /// The words of the device, as the changes leave them.
    struct Device(Vec<u32>);

    impl Device {
        fn apply(&mut self, lists: &Lists) {
            for Changes { runs, values } in &lists.changes {
                assert!(runs.len() + values.len() <= lists.room.change_words());
                for run in runs.chunks_exact(3) {
                    let [first, start, count] = [run[0], run[1], run[2]].map(|word| word as usize);
                    self.0[first..first + count].copy_from_slice(&values[start..start + count]);
                }
            }
        }

        fn counts(&self, range: Range<u32>) -> Vec<(u32, u32)> {
            let second = ROOM.entries() as u32;
            let mut found: Vec<_> = range.map(|at| (self.0[at as usize], self.0[(second + at) as usize])).collect();
            found.sort_unstable();
            found
        }
    }

    fn expected(counts: &TokenCounts) -> Vec<(u32, u32)> {
        let mut all: Vec<_> = listed(counts, ROOM.vocab).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_step_sends_the_tokens_that_are_new() {
        let (mut lists, mut device) = (Lists::new(ROOM), Device(vec![77; ROOM.words()]));
        let mut counts = TokenCounts::new(&[1, 4, 99], &[2, 2]);
        let mut sent = Vec::new();
        for tokens in [&[][..], &[4], &[], &[7, 7], &[2, 7, 99]] {
            tokens.iter().for_each(|&token| counts.push(token));
            lists.begin();
            let range = lists.place(1, &counts).unwrap();
            device.apply(&lists);
            assert_eq!(device.counts(range), expected(&counts));
            sent.push(lists.changes.iter().map(|changes| changes.values.len()).sum::<usize>());
        }
        assert_eq!(sent, [6, 1, 0, 2, 2]);
    }

    #[test]
    fn what_a_step_sends_does_not_depend_on_the_length_of_the_text() {
        let room = CountsRoom { vocab: 9000, seats: 1, room: 8192, spare: 0 };
        for length in [10, 1000, 8000] {
            let output: Vec<u32> = (0..length).collect();
            let (mut lists, mut counts) = (Lists::new(room), TokenCounts::new(&[], &output));
            lists.begin();
            lists.place(0, &counts).unwrap();
            for token in 0..3 {
                counts.push(token);
                lists.begin();
                lists.place(0, &counts).unwrap();
                assert_eq!(lists.changes[0].words(), 4, "{length} tokens");
            }
        }
    }

    #[test]
    fn sequences_that_take_a_seat_and_rows_with_drafts_are_sent_whole() {
        let (mut lists, mut device) = (Lists::new(ROOM), Device(vec![77; ROOM.words()]));
        let [first, second] = [TokenCounts::new(&[1], &[2]), TokenCounts::new(&[3, 5], &[])];
        let drafts = [second.with(3), second.with(3).with(8)];
        let mut places = Vec::new();
        for rows in [vec![(0, &first)], vec![(0, &second), (0, &drafts[0]), (0, &drafts[1])], vec![(0, &second)]] {
            lists.begin();
            let ranges: Vec<_> = rows.iter().map(|(seat, counts)| lists.place(*seat, counts).unwrap()).collect();
            device.apply(&lists);
            for ((_, counts), range) in rows.iter().zip(&ranges) {
                assert_eq!(device.counts(range.clone()), expected(counts));
            }
            places.push((ranges, lists.changes.iter().map(Changes::words).sum::<usize>()));
        }
        assert_eq!(places[1].0, [0..2, 12..14, 14..17]);
        assert_eq!(places[2].1, 0, "drafts are not counted");
    }

    #[test]
    fn without_room_there_is_no_place() {
        let mut lists = Lists::new(ROOM);
        let large = TokenCounts::new(&[1, 2, 3, 4, 5, 6, 7], &[]);
        let mut grown = TokenCounts::new(&[1, 2, 3, 4, 5], &[]);
        lists.begin();
        assert_eq!((lists.place(0, &large), lists.place(1, &grown)), (None, Some(6..11)));
        assert_eq!((lists.place(1, &grown), lists.place(1, &grown)), (Some(12..17), None));
        grown.push(6);
        grown.push(7);
        lists.begin();
        assert_eq!(lists.place(1, &grown), None);
        // The seat is sent again to the next one that fits.
        lists.begin();
        assert_eq!(lists.place(1, &TokenCounts::new(&[1], &[])), Some(6..7));
        lists.forget();
        lists.begin();
        assert_eq!(lists.place(7, &TokenCounts::new(&[1], &[])), Some(12..13), "a seat that does not exist");
    }
}
