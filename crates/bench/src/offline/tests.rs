//! Both measurements of an engine over the mock executor.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use octavo_engine::mock::{FailurePoint, MockConfig, MockExecutor, MockFailure};
use octavo_engine::{Engine, EngineConfig};
use octavo_telemetry::EngineMetrics;

use super::*;

const LIMITS: ModelLimits = ModelLimits { vocab_size: 1000, max_model_len: 64 };

fn engine(mock: MockConfig, config: EngineConfig) -> Engine {
    let config = EngineConfig { max_model_len: LIMITS.max_model_len, ..config };
    Engine::spawn(Box::new(MockExecutor::new(mock)), config, EngineMetrics::disabled()).unwrap()
}

fn batch() -> LatencyConfig {
    LatencyConfig { limits: LIMITS, input_len: 8, output_len: 4, batch_size: 3, n: 2, seed: 0 }
}

fn requests() -> ThroughputConfig {
    ThroughputConfig { limits: LIMITS, prompts: 20, input_len: 10, output_len: 6, range_ratio: 0.0, n: 1, seed: 0 }
}

#[tokio::test]
async fn a_batch_takes_the_time_of_its_steps() {
    let step_latency = Duration::from_millis(2);
    let executor = MockExecutor::new(MockConfig { step_latency, ..MockConfig::default() });
    let counters = executor.counters();
    let config = EngineConfig { max_model_len: LIMITS.max_model_len, ..EngineConfig::default() };
    let engine = Engine::spawn(Box::new(executor), config, EngineMetrics::disabled()).unwrap();
    let latency = FixedBatch::new(&batch()).unwrap().run(&engine.handle()).await.unwrap();
    assert!(latency >= 4 * step_latency, "one step a token: {latency:?}");
    // Each of the six sequences may arrive during a step of its own.
    assert!((4..=9).contains(&counters.steps()), "{} steps", counters.steps());
    assert_eq!((counters.computed_tokens(), counters.drawn_tokens()), (6 * (8 + 3), 6 * 4));
    engine.join();
}

#[test]
fn latencies_are_told_in_vllms_lines_and_keys() {
    let report = LatencyReport::new(&[1, 3, 2].map(Duration::from_secs)).unwrap();
    let text = report.to_string();
    assert!(text.starts_with("Avg latency: 2 seconds\nStd latency: 0.81"), "{text}");
    let expected = "
25% percentile latency: 1.5 seconds
50% percentile latency: 2 seconds
75% percentile latency: 2.5 seconds
90% percentile latency: 2.8 seconds
99% percentile latency: 2.98 seconds
";
    assert!(text.ends_with(expected), "{text}");
    let json = report.to_json();
    assert_eq!((&json["avg_latency"], &json["latencies"]), (&2.0.into(), &serde_json::json!([1.0, 3.0, 2.0])));
    let percents: Vec<&String> = json["percentiles"].as_object().unwrap().keys().collect();
    assert_eq!(percents, ["10", "25", "50", "75", "90", "99"]);
    assert_eq!(LatencyReport::new(&[]), None);
}

#[tokio::test]
async fn every_token_of_every_answer_is_counted() {
    // A queue of three: the rest is sent as places come free.
    let engine = engine(MockConfig::default(), EngineConfig { max_queued_requests: 3, ..EngineConfig::default() });
    let done = AtomicUsize::new(0);
    let report = throughput(&engine.handle(), &ThroughputConfig { n: 2, ..requests() }, &done).await.unwrap();
    assert_eq!((report.requests, report.prompt_tokens, report.output_tokens()), (20, 200, 240));
    assert_eq!(done.load(Ordering::Relaxed), 40);
    assert!(report.arrivals.iter().all(|&at| at > 0.0 && at <= report.elapsed));
    engine.join();
}

#[tokio::test]
async fn lengths_vary_and_repeat_by_seed() {
    let engine = engine(MockConfig::default(), EngineConfig::default());
    let run = async |seed| {
        let config = ThroughputConfig { range_ratio: 0.5, seed, ..requests() };
        let report = throughput(&engine.handle(), &config, &AtomicUsize::new(0)).await.unwrap();
        (report.prompt_tokens, report.output_tokens())
    };
    let (first, again, other) = (run(1).await, run(1).await, run(2).await);
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert!((100..=300).contains(&first.0) && (60..=180).contains(&first.1), "{first:?}");
    engine.join();
}

#[tokio::test]
async fn a_failing_engine_is_an_error() {
    let failures = vec![MockFailure { step: 2, at: FailurePoint::Wait, fatal: true }];
    let engine = engine(MockConfig { failures, ..MockConfig::default() }, EngineConfig::default());
    let error = throughput(&engine.handle(), &requests(), &AtomicUsize::new(0)).await.unwrap_err();
    // The engine may be gone before it has been asked for all of them.
    assert!(matches!(error, OfflineError::Ended(_) | OfflineError::Submit(SubmitError::Stopped)), "{error}");
    engine.join();
}

#[tokio::test]
async fn what_cannot_run_is_refused_before_it_does() {
    let engine = engine(MockConfig::default(), EngineConfig::default());
    for bad in [
        ThroughputConfig { prompts: 0, ..requests() },
        ThroughputConfig { n: 0, ..requests() },
        ThroughputConfig { input_len: 0, ..requests() },
        ThroughputConfig { range_ratio: 1.0, ..requests() },
        ThroughputConfig { range_ratio: f64::NAN, ..requests() },
    ] {
        let error = throughput(&engine.handle(), &bad, &AtomicUsize::new(0)).await.unwrap_err();
        assert!(matches!(error, OfflineError::Config(_)), "{bad:?}: {error}");
    }
    let long = ThroughputConfig { input_len: 60, output_len: 5, ..requests() };
    let error = throughput(&engine.handle(), &long, &AtomicUsize::new(0)).await.unwrap_err().to_string();
    assert!(error.contains("60 tokens with answers of 5") && error.contains("--max-model-len"), "{error}");
    assert!(matches!(FixedBatch::new(&LatencyConfig { batch_size: 0, ..batch() }), Err(OfflineError::Config(_))));
    engine.join();
}
