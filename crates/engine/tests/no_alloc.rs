//! Tests that the step loop does not allocate while its sequences run.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::alloc::System;
use std::task::{Context, Waker};

use octavo_engine::internals::ManualEngine;
use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{Constraint, EngineConfig, Request, SamplingParams};
use octavo_telemetry::{Telemetry, TelemetryConfig};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

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

/// Returns a request, of which every third has a constraint.
fn request(number: u32) -> Request {
    let prompt: Vec<u32> = (0..40).map(|i| number * 100 + i).collect();
    let params = SamplingParams { max_tokens: 300, ..SamplingParams::default() };
    let constraint = number.is_multiple_of(3).then(|| Box::new(Even) as Box<dyn Constraint>);
    Request { constraint, ..Request::new(number.to_string(), prompt, params) }
}

#[test]
fn decode_steps_do_not_allocate() {
    for max_in_flight in [1, 2] {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 2048 });
        let executor = MockExecutor::new(MockConfig { max_in_flight, ..MockConfig::default() });
        let mut engine = ManualEngine::new(Box::new(executor), EngineConfig::default(), telemetry.engine()).unwrap();
        // The buffers of plans and blocks reach their size in the first round. In the others, the test's own threads may
        // allocate, but hardly in all of them.
        let rounds: Vec<usize> = (0..4).map(|round| steady_allocations(&mut engine, round)).collect();
        assert!(rounds[1..].contains(&0), "allocations in the steady state, by round: {rounds:?}");
    }
}

/// Runs 64 requests and returns the number of allocations in turns in which all of them generate.
fn steady_allocations(engine: &mut ManualEngine, round: u32) -> usize {
    let mut streams: Vec<_> = (0..64).map(|number| engine.submit(request(64 * round + number)).unwrap()).collect();
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
    allocations[20..280].iter().sum()
}
