//! Tests that neither the engine, nor the runner, nor the backend of the processor allocates while sequences generate.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::alloc::System;
use std::sync::Arc;
use std::task::{Context, Waker};

use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_engine::internals::ManualEngine;
use octavo_engine::{Constraint, EngineConfig, Request, SamplingParams};
use octavo_ops::Backend;
use octavo_ops::testing::TinyModel;
use octavo_runner::{KvBudget, Runner, RunnerConfig};
use octavo_telemetry::{Telemetry, TelemetryConfig};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SEQUENCES: u32 = 12;

/// Allows every second token.
struct Even;

impl Constraint for Even {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0x5555_5555);
    }

    fn accept(&mut self, token: u32) -> bool {
        token.is_multiple_of(2)
    }

    fn rollback(&mut self, _: usize) {}
}

/// Returns a request; every third has a constraint, and every second is random.
fn request(number: u32) -> Request {
    let prompt: Vec<u32> = (0..20).map(|at| (number + at) % 40).collect();
    let temperature = if number.is_multiple_of(2) { 0.8 } else { 0.0 };
    let params = SamplingParams { max_tokens: 60, temperature, top_p: 0.9, ..SamplingParams::default() };
    let constraint = number.is_multiple_of(3).then(|| Box::new(Even) as Box<dyn Constraint>);
    Request { constraint, ..Request::new(number.to_string(), prompt, params) }
}

fn engine() -> ManualEngine {
    let (program, weights) = TinyModel::default().build().unwrap();
    let threads = Some(2);
    let mut backend = CpuBackend::new(CpuConfig { threads, ..CpuConfig::default() }).unwrap();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 512 });
    let config = EngineConfig { max_model_len: 512, max_num_seqs: 16, ..EngineConfig::default() };
    let runner_config = RunnerConfig {
        block_size: 16,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: config.max_model_len,
        kv: KvBudget::Blocks(600),
        async_scheduling: None,
        adapters: None,
    };
    let register = |device: &_| telemetry.device(device);
    let runner = Runner::observed(Box::new(backend), Arc::new(program), runner_config, None, register).unwrap();
    ManualEngine::new(Box::new(runner), config, telemetry.engine()).unwrap()
}

/// Runs requests and returns the number of allocations in turns in which all of them generate.
fn steady_allocations(engine: &mut ManualEngine, round: u32) -> usize {
    let mut streams: Vec<_> =
        (0..SEQUENCES).map(|number| engine.submit(request(SEQUENCES * round + number)).unwrap()).collect();
    let mut allocations = Vec::new();
    loop {
        let region = Region::new(ALLOCATOR);
        let more = engine.turn();
        let change = region.change();
        allocations.push(change.allocations + change.reallocations);
        for stream in &mut streams {
            let _ = stream.poll_next(&mut Context::from_waker(Waker::noop()));
        }
        if !more {
            break;
        }
    }
    allocations[20..50].iter().sum()
}

#[test]
fn decode_steps_do_not_allocate() {
    let mut engine = engine();
    // The buffers reach their size in the first round. In the others, the test's own threads may allocate, but hardly in all
    // of them.
    let rounds: Vec<usize> = (0..4).map(|round| steady_allocations(&mut engine, round)).collect();
    assert!(rounds[1..].contains(&0), "allocations in the steady state, by round: {rounds:?}");
}
