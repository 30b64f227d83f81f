//! Sends requests over many connections to the release binary: `cargo bench --workspace --bench load`.
//!
//! Runs 500 connections × 10 chat requests ten times, not streamed, on a tiny model, and prints the number of failures,
//! the longest wait beside the mean, and the resident memory after each run. With `OCTAVO_PEER_URL` (another server,
//! already warm), `OCTAVO_PEER_MODEL` (the name it serves) and `OCTAVO_LOAD_MODEL` (the same model for Octavo), both
//! servers then stream in turns.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use octavo_bench::load::{Endpoint, LoadConfig, Report, run};
use octavo_bench::{ProcessUsage, Summary};
use octavo_tests::Server;

const RUNS: u64 = 10;
const CONNECTIONS: usize = 500;
const REQUESTS: usize = 5000;

/// Connections, requests and rounds of the comparison with a peer.
const PEER: [(usize, usize); 3] = [(1, 50), (64, 1000), (256, 3000)];
const ROUNDS: u64 = 3;
const PEER_TOKENS: u32 = 64;

fn main() {
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    if !env::args().any(|arg| arg == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/llama");
    let model = env::var_os("OCTAVO_LOAD_MODEL").map_or(tiny, PathBuf::from);
    runtime.block_on(measure(&model));
}

async fn measure(model: &Path) {
    // The first run fills the KV cache, so later growth has another cause.
    let cache = (64 << 20).to_string();
    let flags = ["--max-num-seqs", "256", "--kv-cache-memory-bytes", &cache];
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_octavo")), model, &flags);
    match (env::var("OCTAVO_PEER_URL"), env::var("OCTAVO_PEER_MODEL")) {
        (Ok(url), Ok(name)) => compare(&server, &url, &name).await,
        _ => repeat(&server).await,
    }
}

async fn repeat(server: &Server) {
    println!("resident when idle: {} KiB", resident(server));
    println!("run  failed    req/s     tok/s  E2E mean / p99 / max ms  resident KiB");
    for seed in 0..RUNS {
        let config = LoadConfig {
            base_url: server.url(""),
            endpoint: Endpoint::Chat,
            model: "default".into(),
            requests: REQUESTS,
            max_concurrency: Some(CONNECTIONS),
            stream: false,
            input_len: 9,
            output_len: 100,
            temperature: 0.7,
            seed,
            timeout: Duration::from_secs(300),
            ..LoadConfig::default()
        };
        let report = run(&config).await.expect("the load runs");
        if let Some(error) = report.records.iter().find_map(|record| record.error.as_ref()) {
            println!("first error: {error}");
        }
        let latency = report.e2el.as_ref().map_or((f64::NAN, f64::NAN), |e| (e.mean, e.percentiles[0].1));
        let longest = report.records.iter().map(|record| record.latency).fold(0.0, f64::max);
        println!(
            "{seed:>3}  {:>6}  {:>7.1}  {:>8.0}  {:>7.0} / {:>5.0} / {:>5.0}  {:>12}",
            report.failed,
            report.request_throughput,
            report.output_throughput,
            latency.0,
            latency.1,
            1e3 * longest,
            resident(server)
        );
    }
}

async fn compare(server: &Server, peer_url: &str, peer_model: &str) {
    println!("connections  round  server     failed    req/s     tok/s   TTFT p50/p99 ms    ITL p50/p99 ms");
    for (connections, requests) in PEER {
        for round in 0..ROUNDS {
            for (name, url, model) in [("ours", server.url(""), "default"), ("peer", peer_url.to_owned(), peer_model)] {
                let config = LoadConfig {
                    base_url: url,
                    model: model.into(),
                    requests,
                    max_concurrency: Some(connections),
                    input_len: 9,
                    output_len: PEER_TOKENS,
                    warmups: 2,
                    seed: round,
                    ..LoadConfig::default()
                };
                let report = run(&config).await.expect("the load runs");
                println!("{connections:>11}  {round:>5}  {name:<8}  {}", line(&report));
            }
        }
    }
}

fn line(report: &Report) -> String {
    format!(
        "{:>7}  {:>7.1}  {:>8.0}  {:>16}  {:>16}",
        report.failed,
        report.request_throughput,
        report.output_throughput,
        Summary::cell(report.ttft.as_ref()),
        Summary::cell(report.itl.as_ref())
    )
}

fn resident(server: &Server) -> u64 {
    ProcessUsage::of_process(server.pid()).map_or(0, |usage| usage.resident_bytes >> 10)
}
