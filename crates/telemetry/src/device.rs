//! Device utilisation: vLLM's estimates, which it counts under `--enable-mfu-metrics`, and metrics that it does not have.

use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};

use crate::TelemetryConfig;
use crate::cells::{Histogram, Unit};
use crate::registry::{Labels, Registry};

/// The properties of the device at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceConfig {
    /// Memory of the device in bytes; `None` if it uses host memory.
    pub memory: Option<DeviceMemory>,
    /// Peak bytes and FLOPs per second; `None` if they are unknown, in which case no utilisation is reported.
    pub peaks: Option<(f64, f64)>,
    /// Whether it may replay recorded steps.
    pub records_steps: bool,
}

/// The use of the device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Total memory.
    pub total: u64,
    /// Weights.
    pub weights: u64,
    /// KV cache.
    pub kv_cache: u64,
    /// Step buffers.
    pub workspace: u64,
}

/// A finished step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStep {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read from memory.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time for which the device was busy with this step alone.
    pub busy: Duration,
}

/// A handle on the device's metrics. Every method is wait-free and does not allocate; clones share the series.
#[derive(Clone, Debug, Default)]
pub struct DeviceMetrics {
    series: Option<Arc<DeviceSeries>>,
}

#[derive(Debug)]
struct DeviceSeries {
    flops: Counter,
    read: Counter,
    written: Counter,
    busy: Histogram,
    shares: Option<Shares>,
    /// Counts of steps that were replayed and of steps that were launched op by op.
    steps: Option<[Counter; 2]>,
}

/// Utilisation relative to the device's limits.
#[derive(Debug)]
struct Shares {
    bandwidth: Gauge,
    flops: Gauge,
    peaks: (f64, f64),
}

const BUSY_HELP: &str = "Time that the device was busy with steps.";

impl DeviceMetrics {
    /// A handle that observes nothing.
    pub fn disabled() -> Self {
        Self::default()
    }

    /// Registers the series, at zero.
    pub(crate) fn register(registry: &Registry, config: &TelemetryConfig, device: &DeviceConfig) -> Self {
        let engine = config.engine.to_string();
        let labels = [("engine", engine.as_str()), ("model_name", config.model_name.as_str())];
        let with = |name, value| [labels[0], labels[1], (name, value)];
        if let Some(memory) = device.memory {
            let kinds = [
                ("total", memory.total),
                ("weights", memory.weights),
                ("kv_cache", memory.kv_cache),
                ("workspace", memory.workspace),
            ];
            for (kind, bytes) in kinds {
                let help = "Bytes of the device's memory, all of them and by what they are used for.";
                registry.gauge("octavo_device_memory_bytes", help, &with("kind", kind)).set(bytes as f64);
            }
        }
        let steps = device.records_steps.then(|| {
            ["replayed", "launched"].map(|mode| {
                let help = "Steps, replayed as a CUDA graph or launched kernel by kernel.";
                registry.counter("octavo_cuda_graph_steps_total", help, &with("mode", mode))
            })
        });
        let counter = |name, help| registry.counter(name, help, &labels);
        let series = DeviceSeries {
            flops: counter(
                "vllm:estimated_flops_per_gpu_total",
                "Floating-point operations of the steps, from the model's program.",
            ),
            read: counter(
                "vllm:estimated_read_bytes_per_gpu_total",
                "Bytes that the steps read, from the model's program.",
            ),
            written: counter(
                "vllm:estimated_write_bytes_per_gpu_total",
                "Bytes that the steps wrote, from the model's program.",
            ),
            busy: registry.summary("octavo_step_busy_seconds", BUSY_HELP, &labels, Unit::Seconds),
            shares: device.peaks.map(|peaks| Shares::register(registry, &labels, peaks)),
            steps,
        };
        Self { series: Some(Arc::new(series)) }
    }

    /// Counts a step.
    pub fn step(&self, step: &DeviceStep) {
        let Some(series) = &self.series else { return };
        series.flops.increment(step.flops);
        series.read.increment(step.read_bytes);
        series.written.increment(step.written_bytes);
        series.busy.observe_duration(step.busy);
    }

    /// Counts steps by the way in which they ran.
    pub fn steps(&self, replayed: u64, launched: u64) {
        let Some([replays, launches]) = self.series.as_ref().and_then(|series| series.steps.as_ref()) else { return };
        replays.increment(replayed);
        launches.increment(launched);
    }

    /// Reports the utilisation of the device over several steps.
    pub fn utilization(&self, steps: &DeviceStep) {
        let Some(shares) = self.series.as_ref().and_then(|series| series.shares.as_ref()) else { return };
        let seconds = steps.busy.as_secs_f64();
        if seconds > 0.0 {
            let bytes = (steps.read_bytes + steps.written_bytes) as f64;
            shares.bandwidth.set(bytes / seconds / shares.peaks.0);
            shares.flops.set(steps.flops as f64 / seconds / shares.peaks.1);
        }
    }
}

impl Shares {
    fn register(registry: &Registry, labels: Labels<'_>, peaks: (f64, f64)) -> Self {
        let gauge = |name, help| registry.gauge(name, help, labels);
        let help = "Bytes of memory that the device moves in a second at most.";
        gauge("octavo_device_peak_bytes_per_second", help).set(peaks.0);
        let help = "Floating-point operations that the device computes in a second at most.";
        gauge("octavo_device_peak_flops_per_second", help).set(peaks.1);
        Self {
            bandwidth: gauge(
                "octavo_step_bandwidth_utilization",
                "Share of the device's memory bandwidth that its latest steps reached while they ran.",
            ),
            flops: gauge(
                "octavo_step_flops_utilization",
                "Share of the device's arithmetic that its latest steps reached while they ran.",
            ),
            peaks,
        }
    }
}
