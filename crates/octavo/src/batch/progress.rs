//! How far a batch has come.

use std::time::{Duration, Instant};

use tracing::info;

/// Between two lines of the log.
const INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct Progress {
    total: usize,
    done: usize,
    failed: usize,
    /// Answers of an earlier run.
    kept: usize,
    begun: Instant,
    told: Instant,
}

impl Progress {
    pub(crate) fn new(total: usize, kept: usize) -> Self {
        let now = Instant::now();
        Self { total, done: kept, failed: 0, kept, begun: now, told: now }
    }

    /// One more answer.
    pub(crate) fn advance(&mut self, ok: bool) {
        self.done += 1;
        self.failed += usize::from(!ok);
        if self.told.elapsed() >= INTERVAL {
            self.told = Instant::now();
            info!("{}", self.line(self.begun.elapsed()));
        }
    }

    /// The last line.
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
            "{} of {} answered, {} of them with an error, {rate:.2} a second, {end}",
            self.done, self.total, self.failed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_counts_this_run_alone() {
        let mut progress = Progress::new(100, 40);
        for _ in 0..20 {
            progress.advance(true);
        }
        progress.advance(false);
        let line = progress.line(Duration::from_secs(10));
        assert_eq!(line, "61 of 100 answered, 1 of them with an error, 2.10 a second, about 19 s left");
    }
}
