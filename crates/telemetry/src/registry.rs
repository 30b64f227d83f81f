//! Everything that a scrape prints.
//!
//! Counters and gauges live in the exporter. Histograms are ours, printed after them: their sample lines are spelled up to
//! the value when a series is registered; a scrape copies them and appends numbers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use metrics::{Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::formatting::{write_help_line, write_type_line};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

use crate::cells::{Counter, Gauge, Histogram, Unit};
use crate::process;
use crate::spelling::{label_set, push_number};

/// Label names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// What the facade wants to know of a registration; the exporter looks at none of it.
const METADATA: Metadata<'static> = Metadata::new("octavo", Level::INFO, None);

/// The exporter, and the histograms in the order of their registration.
#[derive(Debug)]
pub(crate) struct Registry {
    exporter: PrometheusRecorder,
    families: Mutex<Vec<Family>>,
    /// Families of one series of value 1 that is all labels, by name, as they are printed. The exporter would keep every
    /// set of labels that it has seen.
    infos: Mutex<BTreeMap<&'static str, String>>,
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
    /// Each sample's line up to its value: the buckets, of which a summary has none, `_sum`, `_count`.
    lines: Vec<String>,
    histogram: Histogram,
}

impl Default for Registry {
    fn default() -> Self {
        let exporter = PrometheusBuilder::new().build_recorder();
        Self { exporter, families: Mutex::default(), infos: Mutex::default() }
    }
}

impl Registry {
    /// The counter `name` with these labels, registered at the first call. `name` ends in `_total`.
    pub(crate) fn counter(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Counter {
        debug_assert!(name.ends_with("_total"), "{name}");
        self.exporter.describe_counter(KeyName::from_const_str(name), None, help.into());
        Counter::new(self.exporter.register_counter(&key(name, labels), &METADATA))
    }

    /// The gauge `name` with these labels, registered at the first call.
    pub(crate) fn gauge(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Gauge {
        self.exporter.describe_gauge(KeyName::from_const_str(name), None, help.into());
        Gauge::new(self.exporter.register_gauge(&key(name, labels), &METADATA))
    }

    /// The histogram `name` with these labels, registered at the first call.
    pub(crate) fn histogram(
        &self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        (unit, bounds): (Unit, &[f64]),
    ) -> Histogram {
        self.series(name, help, "histogram", labels, || {
            let bounds_and_all = bounds.iter().copied().chain([f64::INFINITY]);
            let lines = bounds_and_all.map(|bound| bucket_line(name, labels, bound));
            (Histogram::new(unit, bounds), lines.chain(sum_and_count_lines(name, labels)).collect())
        })
    }

    /// The summary `name` (sum and count, no quantiles) with these labels, registered at the first call.
    pub(crate) fn summary(&self, name: &'static str, help: &'static str, labels: Labels<'_>, unit: Unit) -> Histogram {
        self.series(name, help, "summary", labels, || {
            (Histogram::new(unit, &[]), sum_and_count_lines(name, labels).into())
        })
    }

    /// Makes the family `name` one series of value 1 with these labels, whatever they were before.
    pub(crate) fn set_info(&self, name: &'static str, help: &str, labels: Labels<'_>) {
        let mut text = header(name, help, "gauge");
        push_sample(&mut text, &format!("{name}{} ", label_set(labels)), 1.0);
        lock(&self.infos).insert(name, text);
    }

    /// Every sample, then the process's own.
    pub(crate) fn render(&self) -> String {
        let mut out = self.exporter.handle().render();
        lock(&self.infos).values().for_each(|text| out.push_str(text));
        let families = lock(&self.families);
        let lines = families.iter().flat_map(|f| &f.series).flat_map(|s| &s.lines);
        out.reserve(lines.map(|line| line.len() + 16).sum::<usize>() + 256 * families.len());
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
        help: &'static str,
        kind: &str,
        labels: Labels<'_>,
        new: impl FnOnce() -> (Histogram, Vec<String>),
    ) -> Histogram {
        let labels = label_set(labels);
        let mut families = lock(&self.families);
        let index = families.iter().position(|f| f.name == name).unwrap_or_else(|| {
            families.push(Family { name, header: header(name, help, kind), series: Vec::new() });
            families.len() - 1
        });
        let family = &mut families[index];
        if let Some(series) = family.series.iter().find(|s| s.labels == labels) {
            return series.histogram.clone();
        }
        let (histogram, lines) = new();
        family.series.push(Series { labels, lines, histogram: histogram.clone() });
        histogram
    }
}

/// What a panic left is still whole: every change under these locks is one insertion.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Series {
    fn render(&self, out: &mut String) {
        let (buckets, sum_and_count) = self.lines.split_at(self.lines.len() - 2);
        let mut count = 0;
        let mut buckets = buckets.iter();
        for total in self.histogram.cumulative() {
            count = total;
            if let Some(line) = buckets.next() {
                push_sample(out, line, count as f64);
            }
        }
        push_sample(out, &sum_and_count[0], self.histogram.sum());
        push_sample(out, &sum_and_count[1], count as f64);
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

/// The exporter's name of a series; labels in name order, as [`label_set`] has them.
fn key(name: &'static str, labels: Labels<'_>) -> Key {
    let mut sorted = labels.to_vec();
    sorted.sort_unstable();
    // The exporter takes a pair of backslashes for one that is escaped already, and misplaces one before a line feed.
    let label = |(name, value): (&str, &str)| Label::new(name.to_owned(), value.replace('\\', "\\\\"));
    Key::from_parts(name, sorted.into_iter().map(label).collect::<Vec<_>>())
}

fn header(name: &str, help: &str, kind: &str) -> String {
    let mut header = String::new();
    write_help_line(&mut header, name, None, None, help);
    write_type_line(&mut header, name, None, None, kind);
    header
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
