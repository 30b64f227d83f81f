//! vLLM's periodic statistics line.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::series::EngineSeries;

/// Number of requests that the hit rate of the prefix cache covers.
const HIT_RATE_REQUESTS: u64 = 1000;

/// Default interval of the lines, which `VLLM_LOG_STATS_INTERVAL` overrides.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) fn interval_from_env() -> Duration {
    let text = std::env::var("VLLM_LOG_STATS_INTERVAL").ok();
    text.and_then(|text| parse_interval(&text)).unwrap_or(DEFAULT_INTERVAL)
}

fn parse_interval(text: &str) -> Option<Duration> {
    let seconds = text.trim().parse::<f64>().ok().filter(|&seconds| seconds > 0.0)?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The totals at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    prompt_tokens: u64,
    generation_tokens: u64,
    preemptions: u64,
    prefix: Lookups,
}

/// Prefix-cache lookups, in requests and tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Lookups {
    requests: u64,
    queries: u64,
    hits: u64,
}

/// The line that vLLM logs every ten seconds while it is busy, computed from the change of the counters.
#[derive(Debug)]
pub struct StatsLine {
    series: Arc<EngineSeries>,
    prefix: String,
    kv_cache: &'static str,
    last: Totals,
    was_busy: bool,
    /// Lookups of past intervals, latest last, over about the last thousand requests.
    window: VecDeque<Lookups>,
}

impl StatsLine {
    pub(crate) fn new(series: Arc<EngineSeries>, engine: u32, on_gpu: bool) -> Self {
        let last = Totals::from_series(&series);
        let (prefix, kv_cache) = (format!("Engine {engine:03}: "), if on_gpu { "GPU KV cache" } else { "KV cache" });
        Self { series, prefix, kv_cache, last, was_busy: false, window: VecDeque::new() }
    }

    /// The line for the `elapsed` time since the last call; `None` if the engine was idle. The first idle interval after a
    /// busy one has a line as well, so that the log ends with zeros.
    pub fn line(&mut self, elapsed: Duration) -> Option<String> {
        let now = Totals::from_series(&self.series);
        let last = std::mem::replace(&mut self.last, now);
        self.remember(Lookups {
            requests: now.prefix.requests - last.prefix.requests,
            queries: now.prefix.queries - last.prefix.queries,
            hits: now.prefix.hits - last.prefix.hits,
        });
        let per_second = |tokens: u64| tokens as f64 / elapsed.as_secs_f64().max(1e-9);
        let prompt = now.prompt_tokens - last.prompt_tokens;
        let generation = now.generation_tokens - last.generation_tokens;
        let preemptions = now.preemptions - last.preemptions;
        let (running, waiting) = (self.series.state.running.get(), self.series.state.waiting.get());

        let busy = prompt > 0 || generation > 0 || running > 0.0 || waiting > 0.0;
        if !std::mem::replace(&mut self.was_busy, busy) && !busy {
            return None;
        }
        let mut line = format!(
            "{}Avg prompt throughput: {:.1} tokens/s, Avg generation throughput: {:.1} tokens/s, \
             Running: {running} reqs, Waiting: {waiting} reqs, ",
            self.prefix,
            per_second(prompt),
            per_second(generation),
        );
        // Writing to a String cannot fail.
        if preemptions > 0 {
            let _ = write!(line, "Preemptions: {preemptions}, ");
        }
        let _ = write!(
            line,
            "{} usage: {:.1}%, Prefix cache hit rate: {:.1}%",
            self.kv_cache,
            100.0 * self.series.state.kv_usage.get(),
            100.0 * self.hit_rate()
        );
        Some(line)
    }

    fn remember(&mut self, lookups: Lookups) {
        if lookups.requests == 0 {
            return;
        }
        self.window.push_back(lookups);
        let mut requests: u64 = self.window.iter().map(|l| l.requests).sum();
        while let Some(oldest) = self.window.front().filter(|l| requests - l.requests >= HIT_RATE_REQUESTS) {
            requests -= oldest.requests;
            self.window.pop_front();
        }
    }

    fn hit_rate(&self) -> f64 {
        let queries: u64 = self.window.iter().map(|l| l.queries).sum();
        let hits: u64 = self.window.iter().map(|l| l.hits).sum();
        if queries == 0 { 0.0 } else { hits as f64 / queries as f64 }
    }
}

impl Totals {
    fn from_series(series: &EngineSeries) -> Self {
        Self {
            // As in vLLM, cached prompt tokens do not count as throughput.
            prompt_tokens: series.counts.prompt_computed.get(),
            generation_tokens: series.counts.generation_tokens.get(),
            preemptions: series.counts.preemptions.get(),
            prefix: Lookups {
                requests: series.counts.prefix_requests.load(Relaxed),
                queries: series.counts.prefix_queries.get(),
                hits: series.counts.prefix_hits.get(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineMetrics, StepStats, Telemetry, TelemetryConfig};

    const TEN: Duration = Duration::from_secs(10);

    fn fixture() -> (EngineMetrics, StatsLine) {
        let config = TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 100 };
        let telemetry = Telemetry::new(config);
        (telemetry.engine(), telemetry.stats_line(true))
    }

    #[test]
    fn only_the_cache_of_a_gpu_is_called_one() {
        let config = TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 100 };
        let telemetry = Telemetry::new(config);
        let mut stats = telemetry.stats_line(false);
        telemetry.engine().generated(1);
        let line = stats.line(TEN).unwrap();
        assert!(line.contains(" reqs, KV cache usage: 0.0%,"), "{line}");
    }

    #[test]
    fn a_busy_interval_is_one_line_in_vllms_words() {
        let (engine, mut stats) = fixture();
        engine.prefix_lookup(400, 100);
        engine.first_token(Duration::from_millis(5), 400, 100);
        engine.generated(1234);
        engine.step(&StepStats { running: 3, waiting: 1, deferred: 1, kv_usage: 0.1234, ..StepStats::default() });
        let expected = "Engine 000: Avg prompt throughput: 30.0 tokens/s, Avg generation throughput: 123.4 tokens/s, \
                        Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.3%, Prefix cache hit rate: 25.0%";
        assert_eq!(stats.line(TEN).as_deref(), Some(expected));
    }

    #[test]
    fn preemptions_are_those_of_the_interval() {
        let (engine, mut stats) = fixture();
        engine.step(&StepStats { running: 1, preempted: 2, generated_tokens: 1, ..StepStats::default() });
        assert!(stats.line(TEN).unwrap().contains("Waiting: 0 reqs, Preemptions: 2, GPU KV"));
        assert!(!stats.line(TEN).unwrap().contains("Preemptions"));
    }

    #[test]
    fn an_idle_engine_is_silent_after_one_last_line() {
        let (engine, mut stats) = fixture();
        assert_eq!(stats.line(TEN), None);
        engine.generated(1);
        assert!(stats.line(TEN).is_some());
        assert!(stats.line(TEN).unwrap().contains("Avg generation throughput: 0.0 tokens/s"));
        assert_eq!(stats.line(TEN), None);
    }

    #[test]
    fn the_hit_rate_forgets_all_but_the_last_thousand_requests() {
        let (engine, mut stats) = fixture();
        for (requests, hits) in [(600, 0), (600, 10), (600, 10)] {
            (0..requests).for_each(|_| engine.prefix_lookup(10, hits));
            stats.line(TEN);
        }
        assert_eq!(stats.hit_rate(), 1.0);
        assert_eq!(stats.window.len(), 2);
        (0..5000).for_each(|_| {
            engine.prefix_lookup(10, 0);
            stats.line(TEN);
        });
        assert_eq!((stats.hit_rate(), stats.window.len()), (0.0, 1000));
    }

    #[test]
    fn intervals_are_positive_numbers_of_seconds() {
        assert_eq!(parse_interval("2.5"), Some(Duration::from_millis(2500)));
        for bad in ["", "0", "-1", "NaN", "inf", "1e300", "ten"] {
            assert_eq!(parse_interval(bad), None, "{bad}");
        }
    }
}
