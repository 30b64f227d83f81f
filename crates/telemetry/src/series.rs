//! The series of an engine.

use std::sync::atomic::AtomicU64;

use metrics::{Counter, Gauge};

use crate::TelemetryConfig;
use crate::buckets;
use crate::cells::{Histogram, ReadableCounter, ReadableGauge, Unit};
use crate::registry::Registry;

/// Values of the label `finished_reason`.
const FINISHED_REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// The series, shared by the engine's handle, the statistics line and the registry.
#[derive(Debug)]
pub(crate) struct EngineSeries {
    pub(crate) state: State,
    pub(crate) counts: Counts,
    pub(crate) times: Times,
    pub(crate) sizes: Sizes,
}

/// The state after the last step.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) running: ReadableGauge,
    pub(crate) waiting: ReadableGauge,
    pub(crate) waiting_capacity: Gauge,
    pub(crate) waiting_deferred: Gauge,
    pub(crate) kv_usage: ReadableGauge,
    pub(crate) awake: Gauge,
}

/// Counts since the start.
#[derive(Debug)]
pub(crate) struct Counts {
    success: [Counter; FINISHED_REASONS.len()],
    pub(crate) prompt_tokens: Counter,
    pub(crate) prompt_computed: ReadableCounter,
    pub(crate) prompt_from_cache: Counter,
    pub(crate) prompt_cached: Counter,
    pub(crate) cached_from_device: Counter,
    pub(crate) generation_tokens: ReadableCounter,
    pub(crate) prefix_queries: ReadableCounter,
    pub(crate) prefix_hits: ReadableCounter,
    pub(crate) media_queries: Counter,
    pub(crate) media_hits: Counter,
    pub(crate) encoder_queries: Counter,
    pub(crate) encoder_hits: Counter,
    /// Number of lookups for the statistics line; not exported.
    pub(crate) prefix_requests: AtomicU64,
    pub(crate) preemptions: ReadableCounter,
}

/// Durations of requests and their stages.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) ttft: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) inference: Histogram,
}

/// Sizes of requests and steps.
#[derive(Debug)]
pub(crate) struct Sizes {
    pub(crate) prompt: Histogram,
    pub(crate) generation: Histogram,
    pub(crate) prefill_computed: Histogram,
    pub(crate) max_generation: Histogram,
    pub(crate) max_tokens: Histogram,
    pub(crate) n: Histogram,
    pub(crate) preemptions: Histogram,
    pub(crate) step_tokens: Histogram,
}

impl EngineSeries {
    pub(crate) fn register(registry: &Registry, config: &TelemetryConfig) -> Self {
        let engine = config.engine.to_string();
        let scope = Scope { registry, labels: [("engine", engine.as_str()), ("model_name", &config.model_name)] };
        Self {
            state: State::register(&scope),
            counts: Counts::register(&scope),
            times: Times::register(&scope),
            sizes: Sizes::register(&scope, &buckets::lengths(config.max_model_len)),
        }
    }
}

/// The series of speculation.
#[derive(Debug)]
pub(crate) struct SpeculationSeries {
    pub(crate) drafts: Counter,
    pub(crate) draft_tokens: Counter,
    pub(crate) accepted_tokens: Counter,
    /// By position in the draft.
    pub(crate) accepted_at: Vec<Counter>,
}

impl SpeculationSeries {
    /// Registers the series for at most `tokens` drafts of a sequence in a step.
    pub(crate) fn register(registry: &Registry, config: &TelemetryConfig, tokens: usize) -> Self {
        let engine = config.engine.to_string();
        let scope = Scope { registry, labels: [("engine", engine.as_str()), ("model_name", &config.model_name)] };
        let counter = |name, help| scope.counter(name, help, None);
        let at = |position: usize| {
            let help = "Draft tokens that were accepted, by their position in the draft.";
            let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
            scope.counter(name, help, Some(("position", &position.to_string())))
        };
        Self {
            drafts: counter("vllm:spec_decode_num_drafts_total", "Drafts that were verified."),
            draft_tokens: counter("vllm:spec_decode_num_draft_tokens_total", "Tokens of drafts that were verified."),
            accepted_tokens: counter("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
            accepted_at: (0..tokens).map(at).collect(),
        }
    }
}

impl State {
    fn register(scope: &Scope<'_>) -> Self {
        let waiting_for = |reason| {
            let help = "Requests that wait, by what they wait for: capacity, or to become ready.";
            scope.gauge("vllm:num_requests_waiting_by_reason", help, Some(("reason", reason)))
        };
        let sleep_state = |state| {
            let help = "Whether the engine is in this state of sleep.";
            scope.gauge("vllm:engine_sleep_state", help, Some(("sleep_state", state)))
        };
        let awake = sleep_state("awake");
        awake.set(1.0);
        // States that this engine lacks are exported as zero.
        for state in ["weights_offloaded", "discard_all"] {
            let _ = sleep_state(state);
        }
        Self {
            awake,
            running: scope.gauge("vllm:num_requests_running", "Requests in the running list.", None).into(),
            waiting: scope.gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", None).into(),
            waiting_capacity: waiting_for("capacity"),
            waiting_deferred: waiting_for("deferred"),
            kv_usage: scope.gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache; 1 is full.", None).into(),
        }
    }
}

impl Counts {
    fn register(scope: &Scope<'_>) -> Self {
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
        let counts = Self {
            success: FINISHED_REASONS.map(success),
            prompt_tokens: counter("vllm:prompt_tokens_total", "Prompt tokens of requests that got a first token."),
            prompt_computed: by_source("local_compute").into(),
            prompt_from_cache: by_source("local_cache_hit"),
            prompt_cached: counter("vllm:prompt_tokens_cached_total", "Prompt tokens that were not computed."),
            cached_from_device: cached_by_source("device"),
            generation_tokens: counter("vllm:generation_tokens_total", "Generated tokens.").into(),
            prefix_queries: counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.").into(),
            prefix_hits: counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.").into(),
            media_queries: counter("vllm:mm_cache_queries_total", "Images looked up in the cache of processed images."),
            media_hits: counter("vllm:mm_cache_hits_total", "Images found in the cache of processed images."),
            encoder_queries: counter(
                "octavo_encoder_cache_queries_total",
                "Images that a step needed and that the prefix cache did not replace.",
            ),
            encoder_hits: counter("octavo_encoder_cache_hits_total", "Images of these that were encoded already."),
            prefix_requests: AtomicU64::new(0),
            preemptions: counter("vllm:num_preemptions_total", "Preemptions of running requests.").into(),
        };
        // Sources that this engine lacks are exported as zero.
        let _ = by_source("external_kv_transfer");
        let _ = counter("vllm:external_prefix_cache_queries_total", "Tokens looked up in a cache of another process.");
        let _ = counter("vllm:external_prefix_cache_hits_total", "Tokens found in a cache of another process.");
        for source in ["host", "p2p", "disk", "external_unspecified"] {
            let _ = cached_by_source(source);
        }
        counts
    }

    /// The counter of a reason; an unknown one counts as an error.
    pub(crate) fn success(&self, reason: &str) -> &Counter {
        const ERROR: usize = 3;
        let index = FINISHED_REASONS.iter().position(|&r| r == reason).unwrap_or(ERROR);
        &self.success[index]
    }
}

impl Times {
    fn register(scope: &Scope<'_>) -> Self {
        let seconds = |name, help, bounds| scope.histogram(name, help, (Unit::Seconds, bounds));
        let latency = |name, help| seconds(name, help, buckets::LATENCY);
        Self {
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
        }
    }
}

impl Sizes {
    fn register(scope: &Scope<'_>, lengths: &[f64]) -> Self {
        let items = |name, help, bounds| scope.histogram(name, help, (Unit::Items, bounds));
        let length = |name, help| items(name, help, lengths);
        Self {
            prompt: length("vllm:request_prompt_tokens", "Prompt tokens of a request."),
            generation: length("vllm:request_generation_tokens", "Generated tokens of a request."),
            prefill_computed: length(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, not cached.",
            ),
            max_generation: length(
                "vllm:request_max_num_generation_tokens",
                "Most tokens that any of a request's n sequences generated.",
            ),
            max_tokens: length("vllm:request_params_max_tokens", "Bound on a request's generated tokens."),
            n: items("vllm:request_params_n", "Sequences that a request asked for.", buckets::SAMPLES),
            preemptions: items("vllm:request_num_preemptions", "Preemptions of a request.", buckets::PREEMPTIONS),
            step_tokens: items(
                "vllm:iteration_tokens_total",
                "Tokens of a step, computed from prompts and generated.",
                buckets::ITERATION,
            ),
        }
    }
}

/// Registers series with the engine's constant labels.
struct Scope<'a> {
    registry: &'a Registry,
    labels: [(&'a str, &'a str); 2],
}

impl Scope<'_> {
    fn counter(&self, name: &'static str, help: &'static str, label: Option<(&str, &str)>) -> Counter {
        self.registry.counter(name, help, &self.with(label))
    }

    fn gauge(&self, name: &'static str, help: &'static str, label: Option<(&str, &str)>) -> Gauge {
        self.registry.gauge(name, help, &self.with(label))
    }

    fn histogram(&self, name: &'static str, help: &'static str, shape: (Unit, &[f64])) -> Histogram {
        self.registry.histogram(name, help, &self.labels, shape)
    }

    fn with<'b>(&'b self, label: Option<(&'b str, &'b str)>) -> Vec<(&'b str, &'b str)> {
        self.labels.into_iter().chain(label).collect()
    }
}
