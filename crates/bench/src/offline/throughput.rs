//! The throughput of many requests that arrive at once.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use octavo_engine::EngineHandle;
use serde_json::{Value, json};

use super::sequence::{Prompt, complete};
use super::{ModelLimits, OfflineError, check_lengths};
use crate::plot::{Axis, Chart, Line, Scale};
use crate::simulator::mix;

/// Number of intervals in the plot.
const INTERVALS: usize = 60;

/// The requests to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct ThroughputConfig {
    /// The limits of the model.
    pub limits: ModelLimits,
    /// Number of prompts.
    pub prompts: usize,
    /// Mean number of tokens per prompt.
    pub input_len: usize,
    /// Mean number of tokens per answer.
    pub output_len: u32,
    /// Spread of lengths in [0, 1): they are sampled between `length * (1 - range_ratio)` and `length * (1 + range_ratio)`.
    pub range_ratio: f64,
    /// Number of answers to each prompt.
    pub n: u32,
    /// Random seed for lengths, prompts and sampling.
    pub seed: u64,
}

/// Runs all requests, and counts completed answers in `done`. It needs a tokio runtime.
///
/// # Errors
/// A length or a count is zero, the lengths do not fit the context, the engine refuses a request, or an answer ends
/// early.
pub async fn throughput(
    engine: &EngineHandle,
    config: &ThroughputConfig,
    done: &AtomicUsize,
) -> Result<ThroughputReport, OfflineError> {
    let prompts = config.draw()?;
    let begun = Instant::now();
    let arrivals = complete(engine, &prompts, begun, done).await?;
    let elapsed = begun.elapsed().as_secs_f64();
    let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
    Ok(ThroughputReport { elapsed, requests: prompts.len(), prompt_tokens, arrivals })
}

impl ThroughputConfig {
    fn draw(&self) -> Result<Vec<Prompt>, OfflineError> {
        if self.prompts == 0 || self.n == 0 {
            return Err(OfflineError::Config("there must be at least one prompt with one answer"));
        }
        if !(0.0..1.0).contains(&self.range_ratio) {
            return Err(OfflineError::Config("the range ratio must be at least 0 and below 1"));
        }
        let inputs = Lengths::around(self.input_len, self.range_ratio);
        let outputs = Lengths::around(self.output_len as usize, self.range_ratio);
        check_lengths(self.limits, inputs.most, u32::try_from(outputs.most).unwrap_or(u32::MAX))?;
        let mut state = mix(self.seed);
        let mut length = |lengths: Lengths| {
            state = mix(state);
            lengths.pick(state)
        };
        let prompt = |index| {
            let (input_len, output_len) = (length(inputs), length(outputs));
            let output_len = u32::try_from(output_len).unwrap_or(u32::MAX);
            Prompt::random(self.seed, index, self.limits.vocab_size, input_len, output_len, self.n)
        };
        Ok((0..self.prompts).map(prompt).collect())
    }
}

/// A uniform distribution of lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    least: usize,
    most: usize,
}

impl Lengths {
    /// Rounds to the wider range, as vLLM does. A length of 0 must be requested explicitly.
    fn around(length: usize, ratio: f64) -> Self {
        let least = (length as f64 * (1.0 - ratio)).floor() as usize;
        let most = (length as f64 * (1.0 + ratio)).ceil() as usize;
        Self { least: least.max(1.min(length)), most }
    }

    fn pick(self, random: u64) -> usize {
        let lengths = (self.most - self.least) as u64 + 1;
        self.least + usize::try_from(random % lengths).unwrap_or(0)
    }
}

/// The result of a run. Throughputs divide by the wall time of the whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct ThroughputReport {
    /// Wall time in seconds.
    pub elapsed: f64,
    /// Number of prompts.
    pub requests: usize,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Arrival times of generated tokens in seconds since the start, in any order.
    pub arrivals: Vec<f64>,
}

impl ThroughputReport {
    /// Number of generated tokens.
    pub fn output_tokens(&self) -> u64 {
        self.arrivals.len() as u64
    }

    /// Number of prompt and generated tokens.
    pub fn total_tokens(&self) -> u64 {
        self.prompt_tokens + self.output_tokens()
    }

    fn per_second(&self, count: f64) -> f64 {
        count / self.elapsed.max(f64::MIN_POSITIVE)
    }

    /// The figures under vLLM's JSON keys.
    pub fn to_json(&self) -> Value {
        json!({
            "elapsed_time": self.elapsed,
            "num_requests": self.requests,
            "total_num_tokens": self.total_tokens(),
            "requests_per_second": self.per_second(self.requests as f64),
            "tokens_per_second": self.per_second(self.total_tokens() as f64),
        })
    }

    /// Output tokens per second over the time of the run.
    pub fn chart(&self, title: String) -> Chart {
        Chart {
            title,
            x: Axis::new("time (s)", Scale::FromZero),
            y: Axis::new("output tokens per second", Scale::FromZero),
            lines: vec![Line::new("output tokens", self.rates())],
        }
    }

    /// `(midpoint, tokens per second)` of each interval of the run.
    fn rates(&self) -> Vec<(f64, f64)> {
        let interval = (self.elapsed / INTERVALS as f64).max(f64::MIN_POSITIVE);
        let mut tokens = [0u64; INTERVALS];
        for at in &self.arrivals {
            tokens[((at / interval) as usize).min(INTERVALS - 1)] += 1;
        }
        let rate = |(index, &tokens): (usize, &u64)| ((index as f64 + 0.5) * interval, tokens as f64 / interval);
        tokens.iter().enumerate().map(rate).collect()
    }
}

impl fmt::Display for ThroughputReport {
    /// The lines that vLLM prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Throughput: {:.2} requests/s, {:.2} total tokens/s, {:.2} output tokens/s",
            self.per_second(self.requests as f64),
            self.per_second(self.total_tokens() as f64),
            self.per_second(self.output_tokens() as f64)
        )?;
        // Two spaces, as vLLM has them.
        writeln!(f, "Total num prompt tokens:  {}", self.prompt_tokens)?;
        writeln!(f, "Total num output tokens:  {}", self.output_tokens())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_lie_around_the_mean() {
        assert_eq!(Lengths::around(100, 0.0), Lengths { least: 100, most: 100 });
        assert_eq!(Lengths::around(10, 0.25), Lengths { least: 7, most: 13 });
        assert_eq!(Lengths::around(1, 0.9), Lengths { least: 1, most: 2 });
        let lengths = Lengths { least: 7, most: 9 };
        let picked: Vec<usize> = (0..4).map(|random| lengths.pick(random)).collect();
        assert_eq!(picked, [7, 8, 9, 7]);
    }

    #[test]
    fn the_lines_and_the_keys_are_vllms() {
        let report = ThroughputReport { elapsed: 2.0, requests: 3, prompt_tokens: 30, arrivals: vec![0.5, 1.0, 2.0] };
        let expected = "\
Throughput: 1.50 requests/s, 16.50 total tokens/s, 1.50 output tokens/s
Total num prompt tokens:  30
Total num output tokens:  3
";
        assert_eq!(report.to_string(), expected);
        let json = json!({
            "elapsed_time": 2.0, "num_requests": 3, "total_num_tokens": 33,
            "requests_per_second": 1.5, "tokens_per_second": 16.5
        });
        assert_eq!(report.to_json(), json);
    }

    #[test]
    fn rates_add_up_to_the_tokens() {
        let arrivals = vec![0.0, 0.5, 59.9, 60.0];
        let report = ThroughputReport { elapsed: 60.0, requests: 1, prompt_tokens: 1, arrivals };
        let rates = report.rates();
        assert_eq!((rates.len(), rates[0], rates[59]), (60, (0.5, 2.0), (59.5, 2.0)));
        assert_eq!(rates.iter().map(|rate| rate.1).sum::<f64>(), 4.0);
    }
}
