//! The figures of a run in vLLM's terms.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::LoadConfig;
use crate::plot::{Axis, Chart, Line, Scale};
use crate::summary::{Summary, cumulative};

/// The measurement of one request; times are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RequestRecord {
    /// Time from the start of the run until the request was sent.
    pub start: f64,
    /// Time from sending to the last event with choices, or to the end of an answer that is not streamed.
    pub latency: f64,
    /// Time from sending to the first event with choices.
    pub ttft: Option<f64>,
    /// Gaps between the later events with choices.
    pub itl: Vec<f64>,
    /// From `usage`.
    pub input_tokens: u64,
    /// From `usage`.
    pub output_tokens: u64,
    /// The reason of a failure.
    pub error: Option<String>,
}

impl RequestRecord {
    /// Time per output token after the first, if there are any and they are streamed.
    fn tpot(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some((self.latency - self.ttft?) / gaps as f64)
    }

    /// The arrival times of tokens. An event counts as one token, as in vLLM.
    fn arrivals(&self) -> impl Iterator<Item = f64> {
        let first = self.ttft.map(|ttft| self.start + ttft);
        let rest = first.into_iter().flat_map(move |first| {
            self.itl.iter().scan(first, |at, gap| {
                *at += gap;
                Some(*at)
            })
        });
        first.into_iter().chain(rest)
    }
}

/// A metric of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to first token.
    Ttft,
    /// Time per output token after the first.
    Tpot,
    /// Inter-token latency.
    Itl,
    /// End-to-end latency.
    E2el,
}

impl Metric {
    /// All metrics in the order of the table.
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tpot, Self::Itl, Self::E2el];

    /// vLLM's name, as flags and JSON keys have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
            Self::Itl => "itl",
            Self::E2el => "e2el",
        }
    }
}

/// Service level objectives that a request must meet to count as good.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goodput {
    /// Maximum time to first token.
    pub ttft: Option<Duration>,
    /// Maximum time per output token.
    pub tpot: Option<Duration>,
    /// Maximum end-to-end latency.
    pub e2el: Option<Duration>,
}

impl Goodput {
    fn is_set(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2el.is_some()
    }

    fn is_met(&self, record: &RequestRecord) -> bool {
        let within =
            |bound: Option<Duration>, value: Option<f64>| bound.is_none_or(|b| value.unwrap_or(0.0) <= b.as_secs_f64());
        within(self.ttft, record.ttft) && within(self.tpot, record.tpot()) && within(self.e2el, Some(record.latency))
    }
}

/// The result of a run. Throughputs divide by the wall time of the whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Wall time in seconds.
    pub duration: f64,
    /// Number of successful requests.
    pub completed: usize,
    /// Number of failed requests.
    pub failed: usize,
    /// Prompt tokens of completed requests.
    pub total_input_tokens: u64,
    /// Generated tokens of completed requests.
    pub total_output_tokens: u64,
    /// Completed requests per second.
    pub request_throughput: f64,
    /// Requests per second that meet the objectives, if there are any.
    pub request_goodput: Option<f64>,
    /// Generated tokens per second.
    pub output_throughput: f64,
    /// Prompt and generated tokens per second.
    pub total_token_throughput: f64,
    /// Largest number of tokens that arrived in one second of the run.
    pub max_output_tokens_per_s: f64,
    /// Largest number of requests in flight.
    pub max_concurrent_requests: usize,
    /// The configured limit on requests in flight.
    pub max_concurrency: Option<usize>,
    /// The configured arrivals per second.
    pub request_rate: Option<f64>,
    /// Time to first token, in milliseconds.
    pub ttft: Option<Summary>,
    /// Time per output token, excluding the first, in milliseconds.
    pub tpot: Option<Summary>,
    /// Gaps between tokens, pooled over requests, in milliseconds.
    pub itl: Option<Summary>,
    /// End-to-end latency, in milliseconds.
    pub e2el: Option<Summary>,
    /// CPU time of the client's process in seconds, where it can be read.
    pub client_cpu_seconds: Option<f64>,
    /// The requests in the order they were sent.
    pub records: Vec<RequestRecord>,
}

impl Report {
    pub(crate) fn new(
        config: &LoadConfig,
        records: Vec<RequestRecord>,
        duration: Duration,
        client_cpu: Option<Duration>,
    ) -> Self {
        let duration = duration.as_secs_f64();
        let good: Vec<&RequestRecord> = records.iter().filter(|r| r.error.is_none()).collect();
        let input: u64 = good.iter().map(|r| r.input_tokens).sum();
        let output: u64 = good.iter().map(|r| r.output_tokens).sum();
        let rate = |count: f64| count / duration.max(f64::MIN_POSITIVE);
        let summary = |metric, seconds| {
            let values = if config.metrics.contains(&metric) { milliseconds(seconds) } else { vec![] };
            Summary::new(values, &config.percentiles)
        };
        let met = good.iter().filter(|r| config.goodput.is_met(r)).count();
        Self {
            duration,
            completed: good.len(),
            failed: records.len() - good.len(),
            total_input_tokens: input,
            total_output_tokens: output,
            request_throughput: rate(good.len() as f64),
            request_goodput: config.goodput.is_set().then(|| rate(met as f64)),
            output_throughput: rate(output as f64),
            total_token_throughput: rate((input + output) as f64),
            max_output_tokens_per_s: peak_tokens(&good),
            max_concurrent_requests: peak_open(&good),
            max_concurrency: config.max_concurrency,
            request_rate: config.request_rate,
            ttft: summary(Metric::Ttft, good.iter().filter_map(|r| r.ttft).collect()),
            tpot: summary(Metric::Tpot, good.iter().filter_map(|r| r.tpot()).collect()),
            itl: summary(Metric::Itl, good.iter().flat_map(|r| r.itl.iter().copied()).collect()),
            e2el: summary(Metric::E2el, good.iter().map(|r| r.latency).collect()),
            client_cpu_seconds: client_cpu.map(|cpu| cpu.as_secs_f64()),
            records,
        }
    }

    /// The figures under vLLM's JSON keys; `details` adds arrays with an entry for each request.
    pub fn to_json(&self, details: bool) -> serde_json::Value {
        let mut out = serde_json::json!({
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_concurrency": self.max_concurrency,
            "client_cpu_seconds": self.client_cpu_seconds,
        });
        for (name, summary) in self.sections().map(|(short, _, summary)| (short.to_lowercase(), summary)) {
            let Some(summary) = summary else { continue };
            out[format!("mean_{name}_ms")] = summary.mean.into();
            out[format!("median_{name}_ms")] = summary.median.into();
            out[format!("std_{name}_ms")] = summary.std.into();
            for (percent, value) in &summary.percentiles {
                out[format!("p{percent}_{name}_ms")] = (*value).into();
            }
        }
        if details {
            let list = |f: fn(&RequestRecord) -> serde_json::Value| self.records.iter().map(f).collect::<Vec<_>>();
            out["input_lens"] = list(|r| r.input_tokens.into()).into();
            out["output_lens"] = list(|r| r.output_tokens.into()).into();
            out["ttfts"] = list(|r| r.ttft.unwrap_or(0.0).into()).into();
            out["itls"] = list(|r| r.itl.clone().into()).into();
            out["latencies"] = list(|r| r.latency.into()).into();
            out["start_times"] = list(|r| r.start.into()).into();
            out["errors"] = list(|r| r.error.clone().unwrap_or_default().into()).into();
        }
        out
    }

    /// The cumulative distributions of TTFT, ITL and end-to-end latency of completed requests, as far as they are measured.
    pub fn chart(&self, title: String) -> Chart {
        let good = || self.records.iter().filter(|r| r.error.is_none());
        let distributions: [(&str, Vec<f64>); 3] = [
            ("TTFT", good().filter_map(|r| r.ttft).collect()),
            ("ITL", good().flat_map(|r| r.itl.iter().copied()).collect()),
            ("E2EL", good().map(|r| r.latency).collect()),
        ];
        let measured = distributions.into_iter().filter(|(_, seconds)| !seconds.is_empty());
        let lines = measured.map(|(name, seconds)| Line::new(name, cumulative(milliseconds(seconds)))).collect();
        Chart {
            title,
            // Gaps between tokens are about a hundredth of whole answers, so a linear axis would not show both.
            x: Axis::new("latency (ms)", Scale::Logarithmic),
            y: Axis::new("observations (%)", Scale::FromZero),
            lines,
        }
    }

    /// Short name, long name and figures of each metric.
    fn sections(&self) -> impl Iterator<Item = (&'static str, &'static str, Option<&Summary>)> {
        [
            ("TTFT", "Time to First Token", self.ttft.as_ref()),
            ("TPOT", "Time per Output Token (excl. 1st token)", self.tpot.as_ref()),
            ("ITL", "Inter-token Latency", self.itl.as_ref()),
            ("E2EL", "End-to-end Latency", self.e2el.as_ref()),
        ]
        .into_iter()
    }
}

impl fmt::Display for Report {
    /// vLLM's table, and a last section about the client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:=^50}", " Serving Benchmark Result ")?;
        count(f, "Successful requests:", self.completed)?;
        count(f, "Failed requests:", self.failed)?;
        if let Some(bound) = self.max_concurrency {
            count(f, "Maximum request concurrency:", bound)?;
        }
        if let Some(rate) = self.request_rate {
            decimal(f, "Request rate configured (RPS):", rate)?;
        }
        decimal(f, "Benchmark duration (s):", self.duration)?;
        count(f, "Total input tokens:", self.total_input_tokens)?;
        count(f, "Total generated tokens:", self.total_output_tokens)?;
        decimal(f, "Request throughput (req/s):", self.request_throughput)?;
        if let Some(goodput) = self.request_goodput {
            decimal(f, "Request goodput (req/s):", goodput)?;
        }
        decimal(f, "Output token throughput (tok/s):", self.output_throughput)?;
        decimal(f, "Peak output token throughput (tok/s):", self.max_output_tokens_per_s)?;
        decimal(f, "Peak concurrent requests:", self.max_concurrent_requests as f64)?;
        decimal(f, "Total token throughput (tok/s):", self.total_token_throughput)?;
        for (short, long, summary) in self.sections() {
            let Some(summary) = summary else { continue };
            writeln!(f, "{long:-^50}")?;
            decimal(f, &format!("Mean {short} (ms):"), summary.mean)?;
            decimal(f, &format!("Median {short} (ms):"), summary.median)?;
            for (percent, value) in &summary.percentiles {
                decimal(f, &format!("P{percent} {short} (ms):"), *value)?;
            }
        }
        if let Some(seconds) = self.client_cpu_seconds {
            writeln!(f, "{:-^50}", "Client")?;
            decimal(f, "Client CPU time (s):", seconds)?;
        }
        writeln!(f, "{:=^50}", "")
    }
}

fn milliseconds(seconds: Vec<f64>) -> Vec<f64> {
    seconds.into_iter().map(|value| value * 1e3).collect()
}

fn count(f: &mut fmt::Formatter<'_>, name: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:<40} {value:<10}")
}

fn decimal(f: &mut fmt::Formatter<'_>, name: &str, value: f64) -> fmt::Result {
    writeln!(f, "{name:<40} {value:<10.2}")
}

/// The largest number of token arrivals in one second of the run.
fn peak_tokens(records: &[&RequestRecord]) -> f64 {
    let mut seconds: Vec<u64> = Vec::new();
    for at in records.iter().flat_map(|r| r.arrivals()) {
        let second = at as usize;
        if seconds.len() <= second {
            seconds.resize(second + 1, 0);
        }
        seconds[second] += 1;
    }
    seconds.into_iter().max().unwrap_or_default() as f64
}

/// The largest number of requests in flight.
fn peak_open(records: &[&RequestRecord]) -> usize {
    // Of simultaneous events, ends come before starts.
    let mut changes: Vec<(f64, i64)> = records.iter().flat_map(|r| [(r.start, 1), (r.start + r.latency, -1)]).collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let open = changes.iter().scan(0i64, |open, (_, change)| {
        *open += change;
        Some(*open)
    });
    open.max().and_then(|peak| usize::try_from(peak).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(start: f64, ttft: f64, itl: &[f64]) -> RequestRecord {
        RequestRecord {
            start,
            latency: ttft + itl.iter().sum::<f64>(),
            ttft: Some(ttft),
            itl: itl.to_vec(),
            input_tokens: 10,
            output_tokens: itl.len() as u64 + 1,
            error: None,
        }
    }

    fn report(goodput: Goodput) -> Report {
        let config = LoadConfig { max_concurrency: Some(2), goodput, ..LoadConfig::default() };
        let failed = RequestRecord { error: Some("no".into()), ..record(0.5, 0.1, &[]) };
        let records = vec![record(0.0, 0.5, &[0.1, 0.3]), failed, record(0.5, 0.25, &[0.125])];
        Report::new(&config, records, Duration::from_secs(2), Some(Duration::from_millis(120)))
    }

    #[test]
    fn the_table_is_vllms() {
        let expected = "\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             2
Benchmark duration (s):                  2.00
Total input tokens:                      20
Total generated tokens:                  5
Request throughput (req/s):              1.00
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         2.50
Peak output token throughput (tok/s):    5.00
Peak concurrent requests:                2.00
Total token throughput (tok/s):          12.50
---------------Time to First Token----------------
Mean TTFT (ms):                          375.00
Median TTFT (ms):                        375.00
P99 TTFT (ms):                           497.50
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          162.50
Median TPOT (ms):                        162.50
P99 TPOT (ms):                           199.25
---------------Inter-token Latency----------------
Mean ITL (ms):                           175.00
Median ITL (ms):                         125.00
P99 ITL (ms):                            296.50
----------------End-to-end Latency----------------
Mean E2EL (ms):                          637.50
Median E2EL (ms):                        637.50
P99 E2EL (ms):                           894.75
----------------------Client----------------------
Client CPU time (s):                     0.12
==================================================
";
        let text = report(Goodput { ttft: Some(Duration::from_millis(300)), ..Goodput::default() }).to_string();
        let trimmed: String = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        assert_eq!(trimmed, expected);
    }

    #[test]
    fn only_the_metrics_asked_for_are_reported() {
        let config = LoadConfig { metrics: vec![Metric::Itl], ..LoadConfig::default() };
        let report = Report::new(&config, vec![record(0.0, 0.5, &[0.1])], Duration::from_secs(1), None);
        assert!(report.ttft.is_none() && report.tpot.is_none() && report.e2el.is_none());
        let text = report.to_string();
        assert!(text.contains("Mean ITL (ms):") && !text.contains("TTFT"), "{text}");
        assert!(report.to_json(false).get("mean_ttft_ms").is_none());
    }

    #[test]
    fn the_json_has_vllms_keys() {
        let report = report(Goodput::default());
        let json = report.to_json(false);
        assert_eq!(json["completed"], 2);
        assert_eq!(json["p99_ttft_ms"], 497.5);
        assert!(json["request_goodput"].is_null() && json.get("ttfts").is_none());
        let detailed = report.to_json(true);
        assert_eq!(detailed["output_lens"], serde_json::json!([3, 1, 2]));
        assert_eq!(detailed["errors"][1], "no");
    }

    #[test]
    fn the_plot_has_a_curve_for_what_was_measured() {
        let mut report = report(Goodput::default());
        let curves = |report: &Report| -> Vec<_> {
            let lines = report.chart("t".into()).lines.into_iter();
            lines.map(|line| (line.name, line.points[0].0, line.points.last().unwrap().0)).collect()
        };
        let expected = [("TTFT", 250.0, 500.0), ("ITL", 100.0, 300.0), ("E2EL", 375.0, 900.0)]
            .map(|(n, a, b)| (n.to_owned(), a, b));
        assert_eq!(curves(&report), expected);
        for record in &mut report.records {
            (record.ttft, record.itl) = (None, Vec::new());
        }
        assert_eq!(curves(&report), expected[2..]);
        report.records.clear();
        assert!(curves(&report).is_empty());
    }

    #[test]
    fn goodput_needs_every_bound() {
        let bounds = |tpot, e2el| Goodput {
            ttft: None,
            tpot: Some(Duration::from_millis(tpot)),
            e2el: Some(Duration::from_millis(e2el)),
        };
        assert_eq!(report(bounds(300, 1000)).request_goodput, Some(1.0));
        assert_eq!(report(bounds(150, 1000)).request_goodput, Some(0.5));
        assert_eq!(report(bounds(300, 10)).request_goodput, Some(0.0));
        assert_eq!(report(Goodput::default()).request_goodput, None);
    }

    #[test]
    fn requests_that_touch_are_not_open_together() {
        let (a, b) = (record(0.0, 1.0, &[]), record(1.0, 1.0, &[]));
        assert_eq!(peak_open(&[&a, &b]), 1);
        assert_eq!(peak_open(&[]), 0);
        assert_eq!(peak_tokens(&[&a, &b]), 1.0);
    }
}
