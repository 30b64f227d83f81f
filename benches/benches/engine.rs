//! Benches of the engine without a model: planning a step, blocks, the prefix index, a turn of the loop.
//!
//! The goal is at most 50 µs to plan a step of 256 running sequences.

use std::hint::black_box;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use octavo_engine::internals::{ManualEngine, ManualKv, ManualScheduler};
use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{EngineConfig, KvCacheSpec, KvGroupSpec, KvKind, Request, SamplingParams, Task};
use octavo_telemetry::{Telemetry, TelemetryConfig};

const RUNNING: usize = 256;
/// Number of tokens that each sequence generates before the bench starts again.
const STEPS: u32 = 512;

fn spec(blocks: usize) -> KvCacheSpec {
    let groups = vec![KvGroupSpec { layers: 1, kind: KvKind::Full }];
    KvCacheSpec { block_size: 16, block_bytes: 1, blocks, groups }
}

fn prompt(number: usize, len: usize) -> Arc<[u32]> {
    (0..len).map(|i| (number * 7919 + i) as u32).collect()
}

/// Returns a scheduler with 256 sequences that decode, with `context` tokens each.
fn decoding(context: usize) -> ManualScheduler {
    let length = context + STEPS as usize + 8;
    let config = EngineConfig {
        max_model_len: length,
        max_num_seqs: RUNNING,
        max_num_batched_tokens: RUNNING * context,
        ..EngineConfig::default()
    };
    let mut scheduler = ManualScheduler::new(config, &spec(RUNNING * length.div_ceil(16) + 1));
    for number in 0..RUNNING {
        scheduler.add(prompt(number, context), STEPS + 4);
    }
    scheduler.schedule();
    scheduler.retire(1);
    assert_eq!(scheduler.running(), RUNNING);
    scheduler
}

fn schedule(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine/schedule");
    for context in [128, 1024, 4096] {
        let timed = |schedules: bool| {
            move |b: &mut criterion::Bencher<'_>| {
                b.iter_custom(|iterations| {
                    let mut total = Duration::ZERO;
                    let mut left = 0;
                    let mut scheduler = decoding(context);
                    for _ in 0..iterations {
                        if left == 0 {
                            scheduler = decoding(context);
                            left = STEPS;
                        }
                        left -= 1;
                        let start = Instant::now();
                        black_box(scheduler.schedule());
                        let planned = start.elapsed();
                        scheduler.retire(1);
                        total += if schedules { planned } else { start.elapsed() - planned };
                    }
                    total
                });
            }
        };
        group.bench_function(BenchmarkId::new("256 running, context", context), timed(true));
        group.bench_function(BenchmarkId::new("retire 256, context", context), timed(false));
    }
    group.finish();
}

fn blocks(c: &mut Criterion) {
    const BLOCKS: usize = 512;
    let mut group = c.benchmark_group("engine/blocks");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    // The pool is as large as the sequence, so that every allocation evicts an indexed block if there are any.
    let kv = || ManualKv::new(&spec(BLOCKS + 2), prompt(1, BLOCKS * 16 + 1));
    let timed = |group: &mut criterion::BenchmarkGroup<'_, _>, name: &str, run: fn(&mut ManualKv) -> Duration| {
        let mut kv = kv();
        group.bench_function(name, |b| b.iter_custom(|iterations| (0..iterations).map(|_| run(&mut kv)).sum()));
    };
    fn time(act: impl FnOnce()) -> Duration {
        let start = Instant::now();
        act();
        start.elapsed()
    }
    timed(&mut group, "allocate", |kv| {
        let allocated = time(|| assert!(kv.allocate()));
        kv.free();
        allocated
    });
    timed(&mut group, "free", |kv| {
        assert!(kv.allocate());
        time(|| kv.free())
    });
    timed(&mut group, "index", |kv| {
        assert!(kv.allocate());
        let indexed = time(|| kv.index());
        kv.free();
        indexed
    });
    timed(&mut group, "allocate, evicting", |kv| {
        let allocated = time(|| assert!(kv.allocate()));
        kv.index();
        kv.free();
        allocated
    });
    timed(&mut group, "hash", |kv| time(|| kv.hash()));
    let mut found = kv();
    assert!(found.allocate());
    found.index();
    group.bench_function("lookup, all found", |b| b.iter(|| assert_eq!(found.lookup(), BLOCKS * 16)));
    group.finish();
}

/// Measures the whole work of the engine thread for a step of 256 decoding sequences whose readers keep up, over the
/// mock executor.
fn turn(c: &mut Criterion) {
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "bench".into(), engine: 0, max_model_len: 2048 });
    let start = |max_in_flight| {
        let executor = MockExecutor::new(MockConfig { max_in_flight, blocks: 65_536, ..MockConfig::default() });
        let config = EngineConfig { max_num_batched_tokens: 65_536, ..EngineConfig::default() };
        let mut engine = ManualEngine::new(Box::new(executor), config, telemetry.engine()).expect("limits are right");
        let streams: Vec<_> = (0..RUNNING)
            .map(|number| {
                let request = Request {
                    id: String::new(),
                    prompt: prompt(number, 128),
                    task: Task::Generate,
                    params: Arc::new(SamplingParams { max_tokens: STEPS + 8, ..SamplingParams::default() }),
                    priority: 0,
                    client: octavo_engine::ClientId::default(),
                    arrival: Instant::now(),
                    cache_salt: None,
                    adapter: None,
                    constraint: None,
                    images: Arc::default(),
                    second_text: None,
                    parent_n: None,
                };
                engine.submit(request).expect("the inbox has room")
            })
            .collect();
        for _ in 0..3 {
            engine.turn();
        }
        (engine, streams)
    };
    let mut group = c.benchmark_group("engine/turn");
    group.throughput(Throughput::Elements(RUNNING as u64));
    for max_in_flight in [1, 2] {
        group.bench_function(BenchmarkId::new("256 running, in flight", max_in_flight), |b| {
            b.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                let mut left = STEPS;
                let (mut engine, mut streams) = start(max_in_flight);
                for _ in 0..iterations {
                    if left == 0 {
                        (engine, streams) = start(max_in_flight);
                        left = STEPS;
                    }
                    left -= 1;
                    let begin = Instant::now();
                    assert!(engine.turn());
                    total += begin.elapsed();
                    for stream in &mut streams {
                        let _ = black_box(stream.poll_next(&mut Context::from_waker(Waker::noop())));
                    }
                }
                total
            });
        });
    }
    group.finish();
}

criterion_group!(benches, schedule, blocks, turn);
criterion_main!(benches);
