//! Benches of the whole HTTP stack over the mock executor on loopback: the cost of a request and of a token without a
//! model.
//!
//! `cargo bench -p octavo-benches --bench http` prints one table and writes `target/bench-results/http.json`. Client
//! and server share the machine's cores. It does not use Criterion, because a run is one measurement of many requests,
//! not many of one.

mod bare;
mod server;
mod tokenizer;

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use octavo_bench::load::{self, LoadConfig, Report};
use octavo_bench::{ProcessUsage, Summary};
use octavo_http_client::{Certificates, Connection, Target};
use serde_json::{Value, json};
use server::{MODEL, ServerProcess, Stack};

/// Loads of a full run: `(connections, streamed requests, requests of one token)`.
const LOADS: [(usize, usize, usize); 4] =
    [(1, 500, 3000), (64, 8000, 20_000), (256, 8000, 20_000), (500, 10_000, 20_000)];
const OUTPUT_TOKENS: u32 = 64;
const PROMPT_WORDS: usize = 9;
const IDLE_CONNECTIONS: usize = 1000;

/// Load that measures the latency added to the first token: streams, requests, and a step time that leaves the cores
/// room.
const PACED: (usize, usize, Duration) = (64, 2000, Duration::from_millis(10));

fn main() -> Result<(), Box<dyn Error>> {
    if server::is_server() {
        return server::serve();
    }
    // Cargo passes `--bench` for a measurement; otherwise a short run checks that the bench works.
    let measured = std::env::args().any(|arg| arg == "--bench");
    let scale = if measured { 1 } else { 100 };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(scale))
}

async fn measure(scale: usize) -> Result<(), Box<dyn Error>> {
    let mut rows = Vec::new();
    println!("{}", Row::HEAD);
    for (connections, streamed, whole) in LOADS {
        for (stack, stream, requests) in
            [(Stack::Server, true, streamed), (Stack::Bare, true, streamed), (Stack::Server, false, whole)]
        {
            let load = Load {
                stack,
                step: Duration::ZERO,
                connections,
                stream,
                requests: (requests / scale).max(connections),
            };
            rows.push(Row::measure(load).await?.print());
        }
    }
    println!("\nsteps of {} ms", PACED.2.as_millis());
    for stack in [Stack::Server, Stack::Bare, Stack::Server, Stack::Bare] {
        let (connections, requests, step) = PACED;
        let load = Load { stack, step, connections, stream: true, requests: (requests / scale).max(connections) };
        rows.push(Row::measure(load).await?.print());
    }
    let idle = idle_connections(IDLE_CONNECTIONS / scale.min(10)).await?;
    println!(
        "\nidle connections: {} × {:.1} KiB on {:.1} MiB",
        idle.connections,
        idle.bytes_each / 1024.0,
        idle.bytes_before as f64 / f64::from(1 << 20)
    );
    let result = json!({
        "bench": "http",
        "machine": machine(),
        "unix_time": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        "prompt_words": PROMPT_WORDS,
        "loads": rows,
        "idle": {
            "connections": idle.connections,
            "bytes_each": idle.bytes_each,
            "resident_bytes_before": idle.bytes_before,
        },
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench-results/http.json");
    fs::create_dir_all(path.parent().ok_or("the path has no parent")?)?;
    fs::write(&path, format!("{result:#}\n"))?;
    Ok(())
}

/// A load and its server.
#[derive(Clone, Copy)]
struct Load {
    stack: Stack,
    /// Duration of a step of the mock.
    step: Duration,
    connections: usize,
    stream: bool,
    requests: usize,
}

/// Result of one load on a fresh server.
struct Row {
    load: Load,
    report: Report,
    server_cpu_seconds: f64,
    resident_bytes: u64,
}

impl Row {
    const HEAD: &str = "server  connections  answer              req/s     tok/s  TTFT p50/p99 ms   ITL p50/p99 ms  E2E p50/p99 ms  \
                        server µs/req  µs/tok  client µs/req  server MiB";

    async fn measure(load: Load) -> Result<Self, Box<dyn Error>> {
        let Load { stack, step, connections, stream, requests } = load;
        let server = ServerProcess::start(stack, step)?;
        let config = LoadConfig {
            base_url: server.url.clone(),
            model: MODEL.into(),
            requests,
            max_concurrency: Some(connections),
            stream,
            input_len: PROMPT_WORDS,
            output_len: if stream { OUTPUT_TOKENS } else { 1 },
            ..LoadConfig::default()
        };
        // After the warm-up, threads, connection buffers and the allocator's arenas exist.
        let warm_up = LoadConfig { requests: requests.min(2 * connections + 20), seed: 1, ..config.clone() };
        load::run(&warm_up).await?;
        let before = ProcessUsage::of_process(server.pid()).ok_or("the server's usage cannot be read")?;
        let report = load::run(&config).await?;
        let after = ProcessUsage::of_process(server.pid()).ok_or("the server's usage cannot be read")?;
        if let Some(error) = report.records.iter().find_map(|record| record.error.as_ref()) {
            return Err(format!("{} of {requests} requests failed, one with: {error}", report.failed).into());
        }
        Ok(Self {
            load,
            report,
            server_cpu_seconds: (after.cpu - before.cpu).as_secs_f64(),
            resident_bytes: after.resident_bytes,
        })
    }

    fn micros_per(&self, seconds: f64, count: u64) -> f64 {
        1e6 * seconds / count.max(1) as f64
    }

    /// Prints the row, and returns it for the file.
    fn print(&self) -> Value {
        println!("{}", self.line());
        self.json()
    }

    fn line(&self) -> String {
        let r = &self.report;
        format!(
            "{:<6}  {:>11}  {:<16} {:>8.0}  {:>8.0}  {:>15}  {:>15}  {:>14}  {:>13.1}  {:>6.2}  {:>13.1}  {:>10.1}",
            self.load.stack.name(),
            self.load.connections,
            if self.load.stream { "64 tokens, SSE" } else { "1 token, JSON" },
            r.request_throughput,
            r.output_throughput,
            Summary::cell(r.ttft.as_ref()),
            Summary::cell(r.itl.as_ref()),
            Summary::cell(r.e2el.as_ref()),
            self.micros_per(self.server_cpu_seconds, r.completed as u64),
            self.micros_per(self.server_cpu_seconds, r.total_output_tokens),
            self.micros_per(r.client_cpu_seconds.unwrap_or(f64::NAN), r.completed as u64),
            self.resident_bytes as f64 / f64::from(1 << 20),
        )
    }

    fn json(&self) -> Value {
        json!({
            "server": self.load.stack.name(),
            "step_micros": self.load.step.as_micros() as u64,
            "connections": self.load.connections,
            "stream": self.load.stream,
            "server_cpu_seconds": self.server_cpu_seconds,
            "server_cpu_us_per_request": self.micros_per(self.server_cpu_seconds, self.report.completed as u64),
            "server_cpu_us_per_token": self.micros_per(self.server_cpu_seconds, self.report.total_output_tokens),
            "server_resident_bytes": self.resident_bytes,
            "report": self.report.to_json(false),
        })
    }
}

struct Idle {
    connections: usize,
    bytes_before: u64,
    bytes_each: f64,
}

/// Measures the resident memory that a connection uses after one answered request.
async fn idle_connections(connections: usize) -> Result<Idle, Box<dyn Error>> {
    let server = ServerProcess::start(Stack::Server, Duration::ZERO)?;
    let target = Target::new(&server.url, None, &Certificates::Trusted)?;
    let resident = || ProcessUsage::of_process(server.pid()).map(|usage| usage.resident_bytes).ok_or("no usage");
    // The first connections also make the server's threads touch their memory.
    let mut warm = open(&target, 16).await?;
    let bytes_before = resident()?;
    let open = open(&target, connections).await?;
    let bytes_after = resident()?;
    drop(open);
    warm.clear();
    let bytes_each = (bytes_after as f64 - bytes_before as f64) / connections as f64;
    Ok(Idle { connections, bytes_before, bytes_each })
}

async fn open(target: &Target, connections: usize) -> Result<Vec<Connection>, Box<dyn Error>> {
    let mut open = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut connection = Connection::new(target.clone());
        let request = target.request(Method::GET, "/v1/models", Bytes::new())?;
        connection.send(request).await?.into_body().collect().await?;
        open.push(connection);
    }
    Ok(open)
}

/// Returns a description of the machine.
fn machine() -> Value {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    json!({"cpu": model, "cores": cores})
}
