//! Metrics and traces with vLLM's names, the statistics line, and logging.
//!
//! Counters and gauges live in the recorder of `metrics-exporter-prometheus`. They are registered once through the
//! `metrics` facade, and the code that observes keeps their handles. A scrape sorts the exporter's page and appends the
//! histograms.
//!
//! # Why this crate has its own histograms
//!
//! Observations come from the engine thread, so they must be wait-free and must not allocate. A scrape must be cheap
//! however much was observed since the last one, and memory must stay constant without scrapes. The exporter keeps the raw
//! samples of a histogram until a scrape or an upkeep pass drains them, so it guarantees neither. The histograms of this
//! crate have fixed buckets and count in integers (nanoseconds or items): an observation is two atomic additions, `_sum`
//! is exact, and no upkeep is needed. Bounds are formatted as by Prometheus' Python client (`le="1.0"`, `le="1e+06"`),
//! because existing dashboards, recording rules and scripts expect that.
//!
//! A scrape takes the locks of registration and of other scrapes, but none of the engine.
//!
//! There is no global state: a process may have several [`Telemetry`] values, as tests do.
//!
//! **Invariant:** this crate depends on no other crate of the workspace.

mod buckets;
mod cells;
mod device;
mod engine;
mod http;
mod keys;
mod logging;
mod process;
mod registry;
mod series;
mod spelling;
mod stats;
mod traces;
mod upkeep;

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

pub use device::{DeviceConfig, DeviceMemory, DeviceMetrics, DeviceStep};
pub use engine::{EngineMetrics, FinishedRequest, StepStats};
pub use http::{HttpExchange, HttpMetrics, Rejection};
pub use keys::{KeyLimit, KeyMetrics};
pub use logging::{LogConfig, LogError, LogFormat, init_logging};
pub use stats::StatsLine;
pub use traces::{
    HttpOutcome, RequestSpan, SequenceTimes, TraceConfig, TraceError, TraceParent, TracedRequest, TracedSequence,
    Tracer, Traces,
};
pub use upkeep::UpkeepGuard;

use registry::Registry;
use series::{EngineSeries, SpeculationSeries};

/// The settings that constant labels and bucket bounds depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// The first served model name: the label `model_name`.
    pub model_name: String,
    /// Index of the engine: the label `engine`, `"0"` for the first.
    pub engine: u32,
    /// Upper end of the length histograms' buckets, in tokens.
    pub max_model_len: usize,
}

/// The labels of [`Telemetry::set_build_info`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo<'a> {
    /// The program's version.
    pub version: &'a str,
    /// The revision of its source.
    pub revision: &'a str,
    /// The backend: `cpu` or `cuda`.
    pub backend: &'a str,
    /// The processor's instruction set or the GPU's name.
    pub device: &'a str,
}

/// The metrics of one server and its tracer. Clones are cheap and share every series.
#[derive(Clone, Debug)]
pub struct Telemetry {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: TelemetryConfig,
    registry: Registry,
    engine: Arc<EngineSeries>,
    tracer: OnceLock<Tracer>,
}

impl Telemetry {
    /// Registers every series of the engine, at zero.
    pub fn new(config: TelemetryConfig) -> Self {
        let registry = Registry::default();
        let engine = Arc::new(EngineSeries::register(&registry, &config));
        let telemetry = Self { inner: Arc::new(Inner { config, registry, engine, tracer: OnceLock::new() }) };
        // Endpoint pickers report a missing family at every scrape.
        telemetry.set_adapters(0, &[], &[]);
        telemetry
    }

    /// Sets `vllm:lora_requests_info`. Readers take the series with the largest value, so there is only the latest.
    fn set_adapters(&self, limit: usize, running: &[Arc<str>], waiting: &[Arc<str>]) {
        let (limit, running, waiting) = (limit.to_string(), running.join(","), waiting.join(","));
        let labels = [
            ("max_lora", limit.as_str()),
            ("running_lora_adapters", running.as_str()),
            ("waiting_lora_adapters", waiting.as_str()),
        ];
        let help = "LoRA adapters in use, as labels; the value is the Unix time of the last change.";
        self.inner.registry.set_info("vllm:lora_requests_info", help, &labels, unix_seconds());
    }

    /// The body of `GET /metrics`: Prometheus' text format 0.0.4 ([`Telemetry::CONTENT_TYPE`]).
    pub fn render(&self) -> String {
        self.inner.registry.render()
    }

    /// The media type of [`Telemetry::render`].
    pub const CONTENT_TYPE: &'static str = "text/plain; version=0.0.4; charset=utf-8";

    /// The engine's handle on its metrics.
    pub fn engine(&self) -> EngineMetrics {
        EngineMetrics::new(self, None)
    }

    /// The handle of an engine that speculates, with series for at most `drafts` tokens of a draft.
    pub fn speculating_engine(&self, drafts: usize) -> EngineMetrics {
        let series = SpeculationSeries::register(&self.inner.registry, &self.inner.config, drafts);
        EngineMetrics::new(self, Some(Arc::new(series)))
    }

    /// The server's handle on its metrics, with `(method, handler)` series for `routes` only. All other requests count under
    /// the handler `none`. Further calls return the same series.
    pub fn http(&self, routes: &[(&'static str, &'static str)]) -> HttpMetrics {
        HttpMetrics::register(&self.inner.registry, &self.inner.config.model_name, routes)
    }

    /// The handle on the metrics of the API key `name`, registered at zero. Further calls return the same series, which
    /// remain until the process ends.
    pub fn key(&self, name: &str) -> KeyMetrics {
        KeyMetrics::register(&self.inner.registry, name)
    }

    /// The handle on the device's metrics.
    pub fn device(&self, device: &DeviceConfig) -> DeviceMetrics {
        DeviceMetrics::register(&self.inner.registry, &self.inner.config, device)
    }

    /// Sets `vllm:cache_config_info`, a constant 1 with the KV cache's configuration as labels, to which the label `engine`
    /// is added. A second call replaces the first.
    pub fn set_cache_config(&self, labels: &[(&str, String)]) {
        let engine = self.inner.config.engine.to_string();
        let mut all: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
        all.push(("engine", &engine));
        self.inner.registry.set_info(
            "vllm:cache_config_info",
            "Configuration of the KV cache, as labels; always 1.",
            &all,
            1.0,
        );
    }

    /// Sets `octavo_build_info`, a constant 1 with the build as labels. A second call replaces the first.
    pub fn set_build_info(&self, info: &BuildInfo<'_>) {
        let labels = [
            ("version", info.version),
            ("revision", info.revision),
            ("backend", info.backend),
            ("device", info.device),
        ];
        self.inner.registry.set_info("octavo_build_info", "What runs, as labels; always 1.", &labels, 1.0);
    }

    /// Starts the trace exporter, whose counts are metrics. It stops when the result is dropped.
    ///
    /// # Errors
    /// The exporter cannot use `config`.
    pub fn start_traces(&self, config: &TraceConfig) -> Result<Traces, TraceError> {
        let traces = Traces::start(config, &self.inner.registry)?;
        // The first exporter stays; a server starts only one.
        let _ = self.inner.tracer.set(traces.tracer());
        Ok(traces)
    }

    /// The tracer, which begins the spans of requests. Without an exporter it begins none.
    pub fn tracer(&self) -> Tracer {
        self.inner.tracer.get().cloned().unwrap_or_default()
    }

    /// A statistics line over this server's counters, starting now. With `on_gpu` it speaks of the "GPU KV cache", as
    /// vLLM's line always does.
    pub fn stats_line(&self, on_gpu: bool) -> StatsLine {
        StatsLine::new(Arc::clone(&self.inner.engine), self.inner.config.engine, on_gpu)
    }

    /// Starts the timer thread that logs the statistics line every `VLLM_LOG_STATS_INTERVAL` seconds (10 by default);
    /// it ends when the guard is dropped. The metrics themselves need no upkeep. For `on_gpu` see
    /// [`Telemetry::stats_line`].
    pub fn spawn_upkeep(&self, on_gpu: bool) -> UpkeepGuard {
        UpkeepGuard::spawn(self.stats_line(on_gpu), stats::interval_from_env())
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
