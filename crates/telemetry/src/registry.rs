//! The registry of all series.
//!
//! The exporter renders the layout of counters and gauges (names, help, types, labels), and this module that of
//! histograms. A scrape reads the numbers. The exporter could read and format them as well, but it builds maps of all
//! series for every scrape.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::{Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::formatting::{write_help_line, write_type_line};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

use crate::cells::{Counter, Gauge, Histogram, Unit};
use crate::page::{Page, Source};
use crate::process;
use crate::spelling::{label_set, push_number};

/// Label names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// The metadata that the facade requires; the exporter ignores it.
const METADATA: Metadata<'static> = Metadata::new("octavo", Level::INFO, None);

/// Every series of a server.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    series: Mutex<Series>,
    /// The page, built from `series` by the first scrape after a registration.
    page: Mutex<Option<Arc<Page>>>,
}

#[derive(Debug)]
struct Series {
    /// Renders counters and gauges. The value of each is its position in `sources`.
    exporter: PrometheusRecorder,
    sources: Vec<Source>,
    positions: HashMap<Key, usize>,
    /// Rendered families of one series with changing labels, by name. The exporter would keep all former sets of labels.
    infos: BTreeMap<&'static str, String>,
    /// The sources in order of registration.
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
    /// The line of each sample up to its number.
    lines: Vec<String>,
    source: Source,
    histogram: Histogram,
}

impl Default for Series {
    fn default() -> Self {
        Self {
            exporter: PrometheusBuilder::new().build_recorder(),
            sources: Vec::new(),
            positions: HashMap::new(),
            infos: BTreeMap::new(),
            histograms: Vec::new(),
        }
    }
}

impl Registry {
    /// The counter `name` with these labels, registered at the first call. `name` ends in `_total`.
    pub(crate) fn counter(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Counter {
        debug_assert!(name.ends_with("_total"), "{name}");
        let mut series = self.change();
        series.exporter.describe_counter(KeyName::from_const_str(name), None, help.into());
        let key = key(name, labels);
        let position = series.position(&key, || Source::Counter(Counter::default()));
        series.exporter.register_counter(&key, &METADATA).absolute(position as u64);
        match &series.sources[position] {
            Source::Counter(counter) => counter.clone(),
            // The counter works but is not shown, since the name belongs to a gauge.
            _ => Counter::default(),
        }
    }

    /// The gauge `name` with these labels, registered at the first call.
    pub(crate) fn gauge(&self, name: &'static str, help: &'static str, labels: Labels<'_>) -> Gauge {
        let mut series = self.change();
        series.exporter.describe_gauge(KeyName::from_const_str(name), None, help.into());
        let key = key(name, labels);
        let position = series.position(&key, || Source::Gauge(Gauge::default()));
        series.exporter.register_gauge(&key, &METADATA).set(position as f64);
        match &series.sources[position] {
            Source::Gauge(gauge) => gauge.clone(),
            _ => Gauge::default(),
        }
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
            (Source::Histogram(histogram.clone()), histogram, lines.chain(sum_and_count_lines(name, labels)).collect())
        })
    }

    /// The summary `name` (sum and count, no quantiles) with these labels, registered at the first call.
    pub(crate) fn summary(&self, name: &'static str, help: &'static str, labels: Labels<'_>, unit: Unit) -> Histogram {
        self.distribution(name, (help, "summary"), labels, || {
            let histogram = Histogram::new(unit, &[]);
            (Source::Summary(histogram.clone()), histogram, sum_and_count_lines(name, labels).into())
        })
    }

    /// Sets the family `name` to one series with these labels and this value, which replaces the former ones.
    pub(crate) fn set_info(&self, name: &'static str, help: &str, labels: Labels<'_>, value: f64) {
        let mut text = header(name, help, "gauge");
        text.push_str(&format!("{name}{} ", label_set(labels)));
        push_number(&mut text, value);
        text.push('\n');
        self.change().infos.insert(name, text);
    }

    /// Renders all samples, and those of the process last.
    pub(crate) fn render(&self) -> String {
        let mut out = String::new();
        self.page().fill(&mut out);
        out
    }

    /// The page as of the last registration.
    fn page(&self) -> Arc<Page> {
        let mut page = lock(&self.page);
        Arc::clone(page.get_or_insert_with(|| Arc::new(lock(&self.series).lay_out())))
    }

    /// Locks the series for a change.
    fn change(&self) -> MutexGuard<'_, Series> {
        // Rebuilding the page waits for the series, and so for the change. Locks are taken in the order of `page`.
        let mut page = lock(&self.page);
        let series = lock(&self.series);
        *page = None;
        series
    }

    fn distribution(
        &self,
        name: &'static str,
        (help, kind): (&'static str, &str),
        labels: Labels<'_>,
        new: impl FnOnce() -> (Source, Histogram, Vec<String>),
    ) -> Histogram {
        let labels = label_set(labels);
        let mut series = self.change();
        let families = &mut series.histograms;
        let index = families.iter().position(|f| f.name == name).unwrap_or_else(|| {
            families.push(Family { name, header: header(name, help, kind), series: Vec::new() });
            families.len() - 1
        });
        let family = &mut families[index];
        if let Some(known) = family.series.iter().find(|s| s.labels == labels) {
            return known.histogram.clone();
        }
        let (source, histogram, lines) = new();
        family.series.push(Distribution { labels, lines, source, histogram: histogram.clone() });
        histogram
    }
}

impl Series {
    /// The position of the series with this key, which is added as `new` if it is missing.
    fn position(&mut self, key: &Key, new: impl FnOnce() -> Source) -> usize {
        if let Some(&position) = self.positions.get(key) {
            return position;
        }
        self.sources.push(new());
        self.positions.insert(key.clone(), self.sources.len() - 1);
        self.sources.len() - 1
    }

    fn lay_out(&self) -> Page {
        let mut page = Page::default();
        // The exporter separates families by empty lines.
        for line in self.exporter.handle().render().lines().filter(|line| !line.is_empty()) {
            let sample = line.rsplit_once(' ').filter(|_| !line.starts_with('#'));
            match sample.and_then(|(name, position)| Some((name, self.sources.get(position.parse::<usize>().ok()?)?))) {
                Some((name, source)) => {
                    page.sample(&format!("{name} "));
                    page.source(source.clone());
                }
                None => page.text(&format!("{line}\n")),
            }
        }
        self.infos.values().for_each(|text| page.text(text));
        for family in &self.histograms {
            page.text(&family.header);
            for series in &family.series {
                series.lines.iter().for_each(|line| page.sample(line));
                page.source(series.source.clone());
            }
        }
        let shown = process::values().map(|value| value.is_some());
        for ((name, help, kind), _) in process::FAMILIES.iter().zip(shown).filter(|(_, shown)| *shown) {
            page.text(&header(name, help, kind));
            page.sample(&format!("{name} "));
        }
        page.source(Source::Process(shown));
        page
    }
}

/// Ignores poisoning: every change under these locks is a single insertion, so the data is consistent after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The exporter's key of a series, with labels in name order as in [`label_set`].
fn key(name: &'static str, labels: Labels<'_>) -> Key {
    let mut sorted = labels.to_vec();
    sorted.sort_unstable();
    // The exporter treats a pair of backslashes as escaped already, and misplaces a backslash before a line feed.
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
