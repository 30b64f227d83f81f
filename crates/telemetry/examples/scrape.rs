//! Prints a scrape with something in it: `cargo run -p octavo-telemetry --example scrape`.

use std::time::Duration;

use octavo_telemetry::{FinishedRequest, HttpExchange, StepStats, Telemetry, TelemetryConfig};

fn main() {
    let config = TelemetryConfig { model_name: "a \"quoted\" \\ name".into(), engine: 0, max_model_len: 8192 };
    let telemetry = Telemetry::new(config);
    telemetry.set_cache_config(&[("block_size", "16".into()), ("num_gpu_blocks", "1000".into())]);
    let engine = telemetry.engine();
    engine.prefix_lookup(100, 32);
    engine.first_token(Duration::from_millis(30), 100, 32);
    engine.next_token(Duration::from_millis(12));
    engine.generated(2);
    engine.step(&StepStats { running: 1, kv_usage: 0.125, generated_tokens: 2, ..StepStats::default() });
    engine.finished(&FinishedRequest { reason: "stop", e2e: Duration::from_millis(42), ..FinishedRequest::default() });
    telemetry.http(&[("POST", "/v1/completions")]).observe(&HttpExchange {
        method: "POST",
        handler: Some("/v1/completions"),
        status: 200,
        duration: Duration::from_millis(42),
        request_bytes: 120,
        response_bytes: 900,
    });
    print!("{}", telemetry.render());
}
