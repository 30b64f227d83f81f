//! The latency of one batch, measured repeatedly.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use octavo_engine::EngineHandle;
use serde_json::{Map, Value, json};

use super::sequence::{Prompt, complete};
use super::{ModelLimits, OfflineError, check_lengths};
use crate::Summary;
use crate::plot::{Axis, Chart, Line, Scale};
use crate::summary::cumulative;

/// The percentiles of `vllm bench latency`.
const PERCENTS: [f64; 6] = [10.0, 25.0, 50.0, 75.0, 90.0, 99.0];

/// The batch to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyConfig {
    /// The limits of the model.
    pub limits: ModelLimits,
    /// Tokens of each prompt.
    pub input_len: usize,
    /// Tokens of each answer.
    pub output_len: u32,
    /// Number of prompts.
    pub batch_size: usize,
    /// Number of answers to each prompt.
    pub n: u32,
    /// Random seed for prompts and sampling.
    pub seed: u64,
}

/// Prompts that are sent together. The engine splits them into several batches if it cannot run them at once.
#[derive(Debug)]
pub struct FixedBatch {
    prompts: Vec<Prompt>,
}

impl FixedBatch {
    /// Generates the prompts.
    ///
    /// # Errors
    /// A length or a count is zero, or the lengths do not fit the context.
    pub fn new(config: &LatencyConfig) -> Result<Self, OfflineError> {
        if config.batch_size == 0 || config.n == 0 {
            return Err(OfflineError::Config("a batch needs at least one prompt with one answer"));
        }
        let &LatencyConfig { limits, input_len, output_len, n, seed, .. } = config;
        check_lengths(limits, input_len, output_len)?;
        let prompt = |index| Prompt::random(seed, index, limits.vocab_size, input_len, output_len, n);
        Ok(Self { prompts: (0..config.batch_size).map(prompt).collect() })
    }

    /// Runs the batch once and returns the time from the first submission to the end of the last answer. It needs a tokio
    /// runtime.
    ///
    /// # Errors
    /// The engine refuses a request, or an answer ends early.
    pub async fn run(&self, engine: &EngineHandle) -> Result<Duration, OfflineError> {
        let begun = Instant::now();
        complete(engine, &self.prompts, begun, &AtomicUsize::new(0)).await?;
        Ok(begun.elapsed())
    }
}

/// The latencies of a batch, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyReport {
    latencies: Vec<f64>,
    summary: Summary,
}

impl LatencyReport {
    /// Creates a report from the latencies of runs; `None` without runs.
    pub fn new(latencies: &[Duration]) -> Option<Self> {
        let latencies: Vec<f64> = latencies.iter().map(Duration::as_secs_f64).collect();
        let summary = Summary::new(latencies.clone(), &PERCENTS)?;
        Some(Self { latencies, summary })
    }

    /// The figures under vLLM's JSON keys; times are in seconds.
    pub fn to_json(&self) -> Value {
        let percentiles = self.summary.percentiles.iter();
        let percentiles: Map<String, Value> =
            percentiles.map(|(percent, value)| (percent.to_string(), (*value).into())).collect();
        json!({
            "avg_latency": self.summary.mean,
            "std_latency": self.summary.std,
            "latencies": self.latencies,
            "percentiles": percentiles,
        })
    }

    /// The cumulative distribution of the latencies.
    pub fn chart(&self, title: String) -> Chart {
        Chart {
            title,
            x: Axis::new("latency of a batch (s)", Scale::Fitted),
            y: Axis::new("iterations (%)", Scale::FromZero),
            lines: vec![Line::new("latency", cumulative(self.latencies.clone()))],
        }
    }
}

impl fmt::Display for LatencyReport {
    /// The lines that vLLM prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Avg latency: {} seconds", self.summary.mean)?;
        writeln!(f, "Std latency: {} seconds", self.summary.std)?;
        for (percent, value) in &self.summary.percentiles {
            writeln!(f, "{percent}% percentile latency: {value} seconds")?;
        }
        Ok(())
    }
}
