//! Tables and JSON of times that are held against a device's limits.

use std::fmt::{self, Write as _};

use octavo_ops::cost::Peaks;
use serde_json::{Value, json};

use super::{Step, StepTime};

/// A device's limits, and who says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// What it can do at most.
    pub peaks: Peaks,
    /// `data sheet or clocks`, `measured`.
    pub source: &'static str,
}

impl Limits {
    /// A line about limits that may not be known.
    pub fn line(limits: Option<&Self>) -> String {
        match limits {
            Some(Self { peaks, source }) => {
                let (gigabytes, teraflops) = (peaks.bandwidth / 1e9, peaks.flops / 1e12);
                format!("limits: {gigabytes:.1} GB/s, {teraflops:.2} TFLOP/s ({source})")
            }
            None => "limits: not known, so there is nothing to hold the times against".to_owned(),
        }
    }

    /// The same for programs.
    pub fn json(limits: Option<&Self>) -> Value {
        limits.map_or(Value::Null, |Self { peaks, source }| {
            json!({
                "bandwidth_bytes_per_second": peaks.bandwidth,
                "flops_per_second": peaks.flops,
                "source": source,
            })
        })
    }
}

/// What was measured of one thing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Time that it took.
    pub seconds: f64,
    /// Bytes that it moves at least.
    pub bytes: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// Seconds that it takes at least.
    pub bound: Option<f64>,
}

impl Figures {
    /// The heads of [`Figures::cells`].
    pub const HEADS: [&str; 5] = ["ms", "GB/s", "TFLOP/s", "bound ms", "of bound"];

    /// Which part of the device's limit it reaches: the least time that is possible over the time that it took.
    pub fn fraction(&self) -> Option<f64> {
        self.bound.map(|bound| bound / self.seconds)
    }

    /// Time, bytes and FLOPs a second, bound and fraction, for people.
    pub fn cells(&self) -> [String; 5] {
        [
            milliseconds(self.seconds),
            gigabytes(self.bytes as f64 / self.seconds),
            teraflops(self.flops as f64 / self.seconds),
            self.bound.map_or_else(dash, milliseconds),
            self.fraction().map_or_else(dash, |fraction| format!("{:.1} %", 100.0 * fraction)),
        ]
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({
            "seconds": self.seconds,
            "bytes": self.bytes,
            "flops": self.flops,
            "bytes_per_second": self.bytes as f64 / self.seconds,
            "flops_per_second": self.flops as f64 / self.seconds,
            "bound_seconds": self.bound,
            "fraction_of_bound": self.fraction(),
        })
    }
}

fn dash() -> String {
    "-".to_owned()
}

/// Seconds as milliseconds with four digits.
fn milliseconds(seconds: f64) -> String {
    let milliseconds = 1e3 * seconds;
    let digits = if milliseconds < 1.0 {
        4
    } else if milliseconds < 100.0 {
        3
    } else {
        1
    };
    format!("{milliseconds:.digits$}")
}

/// Bytes a second in GB/s.
fn gigabytes(rate: f64) -> String {
    format!("{:.1}", rate / 1e9)
}

/// FLOP/s in TFLOP/s.
fn teraflops(rate: f64) -> String {
    format!("{:.3}", rate / 1e12)
}

/// Rows under heads: the first `names` columns to the left, the others to the right. A row may end early; what its last cell says
/// then widens no column.
pub fn table(names: usize, heads: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let whole = rows.iter().filter(|row| row.len() == heads.len());
        let cells = whole.filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([heads[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let mut out = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = match column < names {
                true => write!(out, "{gap}{cell:<width$}"),
                false => write!(out, "{gap}{cell:>width$}"),
            };
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    };
    line(&mut heads.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    out
}

/// A measured step with its figures.
struct StepRow<'a> {
    time: &'a StepTime,
    figures: Option<(Figures, f64)>,
}

/// What `octavo bench roofline` tells.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflineReport {
    /// Name of the model.
    pub model: String,
    /// What computes, for people.
    pub device: String,
    /// Its limits, if they are known.
    pub limits: Option<Limits>,
    /// The steps.
    pub steps: Vec<StepTime>,
}

impl RooflineReport {
    fn rows(&self) -> impl Iterator<Item = StepRow<'_>> {
        self.steps.iter().map(|time| {
            let figures = time.seconds.map(|(seconds, least)| {
                let bytes = time.cost.weight_bytes + time.cost.kv_bytes;
                (Figures { seconds, bytes, flops: time.cost.flops, bound: time.bound }, least)
            });
            StepRow { time, figures }
        })
    }

    /// For programs: times in seconds.
    pub fn to_json(&self) -> Value {
        let steps: Vec<Value> = self.rows().map(|row| row.json()).collect();
        json!({
            "model": self.model,
            "device": self.device,
            "limits": Limits::json(self.limits.as_ref()),
            "steps": steps,
        })
    }
}

impl StepRow<'_> {
    fn cells(&self) -> Vec<String> {
        let name = match self.time.step {
            Step::Decode { sequences, context } => format!("decode {sequences} x {context}"),
            Step::Prefill { tokens } => format!("prefill {tokens}"),
        };
        let Some((figures, least)) = &self.figures else {
            return vec![format!("{name}: does not fit the KV cache")];
        };
        let [median, bandwidth, flops, bound, fraction] = figures.cells();
        let tokens = format!("{:.0}", self.time.step.tokens() as f64 / figures.seconds);
        vec![name, median, milliseconds(*least), tokens, bandwidth, flops, bound, fraction]
    }

    fn json(&self) -> Value {
        let mut value = match self.time.step {
            Step::Decode { sequences, context } => {
                json!({"kind": "decode", "sequences": sequences, "context": context})
            }
            Step::Prefill { tokens } => json!({"kind": "prefill", "tokens": tokens}),
        };
        let cost = &self.time.cost;
        value["activation_bytes"] = cost.activation_bytes.into();
        value["weight_bytes"] = cost.weight_bytes.into();
        value["kv_bytes"] = cost.kv_bytes.into();
        match &self.figures {
            None => value["error"] = "it does not fit the KV cache".into(),
            Some((figures, least)) => {
                value["least_seconds"] = (*least).into();
                value["tokens_per_second"] = (self.time.step.tokens() as f64 / figures.seconds).into();
                if let (Value::Object(value), Value::Object(figures)) = (&mut value, figures.json()) {
                    value.extend(figures);
                }
            }
        }
        value
    }
}

impl fmt::Display for RooflineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}", self.model, self.device)?;
        writeln!(f, "{}", Limits::line(self.limits.as_ref()))?;
        let [median, bandwidth, flops, bound, fraction] = Figures::HEADS;
        let heads = ["step", median, "at best", "tokens/s", bandwidth, flops, bound, fraction];
        let rows: Vec<_> = self.rows().map(|row| row.cells()).collect();
        f.write_str(&table(1, &heads, &rows))
    }
}
