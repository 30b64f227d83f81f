//! A backend that records its calls and behaves as configured.

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use octavo_engine::{
    Executor, InputToken, Joined, PlannedRow, PlannedSequence, RowKind, SamplingParams, Seat, StepId, StepMasks,
    StepOutput, StepPlan, TableChange,
};
use octavo_ops::sampling::{SampleBatch, SampledToken, TokenCounts, TokenLogprobs};
use octavo_ops::testing::TinyModel;
use octavo_ops::{Backend, BackendError, KvGroup, Program, StepBatch, WeightSource};
use octavo_runner::{KvBudget, Runner, RunnerConfig};

/// Behaviour of a step.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Fate {
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

/// Sampler input of one row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SeenRow {
    pub(crate) seed: u64,
    pub(crate) output_position: u32,
    pub(crate) counts: Option<TokenCounts>,
    pub(crate) pending: Option<u32>,
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) forbidden: Vec<u32>,
    pub(crate) mask: Option<Vec<u32>>,
    pub(crate) forced: Option<u32>,
    pub(crate) logprobs: Option<u32>,
    pub(crate) logprob_ids: Vec<u32>,
}

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) batches: Vec<StepBatch>,
    pub(crate) rows: Vec<Vec<SeenRow>>,
    pub(crate) thread: Option<String>,
    pub(crate) kv: usize,
    /// Calls with the number of their step.
    pub(crate) calls: Vec<(&'static str, usize)>,
}

pub(crate) struct FakeBackend {
    pub(crate) log: Arc<Mutex<Log>>,
    pub(crate) fates: Vec<Fate>,
    pub(crate) steps: usize,
    pub(crate) in_flight: usize,
    /// Time that it has measured for each step.
    pub(crate) step_time: Option<Duration>,
    /// A forward pass waits for a message if there is a gate.
    pub(crate) gate: Option<Receiver<()>>,
    /// Tokens that have not been taken, with the number of their step.
    pub(crate) waiting: VecDeque<(usize, Vec<SampledToken>)>,
}

pub(crate) fn failure() -> BackendError {
    BackendError::Failed { backend: "fake", reason: "told to".into() }
}

pub(crate) fn device_lost() -> BackendError {
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

    fn allocate_kv(&mut self, _: usize, blocks: usize) -> Result<(), BackendError> {
        self.log.lock().unwrap().kv = blocks;
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

    /// Row r of the n-th step (from 1) gets the token 10·n + r.
    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let rows = batch.rows.iter().map(|row| SeenRow {
            seed: row.params.seed,
            output_position: row.output_position,
            counts: row.counts.cloned(),
            pending: row.pending,
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

    fn step_time(&self) -> Option<Duration> {
        self.step_time
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

    fn copy_blocks(&mut self, _: &[(u32, u32)]) -> Result<(), BackendError> {
        Ok(())
    }
}

pub(crate) const CONFIG: RunnerConfig = RunnerConfig {
    block_size: 4,
    max_num_seqs: 3,
    max_num_batched_tokens: 16,
    max_model_len: 20,
    kv: KvBudget::Blocks(9),
    async_scheduling: None,
    adapters: None,
};

pub(crate) fn program() -> Arc<Program> {
    Arc::new(TinyModel::default().build().unwrap().0)
}

pub(crate) fn start(backend: FakeBackend) -> (Runner, Arc<Mutex<Log>>) {
    let log = backend.log.clone();
    (Runner::new(Box::new(backend), program(), CONFIG).unwrap(), log)
}

pub(crate) fn backend(fates: &[Fate]) -> FakeBackend {
    FakeBackend {
        log: Arc::default(),
        fates: fates.to_vec(),
        steps: 0,
        in_flight: 1,
        step_time: None,
        gate: None,
        waiting: VecDeque::new(),
    }
}

pub(crate) fn joined(seat: Seat, params: SamplingParams, output: &[u32]) -> Joined {
    Joined { output: output.to_vec(), ..Joined::new(seat, [3, 1, 3], params) }
}

/// Adds the tokens of a sequence with the blocks 1 + seat and 4 + seat, of which the last draws if `draws`.
pub(crate) fn push(plan: &mut StepPlan, seat: Seat, first_position: u32, tokens: &[InputToken], draws: bool) {
    let start = plan.tokens.len();
    plan.tokens.extend_from_slice(tokens);
    plan.sequences.push(PlannedSequence {
        seat,
        tokens: start..plan.tokens.len(),
        first_position,
        ..PlannedSequence::default()
    });
    plan.tables.push(TableChange { seat, group: 0, start: 0, blocks: plan.blocks.len()..plan.blocks.len() + 2 });
    plan.blocks.extend([1 + seat, 4 + seat]);
    if draws {
        add_rows(plan, RowKind::Draw, [first_position + tokens.len() as u32 - 1]);
    }
}

/// Adds rows of the last sequence.
pub(crate) fn add_rows(plan: &mut StepPlan, kind: RowKind, positions: impl IntoIterator<Item = u32>) {
    let sequence = plan.sequences.len() as u32 - 1;
    plan.rows.extend(positions.into_iter().map(|position| PlannedRow { sequence, position, kind }));
}

/// Returns a prefill of one sequence in seat 1.
pub(crate) fn prefill(step: StepId, params: SamplingParams) -> StepPlan {
    let mut plan = StepPlan { step, joined: vec![joined(1, params, &[])], ..StepPlan::default() };
    push(&mut plan, 1, 0, &[3, 1, 3].map(InputToken::Id), true);
    plan
}

/// Returns a decode of seat 1.
pub(crate) fn decode(step: StepId, position: u32, token: InputToken) -> StepPlan {
    let mut plan = StepPlan { step, ..StepPlan::default() };
    push(&mut plan, 1, position, &[token], true);
    plan
}

pub(crate) fn run(runner: &mut Runner, plan: StepPlan) -> Result<StepOutput, String> {
    let step = plan.step;
    let text =
        |error: octavo_engine::ExecutorError| format!("{} {}", if error.fatal { "fatal" } else { "lost" }, error);
    runner.submit(plan).map_err(text)?;
    runner.sample(step, StepMasks::default()).map_err(text)?;
    runner.wait().map_err(text)
}

pub(crate) fn ids(output: &StepOutput) -> Vec<u32> {
    output.tokens.iter().map(|token| token.id).collect()
}
