//! A strict parser of Prometheus' text format 0.0.4: what it rejects, a scraper may misread.

use std::collections::BTreeMap;

/// A metric family in the order of the text.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: String,
    pub(crate) help: String,
    pub(crate) kind: String,
    pub(crate) samples: Vec<Sample>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

impl Family {
    pub(crate) fn label_values(&self, label: &str) -> Vec<&str> {
        let mut values: Vec<&str> =
            self.samples.iter().filter_map(|s| s.labels.get(label)).map(String::as_str).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// The sample `name + suffix` whose labels include `labels`; there must be exactly one.
    pub(crate) fn value(&self, suffix: &str, labels: &[(&str, &str)]) -> f64 {
        let name = format!("{}{suffix}", self.name);
        let matches = |s: &&Sample| {
            s.name == name && labels.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|found| found == v))
        };
        let found: Vec<&Sample> = self.samples.iter().filter(matches).collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
        found[0].value
    }
}

/// Every family, or why the text is not well formed.
pub(crate) fn parse(text: &str) -> Result<Vec<Family>, String> {
    if !text.ends_with('\n') {
        return Err("the text does not end in a newline".into());
    }
    let mut families: Vec<Family> = Vec::new();
    let mut lines = text.lines().filter(|line| !line.is_empty()).peekable();
    while let Some(line) = lines.next() {
        let (name, help) = header(line, "# HELP ")?;
        let (typed, kind) = header(lines.next().unwrap_or_default(), "# TYPE ")?;
        if name != typed || !["counter", "gauge", "histogram", "summary"].contains(&kind) {
            return Err(format!("{name}: TYPE line '{typed} {kind}'"));
        }
        if families.iter().any(|f| f.name == name) {
            return Err(format!("{name} is there twice"));
        }
        let mut samples: Vec<Sample> = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let sample = sample(line)?;
            if samples.iter().any(|s| s.name == sample.name && s.labels == sample.labels) {
                return Err(format!("{line} is there twice"));
            }
            samples.push(sample);
        }
        let family = Family { name: name.into(), help: help.into(), kind: kind.into(), samples };
        check(&family)?;
        families.push(family);
    }
    Ok(families)
}

fn header<'a>(line: &'a str, start: &str) -> Result<(&'a str, &'a str), String> {
    let rest = line.strip_prefix(start).ok_or_else(|| format!("expected '{start}' and found '{line}'"))?;
    rest.split_once(' ').filter(|(name, _)| is_name(name)).ok_or_else(|| format!("no metric name in '{line}'"))
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == ':')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}

fn sample(line: &str) -> Result<Sample, String> {
    let bad = |what: &str| format!("{what} in '{line}'");
    let end = line.find(['{', ' ']).ok_or_else(|| bad("no value"))?;
    let (name, mut rest) = line.split_at(end);
    if !is_name(name) {
        return Err(bad("no metric name"));
    }
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or_else(|| bad("no label"))?;
            let (value, after) = unescape(after).ok_or_else(|| bad("an open label value"))?;
            if !is_name(label) || label.contains(':') || labels.insert(label.to_owned(), value).is_some() {
                return Err(bad("a wrong label"));
            }
            if let Some(after) = after.strip_prefix('}') {
                rest = after;
                break;
            }
            rest = after.strip_prefix(',').ok_or_else(|| bad("no comma"))?;
        }
    }
    let value = rest.strip_prefix(' ').ok_or_else(|| bad("no space"))?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        "NaN" => f64::NAN,
        // Rust also reads "inf" and "infinity", which Prometheus does not write.
        number if number.contains(|c: char| c.is_ascii_digit()) => number.parse().map_err(|_| bad("no number"))?,
        _ => return Err(bad("no number")),
    };
    Ok(Sample { name: name.to_owned(), labels, value })
}

/// The label value up to its closing quote, and what follows.
fn unescape(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices();
    while let Some((i, c)) = chars.next() {
        match c {
            '"' => return Some((out, &text[i + 1..])),
            '\n' => return None,
            '\\' => out.push(match chars.next()?.1 {
                'n' => '\n',
                c @ ('\\' | '"') => c,
                _ => return None,
            }),
            c => out.push(c),
        }
    }
    None
}

/// Rules of the kinds.
fn check(family: &Family) -> Result<(), String> {
    let name = &family.name;
    if family.help.is_empty() || family.samples.is_empty() {
        return Err(format!("{name} has no help or no samples"));
    }
    let suffixes: &[&str] = match family.kind.as_str() {
        "histogram" => &["_bucket", "_sum", "_count"],
        "summary" => &["_sum", "_count"],
        _ => &[""],
    };
    for sample in &family.samples {
        if !suffixes.iter().any(|suffix| sample.name == format!("{name}{suffix}")) {
            return Err(format!("{} does not belong to the {} {name}", sample.name, family.kind));
        }
    }
    match family.kind.as_str() {
        "counter" if !name.ends_with("_total") || name.ends_with("_total_total") => {
            Err(format!("the counter {name} does not end in one _total"))
        }
        "histogram" => check_histogram(family),
        _ => Ok(()),
    }
}

fn check_histogram(family: &Family) -> Result<(), String> {
    let name = &family.name;
    let mut series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for bucket in family.samples.iter().filter(|s| s.name.ends_with("_bucket")) {
        let mut labels = bucket.labels.clone();
        let le = labels.remove("le").ok_or_else(|| format!("a bucket of {name} has no le"))?;
        let bound = if le == "+Inf" { f64::INFINITY } else { le.parse().map_err(|_| format!("{name}: le={le}"))? };
        series.entry(labels).or_default().push((bound, bucket.value));
    }
    for (labels, buckets) in &series {
        if !buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1) {
            return Err(format!("the buckets of {name} do not rise: {buckets:?}"));
        }
        let of = |suffix: &str| {
            let name = format!("{name}{suffix}");
            family.samples.iter().find(|s| s.name == name && &s.labels == labels).map(|s| s.value)
        };
        let last = buckets.last().filter(|(bound, _)| bound.is_infinite()).map(|(_, count)| *count);
        if last.is_none() || of("_count") != last || of("_sum").is_none() {
            return Err(format!("{name}{labels:?}: +Inf {last:?}, count {:?}, sum {:?}", of("_count"), of("_sum")));
        }
    }
    Ok(())
}
