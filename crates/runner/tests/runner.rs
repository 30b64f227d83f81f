//! The runner over a backend that records what it is asked.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use octavo_engine::{
    Executor, InputToken, Joined, PlannedSequence, SamplingParams, Slot, StepId, StepMasks, StepOutput, StepPlan,
};
use octavo_ops::sampling::{SampleBatch, SampledToken, TokenCounts, TokenLogprobs};
use octavo_ops::testing::TinyModel;
use octavo_ops::{Backend, BackendError, KvGroup, Program, StepBatch, WeightSource};
use octavo_runner::{KvBudget, Runner, RunnerConfig, RunnerError};

/// What a step does.
#[derive(Clone, Copy, Default, PartialEq)]
enum Fate {
    #[default]
    Succeeds,
    ForwardFails,
    ForwardPanics,
    SampleFails,
    SamplePanics,
    TakeFails,
    TakeLosesTheDevice,
    DeviceIsLost,
}

/// What the sampler was asked for one row.
#[derive(Clone, Debug, PartialEq)]
struct SeenRow {
    seed: u64,
    output_position: u32,
    counts: Option<TokenCounts>,
    bias: Vec<(u32, f32)>,
    forbidden: Vec<u32>,
    mask: Option<Vec<u32>>,
    forced: Option<u32>,
    logprobs: Option<u32>,
    logprob_ids: Vec<u32>,
}

#[derive(Default)]
struct Log {
    batches: Vec<StepBatch>,
    rows: Vec<Vec<SeenRow>>,
    thread: Option<String>,
    kv: Vec<usize>,
    /// What the backend was asked, by step.
    calls: Vec<(&'static str, usize)>,
}

struct FakeBackend {
    log: Arc<Mutex<Log>>,
    fates: Vec<Fate>,
    steps: usize,
    in_flight: usize,
    /// A forward pass waits for one of these, if there is the other end.
    gate: Option<Receiver<()>>,
    /// Tokens that nobody has taken, with the number of their step.
    waiting: VecDeque<(usize, Vec<SampledToken>)>,
}

fn failure() -> BackendError {
    BackendError::Failed { backend: "fake", reason: "told to".into() }
}

fn device_lost() -> BackendError {
    BackendError::DeviceLost { backend: "fake", reason: "told to".into() }
}

impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn block_sizes(&self) -> &[usize] {
        &[4, 8]
    }

    fn kv_dtype(&self) -> &'static str {
        "float32"
    }

    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64 {
        (group.elements_per_token() * block_size * 4) as u64
    }

    fn load(&mut self, _: &Program, _: &dyn WeightSource, _: &mut dyn FnMut(u64)) -> Result<(), BackendError> {
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        1234
    }

    fn allocate_kv(&mut self, _: usize, blocks: &[usize]) -> Result<(), BackendError> {
        self.log.lock().unwrap().kv = blocks.to_vec();
        Ok(())
    }

    fn max_in_flight(&self) -> usize {
        self.in_flight
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        if let Some(gate) = &self.gate {
            gate.recv().unwrap();
        }
        let mut log = self.log.lock().unwrap();
        log.thread = std::thread::current().name().map(str::to_owned);
        log.batches.push(batch.clone());
        self.steps += 1;
        log.calls.push(("forward", self.steps));
        drop(log);
        match self.fates.get(self.steps - 1) {
            Some(Fate::ForwardFails) => Err(failure()),
            Some(Fate::ForwardPanics) => panic!("told to {}", "panic"),
            Some(Fate::DeviceIsLost) => Err(device_lost()),
            _ => Ok(()),
        }
    }

    /// Row r of the n-th step (from 1) draws 10·n + r.
    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let rows = batch.rows.iter().map(|row| SeenRow {
            seed: row.params.seed,
            output_position: row.output_position,
            counts: row.counts.cloned(),
            bias: row.logit_bias.to_vec(),
            forbidden: row.forbidden.to_vec(),
            mask: row.mask.map(<[u32]>::to_vec),
            forced: row.forced,
            logprobs: row.params.logprobs,
            logprob_ids: row.logprob_ids.to_vec(),
        });
        let mut log = self.log.lock().unwrap();
        log.rows.push(rows.collect());
        log.calls.push(("start", self.steps));
        drop(log);
        match self.fates.get(self.steps - 1) {
            Some(Fate::SampleFails) => return Err(failure()),
            Some(Fate::SamplePanics) => panic!("told to panic"),
            _ => {}
        }
        let tokens = batch.rows.iter().enumerate().map(|(r, row)| SampledToken {
            id: row.forced.unwrap_or((10 * self.steps + r) as u32),
            logprobs: row.params.logprobs.map(|_| TokenLogprobs { logprob: -0.5, rank: 2, top: vec![(7, -0.1)] }),
        });
        self.waiting.push_back((self.steps, tokens.collect()));
        Ok(())
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        let (step, tokens) = self.waiting.pop_front().unwrap();
        self.log.lock().unwrap().calls.push(("take", step));
        match self.fates.get(step - 1) {
            Some(Fate::TakeFails) => Err(failure()),
            Some(Fate::TakeLosesTheDevice) => Err(device_lost()),
            _ => {
                *out = tokens;
                Ok(())
            }
        }
    }

    /// Row e of the n-th step is [n, the row of the step that is pooled].
    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError> {
        out.clear();
        let log = self.log.lock().unwrap();
        let rows = log.batches.last().unwrap().pooled_rows.iter();
        out.extend(rows.flat_map(|&row| [self.steps as f32, row as f32]));
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        Ok(Vec::new())
    }

    fn copy_blocks(&mut self, _: usize, _: &[(u32, u32)]) -> Result<(), BackendError> {
        Ok(())
    }
}

const CONFIG: RunnerConfig = RunnerConfig {
    block_size: 4,
    max_num_seqs: 3,
    max_num_batched_tokens: 16,
    max_model_len: 20,
    kv: KvBudget::Blocks(9),
    async_scheduling: None,
};

fn program() -> Arc<Program> {
    Arc::new(TinyModel::default().build().unwrap().0)
}

fn start(backend: FakeBackend) -> (Runner, Arc<Mutex<Log>>) {
    let log = backend.log.clone();
    (Runner::new(Box::new(backend), program(), CONFIG).unwrap(), log)
}

fn backend(fates: &[Fate]) -> FakeBackend {
    FakeBackend {
        log: Arc::default(),
        fates: fates.to_vec(),
        steps: 0,
        in_flight: 1,
        gate: None,
        waiting: VecDeque::new(),
    }
}

fn joined(slot: Slot, params: SamplingParams, output: &[u32]) -> Joined {
    Joined { slot, params: Arc::new(params), prompt: [3, 1, 3].into(), output: output.to_vec() }
}

/// Adds the tokens of a sequence whose blocks are 1 + slot, 4 + slot.
fn push(plan: &mut StepPlan, slot: Slot, first_position: u32, tokens: &[InputToken], samples: bool) {
    let start = plan.tokens.len();
    plan.tokens.extend_from_slice(tokens);
    plan.sequences.push(PlannedSequence {
        slot,
        tokens: start..plan.tokens.len(),
        first_position,
        tables: plan.tables.len()..plan.tables.len() + 1,
        samples,
        output_position: (first_position + tokens.len() as u32).saturating_sub(3),
        ..PlannedSequence::default()
    });
    plan.tables.push(plan.blocks.len()..plan.blocks.len() + 2);
    plan.blocks.extend([1 + slot, 4 + slot]);
}

/// The prompt of one sequence in slot 1.
fn prefill(step: StepId, params: SamplingParams) -> StepPlan {
    let mut plan = StepPlan { step, joined: vec![joined(1, params, &[])], ..StepPlan::default() };
    push(&mut plan, 1, 0, &[3, 1, 3].map(InputToken::Id), true);
    plan
}

/// A decode of slot 1.
fn decode(step: StepId, position: u32, token: InputToken) -> StepPlan {
    let mut plan = StepPlan { step, ..StepPlan::default() };
    push(&mut plan, 1, position, &[token], true);
    plan
}

fn run(runner: &mut Runner, plan: StepPlan) -> Result<StepOutput, String> {
    let step = plan.step;
    let text =
        |error: octavo_engine::ExecutorError| format!("{} {}", if error.fatal { "fatal" } else { "lost" }, error);
    runner.submit(plan).map_err(text)?;
    runner.sample(step, StepMasks::default()).map_err(text)?;
    runner.wait().map_err(text)
}

fn ids(output: &StepOutput) -> Vec<u32> {
    output.rows.iter().map(|row| row.id).collect()
}

#[test]
fn a_plan_becomes_a_batch_and_its_memory_comes_back() {
    let (mut runner, log) = start(backend(&[]));
    let plan = prefill(1, SamplingParams { logprobs: Some(1), ..SamplingParams::default() });
    let memory = plan.tokens.as_ptr();
    let output = run(&mut runner, plan).unwrap();
    assert_eq!(output.plan.tokens.as_ptr(), memory);
    assert_eq!(ids(&output), [10]);
    let logprobs = output.rows[0].logprobs.clone().unwrap();
    assert_eq!((logprobs.logprob, logprobs.rank, logprobs.top), (-0.5, 2, vec![(7, -0.1)]));
    let mut rows = output.rows;
    rows.clear();
    let memory = rows.as_ptr();
    runner.recycle(rows);
    let output = run(&mut runner, decode(2, 3, InputToken::Id(9))).unwrap();
    assert_eq!(output.rows.as_ptr(), memory, "the memory of rows is used again");
    let log = log.lock().unwrap();
    assert_eq!(log.thread.as_deref(), Some("octavo-device"));
    assert_eq!(log.kv, [9]);
    let batch = &log.batches[0];
    assert_eq!((&batch.token_ids[..], &batch.positions[..]), (&[3, 1, 3][..], &[0, 1, 2][..]));
    assert_eq!(batch.slot_mapping[0], [8, 9, 10]);
    assert_eq!((&batch.seq_lens[..], &batch.sampled_rows[..], &batch.slots[..]), (&[3][..], &[2][..], &[1][..]));
    assert_eq!(log.batches[1].block_tables[0].ids, [2, 5]);
}

/// A step of the sequences in slots 1 and 2, and the one after it, in another order, whose tokens are not known yet.
fn two_steps(params: &SamplingParams) -> [StepPlan; 2] {
    let mut first = prefill(1, params.clone());
    first.joined.push(joined(2, params.clone(), &[]));
    push(&mut first, 2, 0, &[InputToken::Id(5)], true);
    let mut second = StepPlan { step: 2, ..StepPlan::default() };
    push(&mut second, 2, 1, &[InputToken::Drawn { row: 1 }], true);
    push(&mut second, 1, 3, &[InputToken::Drawn { row: 0 }], true);
    [first, second]
}

#[test]
fn tokens_that_the_engine_has_not_seen_are_filled_in() {
    let config = RunnerConfig { async_scheduling: Some(true), ..CONFIG };
    let backend = backend(&[]);
    let log = backend.log.clone();
    let mut runner = Runner::new(Box::new(backend), program(), config).unwrap();
    assert_eq!(runner.max_in_flight(), 2);
    let [first, second] = two_steps(&SamplingParams::default());
    runner.submit(first).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    runner.submit(second).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10, 11]);
    runner.sample(2, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [20, 21]);
    assert_eq!(log.lock().unwrap().batches[1].token_ids, [11, 10]);
}

/// Of each step its tokens, or its error.
type Results = Vec<Result<Vec<u32>, String>>;

/// Two steps of which the second is asked for as early as can be.
fn run_ahead(backend: FakeBackend, params: &SamplingParams) -> (Results, Arc<Mutex<Log>>) {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend });
    assert_eq!(runner.max_in_flight(), 2);
    let [first, second] = two_steps(params);
    runner.submit(first).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    runner.submit(second).unwrap();
    runner.sample(2, StepMasks::default()).unwrap();
    let results = (0..2).map(|_| match runner.wait() {
        Ok(output) => Ok(ids(&output)),
        Err(error) => Err(format!("{} {error}", if error.fatal { "fatal" } else { "lost" })),
    });
    (results.collect(), log)
}

#[test]
fn a_backend_that_launches_has_the_next_step_before_its_tokens_are_taken() {
    let (results, log) = run_ahead(backend(&[]), &SamplingParams::default());
    assert_eq!(results, [Ok(vec![10, 11]), Ok(vec![20, 21])]);
    let log = log.lock().unwrap();
    assert_eq!(log.batches[1].token_ids, [StepBatch::drawn(1), StepBatch::drawn(0)]);
    let calls = [("forward", 1), ("start", 1), ("forward", 2), ("start", 2), ("take", 1), ("take", 2)];
    assert_eq!(log.calls, calls);
}

#[test]
fn a_step_with_penalties_is_sampled_when_the_tokens_before_are_known() {
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    let (results, log) = run_ahead(backend(&[]), &params);
    assert_eq!(results, [Ok(vec![10, 11]), Ok(vec![20, 21])]);
    let log = log.lock().unwrap();
    let calls = [("forward", 1), ("start", 1), ("forward", 2), ("take", 1), ("start", 2), ("take", 2)];
    assert_eq!(log.calls, calls);
    let counted: Vec<_> = log.rows[1].iter().map(|row| row.counts.clone().unwrap().output).collect();
    assert_eq!(counted, [vec![(11, 1)], vec![(10, 1)]]);
}

#[test]
fn a_token_counts_for_whom_it_was_drawn() {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend(&[]) });
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    runner.submit(prefill(1, params.clone())).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    // Another sequence takes the slot while the first one's token is under way.
    runner.submit(prefill(2, params)).unwrap();
    runner.sample(2, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10]);
    assert_eq!(ids(&runner.wait().unwrap()), [20]);
    assert_eq!(log.lock().unwrap().rows[1][0].counts.as_ref().unwrap().output, []);
}

#[test]
fn a_failure_is_told_to_those_who_wait_for_its_step() {
    let told = "the fake backend failed: told to";
    let not_drawn = "step 2 is malformed: row 1 of the step before was not drawn";
    let (lost, gone) =
        (|reason: &str| Err(format!("lost {reason}")), "fatal the fake backend lost its device: told to");
    let second = || Ok(vec![20, 21]);
    for (fate, expected) in [
        (Fate::ForwardFails, [lost(told), lost(not_drawn)]),
        (Fate::SampleFails, [lost(told), lost(not_drawn)]),
        (Fate::TakeFails, [lost(told), second()]),
        (Fate::DeviceIsLost, [Err(gone.into()), Err("fatal the device thread has ended".into())]),
        (Fate::TakeLosesTheDevice, [Err(gone.into()), Err("fatal the device thread has ended".into())]),
    ] {
        let (results, _) = run_ahead(backend(&[fate]), &SamplingParams::default());
        assert_eq!(results, expected);
    }
}

#[test]
fn the_sampler_gets_what_the_sequence_asked_for() {
    let (mut runner, log) = start(backend(&[]));
    let params = SamplingParams {
        presence_penalty: 0.5,
        seed: 77,
        min_tokens: 2,
        eos_token_ids: vec![2],
        stop_token_ids: vec![4],
        ignore_eos: true,
        logit_bias: vec![(6, 1.5)],
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
    plan.sequences[2].constrained = true;
    runner.submit(plan).unwrap();
    runner.sample(1, StepMasks { words: 2, bits: vec![0xf0, 0x1] }).unwrap();
    runner.wait().unwrap();
    run(&mut runner, decode(2, 3, InputToken::Id(10))).unwrap();
    run(&mut runner, decode(3, 4, InputToken::Id(20))).unwrap();
    // Another sequence takes the slot.
    run(&mut runner, prefill(4, SamplingParams::default())).unwrap();
    let log = log.lock().unwrap();
    let prompt = vec![1, 3];
    let row = SeenRow {
        seed: 77,
        output_position: 0,
        counts: Some(TokenCounts { prompt: prompt.clone(), output: vec![] }),
        bias: vec![(6, 1.5)],
        forbidden: vec![2, 4],
        mask: None,
        forced: None,
        logprobs: Some(3),
        logprob_ids: vec![7, 5],
    };
    let returned = SeenRow {
        output_position: 3,
        counts: Some(TokenCounts { prompt: prompt.clone(), output: vec![(8, 1), (9, 2)] }),
        forbidden: vec![],
        mask: Some(vec![0xf0, 0x1]),
        ..row.clone()
    };
    assert_eq!(log.rows[0], [row.clone(), returned], "the sequence that does not sample has no row");
    let counts = |output: &[(u32, u32)]| Some(TokenCounts { prompt: prompt.clone(), output: output.to_vec() });
    assert_eq!(log.rows[1], [SeenRow { output_position: 1, counts: counts(&[(10, 1)]), ..row.clone() }]);
    let free = SeenRow { output_position: 2, counts: counts(&[(10, 1), (20, 1)]), forbidden: vec![], ..row.clone() };
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
    plan.sequences[0].scores = 0..2;
    plan.joined.push(joined(2, params, &[]));
    push(&mut plan, 2, 0, &[3, 1].map(InputToken::Id), false);
    plan.sequences[1].scores = 1..2;
    let output = run(&mut runner, plan).unwrap();
    assert_eq!(ids(&output), [1, 3, 12, 3], "prompt tokens 1 and 2, the drawn one, prompt token 2");
    assert!(output.rows[0].logprobs.is_some() && output.rows[2].logprobs.is_none());
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
fn hidden_states_come_apart_from_the_rows() {
    let (mut runner, log) = start(backend(&[]));
    let mut plan = prefill(1, SamplingParams::default());
    plan.sequences[0].samples = false;
    plan.sequences[0].pools = true;
    plan.joined.push(joined(0, SamplingParams::default(), &[]));
    push(&mut plan, 0, 0, &[5, 6].map(InputToken::Id), true);
    plan.joined.push(joined(2, SamplingParams::default(), &[]));
    push(&mut plan, 2, 0, &[5].map(InputToken::Id), false);
    plan.sequences[2].pools = true;
    let output = run(&mut runner, plan).unwrap();
    assert_eq!((ids(&output), output.embeddings), (vec![10], vec![vec![1.0, 2.0], vec![1.0, 5.0]]));
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
    plan.sequences[0].samples = false;
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
    assert_eq!(error(&mut runner, &|p| p.joined[0].slot = 3), lost("slot 3 of 3"));
    assert_eq!(error(&mut runner, &|p| p.joined.clear()), lost("nobody has slot 1"));
    assert_eq!(error(&mut runner, &|p| p.sequences[0].constrained = true), lost("a mask is missing"));
    let message = lost("slot 1 scores position 2, its prompt ends there");
    assert_eq!(error(&mut runner, &|p| p.sequences[0].scores = 2..3), message);
    assert_eq!(error(&mut runner, &|p| p.blocks.clear()), lost("slot 1 lacks a block table"));
    assert_eq!(log.lock().unwrap().batches.len(), 3);
    run(&mut runner, prefill(1, SamplingParams::default())).unwrap();
}

#[test]
fn the_kv_cache_is_sized_by_bytes_or_blocks() {
    // Two layers, two heads of 8, key and value, four tokens, four bytes.
    let block = 2 * 2 * 8 * 2 * 4 * 4;
    let plan = |kv| {
        let runner = Runner::new(Box::new(backend(&[])), program(), RunnerConfig { kv, ..CONFIG })?;
        assert_eq!(runner.kv_cache_spec().groups[0].blocks, runner.memory_plan().blocks);
        assert_eq!(runner.kv_cache_spec().groups[0].block_bytes, block);
        Ok::<_, RunnerError>(runner.memory_plan().clone())
    };
    let by_bytes = plan(KvBudget::Bytes(11 * block + 5)).unwrap();
    assert_eq!((by_bytes.blocks, by_bytes.kv_bytes, by_bytes.weight_bytes), (11, 11 * block, 1234));
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
fn every_kv_group_gets_as_many_blocks() {
    let model = TinyModel { layers: vec![0, 1, 0], windows: vec![None, Some(8)], ..TinyModel::default() };
    let (program, _) = model.build().unwrap();
    let backend = backend(&[]);
    let log = backend.log.clone();
    let block = 2 * 8 * 2 * 4 * 4;
    let config = RunnerConfig { kv: KvBudget::Bytes(3 * block * 7), ..CONFIG };
    let runner = Runner::new(Box::new(backend), Arc::new(program), config).unwrap();
    assert_eq!(log.lock().unwrap().kv, [7, 7]);
    let groups: Vec<_> =
        runner.kv_cache_spec().groups.iter().map(|g| (g.layers, g.block_bytes, g.blocks, g.window)).collect();
    assert_eq!(groups, [(2, 2 * block, 7, None), (1, block, 7, Some(8))]);
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
