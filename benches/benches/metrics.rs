//! Benches of metrics: observing a token on the engine thread, and a scrape after a million observations.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use octavo_telemetry::{EngineMetrics, FinishedRequest, StepStats, Telemetry, TelemetryConfig};

const SEQUENCES: u64 = 256;

fn telemetry() -> Telemetry {
    Telemetry::new(TelemetryConfig { model_name: "bench/model".into(), engine: 0, max_model_len: 131_072 })
}

/// Observes a decode step of 256 sequences as the engine does.
fn decode_step(engine: &EngineMetrics, gap: Duration) {
    for _ in 0..SEQUENCES {
        engine.next_token(black_box(gap));
        engine.generated(1);
    }
    engine.step(&StepStats { running: 256, kv_usage: 0.5, generated_tokens: SEQUENCES, ..StepStats::default() });
}

fn observe(c: &mut Criterion) {
    let telemetry = telemetry();
    let engine = telemetry.engine();
    let mut group = c.benchmark_group("metrics");
    group.throughput(Throughput::Elements(SEQUENCES));
    let mut gap = 0u64;
    group.bench_function("decode step of 256 sequences", |b| {
        b.iter(|| {
            gap = (gap + 7_919_000) % 200_000_000;
            decode_step(&engine, Duration::from_nanos(gap));
        });
    });
    group.throughput(Throughput::Elements(1));
    let request = FinishedRequest {
        reason: "length",
        e2e: Duration::from_millis(900),
        queue: Some(Duration::from_millis(10)),
        prefill: Some(Duration::from_millis(90)),
        decode: Some(Duration::from_millis(800)),
        prompt_tokens: 100,
        generated_tokens: 200,
        max_tokens: 200,
        n: Some(1),
        ..FinishedRequest::default()
    };
    group.bench_function("finished request", |b| b.iter(|| engine.finished(black_box(&request))));
    group.finish();
}

fn scrape(c: &mut Criterion) {
    let telemetry = telemetry();
    let engine = telemetry.engine();
    let routes = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")];
    telemetry.http(&routes);
    for i in 0..1_000_000 / SEQUENCES {
        decode_step(&engine, Duration::from_micros(i % 100_000));
    }
    let text = telemetry.render();
    println!("a scrape has {} lines, {} bytes", text.lines().count(), text.len());
    c.bench_function("metrics/scrape after a million observations", |b| b.iter(|| telemetry.render()));
}

criterion_group!(benches, observe, scrape);
criterion_main!(benches);
