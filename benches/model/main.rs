//! The default model end to end: `cargo bench -p octavo --bench model`.
//!
//! Starts the release binary, measures the time from process start to the first 200 on /health and the processor time that
//! it takes when nobody asks, loads it with 1, 8 and 32 requests at a time, and prints throughput, latencies, resident memory,
//! and how long /health and /metrics take meanwhile: 99 of 100 answers within 10 ms are wanted, on a machine that is full.

use std::path::Path;
use std::time::{Duration, Instant};

use octavo_bench::ProcessUsage;
use octavo_bench::load::{LoadConfig, run};
use octavo_tests::Server;

/// Starts that are timed.
const STARTS: usize = 5;

/// How long a server is watched that nobody asks.
const IDLE: Duration = Duration::from_secs(5);

/// Between two probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(10);

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
    println!("resident when idle: {} MiB", usage(&server).resident_bytes >> 20);
    let before = usage(&server).cpu;
    tokio::time::sleep(IDLE).await;
    println!("processor time while idle for {IDLE:.0?}: {:.0?}", usage(&server).cpu - before);
    for (concurrency, requests) in [(1, 6), (8, 32), (32, 64)] {
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
        let mut probes = Vec::new();
        let report = tokio::select! {
            report = run(&config) => report.expect("the load runs"),
            () = probe(&server, &mut probes) => unreachable!("it goes on as long as it is asked to"),
        };
        println!("\n{concurrency} at a time, 128 prompt words and 64 output tokens each\n{report}");
        assert_eq!(report.failed, 0);
        probes.sort_unstable();
        let quantile = |q: f64| probes[((probes.len() - 1) as f64 * q) as usize];
        println!(
            "/health and /metrics meanwhile, {} times: median {:.2?}, p99 {:.2?}, longest {:.2?}",
            probes.len(),
            quantile(0.5),
            quantile(0.99),
            quantile(1.0)
        );
    }
    println!("resident after the load: {} MiB", usage(&server).resident_bytes >> 20);
}

/// Asks for /health and /metrics in turns, for ever, and keeps how long the answers took.
async fn probe(server: &Server, times: &mut Vec<Duration>) {
    for path in ["/health", "/metrics"].into_iter().cycle() {
        let begun = Instant::now();
        assert_eq!(server.get(path).await.0, 200);
        times.push(begun.elapsed());
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

fn usage(server: &Server) -> ProcessUsage {
    ProcessUsage::of(server.pid()).expect("the server runs")
}
