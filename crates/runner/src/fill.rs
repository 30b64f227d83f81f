//! Conversion of a [`StepPlan`] into the flat arrays of a [`StepBatch`].

use octavo_engine::{AdapterSlot, InputToken, PassedBlocks, PlannedSequence, Seat, StepPlan, TableChange};
use octavo_models::ImagePositions;
use octavo_ops::{BlockTables, InjectedRow, Program, StepBatch};

/// Tokens sampled by the rows of a step.
#[derive(Debug, Default)]
pub(crate) struct Drawn {
    /// Token ids, if the host has them.
    pub(crate) ids: Vec<u32>,
    /// Number of rows whose tokens are on the device.
    pub(crate) on_device: usize,
}

impl Drawn {
    /// Returns a row's token, or the reference through which the device finds it.
    fn token(&self, row: u32) -> Option<u32> {
        let known = self.ids.get(row as usize).copied();
        known.or_else(|| ((row as usize) < self.on_device).then(|| StepBatch::drawn(row)))
    }
}

/// Sizes of the arrays that a program reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Number of tokens in a block.
    pub(crate) block_size: usize,
    /// Number of KV groups.
    pub(crate) groups: usize,
    /// Number of positions per token.
    pub(crate) streams: usize,
    /// Whether the rows of a sequence are reduced to one.
    pub(crate) reduces_rows: bool,
    /// Whether the program reads the types of tokens.
    pub(crate) has_types: bool,
    /// Whether the tokens of an image see each other.
    pub(crate) has_spans: bool,
    /// Whether adapters add to its products.
    pub(crate) has_sites: bool,
}

impl Shape {
    pub(crate) fn new(program: &Program, block_size: usize) -> Self {
        Self {
            block_size,
            groups: program.kv_groups.len(),
            streams: program.position_streams(),
            reduces_rows: program.reduces_rows(),
            has_types: program.token_types() > 0,
            has_spans: program.has_spans(),
            has_sites: !program.sites.is_empty(),
        }
    }
}

/// The running sequences, as far as a batch depends on them.
pub(crate) trait SeatInputs<'a> {
    /// Returns the positions of the tokens of a seat's sequence, if its prompt has images.
    fn images(&self, seat: Seat) -> Option<&'a ImagePositions>;

    /// Returns the position of the first token of the second text, if a seat's prompt is a pair.
    fn second_text(&self, seat: Seat) -> Option<u32>;

    /// Returns the slot of the adapter of a seat's sequence.
    fn adapter(&self, seat: Seat) -> Option<AdapterSlot>;
}

/// Writes the plan into the batch and reuses its memory. `drawn` are the tokens of the step before.
///
/// The error describes the defect of the plan.
pub(crate) fn fill<'a>(
    batch: &mut StepBatch,
    plan: &StepPlan,
    shape: &Shape,
    drawn: &Drawn,
    seats: &impl SeatInputs<'a>,
) -> Result<(), String> {
    let &Shape { groups, streams, block_size, .. } = shape;
    batch.clear();
    batch.slot_mapping.resize_with(groups, Vec::new);
    batch.block_tables.resize_with(groups, BlockTables::default);
    change_tables(batch, plan)?;
    batch.query_start.push(0);
    for sequence in &plan.sequences {
        push_sequence(batch, plan, sequence, drawn)?;
        if shape.has_types {
            let second = seats.second_text(sequence.seat).unwrap_or(u32::MAX);
            let positions = (sequence.first_position..).take(sequence.tokens.len());
            batch.token_types.extend(positions.map(|position| u32::from(position >= second)));
        }
        if shape.has_sites {
            batch.adapters.push(seats.adapter(sequence.seat).map_or(0, |slot| slot + 1));
        }
        if shape.has_spans {
            push_spans(batch, sequence, seats)?;
        }
        for group in 0..groups {
            push_slots(batch, sequence, group, block_size)?;
        }
    }
    if batch.adapters.iter().all(|adapter| *adapter == 0) {
        batch.adapters.clear();
    }
    if streams > 1 {
        fill_positions(batch, plan, streams, seats);
    }
    push_rows(batch, plan, shape.reduces_rows)
}

/// Replaces the positions by those of all streams. All positions of a token are equal unless its sequence has images.
fn fill_positions<'a>(batch: &mut StepBatch, plan: &StepPlan, streams: usize, seats: &impl SeatInputs<'a>) {
    batch.positions.clear();
    for stream in 0..streams {
        for sequence in &plan.sequences {
            let places = sequence.first_position..sequence.first_position + sequence.tokens.len() as u32;
            match seats.images(sequence.seat) {
                Some(images) => batch.positions.extend(places.map(|place| images.at(place)[stream.min(2)])),
                None => batch.positions.extend(places),
            }
        }
    }
}

/// Appends the place after the last key that each row of a sequence sees.
fn push_spans<'a>(
    batch: &mut StepBatch,
    sequence: &PlannedSequence,
    seats: &impl SeatInputs<'a>,
) -> Result<(), String> {
    let places = sequence.first_position..sequence.first_position + sequence.tokens.len() as u32;
    let Some(images) = seats.images(sequence.seat) else {
        batch.seen_ends.extend(places.map(|place| place + 1));
        return Ok(());
    };
    let end = places.end;
    batch.seen_ends.extend(places.map(|place| images.seen_end(place)));
    match batch.seen_ends.last() {
        Some(&last) if last > end => {
            Err(format!("seat {} has a part of an image, which ends at {last}", sequence.seat))
        }
        _ => Ok(()),
    }
}

/// Appends the rows of a sequence, of which the first is row `start` of the step, that take rows of the media cache.
fn push_injected(
    batch: &mut StepBatch,
    plan: &StepPlan,
    sequence: &PlannedSequence,
    start: usize,
) -> Result<(), String> {
    let runs = plan.injected.get(sequence.injected.clone());
    let runs = runs.ok_or_else(|| format!("seat {} has the images {:?}", sequence.seat, sequence.injected))?;
    for run in runs {
        let offset = run.position.checked_sub(sequence.first_position).map(|offset| offset as usize);
        let offset = offset.filter(|offset| offset + run.media.len() <= sequence.tokens.len());
        let offset = offset.ok_or_else(|| format!("seat {} has an image at {}", sequence.seat, run.position))?;
        let rows = run.media.clone().zip((start + offset) as u32..);
        batch.injected.extend(rows.map(|(media, row)| InjectedRow { row, media }));
    }
    Ok(())
}

fn push_sequence(
    batch: &mut StepBatch,
    plan: &StepPlan,
    sequence: &PlannedSequence,
    drawn: &Drawn,
) -> Result<(), String> {
    let tokens = plan.tokens.get(sequence.tokens.clone()).filter(|tokens| !tokens.is_empty());
    let tokens = tokens.ok_or_else(|| format!("seat {} has the tokens {:?}", sequence.seat, sequence.tokens))?;
    for (token, position) in tokens.iter().zip(sequence.first_position..) {
        let id = match *token {
            InputToken::Id(id) => id,
            InputToken::Drawn { row } => {
                let id = drawn.token(row);
                id.ok_or_else(|| format!("row {row} of the step before was not drawn"))?
            }
        };
        batch.token_ids.push(id);
        batch.positions.push(position);
    }
    push_injected(batch, plan, sequence, batch.token_ids.len() - tokens.len())?;
    batch.query_start.push(batch.token_ids.len() as u32);
    batch.seq_lens.push(sequence.first_position + tokens.len() as u32);
    batch.seats.push(sequence.seat);
    Ok(())
}

/// Appends the rows that give an output, once all sequences are in the batch.
fn push_rows(batch: &mut StepBatch, plan: &StepPlan, reduces_rows: bool) -> Result<(), String> {
    let mut previous = None;
    for row in &plan.rows {
        let sequence = plan.sequence(row).ok_or_else(|| format!("a row is of sequence {}", row.sequence))?;
        let outside = || format!("seat {} has a row at position {}", sequence.seat, row.position);
        let start = batch.query_start[row.sequence as usize];
        let offset = row.position.checked_sub(sequence.first_position);
        let index = start + offset.filter(|&offset| (offset as usize) < sequence.tokens.len()).ok_or_else(outside)?;
        if row.kind.gives_token() {
            batch.sampled_rows.push(index);
            continue;
        }
        batch.pooled_rows.push(index);
        if reduces_rows {
            let first = match previous {
                Some((of, pooled)) if of == row.sequence => pooled + 1,
                _ => start,
            };
            batch.pooled_lens.push((index + 1).checked_sub(first).ok_or_else(outside)?);
            previous = Some((row.sequence, index));
        }
    }
    Ok(())
}

/// Applies the plan's changes of block tables.
fn change_tables(batch: &mut StepBatch, plan: &StepPlan) -> Result<(), String> {
    for joined in &plan.joined {
        for tables in &mut batch.block_tables {
            tables.change(joined.seat, 0, []);
        }
    }
    for change in &plan.tables {
        let TableChange { seat, group, start, .. } = *change;
        let tables = batch.block_tables.get_mut(group as usize);
        let blocks = plan.blocks.get(change.blocks.clone());
        let changed = tables
            .zip(blocks)
            .is_some_and(|(tables, blocks)| tables.change(seat, start as usize, blocks.iter().copied()));
        if !changed {
            return Err(format!("the table of seat {seat} in KV group {group} has no block {start} to change"));
        }
    }
    for PassedBlocks { seat, group, blocks } in &plan.passed {
        let tables = batch.block_tables.get_mut(*group as usize);
        if !tables.is_some_and(|tables| tables.pass(*seat, blocks.start as usize..blocks.end as usize)) {
            return Err(format!("the table of seat {seat} in KV group {group} has no blocks {blocks:?} to pass"));
        }
    }
    Ok(())
}

/// Appends the slots of a sequence's tokens in a group.
fn push_slots(
    batch: &mut StepBatch,
    sequence: &PlannedSequence,
    group: usize,
    block_size: usize,
) -> Result<(), String> {
    let StepBatch { slot_mapping, block_tables, .. } = batch;
    let blocks = block_tables[group].get(sequence.seat);
    for offset in 0..sequence.tokens.len() {
        let position = sequence.first_position as usize + offset;
        let block = blocks.get(position / block_size).filter(|block| **block != 0);
        let block = block.ok_or_else(|| format!("position {position} of seat {} has no block", sequence.seat))?;
        slot_mapping[group].push(block * block_size as u32 + (position % block_size) as u32);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use octavo_engine::{InjectedTokens, PlannedRow, RowKind};

    use super::*;

    fn row(sequence: u32, position: u32, kind: RowKind) -> PlannedRow {
        PlannedRow { sequence, position, kind }
    }

    /// Returns a plan with a prefill chunk at positions 3..6 and a decode at position 8, whose token is the second row
    /// of the step before; blocks of 4.
    fn plan() -> StepPlan {
        let sequence = |seat, tokens, first_position| PlannedSequence {
            seat,
            tokens,
            first_position,
            ..PlannedSequence::default()
        };
        let change = |seat, group, blocks| TableChange { seat, group, start: 0, blocks };
        StepPlan {
            step: 1,
            tokens: vec![InputToken::Id(10), InputToken::Id(11), InputToken::Id(12), InputToken::Drawn { row: 1 }],
            sequences: vec![sequence(4, 0..3, 3), sequence(2, 3..4, 8)],
            rows: vec![row(1, 8, RowKind::Draw)],
            tables: vec![change(4, 0, 0..2), change(4, 1, 2..4), change(2, 0, 4..7), change(2, 1, 7..10)],
            blocks: vec![5, 6, 15, 16, 7, 8, 9, 0, 0, 19],
            ..StepPlan::default()
        }
    }

    /// SeatInputs of which one may have images, and one a pair of texts.
    #[derive(Default)]
    struct Known<'a> {
        images: Option<(Seat, &'a ImagePositions)>,
        pair: Option<(Seat, u32)>,
    }

    impl<'a> SeatInputs<'a> for Known<'a> {
        fn images(&self, seat: Seat) -> Option<&'a ImagePositions> {
            self.images.filter(|(of, _)| *of == seat).map(|(_, images)| images)
        }

        fn second_text(&self, seat: Seat) -> Option<u32> {
            self.pair.filter(|(of, _)| *of == seat).map(|(_, second)| second)
        }

        fn adapter(&self, _: Seat) -> Option<AdapterSlot> {
            None
        }
    }

    fn shape(streams: usize) -> Shape {
        Shape {
            block_size: 4,
            groups: 2,
            streams,
            reduces_rows: false,
            has_types: false,
            has_spans: false,
            has_sites: false,
        }
    }

    #[test]
    fn images_determine_positions_and_rows() {
        let mut batch = StepBatch::default();
        let mut plan = plan();
        // The chunk holds the last two of four tokens of an image, and the first token after it.
        plan.injected = vec![InjectedTokens { position: 3, media: 12..14 }];
        plan.sequences[0].injected = 0..1;
        plan.sequences[1].injected = 1..1;
        let images = ImagePositions::new([octavo_models::ImageSpan { start: 1, rows: 2, cols: 2 }]);
        fill(&mut batch, &plan, &shape(3), &drawn(&[70, 71]), &Known { images: Some((4, &images)), pair: None })
            .unwrap();
        assert_eq!(batch.positions, [1, 1, 3, 8, 2, 2, 3, 8, 1, 2, 3, 8]);
        let rows = [InjectedRow { row: 0, media: 12 }, InjectedRow { row: 1, media: 13 }];
        assert_eq!(batch.injected, rows);
        plan.injected[0].media = 12..16;
        let error = fill(&mut batch, &plan, &shape(3), &drawn(&[70, 71]), &Known::default()).unwrap_err();
        assert_eq!(error, "seat 4 has an image at 3");
        plan.sequences[0].injected = 1..2;
        let error = fill(&mut batch, &plan, &shape(3), &drawn(&[70, 71]), &Known::default()).unwrap_err();
        assert_eq!(error, "seat 4 has the images 1..2");
    }

    #[test]
    fn the_tokens_of_an_image_see_its_end() {
        let mut batch = StepBatch::default();
        let spans = Shape { has_spans: true, ..shape(1) };
        let images = |rows| ImagePositions::new([octavo_models::ImageSpan { start: 1, rows, cols: 2 }]);
        let mut fill = |images: &ImagePositions| {
            fill(&mut batch, &plan(), &spans, &drawn(&[70, 71]), &Known { images: Some((4, images)), pair: None })
                .map(|()| batch.seen_ends.clone())
        };
        // The image has the positions 1 to 4, and the chunk 3 to 5.
        assert_eq!(fill(&images(2)), Ok(vec![5, 5, 6, 9]));
        assert_eq!(fill(&images(3)), Err("seat 4 has a part of an image, which ends at 7".to_owned()));
    }

    fn drawn(ids: &[u32]) -> Drawn {
        Drawn { ids: ids.to_vec(), on_device: 0 }
    }

    #[test]
    fn a_token_that_is_still_on_the_device_is_named_by_its_row() {
        let mut batch = StepBatch::default();
        fill(&mut batch, &plan(), &shape(1), &Drawn { ids: Vec::new(), on_device: 2 }, &Known::default()).unwrap();
        assert_eq!(batch.token_ids, [10, 11, 12, StepBatch::drawn(1)]);
        let error = fill(&mut batch, &plan(), &shape(1), &Drawn { ids: Vec::new(), on_device: 1 }, &Known::default())
            .unwrap_err();
        assert_eq!(error, "row 1 of the step before was not drawn");
    }

    #[test]
    fn every_array_is_as_defined() {
        let tables = |[of_4, of_2]: [Vec<u32>; 2]| BlockTables::from_iter([vec![], vec![], of_2, vec![], of_4]);
        let mut batch = StepBatch::default();
        fill(&mut batch, &plan(), &shape(1), &drawn(&[70, 71]), &Known::default()).unwrap();
        let expected = StepBatch {
            token_ids: vec![10, 11, 12, 71],
            positions: vec![3, 4, 5, 8],
            slot_mapping: vec![vec![23, 24, 25, 36], vec![63, 64, 65, 76]],
            block_tables: vec![tables([vec![5, 6], vec![7, 8, 9]]), tables([vec![15, 16], vec![0, 0, 19]])],
            query_start: vec![0, 3, 4],
            seq_lens: vec![6, 9],
            sampled_rows: vec![3],
            pooled_rows: vec![],
            pooled_lens: vec![],
            token_types: vec![],
            seats: vec![4, 2],
            adapters: vec![],
            injected: vec![],
            seen_ends: vec![],
        };
        assert_eq!(batch, expected);
        let memory = batch.token_ids.as_ptr();
        fill(&mut batch, &plan(), &shape(1), &drawn(&[70, 71]), &Known::default()).unwrap();
        assert_eq!(batch, expected, "filled again");
        assert_eq!(batch.token_ids.as_ptr(), memory);
    }

    #[test]
    fn tables_stay_until_they_change() {
        let mut batch = StepBatch::default();
        let mut fill = |plan: &StepPlan| {
            fill(&mut batch, plan, &shape(1), &drawn(&[70, 71]), &Known::default()).unwrap();
            [2, 4].map(|seat| batch.block_tables[0].get(seat).to_vec())
        };
        let mut next = plan();
        assert_eq!(fill(&next), [vec![7, 8, 9], vec![5, 6]]);
        (next.sequences, next.tables, next.blocks) = (vec![next.sequences[1].clone()], Vec::new(), Vec::new());
        (next.rows, next.sequences[0].first_position) = (Vec::new(), 11);
        assert_eq!(fill(&next), [vec![7, 8, 9], vec![5, 6]], "nothing is new");
        next.tables = vec![TableChange { seat: 2, group: 0, start: 2, blocks: 0..2 }];
        next.tables.push(TableChange { seat: 2, group: 1, start: 3, blocks: 2..3 });
        (next.blocks, next.sequences[0].first_position) = (vec![3, 4, 1], 12);
        assert_eq!(fill(&next), [vec![7, 8, 3, 4], vec![5, 6]]);
        (next.tables, next.passed) = (Vec::new(), vec![PassedBlocks { seat: 2, group: 0, blocks: 0..2 }]);
        assert_eq!(fill(&next), [vec![0, 0, 3, 4], vec![5, 6]]);
    }

    #[test]
    fn all_positions_of_text_are_alike() {
        let mut batch = StepBatch::default();
        fill(&mut batch, &plan(), &shape(3), &drawn(&[70, 71]), &Known::default()).unwrap();
        assert_eq!(batch.positions, [[3, 4, 5, 8]; 3].concat());
    }

    #[test]
    fn rows_are_found_by_their_positions() {
        let mut batch = StepBatch::default();
        let mut plan = plan();
        plan.rows = vec![
            row(0, 3, RowKind::Score),
            row(0, 4, RowKind::Draw),
            row(0, 5, RowKind::Verify),
            row(0, 5, RowKind::Pool),
            row(1, 8, RowKind::Draw),
        ];
        fill(&mut batch, &plan, &shape(1), &drawn(&[70, 71]), &Known::default()).unwrap();
        assert_eq!(
            (batch.sampled_rows.as_slice(), batch.pooled_rows.as_slice()),
            ([0, 1, 2, 3].as_slice(), [2].as_slice())
        );
    }

    #[test]
    fn pooled_rows_are_those_of_the_prompt_or_of_each_token() {
        let mut batch = StepBatch::default();
        let mut plan = plan();
        plan.rows = [(0, 3), (0, 4), (0, 5), (1, 8)].map(|(of, position)| row(of, position, RowKind::Pool)).to_vec();
        let reducing = Shape { reduces_rows: true, has_types: true, ..shape(1) };
        let seats = Known { images: None, pair: Some((4, 5)) };
        fill(&mut batch, &plan, &reducing, &drawn(&[70, 71]), &seats).unwrap();
        assert_eq!(
            (batch.pooled_rows.as_slice(), batch.pooled_lens.as_slice()),
            (&[0, 1, 2, 3][..], &[1, 1, 1, 1][..])
        );
        assert_eq!(batch.token_types, [0, 0, 1, 0], "the second text begins at position 5 of the first sequence");
        plan.rows.drain(..2);
        fill(&mut batch, &plan, &reducing, &drawn(&[70, 71]), &seats).unwrap();
        assert_eq!((batch.pooled_rows.as_slice(), batch.pooled_lens.as_slice()), (&[2, 3][..], &[3, 1][..]));
        fill(&mut batch, &plan, &shape(1), &drawn(&[70, 71]), &seats).unwrap();
        assert_eq!((batch.pooled_rows.as_slice(), batch.pooled_lens.as_slice()), (&[2, 3][..], &[][..]));
        assert_eq!(batch.token_types, [0u32; 0]);
    }

    #[test]
    fn a_malformed_plan_is_an_error() {
        let message = |edit: &dyn Fn(&mut StepPlan)| {
            let mut plan = plan();
            edit(&mut plan);
            fill(&mut StepBatch::default(), &plan, &shape(1), &drawn(&[70]), &Known::default()).unwrap_err()
        };
        let message_of_rows = |rows: &[PlannedRow]| {
            message(&|p| {
                p.tokens[3] = InputToken::Id(1);
                p.rows = rows.to_vec();
            })
        };
        assert_eq!(message(&|_| {}), "row 1 of the step before was not drawn");
        assert_eq!(message(&|p| p.sequences[0].tokens = 2..9), "seat 4 has the tokens 2..9");
        assert_eq!(message(&|p| p.sequences[0].tokens = 2..2), "seat 4 has the tokens 2..2");
        assert_eq!(message(&|p| p.sequences[0].first_position = 6), "position 8 of seat 4 has no block");
        assert_eq!(message(&|p| p.blocks[3] = 0), "position 4 of seat 4 has no block");
        assert_eq!(message_of_rows(&[row(0, 2, RowKind::Score)]), "seat 4 has a row at position 2");
        assert_eq!(message_of_rows(&[row(0, 6, RowKind::Score)]), "seat 4 has a row at position 6");
        assert_eq!(message_of_rows(&[row(2, 6, RowKind::Draw)]), "a row is of sequence 2");
        let message_of_change =
            |start: u32, group: u32| message(&|p| (p.tables[3].start, p.tables[3].group) = (start, group));
        assert_eq!(message_of_change(1, 1), "the table of seat 2 in KV group 1 has no block 1 to change");
        assert_eq!(message_of_change(0, 2), "the table of seat 2 in KV group 2 has no block 0 to change");
        let passed = |p: &mut StepPlan| p.passed.push(PassedBlocks { seat: 2, group: 1, blocks: 2..4 });
        assert_eq!(message(&passed), "the table of seat 2 in KV group 1 has no blocks 2..4 to pass");
        assert_eq!(message(&|p| p.blocks.truncate(9)), "the table of seat 2 in KV group 1 has no block 0 to change");
    }
}
