//! The time of a log line.

use std::fmt;

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Characters up to the milliseconds of `2026-01-02T03:04:05.678901Z`.
const LENGTH: usize = "2026-01-02T03:04:05.678".len();

/// UTC, to the millisecond: `2026-01-02T03:04:05.678Z`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Milliseconds;

impl FormatTime for Milliseconds {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        match time.get(..LENGTH) {
            Some(milliseconds) => write!(writer, "{milliseconds}Z"),
            None => writer.write_str(&time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_three_decimals() {
        let mut time = String::new();
        Milliseconds.format_time(&mut Writer::new(&mut time)).unwrap();
        let (_, fraction) = time.rsplit_once('.').unwrap();
        assert!(time.len() == LENGTH + 1 && fraction.len() == 4 && fraction.ends_with('Z'), "{time}");
    }
}
