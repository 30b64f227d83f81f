//! The requests of a batch that failed.

use std::fmt;

/// Failures that are named; further ones are counted.
const NAMED: usize = 10;

/// Failed requests in the order of the input.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    named: Vec<String>,
    count: usize,
}

impl Failures {
    /// Adds the request that `name` describes.
    pub(crate) fn add(&mut self, name: impl FnOnce() -> String) {
        self.count += 1;
        if self.named.len() < NAMED {
            self.named.push(name());
        }
    }

    /// Number of failed requests.
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

impl fmt::Display for Failures {
    /// One sentence: `2 requests failed: line 3 (custom_id 'a'), line 7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = if self.count == 1 { "request" } else { "requests" };
        write!(f, "{} {requests} failed: {}", self.count, self.named.join(", "))?;
        match self.count - self.named.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Names the request of a line of the input.
pub(crate) fn name(number: usize, custom_id: Option<&str>) -> String {
    match custom_id {
        Some(id) => format!("line {number} (custom_id '{id}')"),
        None => format!("line {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failures_are_named_and_the_others_counted() {
        let mut failures = Failures::default();
        failures.add(|| name(3, Some("a")));
        assert_eq!(failures.to_string(), "1 request failed: line 3 (custom_id 'a')");
        (4..15).for_each(|number| failures.add(|| name(number, None)));
        let text = failures.to_string();
        assert!(text.starts_with("12 requests failed: line 3 (custom_id 'a'), line 4, "), "{text}");
        assert!(text.ends_with(", line 12 and 2 more"), "{text}");
    }
}
