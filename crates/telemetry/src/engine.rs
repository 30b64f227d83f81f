//! What the engine observes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::TelemetryConfig;
use crate::buckets;
use crate::cells::{Counter, Gauge, Histogram, Unit};
use crate::registry::Registry;

/// Values of the label `finished_reason`.
const FINISHED_REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// State after a step, and what the step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Sequences in the running list.
    pub running: usize,
    /// Sequences that wait for capacity.
    pub waiting: usize,
    /// Waiting sequences that were passed over because they are not ready.
    pub deferred: usize,
    /// Used share of the KV blocks, 0 to 1; evictable blocks count as free.
    pub kv_usage: f64,
    /// Sequences preempted in this step.
    pub preempted: u64,
    /// Prompt tokens computed in this step.
    pub prompt_tokens: u64,
    /// Tokens generated in this step.
    pub generated_tokens: u64,
}

/// A sequence that has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FinishedRequest {
    /// `stop`, `length`, `abort`, `error` or `repetition`; anything else counts as `error`.
    pub reason: &'static str,
    /// Arrival in the front end → end.
    pub e2e: Duration,
    /// Taken into the queue → first scheduled; `None` if it never was.
    pub queue: Option<Duration>,
    /// First scheduled → first token; `None` without a token.
    pub prefill: Option<Duration>,
    /// First token → last token, zero for one token; `None` without a token.
    pub decode: Option<Duration>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// The bound on generated tokens in force.
    pub max_tokens: u64,
    /// `n` of the API request, from the first of its sequences only.
    pub n: Option<u32>,
    /// How often it was preempted.
    pub preemptions: u64,
}

/// The engine's handle on its metrics. Every method is wait-free and does not allocate; clones share the series.
#[derive(Clone, Debug, Default)]
pub struct EngineMetrics {
    series: Option<Arc<EngineSeries>>,
}

impl EngineMetrics {
    /// A handle that observes nothing.
    pub fn disabled() -> Self {
        Self::default()
    }

    pub(crate) fn new(series: Arc<EngineSeries>) -> Self {
        Self { series: Some(series) }
    }

    /// Observes the state after a step. A call without tokens updates the gauges and counts as no step, so that an
    /// engine can report that it became idle.
    pub fn step(&self, stats: &StepStats) {
        let Some(s) = &self.series else { return };
        s.running.set(stats.running as f64);
        s.waiting.set((stats.waiting + stats.deferred) as f64);
        s.waiting_capacity.set(stats.waiting as f64);
        s.waiting_deferred.set(stats.deferred as f64);
        s.kv_usage.set(stats.kv_usage);
        s.preemptions.add(stats.preempted);
        let tokens = stats.prompt_tokens + stats.generated_tokens;
        if tokens > 0 {
            s.iteration_tokens.observe(tokens);
        }
    }

    /// Observes the prefix-cache lookup at the first admission of a sequence.
    pub fn prefix_lookup(&self, queried_tokens: u64, hit_tokens: u64) {
        let Some(s) = &self.series else { return };
        s.prefix_requests.fetch_add(1, Relaxed);
        s.prefix_queries.add(queried_tokens);
        s.prefix_hits.add(hit_tokens);
        s.cached_from_device.add(hit_tokens);
    }

    /// Observes a sequence's first token: `ttft` since its arrival in the front end, its whole prompt, and the part of
    /// it found in the prefix cache.
    pub fn first_token(&self, ttft: Duration, prompt_tokens: u64, cached_tokens: u64) {
        let Some(s) = &self.series else { return };
        s.ttft.observe_duration(ttft);
        s.prompt_tokens.add(prompt_tokens);
        s.prompt_cached.add(cached_tokens);
        s.prompt_from_cache.add(cached_tokens);
        s.prompt_computed.add(prompt_tokens.saturating_sub(cached_tokens));
    }

    /// Observes a later output of a sequence, `gap` after the one before.
    pub fn next_token(&self, gap: Duration) {
        let Some(s) = &self.series else { return };
        s.inter_token.observe_duration(gap);
    }

    /// Counts generated tokens.
    pub fn generated(&self, tokens: u64) {
        let Some(s) = &self.series else { return };
        s.generation_tokens.add(tokens);
    }

    /// Observes the end of a sequence.
    pub fn finished(&self, request: &FinishedRequest) {
        let Some(s) = &self.series else { return };
        s.success(request.reason).add(1);
        s.e2e.observe_duration(request.e2e);
        if let Some(queue) = request.queue {
            s.queue.observe_duration(queue);
        }
        if let (Some(prefill), Some(decode)) = (request.prefill, request.decode) {
            s.prefill.observe_duration(prefill);
            s.decode.observe_duration(decode);
            s.inference.observe_duration(prefill + decode);
            let gaps = u32::try_from(request.generated_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
            s.per_token.observe_duration(decode.checked_div(gaps).unwrap_or_default());
        }
        s.request_prompt.observe(request.prompt_tokens);
        s.request_generation.observe(request.generated_tokens);
        s.request_prefill_computed.observe(request.prompt_tokens.saturating_sub(request.cached_tokens));
        s.request_max_tokens.observe(request.max_tokens);
        s.request_preemptions.observe(request.preemptions);
        if let Some(n) = request.n {
            s.request_n.observe(u64::from(n));
        }
        if request.n == Some(1) {
            s.request_max_generation.observe(request.generated_tokens);
        }
    }

    /// Observes the end of an API request with `n` > 1: the most tokens that any of its sequences generated. For
    /// `n` = 1, [`EngineMetrics::finished`] does it.
    pub fn parent_finished(&self, most_generated_tokens: u64) {
        let Some(s) = &self.series else { return };
        s.request_max_generation.observe(most_generated_tokens);
    }
}

/// Every series of an engine.
#[derive(Debug)]
pub(crate) struct EngineSeries {
    pub(crate) running: Gauge,
    pub(crate) waiting: Gauge,
    waiting_capacity: Gauge,
    waiting_deferred: Gauge,
    pub(crate) kv_usage: Gauge,
    success: [Counter; FINISHED_REASONS.len()],
    prompt_tokens: Counter,
    pub(crate) prompt_computed: Counter,
    prompt_from_cache: Counter,
    prompt_cached: Counter,
    cached_from_device: Counter,
    pub(crate) generation_tokens: Counter,
    pub(crate) prefix_queries: Counter,
    pub(crate) prefix_hits: Counter,
    /// Lookups, for the statistics line; not exported.
    pub(crate) prefix_requests: AtomicU64,
    pub(crate) preemptions: Counter,
    ttft: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    request_prompt: Histogram,
    request_generation: Histogram,
    request_prefill_computed: Histogram,
    request_max_generation: Histogram,
    request_max_tokens: Histogram,
    request_n: Histogram,
    request_preemptions: Histogram,
    iteration_tokens: Histogram,
}

impl EngineSeries {
    pub(crate) fn register(registry: &Registry, config: &TelemetryConfig) -> Self {
        let engine = config.engine.to_string();
        let scope = Scope { registry, labels: [("engine", engine.as_str()), ("model_name", &config.model_name)] };
        let lengths = buckets::lengths(config.max_model_len);
        let seconds = |name, help, bounds| scope.histogram(name, help, (Unit::Seconds, bounds));
        let items = |name, help, bounds| scope.histogram(name, help, (Unit::Items, bounds));
        let latency = |name, help| seconds(name, help, buckets::LATENCY);
        let length = |name, help| items(name, help, &lengths);

        let waiting_for = |reason| {
            let help = "Requests that wait, by what they wait for: capacity, or to become ready.";
            scope.gauge("vllm:num_requests_waiting_by_reason", help, Some(("reason", reason)))
        };
        let by_source = |source| {
            let help = "Prompt tokens, by where their keys and values came from.";
            scope.counter("vllm:prompt_tokens_by_source_total", help, Some(("source", source)))
        };
        let cached_by_source = |source| {
            let help = "Prompt tokens found in a cache when the request was admitted, by the kind of cache.";
            scope.counter("vllm:prompt_tokens_cached_by_source_total", help, Some(("source", source)))
        };
        let success = |reason| {
            let help = "Finished sequences, by the reason of their end.";
            scope.counter("vllm:request_success_total", help, Some(("finished_reason", reason)))
        };
        let counter = |name, help| scope.counter(name, help, None);

        let series = Self {
            running: scope.gauge("vllm:num_requests_running", "Requests in the running list.", None),
            waiting: scope.gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", None),
            waiting_capacity: waiting_for("capacity"),
            waiting_deferred: waiting_for("deferred"),
            kv_usage: scope.gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache; 1 is full.", None),
            success: FINISHED_REASONS.map(success),
            prompt_tokens: counter("vllm:prompt_tokens_total", "Prompt tokens of requests that got a first token."),
            prompt_computed: by_source("local_compute"),
            prompt_from_cache: by_source("local_cache_hit"),
            prompt_cached: counter("vllm:prompt_tokens_cached_total", "Prompt tokens that were not computed."),
            cached_from_device: cached_by_source("device"),
            generation_tokens: counter("vllm:generation_tokens_total", "Generated tokens."),
            prefix_queries: counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
            prefix_hits: counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache."),
            prefix_requests: AtomicU64::new(0),
            preemptions: counter("vllm:num_preemptions_total", "Preemptions of running requests."),
            ttft: seconds("vllm:time_to_first_token_seconds", "Arrival to first token.", buckets::TTFT),
            inter_token: seconds("vllm:inter_token_latency_seconds", "Gap between tokens.", buckets::TOKEN),
            per_token: seconds(
                "vllm:request_time_per_output_token_seconds",
                "Mean gap between the tokens of a request.",
                buckets::TOKEN,
            ),
            e2e: latency("vllm:e2e_request_latency_seconds", "Arrival to end."),
            queue: latency("vllm:request_queue_time_seconds", "Time in the waiting queue."),
            prefill: latency("vllm:request_prefill_time_seconds", "First scheduled to first token."),
            decode: latency("vllm:request_decode_time_seconds", "First token to last token."),
            inference: latency("vllm:request_inference_time_seconds", "First scheduled to last token."),
            request_prompt: length("vllm:request_prompt_tokens", "Prompt tokens of a request."),
            request_generation: length("vllm:request_generation_tokens", "Generated tokens of a request."),
            request_prefill_computed: length(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, not cached.",
            ),
            request_max_generation: length(
                "vllm:request_max_num_generation_tokens",
                "Most tokens that any of a request's n sequences generated.",
            ),
            request_max_tokens: length("vllm:request_params_max_tokens", "Bound on a request's generated tokens."),
            request_n: items("vllm:request_params_n", "Sequences that a request asked for.", buckets::SAMPLES),
            request_preemptions: items(
                "vllm:request_num_preemptions",
                "Preemptions of a request.",
                buckets::PREEMPTIONS,
            ),
            iteration_tokens: items(
                "vllm:iteration_tokens_total",
                "Tokens of a step, computed from prompts and generated.",
                buckets::ITERATION,
            ),
        };
        // Sources that this engine does not have yet are there all the same, at zero.
        by_source("external_kv_transfer");
        for source in ["host", "p2p", "disk", "external_unspecified"] {
            cached_by_source(source);
        }
        series
    }

    fn success(&self, reason: &str) -> &Counter {
        const ERROR: usize = 3;
        let index = FINISHED_REASONS.iter().position(|&r| r == reason).unwrap_or(ERROR);
        &self.success[index]
    }
}

/// Registers series with the engine's constant labels.
struct Scope<'a> {
    registry: &'a Registry,
    labels: [(&'a str, &'a str); 2],
}

impl Scope<'_> {
    fn counter(&self, name: &'static str, help: &str, label: Option<(&str, &str)>) -> Counter {
        self.registry.counter(name, help, &self.with(label))
    }

    fn gauge(&self, name: &'static str, help: &str, label: Option<(&str, &str)>) -> Gauge {
        self.registry.gauge(name, help, &self.with(label))
    }

    fn histogram(&self, name: &'static str, help: &str, shape: (Unit, &[f64])) -> Histogram {
        self.registry.histogram(name, help, &self.labels, shape)
    }

    fn with<'b>(&'b self, label: Option<(&'b str, &'b str)>) -> Vec<(&'b str, &'b str)> {
        self.labels.into_iter().chain(label).collect()
    }
}
