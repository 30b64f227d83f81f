//! Bench of a decode step of many sequences at several lengths of context, on a backend that computes nothing: the
//! processor time of the engine thread and of the device thread.
//!
//! `cargo bench -p octavo-runner --bench contexts`

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on stops")]

use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use octavo_engine::internals::ManualEngine;
use octavo_engine::{EngineConfig, Request, RequestStream, SamplingParams};
use octavo_ops::sampling::{SampleBatch, SampledToken};
use octavo_ops::testing::TinyModel;
use octavo_ops::{Backend, BackendError, KvGroup, Limits, Program, StepBatch, WeightSource};
use octavo_runner::{KvBudget, Runner, RunnerConfig};
use octavo_telemetry::EngineMetrics;

const RUNNING: usize = 1000;
const BLOCK: usize = 16;
/// Number of steps that are measured at a time.
const STEPS: u32 = 64;
const ROUNDS: u32 = 5;

/// A backend that checks its steps and draws the same token in every row.
struct Nothing {
    program: Arc<Program>,
    kv: (usize, usize),
    drawn: usize,
}

impl Backend for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn block_sizes(&self) -> &[usize] {
        &[BLOCK]
    }

    fn kv_dtype(&self) -> &'static str {
        "none"
    }

    fn kv_block_bytes(&self, _: &KvGroup, _: usize) -> u64 {
        1
    }

    fn load(&mut self, _: &Program, _: &dyn WeightSource, _: &mut dyn FnMut(u64)) -> Result<(), BackendError> {
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError> {
        self.kv = (block_size, blocks);
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        let limits = Limits { kv: self.kv, drawn: self.drawn, ..Limits::default() };
        batch
            .check(&self.program, limits)
            .map_err(|what| BackendError::Failed { backend: "nothing", reason: what.into() })
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        self.drawn = batch.rows.len();
        Ok(())
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        out.clear();
        out.resize(self.drawn, SampledToken { id: 1, logprobs: None });
        Ok(())
    }

    fn embeddings(&mut self, _: &mut Vec<f32>) -> Result<(), BackendError> {
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        Ok(Vec::new())
    }

    fn copy_blocks(&mut self, _: &[(u32, u32)]) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Returns an engine whose sequences have computed `context` tokens each.
fn decoding(context: usize) -> (ManualEngine, Vec<RequestStream>) {
    let program = Arc::new(TinyModel::default().build().unwrap().0);
    let output = STEPS * (ROUNDS + 4);
    let length = context + output as usize + BLOCK;
    let blocks = RUNNING * length.div_ceil(BLOCK) + 1;
    let max_num_batched_tokens = 1 << 20;
    let backend = Nothing { program: program.clone(), kv: (0, 0), drawn: 0 };
    let config = RunnerConfig {
        block_size: BLOCK,
        max_num_seqs: RUNNING,
        max_num_batched_tokens,
        max_model_len: length,
        kv: KvBudget::Blocks(blocks),
        async_scheduling: None,
        adapters: None,
    };
    let runner = Runner::new(Box::new(backend), program, config).unwrap();
    let config = EngineConfig {
        max_model_len: length,
        max_num_seqs: RUNNING,
        max_num_batched_tokens,
        max_queued_requests: RUNNING,
        max_queued_tokens: usize::MAX,
        enable_prefix_caching: false,
        watermark: 0.0,
        ..EngineConfig::default()
    };
    let mut engine = ManualEngine::new(Box::new(runner), config, EngineMetrics::disabled()).unwrap();
    let prompt: Arc<[u32]> = vec![1; context].into();
    let params = Arc::new(SamplingParams { max_tokens: output, ..SamplingParams::default() });
    let submit = |number: usize| {
        let request = Request::new(number.to_string(), prompt.clone(), params.clone());
        engine.submit(request).unwrap()
    };
    let mut streams: Vec<_> = (0..RUNNING).map(submit).collect();
    let mut begun = vec![false; RUNNING];
    while begun.contains(&false) {
        engine.turn();
        for (begun, stream) in begun.iter_mut().zip(&mut streams) {
            *begun |= read(stream);
        }
    }
    (engine, streams)
}

/// Takes what a stream has. Returns whether that is anything.
fn read(stream: &mut RequestStream) -> bool {
    stream.poll_next(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Returns the processor time of the thread that calls, which is the engine thread here, and of the device thread.
fn processor_times() -> [Duration; 2] {
    let read = |path: &Path, file: &str| std::fs::read_to_string(path.join(file)).unwrap();
    let time = |path: &Path| Duration::from_nanos(read(path, "schedstat").split(' ').next().unwrap().parse().unwrap());
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let device = tasks.filter(|task| read(task, "comm").trim() == "octavo-device").map(|task| time(&task)).sum();
    [time(Path::new("/proc/thread-self")), device]
}

fn main() {
    println!("microseconds of a step, {RUNNING} running, medians and ranges of {ROUNDS} rounds of {STEPS} steps");
    for context in [1 << 10, 1 << 15, 1 << 17] {
        let (mut engine, mut streams) = decoding(context);
        let mut rounds = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            let before = processor_times();
            for _ in 0..STEPS {
                engine.turn();
            }
            for ((round, after), before) in rounds.iter_mut().zip(processor_times()).zip(before) {
                round.push((after - before).as_secs_f64() * 1e6 / f64::from(STEPS));
            }
            streams.iter_mut().for_each(|stream| while read(stream) {});
        }
        for (name, mut round) in ["engine thread", "device thread"].into_iter().zip(rounds) {
            round.sort_by(f64::total_cmp);
            let (least, median, most) = (round[0], round[round.len() / 2], round[round.len() - 1]);
            println!("context {context:6}, {name}: {median:7.0} ({least:.0} to {most:.0})");
        }
    }
}
