//! Progress of a batch in the log.

use std::time::{Duration, Instant};

use tracing::info;

/// Minimum interval of log lines.
const INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct Progress {
    total: usize,
    done: usize,
    failed: usize,
    /// Number of answers of an earlier run.
    kept: usize,
    begun: Instant,
    told: Instant,
}

impl Progress {
    /// `kept` answers of an earlier run are there, `failed` of them with an error.
    pub(crate) fn new(total: usize, kept: usize, failed: usize) -> Self {
        let now = Instant::now();
        Self { total, done: kept, failed, kept, begun: now, told: now }
    }

    /// Counts an answer.
    pub(crate) fn advance(&mut self, ok: bool) {
        self.done += 1;
        self.failed += usize::from(!ok);
        if self.told.elapsed() >= INTERVAL {
            self.told = Instant::now();
            info!("{}", self.line(self.begun.elapsed()));
        }
    }

    /// Logs the last line.
    pub(crate) fn finish(&self) {
        info!("{}", self.line(self.begun.elapsed()));
    }

    fn line(&self, elapsed: Duration) -> String {
        let seconds = elapsed.as_secs_f64().max(1e-3);
        let rate = (self.done - self.kept) as f64 / seconds;
        let left = self.total.saturating_sub(self.done);
        let end = match left {
            0 => format!("in {seconds:.1} s"),
            _ if rate > 0.0 => format!("about {:.0} s left", left as f64 / rate),
            _ => "no answer yet".to_owned(),
        };
        format!(
            "{} of {} requests answered, {} failed, {rate:.2} requests/s, {end}",
            self.done, self.total, self.failed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_counts_this_run_alone() {
        let mut progress = Progress::new(100, 40, 2);
        for _ in 0..20 {
            progress.advance(true);
        }
        progress.advance(false);
        let line = progress.line(Duration::from_secs(10));
        assert_eq!(line, "61 of 100 requests answered, 3 failed, 2.10 requests/s, about 19 s left");
    }
}
