//! The list of families that a scrape prints.
//!
//! Sample lines are spelled up to the value when a series is registered; a scrape copies them and appends numbers.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cells::{Counter, Gauge, Histogram, Unit};
use crate::process;
use crate::spelling::{label_set, push_number};

/// Label names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// Families in the order of registration.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    families: Mutex<Vec<Family>>,
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    /// The `# HELP` and `# TYPE` lines.
    header: String,
    series: Vec<Series>,
}

#[derive(Debug)]
struct Series {
    labels: String,
    /// Each sample's line up to its value. A histogram: its buckets, `_sum`, `_count`.
    lines: Vec<String>,
    value: Value,
}

#[derive(Clone, Debug)]
enum Value {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
    /// A histogram without buckets, of type `summary`.
    Summary(Histogram),
    Info,
}

impl Value {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Counter(_) => "counter",
            Self::Gauge(_) | Self::Info => "gauge",
            Self::Histogram(_) => "histogram",
            Self::Summary(_) => "summary",
        }
    }
}

impl Registry {
    /// The counter `name` with these labels, registered at the first call. `name` ends in `_total`.
    pub(crate) fn counter(&self, name: &'static str, help: &str, labels: Labels<'_>) -> Counter {
        debug_assert!(name.ends_with("_total"), "{name}");
        let new = || (Value::Counter(Counter::default()), sample_lines(name, labels));
        match self.series(name, help, labels, new) {
            Value::Counter(counter) => counter,
            other => unreachable!("{name} is a counter and was a {}", other.kind()),
        }
    }

    /// The gauge `name` with these labels, registered at the first call.
    pub(crate) fn gauge(&self, name: &'static str, help: &str, labels: Labels<'_>) -> Gauge {
        let new = || (Value::Gauge(Gauge::default()), sample_lines(name, labels));
        match self.series(name, help, labels, new) {
            Value::Gauge(gauge) => gauge,
            other => unreachable!("{name} is a gauge and was a {}", other.kind()),
        }
    }

    /// The histogram `name` with these labels, registered at the first call.
    pub(crate) fn histogram(
        &self,
        name: &'static str,
        help: &str,
        labels: Labels<'_>,
        (unit, bounds): (Unit, &[f64]),
    ) -> Histogram {
        let new = || {
            let mut lines: Vec<String> = bounds.iter().map(|&b| bucket_line(name, labels, b)).collect();
            lines.push(bucket_line(name, labels, f64::INFINITY));
            lines.extend(sum_and_count_lines(name, labels));
            (Value::Histogram(Histogram::new(unit, bounds)), lines)
        };
        match self.series(name, help, labels, new) {
            Value::Histogram(histogram) => histogram,
            other => unreachable!("{name} is a histogram and was a {}", other.kind()),
        }
    }

    /// The summary `name` (sum and count, no quantiles) with these labels, registered at the first call.
    pub(crate) fn summary(&self, name: &'static str, help: &str, labels: Labels<'_>) -> Histogram {
        let new = || (Value::Summary(Histogram::new(Unit::Items, &[])), sum_and_count_lines(name, labels).into());
        match self.series(name, help, labels, new) {
            Value::Summary(summary) => summary,
            other => unreachable!("{name} is a summary and was a {}", other.kind()),
        }
    }

    /// Makes the family `name` one series of value 1 with these labels, whatever it was before.
    pub(crate) fn set_info(&self, name: &'static str, help: &str, labels: Labels<'_>) {
        let mut families = self.lock();
        let family = find_or_add(&mut families, name, help, &Value::Info);
        family.series.clear();
        family.series.push(Series { labels: label_set(labels), lines: sample_lines(name, labels), value: Value::Info });
    }

    /// Every sample, then the process's own.
    pub(crate) fn render(&self) -> String {
        let families = self.lock();
        let lines = families.iter().flat_map(|f| &f.series).flat_map(|s| &s.lines);
        let size: usize = lines.map(|line| line.len() + 16).sum();
        let mut out = String::with_capacity(size + 256 * families.len());
        for family in families.iter() {
            out.push_str(&family.header);
            for series in &family.series {
                series.render(&mut out);
            }
        }
        drop(families);
        process::render(&mut out);
        out
    }

    fn series(
        &self,
        name: &'static str,
        help: &str,
        labels: Labels<'_>,
        new: impl FnOnce() -> (Value, Vec<String>),
    ) -> Value {
        let key = label_set(labels);
        let mut families = self.lock();
        let known = families.iter().find(|f| f.name == name).and_then(|f| f.series.iter().find(|s| s.labels == key));
        if let Some(series) = known {
            return series.value.clone();
        }
        let (value, lines) = new();
        let family = find_or_add(&mut families, name, help, &value);
        family.series.push(Series { labels: key, lines, value: value.clone() });
        value
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Family>> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Series {
    fn render(&self, out: &mut String) {
        match &self.value {
            Value::Counter(counter) => self.push_samples(out, [counter.get() as f64]),
            Value::Gauge(gauge) => self.push_samples(out, [gauge.get()]),
            Value::Info => self.push_samples(out, [1.0]),
            Value::Histogram(histogram) => {
                let mut count = 0.0;
                let buckets = histogram.cumulative().map(|total| {
                    count = total as f64;
                    count
                });
                let bucket_lines = self.lines.len() - 2;
                for (line, value) in self.lines[..bucket_lines].iter().zip(buckets) {
                    push_sample(out, line, value);
                }
                push_sample(out, &self.lines[bucket_lines], histogram.sum());
                push_sample(out, &self.lines[bucket_lines + 1], count);
            }
            Value::Summary(summary) => {
                let count = summary.cumulative().last().unwrap_or_default();
                self.push_samples(out, [summary.sum(), count as f64]);
            }
        }
    }

    fn push_samples<const N: usize>(&self, out: &mut String, values: [f64; N]) {
        for (line, value) in self.lines.iter().zip(values) {
            push_sample(out, line, value);
        }
    }
}

/// Appends a family of one sample that is read when it is scraped.
pub(crate) fn push_family(out: &mut String, name: &str, help: &str, kind: &str, value: f64) {
    out.push_str(&header(name, help, kind));
    push_sample(out, &format!("{name} "), value);
}

fn push_sample(out: &mut String, line: &str, value: f64) {
    out.push_str(line);
    push_number(out, value);
    out.push('\n');
}

fn find_or_add<'a>(families: &'a mut Vec<Family>, name: &'static str, help: &str, value: &Value) -> &'a mut Family {
    let index = families.iter().position(|f| f.name == name).unwrap_or_else(|| {
        families.push(Family { name, header: header(name, help, value.kind()), series: Vec::new() });
        families.len() - 1
    });
    &mut families[index]
}

fn header(name: &str, help: &str, kind: &str) -> String {
    debug_assert!(!help.contains(['\n', '\\']), "{name}: the help text would need escapes");
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
}

fn sample_lines(name: &str, labels: Labels<'_>) -> Vec<String> {
    vec![format!("{name}{} ", label_set(labels))]
}

fn sum_and_count_lines(name: &str, labels: Labels<'_>) -> [String; 2] {
    let labels = label_set(labels);
    [format!("{name}_sum{labels} "), format!("{name}_count{labels} ")]
}

fn bucket_line(name: &str, labels: Labels<'_>, bound: f64) -> String {
    let mut le = String::new();
    push_number(&mut le, bound);
    let mut labels = labels.to_vec();
    labels.push(("le", &le));
    format!("{name}_bucket{} ", label_set(&labels))
}
