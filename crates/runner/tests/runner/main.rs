//! Tests of the runner over a backend that records its calls.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

mod ahead;
mod fake;

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use octavo_engine::{Executor, InputToken, Joined, KvKind, RowKind, SamplingParams, StepMasks, StepPlan};
use octavo_ops::sampling::TokenCounts;
use octavo_ops::testing::TinyModel;
use octavo_runner::{KvBudget, Runner, RunnerConfig, RunnerError};

use crate::fake::{
    CONFIG, FakeBackend, Fate, SeenRow, add_rows, backend, decode, ids, joined, prefill, program, push, run, start,
};

#[test]
fn a_plan_becomes_a_batch_and_its_memory_comes_back() {
    let (mut runner, log) = start(backend(&[]));
    let plan = prefill(1, SamplingParams { logprobs: Some(1), ..SamplingParams::default() });
    let memory = plan.tokens.as_ptr();
    let output = run(&mut runner, plan).unwrap();
    assert_eq!(output.plan.tokens.as_ptr(), memory);
    assert_eq!(ids(&output), [10]);
    let logprobs = output.tokens[0].logprobs.clone().unwrap();
    assert_eq!((logprobs.logprob, logprobs.rank, logprobs.top), (-0.5, 2, vec![(7, -0.1)]));
    let mut tokens = output.tokens;
    tokens.clear();
    let memory = tokens.as_ptr();
    runner.recycle(tokens);
    let output = run(&mut runner, decode(2, 3, InputToken::Id(9))).unwrap();
    assert_eq!(output.tokens.as_ptr(), memory, "the memory of tokens is used again");
    let log = log.lock().unwrap();
    assert_eq!(log.thread.as_deref(), Some("octavo-device"));
    assert_eq!(log.kv, 9);
    let batch = &log.batches[0];
    assert_eq!((&batch.token_ids[..], &batch.positions[..]), (&[3, 1, 3][..], &[0, 1, 2][..]));
    assert_eq!(batch.slot_mapping[0], [8, 9, 10]);
    assert_eq!((&batch.seq_lens[..], &batch.sampled_rows[..], &batch.seats[..]), (&[3][..], &[2][..], &[1][..]));
    assert_eq!(log.batches[1].tables(0).row(0), [2, 5]);
}

#[test]
fn the_sampler_gets_what_the_sequence_asked_for() {
    let (mut runner, log) = start(backend(&[]));
    let params = SamplingParams {
        presence_penalty: 0.5,
        seed: 77,
        min_tokens: 2,
        eos_token_ids: vec![2],
        stop_token_ids: vec![4, 2].into(),
        ignore_eos: true,
        logit_bias: [(6, 1.5)].into(),
        logprobs: Some(3),
        logprob_token_ids: vec![7, 5],
        prompt_logprobs: Some(4),
        ..SamplingParams::default()
    };
    let mut plan = prefill(1, params.clone());
    plan.joined.push(joined(0, SamplingParams { seed: 5, ..SamplingParams::default() }, &[]));
    plan.joined.push(joined(2, SamplingParams { frequency_penalty: 1.0, ..params.clone() }, &[9, 8, 9]));
    push(&mut plan, 0, 0, &[InputToken::Id(5)], false);
    push(&mut plan, 2, 0, &[3, 1, 3, 9, 8, 9].map(InputToken::Id), true);
    plan.joined[2].constrained = true;
    runner.submit(plan).unwrap();
    runner.sample(1, StepMasks { rows: vec![vec![0xf0, 0x1]] }).unwrap();
    runner.wait().unwrap();
    run(&mut runner, decode(2, 3, InputToken::Id(10))).unwrap();
    run(&mut runner, decode(3, 4, InputToken::Id(20))).unwrap();
    // Another sequence takes the seat.
    run(&mut runner, prefill(4, SamplingParams::default())).unwrap();
    let log = log.lock().unwrap();
    let prompt = vec![1, 3];
    let row = SeenRow {
        seed: 77,
        output_position: 0,
        counts: Some(TokenCounts::new(&prompt, &[])),
        pending: None,
        bias: vec![(6, 1.5)],
        forbidden: vec![2, 4],
        mask: None,
        forced: None,
        logprobs: Some(3),
        logprob_ids: vec![7, 5],
    };
    let returned = SeenRow {
        output_position: 3,
        counts: Some(TokenCounts::new(&prompt, &[9, 8, 9])),
        forbidden: vec![],
        mask: Some(vec![0xf0, 0x1]),
        ..row.clone()
    };
    assert_eq!(log.rows[0], [row.clone(), returned], "the sequence that does not sample has no row");
    let counts = |output: &[u32]| Some(TokenCounts::new(&prompt, output));
    assert_eq!(log.rows[1], [SeenRow { output_position: 1, counts: counts(&[10]), ..row.clone() }]);
    let free = SeenRow { output_position: 2, counts: counts(&[20, 10]), forbidden: vec![], ..row.clone() };
    assert_eq!(log.rows[2], [free], "min_tokens are reached");
    let nothing = SeenRow { logprobs: None, logprob_ids: vec![], bias: vec![], forbidden: vec![], ..row };
    let plain = SeenRow { seed: 0, counts: None, ..nothing };
    assert_eq!(log.rows[3], [plain]);
}

#[test]
fn scored_rows_are_forced_and_come_first() {
    let (mut runner, log) = start(backend(&[]));
    let params = SamplingParams {
        prompt_logprobs: Some(4),
        logprob_token_ids: vec![7],
        frequency_penalty: 1.0,
        seed: 9,
        ..SamplingParams::default()
    };
    let mut plan = prefill(1, params.clone());
    plan.rows.clear();
    add_rows(&mut plan, RowKind::Score, 0..2);
    add_rows(&mut plan, RowKind::Draw, [2]);
    plan.joined.push(joined(2, params, &[]));
    push(&mut plan, 2, 0, &[3, 1].map(InputToken::Id), false);
    add_rows(&mut plan, RowKind::Score, [1]);
    let output = run(&mut runner, plan).unwrap();
    assert_eq!(ids(&output), [1, 3, 12, 3], "prompt tokens 1 and 2, the drawn one, prompt token 2");
    assert!(output.tokens[0].logprobs.is_some() && output.tokens[2].logprobs.is_none());
    run(&mut runner, decode(2, 3, InputToken::Drawn { row: 2 })).unwrap();
    let log = log.lock().unwrap();
    assert_eq!(log.batches[0].sampled_rows, [0, 1, 2, 4]);
    assert_eq!(log.batches[1].token_ids, [12], "rows are numbered with the scored ones");
    let scored = &log.rows[0][0];
    assert_eq!((scored.forced, scored.logprobs, scored.seed), (Some(1), Some(4), 0));
    assert_eq!((&scored.counts, scored.logprob_ids.len()), (&None, 0));
    let drawn = &log.rows[0][2];
    assert_eq!((drawn.forced, drawn.logprobs, drawn.seed), (None, None, 9));
    let counts = log.rows[1][0].counts.as_ref().unwrap();
    assert_eq!(counts.output, [(12, 1)], "what is scored is not generated");
}

#[test]
fn counts_include_drafts_and_then_what_was_accepted() {
    let (mut runner, log) = start(backend(&[]));
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    assert_eq!(ids(&run(&mut runner, prefill(1, params)).unwrap()), [10]);
    // The second step draws 20, 21, 22: the first draft is right, and the second is not.
    let mut plan = StepPlan { step: 2, ..StepPlan::default() };
    push(&mut plan, 1, 3, &[10, 20, 9].map(InputToken::Id), false);
    add_rows(&mut plan, RowKind::Draw, [3]);
    add_rows(&mut plan, RowKind::Verify, 4..6);
    assert_eq!(ids(&run(&mut runner, plan).unwrap()), [20, 21, 22]);
    run(&mut runner, decode(3, 5, InputToken::Id(21))).unwrap();
    let log = log.lock().unwrap();
    let counts = |step: usize| -> Vec<Vec<(u32, u32)>> {
        log.rows[step].iter().map(|row| row.counts.clone().unwrap().output).collect()
    };
    assert_eq!(counts(1), [vec![(10, 1)], vec![(10, 1), (20, 1)], vec![(9, 1), (10, 1), (20, 1)]]);
    assert_eq!(counts(2), [vec![(10, 1), (20, 1), (21, 1)]]);
    assert_eq!(log.rows[1].iter().map(|row| row.output_position).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn hidden_states_come_apart_from_the_rows() {
    let (mut runner, log) = start(backend(&[]));
    let mut plan = prefill(1, SamplingParams::default());
    plan.rows.clear();
    add_rows(&mut plan, RowKind::Pool, [2]);
    plan.joined.push(Joined::new(0, [5, 6], SamplingParams::default()));
    push(&mut plan, 0, 0, &[5, 6].map(InputToken::Id), true);
    plan.joined.push(joined(2, SamplingParams::default(), &[]));
    push(&mut plan, 2, 0, &[5].map(InputToken::Id), false);
    add_rows(&mut plan, RowKind::Pool, [0]);
    let output = run(&mut runner, plan).unwrap();
    assert_eq!((ids(&output), output.vectors), (vec![10], vec![1.0, 2.0, 1.0, 5.0]));
    let log = log.lock().unwrap();
    assert_eq!(
        (log.batches[0].pooled_rows.as_slice(), log.batches[0].sampled_rows.as_slice()),
        (&[2, 5][..], &[4][..])
    );
}

#[test]
fn a_step_that_samples_nothing_returns_no_rows() {
    let (mut runner, log) = start(backend(&[]));
    let mut plan = prefill(1, SamplingParams::default());
    plan.rows.clear();
    assert_eq!(ids(&run(&mut runner, plan).unwrap()), [0u32; 0]);
    assert_eq!(log.lock().unwrap().rows.len(), 0, "the backend is not asked");
}

#[test]
fn the_engine_thread_does_not_wait_for_the_device() {
    let (open, gate): (Sender<()>, _) = channel();
    let (mut runner, log) = start(FakeBackend { gate: Some(gate), ..backend(&[]) });
    runner.submit(prefill(1, SamplingParams::default())).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    assert_eq!(log.lock().unwrap().batches.len(), 0, "the forward pass has not begun");
    open.send(()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10]);
}

#[test]
fn a_step_that_fails_is_lost_and_the_runner_goes_on() {
    for fate in [Fate::ForwardFails, Fate::SampleFails] {
        let (mut runner, _) = start(backend(&[Fate::Succeeds, fate]));
        run(&mut runner, prefill(1, SamplingParams::default())).unwrap();
        let error = run(&mut runner, decode(2, 3, InputToken::Drawn { row: 0 })).unwrap_err();
        assert_eq!(error, "lost the fake backend failed: told to");
        let error = run(&mut runner, decode(3, 4, InputToken::Drawn { row: 0 })).unwrap_err();
        assert_eq!(error, "lost step 3 is malformed: row 0 of the step before was not drawn");
        assert_eq!(ids(&run(&mut runner, prefill(4, SamplingParams::default())).unwrap()), [30]);
    }
}

#[test]
fn a_backend_that_panics_is_not_used_again() {
    for fate in [Fate::ForwardPanics, Fate::SamplePanics] {
        let (mut runner, _) = start(backend(&[fate]));
        let error = run(&mut runner, prefill(1, SamplingParams::default())).unwrap_err();
        assert_eq!(error, "fatal the device thread panicked: told to panic");
        let error = run(&mut runner, prefill(2, SamplingParams::default())).unwrap_err();
        assert_eq!(error, "fatal the device thread has ended");
    }
}

#[test]
fn a_backend_without_its_device_is_not_used_again() {
    let (mut runner, _) = start(backend(&[Fate::Succeeds, Fate::DeviceIsLost]));
    run(&mut runner, prefill(1, SamplingParams::default())).unwrap();
    let error = run(&mut runner, decode(2, 3, InputToken::Drawn { row: 0 })).unwrap_err();
    assert_eq!(error, "fatal the fake backend lost its device: told to");
    let error = run(&mut runner, prefill(3, SamplingParams::default())).unwrap_err();
    assert_eq!(error, "fatal the device thread has ended");
}

#[test]
fn a_malformed_plan_is_lost() {
    let (mut runner, log) = start(backend(&[]));
    let error = |runner: &mut Runner, edit: &dyn Fn(&mut StepPlan)| {
        let mut plan = prefill(1, SamplingParams::default());
        edit(&mut plan);
        run(runner, plan).unwrap_err()
    };
    let lost = |reason: &str| format!("lost step 1 is malformed: {reason}");
    assert_eq!(error(&mut runner, &|p| p.joined[0].seat = 3), lost("seat 3 of 3"));
    assert_eq!(error(&mut runner, &|p| p.joined.clear()), lost("nobody has seat 1"));
    assert_eq!(error(&mut runner, &|p| p.joined[0].constrained = true), lost("a mask is missing"));
    let message = lost("seat 1 scores position 2, its prompt ends there");
    assert_eq!(error(&mut runner, &|p| p.rows[0].kind = RowKind::Score), message);
    let message = lost("the table of seat 1 in KV group 0 has no block 0 to change");
    assert_eq!(error(&mut runner, &|p| p.blocks.clear()), message);
    assert_eq!(error(&mut runner, &|p| p.tables.clear()), lost("position 0 of seat 1 has no block"));
    let message = lost("seat 1 draws in its prompt, at position 1");
    assert_eq!(error(&mut runner, &|p| p.rows[0].position = 1), message);
    assert_eq!(log.lock().unwrap().batches.len(), 4);
    run(&mut runner, prefill(1, SamplingParams::default())).unwrap();
}

#[test]
fn the_kv_cache_is_sized_by_bytes_or_blocks() {
    // A block holds two layers of two heads of 8, key and value, for four tokens of four bytes per element.
    let block = 2 * 2 * 8 * 2 * 4 * 4;
    let plan = |kv| {
        let runner = Runner::new(Box::new(backend(&[])), program(), RunnerConfig { kv, ..CONFIG })?;
        assert_eq!(runner.kv_cache_spec().block_bytes, block);
        Ok::<_, RunnerError>(runner.memory_plan().clone())
    };
    let by_bytes = plan(KvBudget::Bytes(11 * block + 5)).unwrap();
    assert_eq!((by_bytes.kv.blocks, by_bytes.kv_bytes, by_bytes.weight_bytes), (11, 11 * block, 1234));
    assert_eq!((by_bytes.kv_tokens(), by_bytes.max_concurrency()), (40, 2.0));
    assert_eq!(plan(KvBudget::Blocks(6)).unwrap().max_concurrency(), 1.0);
    let error = plan(KvBudget::Blocks(5)).unwrap_err().to_string();
    assert_eq!(
        error,
        "one request of --max-model-len 20 needs a KV cache of 6144 bytes, but it has 5120: lower --max-model-len to \
         16 or give the cache more memory"
    );
    assert!(matches!(plan(KvBudget::Bytes(0)), Err(RunnerError::KvCacheTooSmall { fits: 0, .. })));
}

#[test]
fn kv_groups_share_blocks_of_the_size_of_the_largest() {
    let model = TinyModel { layers: vec![0, 1, 0], windows: vec![None, Some(8)], ..TinyModel::default() };
    let (program, _) = model.build().unwrap();
    let backend = backend(&[]);
    let log = backend.log.clone();
    let block = 2 * 8 * 2 * 4 * 4;
    let config = RunnerConfig { kv: KvBudget::Bytes(2 * block * 13), ..CONFIG };
    let runner = Runner::new(Box::new(backend), Arc::new(program), config).unwrap();
    assert_eq!(log.lock().unwrap().kv, 13);
    let spec = runner.kv_cache_spec();
    assert_eq!((spec.blocks, spec.block_bytes), (13, 2 * block));
    let groups: Vec<_> = spec.groups.iter().map(|group| (group.layers, group.kind)).collect();
    assert_eq!(groups, [(2, KvKind::Full), (1, KvKind::Window(8))]);
    // A sequence of 20 tokens has five blocks in the first group; in the other, a window of 8 tokens and a step lie in
    // no more.
    assert_eq!(runner.memory_plan().max_concurrency(), 12.0 / 10.0);
}

#[test]
fn limits_that_cannot_be_are_errors() {
    let error = |config| match Runner::new(Box::new(backend(&[])), program(), config) {
        Ok(_) => panic!("the runner started"),
        Err(error) => error.to_string(),
    };
    let message = error(RunnerConfig { block_size: 16, ..CONFIG });
    assert_eq!(message, "the fake backend has no KV blocks of 16 tokens: choose --block-size from [4, 8]");
    assert_eq!(error(RunnerConfig { max_num_seqs: 0, ..CONFIG }), "max_num_seqs must be at least 1");
}
