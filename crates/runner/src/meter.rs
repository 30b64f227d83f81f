//! Measurement of step times against the cost of the steps.

use std::collections::VecDeque;
use std::time::Duration;

use octavo_engine::StepId;
use octavo_ops::StepBatch;
use octavo_ops::cost::StepPricer;
use octavo_telemetry::{DeviceMetrics, DeviceStep};

/// Time over which shares are averaged, because a single step varies too much.
const WINDOW: Duration = Duration::from_secs(1);

/// Counts the steps of a device. Steps begin and end in the same order; several may be under way.
pub(crate) struct StepMeter {
    pricer: StepPricer,
    metrics: DeviceMetrics,
    under_way: VecDeque<(StepId, DeviceStep)>,
    /// Maximum number of steps under way. If more were begun, the oldest have failed.
    in_flight: usize,
    /// Sum over the steps since shares were last reported.
    window: DeviceStep,
    /// Number of replayed and of launched steps at the last report.
    counts: (u64, u64),
}

impl StepMeter {
    /// Creates a meter for at most `in_flight` steps under way, at least 1, and allocates memory for them.
    pub(crate) fn new(pricer: StepPricer, metrics: DeviceMetrics, in_flight: usize) -> Self {
        let under_way = VecDeque::with_capacity(in_flight);
        Self { pricer, metrics, under_way, in_flight, window: DeviceStep::default(), counts: (0, 0) }
    }

    /// Records that a step is handed to the device.
    pub(crate) fn begin(&mut self, step: StepId, batch: &StepBatch) {
        let cost = self.pricer.price(batch);
        let (read_bytes, written_bytes) = (cost.read_bytes(), cost.written_bytes);
        let priced = DeviceStep { flops: cost.flops, read_bytes, written_bytes, busy: Duration::ZERO };
        if self.under_way.len() == self.in_flight {
            self.under_way.pop_front();
        }
        self.under_way.push_back((step, priced));
    }

    /// Records that a step is complete, on which the device has worked for the time `busy`. Earlier steps that have not
    /// ended have failed. `counts` are the backend's counters.
    pub(crate) fn end(&mut self, step: StepId, busy: Duration, counts: Option<(u64, u64)>) {
        while let Some((ended, priced)) = self.under_way.pop_front() {
            if ended == step {
                self.count(DeviceStep { busy, ..priced });
                break;
            }
        }
        if let Some((replayed, launched)) = counts {
            self.metrics.steps(replayed.saturating_sub(self.counts.0), launched.saturating_sub(self.counts.1));
            self.counts = (replayed, launched);
        }
    }

    fn count(&mut self, step: DeviceStep) {
        self.metrics.step(&step);
        self.window.flops += step.flops;
        self.window.read_bytes += step.read_bytes;
        self.window.written_bytes += step.written_bytes;
        self.window.busy += step.busy;
        if self.window.busy >= WINDOW {
            self.metrics.utilization(&self.window);
            self.window = DeviceStep::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::cost::{ElementBytes, StepShape, step_cost};
    use octavo_ops::testing::TinyModel;
    use octavo_telemetry::{DeviceConfig, Telemetry, TelemetryConfig};

    use super::*;

    fn scraped(telemetry: &Telemetry, name: &str) -> f64 {
        let text = telemetry.render();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    #[test]
    fn steps_are_counted_once_and_lost_ones_not_at_all() {
        let (program, _) = TinyModel::default().build().unwrap();
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 8 });
        let metrics = telemetry.device(&DeviceConfig { records_steps: true, ..DeviceConfig::default() });
        let mut meter = StepMeter::new(StepPricer::new(&program, ElementBytes::F32), metrics, 2);
        let mut batch = StepBatch::with_capacity(4, 2, 2, 1);
        batch.token_ids.extend([1, 2]);
        batch.query_start.extend([0, 1, 2]);
        batch.seq_lens.extend([5, 9]);
        batch.sampled_rows.extend([0, 1]);
        let cost = step_cost(&program, &StepShape::from_batch(&batch), ElementBytes::F32);
        // Two steps are under way and the first is lost. Then comes one step, and the end of one that was never begun.
        meter.begin(1, &batch);
        meter.begin(2, &batch);
        meter.end(2, Duration::from_millis(5), Some((1, 1)));
        meter.begin(3, &batch);
        meter.end(3, Duration::from_millis(20), Some((2, 1)));
        meter.end(9, Duration::from_millis(7), Some((2, 1)));
        let flops = scraped(&telemetry, "vllm:estimated_flops_per_gpu_total{");
        assert_eq!(flops, 2.0 * cost.flops as f64);
        assert_eq!(scraped(&telemetry, "vllm:estimated_write_bytes_per_gpu_total{"), 2.0 * cost.written_bytes as f64);
        assert_eq!(scraped(&telemetry, "octavo_step_busy_seconds_count"), 2.0);
        let busy = scraped(&telemetry, "octavo_step_busy_seconds_sum");
        assert!((busy - 0.025).abs() < 1e-9, "{busy}");
        let text = telemetry.render();
        for (mode, count) in [("replayed", 2), ("launched", 1)] {
            let line = text.lines().find(|line| line.contains(&format!("mode=\"{mode}\""))).unwrap();
            assert!(line.ends_with(&format!(" {count}")) || line.ends_with(&format!(" {count}.0")), "{line}");
        }
    }
}
