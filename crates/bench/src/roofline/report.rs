//! Tables and JSON of times that are held against a device's limits.

use std::fmt::{self, Write as _};

use octavo_ops::cost::Peaks;
use serde_json::{Value, json};

use super::{Step, StepTime};

/// A device's limits, and their source.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// The most that the device can do.
    pub peaks: Peaks,
    /// `data sheet or clocks`, `measured`.
    pub source: &'static str,
}

impl Limits {
    fn json(&self) -> Value {
        json!({
            "bandwidth_bytes_per_second": self.peaks.bandwidth,
            "flops_per_second": self.peaks.flops,
            "source": self.source,
        })
    }
}

/// The limits that times are compared with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bounds {
    /// The limits that the maker states or that clocks give; the measured ones of a device of which neither is known. `None` if there
    /// are none.
    pub limits: Option<Limits>,
    /// The ceilings that this very device reached, from `octavo bench limits`.
    pub ceilings: Option<Peaks>,
}

impl Bounds {
    /// Shortest times, by the limits and by the ceilings, that `bound` gives for the peaks of each.
    pub fn seconds(&self, bound: impl Fn(&Peaks) -> f64) -> BoundSeconds {
        BoundSeconds {
            limits: self.limits.as_ref().map(|limits| bound(&limits.peaks)),
            ceilings: self.ceilings.as_ref().map(bound),
        }
    }

    /// The limits as lines for people.
    pub fn lines(&self) -> String {
        let line = |peaks: &Peaks, source: &str| {
            let (gigabytes, teraflops) = (peaks.bandwidth / 1e9, peaks.flops / 1e12);
            format!("{gigabytes:.1} GB/s, {teraflops:.2} TFLOP/s ({source})")
        };
        let limits = self.limits.as_ref().map_or_else(
            || "limits: unknown, so no fractions are reported".to_owned(),
            |limits| format!("limits: {}", line(&limits.peaks, limits.source)),
        );
        let ceilings = self.ceilings.as_ref().map(|peaks| format!("\nceilings: {}", line(peaks, "measured")));
        limits + &ceilings.unwrap_or_default()
    }

    /// Adds `limits` and `ceilings` to a JSON object.
    pub fn add_to(&self, value: &mut Value) {
        value["limits"] = self.limits.as_ref().map_or(Value::Null, Limits::json);
        let measured = |peaks: &Peaks| Limits { peaks: *peaks, source: "measured" }.json();
        value["ceilings"] = self.ceilings.as_ref().map_or(Value::Null, measured);
    }
}

/// Shortest times of a piece of work, in seconds; `None` where the limits are not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BoundSeconds {
    /// By [`Bounds::limits`].
    pub limits: Option<f64>,
    /// By [`Bounds::ceilings`].
    pub ceilings: Option<f64>,
}

impl std::ops::AddAssign for BoundSeconds {
    fn add_assign(&mut self, other: Self) {
        let add = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b);
        *self = Self { limits: add(self.limits, other.limits), ceilings: add(self.ceilings, other.ceilings) };
    }
}

/// The time of a piece of work, and its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Time that it took.
    pub seconds: f64,
    /// Bytes that it moves at least.
    pub bytes: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// Time that it takes at least.
    pub bound: BoundSeconds,
}

impl Figures {
    /// The heads of [`Figures::cells`].
    pub const HEADS: [&str; 6] = ["ms", "GB/s", "TFLOP/s", "bound ms", "of bound", "of ceiling"];

    /// Fractions of the limits and of the ceilings that it reaches: the shortest possible time over the time that it took.
    pub fn fractions(&self) -> BoundSeconds {
        let fraction = |bound: Option<f64>| bound.map(|bound| bound / self.seconds);
        BoundSeconds { limits: fraction(self.bound.limits), ceilings: fraction(self.bound.ceilings) }
    }

    /// Time, bytes and FLOPs a second, bound and fractions, for people.
    pub fn cells(&self) -> [String; 6] {
        let percent = |fraction: Option<f64>| fraction.map_or_else(dash, |x| format!("{:.1} %", 100.0 * x));
        let fractions = self.fractions();
        [
            milliseconds(self.seconds),
            gigabytes(self.bytes as f64 / self.seconds),
            teraflops(self.flops as f64 / self.seconds),
            self.bound.limits.map_or_else(dash, milliseconds),
            percent(fractions.limits),
            percent(fractions.ceilings),
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
            "bound_seconds": self.bound.limits,
            "fraction_of_bound": self.fractions().limits,
            "fraction_of_ceiling": self.fractions().ceilings,
        })
    }
}

fn dash() -> String {
    "-".to_owned()
}

/// Seconds as milliseconds with four digits.
pub fn milliseconds(seconds: f64) -> String {
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

impl Step {
    /// Its kind and sizes, for programs.
    pub fn json(self) -> Value {
        match self {
            Self::Decode { sequences, context } => {
                json!({"kind": "decode", "sequences": sequences, "context": context})
            }
            Self::Prefill { tokens } => json!({"kind": "prefill", "tokens": tokens}),
        }
    }
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
    /// Its limits.
    pub bounds: Bounds,
    /// Number of steps to measure; the report is complete with as many.
    pub planned: usize,
    /// The steps that were measured.
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
        let complete = self.steps.len() == self.planned;
        let mut value = json!({"model": self.model, "device": self.device, "complete": complete, "steps": steps});
        self.bounds.add_to(&mut value);
        value
    }
}

impl StepRow<'_> {
    fn cells(&self) -> Vec<String> {
        let name = self.time.step.name();
        let Some((figures, least)) = &self.figures else {
            return vec![format!("{name}: does not fit the KV cache")];
        };
        let [median, bandwidth, flops, bound, fraction, of_ceiling] = figures.cells();
        let tokens = format!("{:.0}", self.time.step.tokens() as f64 / figures.seconds);
        vec![name, median, milliseconds(*least), tokens, bandwidth, flops, bound, fraction, of_ceiling]
    }

    fn json(&self) -> Value {
        let mut value = self.time.step.json();
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
        writeln!(f, "{}", self.bounds.lines())?;
        let [median, bandwidth, flops, bound, fraction, of_ceiling] = Figures::HEADS;
        let heads = ["step", median, "at best", "tokens/s", bandwidth, flops, bound, fraction, of_ceiling];
        let rows: Vec<_> = self.rows().map(|row| row.cells()).collect();
        f.write_str(&table(1, &heads, &rows))
    }
}
