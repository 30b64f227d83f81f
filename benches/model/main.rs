//! The default model end to end: `cargo bench -p octavo --bench model`.
//!
//! Starts the release binary, measures the time from process start to the first 200 on /health, loads it with 1 and 8
//! requests at a time, and prints throughput, latencies and resident memory. No target but honesty: it is the candle
//! backend, the plain reference.

use std::path::Path;
use std::time::{Duration, Instant};

use octavo_bench::ProcessUsage;
use octavo_bench::load::{LoadConfig, run};
use octavo_tests::Server;

/// Starts that are timed.
const STARTS: usize = 5;

fn main() {
    // `cargo test` builds and runs benches too, but only for their smoke tests: this one has none.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let Some(model) = octavo_models::testing::default_model() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(measure(&model));
}

fn start(model: &Path) -> Server {
    Server::start(Path::new(env!("CARGO_BIN_EXE_octavo")), model, &["--max-model-len", "2048"])
}

async fn measure(model: &Path) {
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let begun = Instant::now();
        let server = start(model);
        assert_eq!(server.get("/health").await.0, 200);
        starts.push(begun.elapsed());
    }
    starts.sort_unstable();
    println!(
        "process start to first 200 on /health: min {:.2?}, median {:.2?}, max {:.2?}",
        starts[0],
        starts[STARTS / 2],
        starts[STARTS - 1]
    );

    let server = start(model);
    println!("resident when idle: {} MiB", resident(&server));
    for (concurrency, requests) in [(1, 3), (8, 16)] {
        let config = LoadConfig {
            base_url: server.url(""),
            model: "default".into(),
            requests,
            max_concurrency: Some(concurrency),
            input_len: 128,
            output_len: 64,
            warmups: 1,
            seed: concurrency as u64,
            timeout: Duration::from_secs(600),
            ..LoadConfig::default()
        };
        let report = run(&config).await.expect("the load runs");
        println!("\n{concurrency} at a time, 128 prompt words and 64 output tokens each\n{report}");
        assert_eq!(report.failed, 0);
    }
    println!("resident after the load: {} MiB", resident(&server));
}

fn resident(server: &Server) -> u64 {
    ProcessUsage::of(server.pid()).map_or(0, |usage| usage.resident_bytes >> 20)
}
