//! Measures the default model end to end: `cargo bench -p octavo --bench model`.
//!
//! Starts the release binary and measures the time from process start to the first 200 on /health and the CPU time of
//! an idle server. Then it sends 1, 8 and 32 requests at a time, and prints throughput, latencies, resident memory and
//! the response times of /health and /metrics meanwhile. The goal is that 99 % of these responses take at most 10 ms on
//! a fully loaded machine.

use std::path::Path;
use std::time::{Duration, Instant};

use octavo_bench::ProcessUsage;
use octavo_bench::load::{LoadConfig, run};
use octavo_tests::Server;

/// Number of timed starts.
const STARTS: usize = 5;

/// Time over which an idle server is observed.
const IDLE: Duration = Duration::from_secs(5);

/// Interval between two probes.
const PROBE_INTERVAL: Duration = Duration::from_millis(10);

fn main() {
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let model = octavo_models::testing::default_model();
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

/// Requests /health and /metrics alternately forever and records the response times.
async fn probe(server: &Server, times: &mut Vec<Duration>) {
    for path in ["/health", "/metrics"].into_iter().cycle() {
        let begun = Instant::now();
        assert_eq!(server.get(path).await.0, 200);
        times.push(begun.elapsed());
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

fn usage(server: &Server) -> ProcessUsage {
    ProcessUsage::of_process(server.pid()).expect("the server runs")
}
