//! The registry of all series.
//!
//! Counters and gauges live in the Prometheus exporter's recorder and are reached through the `metrics` facade. Histograms
//! and families with changing labels are kept here; the crate's documentation says why.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use metrics::{Counter, Gauge, Label, with_local_recorder};
use metrics_exporter_prometheus::formatting::{write_help_line, write_type_line};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

use crate::cells::{Histogram, Unit};
use crate::process;
use crate::spelling::{label_set, push_count, push_number};

/// Label names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// Every series of a server.
#[derive(Debug)]
pub(crate) struct Registry {
    /// Counters and gauges. The recorder is local to the server, because a process may have several servers.
    exporter: PrometheusRecorder,
    series: Mutex<Series>,
}

/// The series that the exporter does not hold.
#[derive(Debug, Default)]
struct Series {
    /// Rendered families of one series with changing labels, by name. The exporter would keep all former sets of labels.
    infos: BTreeMap<&'static str, String>,
    /// In order of registration.
    histograms: Vec<Family>,
}

/// Histograms or summaries of one name.
#[derive(Debug)]
struct Family {
    name: &'static str,
    /// The `# HELP` and `# TYPE` lines.
    header: String,
    series: Vec<Distribution>,
}

#[derive(Debug)]
struct Distribution {
    labels: String,
    /// The line of each sample up to its number: those of the buckets, which a summary lacks, then `_sum` and `_count`.
    lines: Vec<String>,
    histogram: Histogram,
}

impl Default for Registry {
    fn default() -> Self {
        Self { exporter: PrometheusBuilder::new().build_recorder(), series: Mutex::default() }
    }
}

impl Registry {
    /// The counter `name` with these labels, registered at the first call. `name` ends in `_total`.
    pub(crate) fn counter(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Counter {
        debug_assert!(name.ends_with("_total"), "{name}");
        with_local_recorder(&self.exporter, || {
            metrics::describe_counter!(name, help);
            metrics::counter!(name, exported(labels))
        })
    }

    /// The gauge `name` with these labels, registered at the first call.
    pub(crate) fn gauge(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Gauge {
        with_local_recorder(&self.exporter, || {
            metrics::describe_gauge!(name, help);
            metrics::gauge!(name, exported(labels))
        })
    }

    /// The histogram `name` with these labels, registered at the first call.
    pub(crate) fn histogram(
        &self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        (unit, bounds): (Unit, &[f64]),
    ) -> Histogram {
        self.distribution(name, (help, "histogram"), labels, || {
            let histogram = Histogram::new(unit, bounds);
            let bounds_and_all = bounds.iter().copied().chain([f64::INFINITY]);
            let lines = bounds_and_all.map(|bound| bucket_line(name, labels, bound));
            (histogram, lines.chain(sum_and_count_lines(name, labels)).collect())
        })
    }

    /// The summary `name` (sum and count, no quantiles) with these labels, registered at the first call.
    pub(crate) fn summary(&self, name: &'static str, help: &'static str, labels: Labels<'_>, unit: Unit) -> Histogram {
        self.distribution(name, (help, "summary"), labels, || {
            (Histogram::new(unit, &[]), sum_and_count_lines(name, labels).into())
        })
    }

    /// Sets the family `name` to one series with these labels and this value, which replaces the former ones.
    pub(crate) fn set_info(&self, name: &'static str, help: &str, labels: Labels<'_>, value: f64) {
        let mut text = header(name, help, "gauge");
        push_sample(&mut text, &format!("{name}{} ", label_set(labels)), |text| push_number(text, value));
        self.series().infos.insert(name, text);
    }

    /// Renders all samples, and those of the process last.
    pub(crate) fn render(&self) -> String {
        let mut out = sorted(&self.exporter.handle().render());
        self.series().render(&mut out);
        for ((name, help, kind), value) in process::FAMILIES.iter().zip(process::values()) {
            if let Some(value) = value {
                out.push_str(&header(name, help, kind));
                push_sample(&mut out, &format!("{name} "), |out| push_number(out, value));
            }
        }
        out
    }

    /// Ignores poisoning: every change under this lock is a single insertion, so the data is consistent after a panic.
    fn series(&self) -> MutexGuard<'_, Series> {
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn distribution(
        &self,
        name: &'static str,
        (help, kind): (&'static str, &str),
        labels: Labels<'_>,
        new: impl FnOnce() -> (Histogram, Vec<String>),
    ) -> Histogram {
        let labels = label_set(labels);
        let families = &mut self.series().histograms;
        let index = families.iter().position(|f| f.name == name).unwrap_or_else(|| {
            families.push(Family { name, header: header(name, help, kind), series: Vec::new() });
            families.len() - 1
        });
        let family = &mut families[index];
        if let Some(known) = family.series.iter().find(|s| s.labels == labels) {
            return known.histogram.clone();
        }
        let (histogram, lines) = new();
        family.series.push(Distribution { labels, lines, histogram: histogram.clone() });
        histogram
    }
}

impl Series {
    fn render(&self, out: &mut String) {
        self.infos.values().for_each(|text| out.push_str(text));
        for family in &self.histograms {
            out.push_str(&family.header);
            family.series.iter().for_each(|series| series.render(out));
        }
    }
}

impl Distribution {
    fn render(&self, out: &mut String) {
        let [buckets @ .., sum, count] = self.lines.as_slice() else { return };
        // A summary has one count and no bucket.
        let mut total = 0;
        for (n, cumulative) in self.histogram.cumulative().enumerate() {
            total = cumulative;
            if let Some(line) = buckets.get(n) {
                push_sample(out, line, |out| push_count(out, total));
            }
        }
        push_sample(out, sum, |out| push_number(out, self.histogram.sum()));
        push_sample(out, count, |out| push_count(out, total));
    }
}

/// Labels for the exporter, in name order as in [`label_set`].
fn exported(labels: Labels<'_>) -> Vec<Label> {
    let mut sorted = labels.to_vec();
    sorted.sort_unstable();
    // The exporter treats a pair of backslashes as escaped already, and misplaces a backslash before a line feed.
    sorted.into_iter().map(|(name, value)| Label::new(name.to_owned(), value.replace('\\', "\\\\"))).collect()
}

/// The exporter's page with families and their samples in name order; the exporter renders them in that of a hash map, and
/// an empty line after each family.
fn sorted(page: &str) -> String {
    let mut families: Vec<Vec<&str>> = page
        .split("\n\n")
        .map(|family| family.lines().collect())
        .filter(|family: &Vec<_>| !family.is_empty())
        .collect();
    // `# HELP` sorts before `# TYPE`, and both before any name.
    families.iter_mut().for_each(|lines| lines.sort_unstable());
    families.sort_unstable();
    families.into_iter().flatten().flat_map(|line| [line, "\n"]).collect()
}

/// Appends a sample, whose `line` is given up to the number.
fn push_sample(out: &mut String, line: &str, number: impl FnOnce(&mut String)) {
    out.push_str(line);
    number(out);
    out.push('\n');
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exporter_holds_the_values_of_counters_and_gauges() {
        let registry = Registry::default();
        registry.counter("a_total", "A.", &[("x", "1")]).increment(7);
        registry.counter("b_total", "B.", &[]).increment(9);
        registry.gauge("c", "C.", &[]).set(0.25);
        let page = registry.exporter.handle().render();
        for sample in ["a_total{x=\"1\"} 7\n", "b_total 9\n", "c 0.25\n"] {
            assert!(page.contains(sample), "{page}");
        }
    }

    #[test]
    fn a_second_registration_returns_the_same_series() {
        let registry = Registry::default();
        registry.counter("a_total", "A.", &[("x", "1"), ("y", "2")]).increment(7);
        registry.counter("a_total", "A.", &[("y", "2"), ("x", "1")]).increment(1);
        assert!(
            registry.render().starts_with("# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1\",y=\"2\"} 8\n")
        );
    }

    #[test]
    fn a_page_is_in_name_order() {
        let page = "# HELP b B.\n# TYPE b gauge\nb{x=\"2\"} 1\nb{x=\"1\"} 0\n\n# HELP a A.\n# TYPE a gauge\na 1\n\n";
        let expected = "# HELP a A.\n# TYPE a gauge\na 1\n# HELP b B.\n# TYPE b gauge\nb{x=\"1\"} 0\nb{x=\"2\"} 1\n";
        assert_eq!(sorted(page), expected);
        assert_eq!(sorted(""), "");
    }
}
