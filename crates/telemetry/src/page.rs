//! The text of the metrics page and the places of its numbers.
//!
//! Names, help, types and labels change only when a series is registered. The text between the numbers is therefore built
//! once, and a scrape copies it and fills in the numbers. A scrape of a thousand series takes tens of microseconds, which
//! matters because endpoint pickers scrape twenty times per second.

use crate::cells::{Counter, Gauge, Histogram};
use crate::process;
use crate::spelling::{push_count, push_gauge, push_integer, push_number};

/// The source of the numbers of one or more samples.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// One sample.
    Counter(Counter),
    /// One sample.
    Gauge(Gauge),
    /// The samples of the buckets, then `_sum` and `_count`.
    Histogram(Histogram),
    /// `_sum` and `_count`.
    Summary(Histogram),
    /// One sample for each marked family of the process.
    Process([bool; process::FAMILIES.len()]),
}

/// The page; see the module.
#[derive(Debug, Default)]
pub(crate) struct Page {
    text: String,
    /// Byte positions in `text`, ascending.
    places: Vec<usize>,
    /// The sources, which fill the places in order.
    sources: Vec<Source>,
}

/// Upper estimate of the length of a number in bytes.
const NUMBER: usize = 24;

impl Page {
    /// Appends lines without numbers.
    pub(crate) fn text(&mut self, lines: &str) {
        self.text.push_str(lines);
    }

    /// Appends a sample's line, given up to the space before its number.
    pub(crate) fn sample(&mut self, line: &str) {
        self.text.push_str(line);
        self.places.push(self.text.len());
        self.text.push('\n');
    }

    /// Sets the source of the numbers of all samples that were appended since the last call.
    pub(crate) fn source(&mut self, source: Source) {
        self.sources.push(source);
    }

    /// Appends the page with the current numbers.
    pub(crate) fn fill(&self, out: &mut String) {
        out.reserve(self.text.len() + NUMBER * self.places.len());
        let mut filling = Filling { text: &self.text, places: self.places.iter(), from: 0, out };
        for source in &self.sources {
            match source {
                Source::Counter(counter) => filling.next(|out| push_integer(out, counter.get())),
                Source::Gauge(gauge) => filling.next(|out| push_gauge(out, gauge.get())),
                Source::Histogram(histogram) => filling.histogram(histogram),
                Source::Process(shown) => {
                    for (value, _) in process::values().iter().zip(shown).filter(|(_, shown)| **shown) {
                        filling.next(|out| push_number(out, value.unwrap_or(f64::NAN)));
                    }
                }
                Source::Summary(histogram) => {
                    filling.sum_and_count(histogram, histogram.cumulative().last().unwrap_or_default());
                }
            }
        }
        let rest = filling.from;
        out.push_str(&self.text[rest..]);
    }
}

/// A page that is being written.
struct Filling<'a> {
    text: &'a str,
    places: std::slice::Iter<'a, usize>,
    /// Length of the text that is written.
    from: usize,
    out: &'a mut String,
}

impl Filling<'_> {
    /// Writes the text up to the next place, and the number of that place.
    fn next(&mut self, number: impl FnOnce(&mut String)) {
        let Some(&place) = self.places.next() else { return };
        self.out.push_str(&self.text[self.from..place]);
        self.from = place;
        number(self.out);
    }

    fn histogram(&mut self, histogram: &Histogram) {
        let mut count = 0;
        for total in histogram.cumulative() {
            count = total;
            self.next(|out| push_count(out, count));
        }
        self.sum_and_count(histogram, count);
    }

    fn sum_and_count(&mut self, histogram: &Histogram, count: u64) {
        self.next(|out| push_number(out, histogram.sum()));
        self.next(|out| push_count(out, count));
    }
}
