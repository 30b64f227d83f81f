//! Measures what the engine thread waits for locks that the threads of readers and callers hold, while the processor is
//! saturated as by the CPU backend: a thread computes on every core all the time.
//!
//! `cargo bench -p octavo-engine --bench locks`

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use octavo_engine::internals::{LockWaits, lock_waits};
use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{
    Engine, EngineConfig, EngineHandle, Executor, ExecutorError, KvCacheSpec, Request, SamplingParams, StepId,
    StepMasks, StepOutput, StepPlan, TokenOutput,
};
use octavo_telemetry::EngineMetrics;

/// Time for which the engine runs.
const TIME: Duration = Duration::from_secs(30);
/// Number of sequences that run all the time.
const RUNNING: u32 = 64;
/// Time of a step.
const STEP: Duration = Duration::from_millis(2);

/// Tells what the engine thread, which calls it, has waited for.
struct Watched {
    inner: MockExecutor,
    waits: Arc<Mutex<(u64, LockWaits)>>,
}

impl Executor for Watched {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        self.inner.kv_cache_spec()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_rows(&self) -> usize {
        self.inner.max_rows()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        self.inner.sample(step, masks)
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        *waits = (waits.0 + 1, lock_waits());
        drop(waits);
        self.inner.wait()
    }

    fn recycle(&mut self, tokens: Vec<TokenOutput>) {
        self.inner.recycle(tokens);
    }
}

/// Submits a request and reads its tokens.
async fn generate(engine: &EngineHandle, number: u32, max_tokens: u32) {
    let prompt: Vec<u32> = (0..200).map(|at| (number * 7919 + at) % 1000).collect();
    let params = SamplingParams { max_tokens, ignore_eos: true, ..SamplingParams::default() };
    let mut stream = engine.submit(Request::new(number.to_string(), prompt, params)).unwrap();
    while stream.next().await.is_some() {}
}

fn main() {
    let inner = MockExecutor::new(MockConfig { step_latency: STEP, blocks: 1 << 18, ..MockConfig::default() });
    let waits = Arc::default();
    let config = EngineConfig { max_model_len: 1 << 15, max_num_seqs: 2 * RUNNING as usize, ..EngineConfig::default() };
    let executor = Box::new(Watched { inner, waits: Arc::clone(&waits) });
    let engine = Engine::spawn(executor, config, EngineMetrics::disabled()).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let cores = available_parallelism().map_or(1, usize::from);
    for _ in 0..cores {
        let over = over.clone();
        std::thread::spawn(move || {
            while !over.load(Relaxed) {
                spin_loop();
            }
        });
    }
    let readers = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
    // Half of the requests are long. The others come and go, so that there are messages in every step.
    for number in 0..2 * RUNNING {
        let (handle, over) = (engine.handle(), over.clone());
        let length = if number < RUNNING { 1 << 14 } else { 8 };
        readers.spawn(async move {
            while !over.load(Relaxed) {
                generate(&handle, number, length).await;
            }
        });
    }
    std::thread::sleep(TIME);
    over.store(true, Relaxed);
    engine.handle().abort_all();
    let (steps, LockWaits { count, total, longest }) = *waits.lock().unwrap_or_else(PoisonError::into_inner);
    println!(
        "{cores} cores: {steps} steps in {} s; {count} waits for locks, {:.3} ms in all, the longest {:.3} ms",
        TIME.as_secs(),
        total.as_secs_f64() * 1e3,
        longest.as_secs_f64() * 1e3,
    );
    assert!(steps > 100, "the engine runs");
}
