//! The metrics page without its numbers, and where they go.
//!
//! Names, help, types and labels change only when a series is registered. So the text between the numbers is made once, and a
//! scrape copies it and writes each number in its place: a scrape of a thousand series costs tens of microseconds, and endpoint
//! pickers scrape twenty times a second.

use crate::cells::{Counter, Gauge, Histogram};
use crate::process;
use crate::spelling::{push_count, push_gauge, push_integer, push_number};

/// Where the numbers of one or more samples come from.
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
    /// One sample for each of the process's families that are marked.
    Process([bool; process::FAMILIES.len()]),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Page {
    text: String,
    /// Byte positions in `text`, ascending.
    places: Vec<usize>,
    /// They fill the places one after another.
    sources: Vec<Source>,
}

/// Bytes that a number takes, generously.
const NUMBER: usize = 24;

impl Page {
    /// Appends lines as they are.
    pub(crate) fn text(&mut self, lines: &str) {
        self.text.push_str(lines);
    }

    /// Appends a sample's line, given up to its number and with the space before it.
    pub(crate) fn sample(&mut self, line: &str) {
        self.text.push_str(line);
        self.places.push(self.text.len());
        self.text.push('\n');
    }

    /// Says where the numbers of the samples come from that were appended since the last call.
    pub(crate) fn source(&mut self, source: Source) {
        self.sources.push(source);
    }

    /// Appends the page with the numbers of this moment.
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
    /// Up to where the text has been written.
    from: usize,
    out: &'a mut String,
}

impl Filling<'_> {
    /// The text up to the next place, and the number that belongs there.
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
