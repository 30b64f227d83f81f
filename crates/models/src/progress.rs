//! Progress of long operations (a download, loading weights): a bar on a terminal, log lines elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Receives the progress of long operations. Implementations must be cheap, because `advance_to` is called for every
/// buffer.
pub trait Progress: Send + Sync {
    /// Starts a task. `total` is in bytes; `None` if unknown.
    fn begin(&self, label: &str, total: Option<u64>) -> Box<dyn ProgressTask>;

    /// Shows a message between tasks.
    fn message(&self, text: &str);
}

/// A task of a [`Progress`]. Dropping it without [`finish`](ProgressTask::finish) means that it was abandoned.
pub trait ProgressTask: Send + Sync {
    /// Reports that `done` bytes of the total are complete. The value may decrease when a download restarts.
    fn advance_to(&self, done: u64);

    /// Reports that the task is complete.
    fn finish(self: Box<Self>);
}

/// Returns a bar on standard error if that is a terminal, else log lines at every tenth.
pub fn progress_for(terminal: bool) -> Box<dyn Progress> {
    if terminal { Box::new(BarProgress) } else { Box::new(LogProgress) }
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _label: &str, _total: Option<u64>) -> Box<dyn ProgressTask> {
        Box::new(Silent)
    }

    fn message(&self, _text: &str) {}
}

impl ProgressTask for Silent {
    fn advance_to(&self, _done: u64) {}

    fn finish(self: Box<Self>) {}
}

/// Shows a bar for each task on standard error.
#[derive(Clone, Copy, Debug, Default)]
pub struct BarProgress;

struct BarTask(ProgressBar);

impl Progress for BarProgress {
    fn begin(&self, label: &str, total: Option<u64>) -> Box<dyn ProgressTask> {
        let bar = match total {
            Some(total) => ProgressBar::new(total),
            None => ProgressBar::new_spinner(),
        };
        let template = match total {
            Some(_) => "{msg} [{wide_bar:.cyan}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{spinner} {msg} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(label.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Box::new(BarTask(bar))
    }

    fn message(&self, text: &str) {
        // Plain output is enough, because no bar is shown while a message is printed.
        eprintln!("{text}");
    }
}

impl ProgressTask for BarTask {
    fn advance_to(&self, done: u64) {
        self.0.set_position(done);
    }

    fn finish(self: Box<Self>) {
        self.0.finish();
    }
}

impl Drop for BarTask {
    fn drop(&mut self) {
        if !self.0.is_finished() {
            self.0.abandon();
        }
    }
}

/// Logs a line when a task starts, at about every tenth of it and when it ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogProgress;

/// Number of bytes between two lines of a task whose total is unknown.
const LOG_EVERY: u64 = 64 << 20;

struct LogTask {
    label: String,
    total: Option<u64>,
    /// Number of tenths (or multiples of [`LOG_EVERY`]) already logged.
    logged: AtomicU64,
}

impl Progress for LogProgress {
    fn begin(&self, label: &str, total: Option<u64>) -> Box<dyn ProgressTask> {
        match total {
            Some(total) => tracing::info!("{label}: {}", in_units(total)),
            None => tracing::info!("{label}"),
        }
        Box::new(LogTask { label: label.to_owned(), total, logged: AtomicU64::new(0) })
    }

    fn message(&self, text: &str) {
        tracing::info!("{text}");
    }
}

impl LogTask {
    /// Returns the line to log now, if one is due.
    fn due(&self, done: u64) -> Option<String> {
        let step = match self.total {
            Some(0) => return None,
            Some(total) => u128::from(done) * 10 / u128::from(total),
            None => u128::from(done / LOG_EVERY),
        };
        let step = u64::try_from(step).unwrap_or(u64::MAX);
        if self.logged.fetch_max(step, Ordering::Relaxed) >= step {
            return None;
        }
        Some(match self.total {
            Some(total) => format!("{}: {} %, {} of {}", self.label, step * 10, in_units(done), in_units(total)),
            None => format!("{}: {}", self.label, in_units(done)),
        })
    }
}

impl ProgressTask for LogTask {
    fn advance_to(&self, done: u64) {
        if let Some(line) = self.due(done) {
            tracing::info!("{line}");
        }
    }

    fn finish(self: Box<Self>) {
        tracing::info!("{}: done", self.label);
    }
}

/// Formats a number of bytes in decimal units with one decimal.
pub(crate) fn in_units(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    for (size, unit) in UNITS {
        if bytes >= size {
            return format!("{:.1} {unit}", bytes as f64 / size as f64);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_each_tenth_once() {
        let task = LogTask { label: "x".into(), total: Some(1000), logged: AtomicU64::new(0) };
        let lines: Vec<String> = (0..=1000).filter_map(|done| task.due(done)).collect();
        assert_eq!(lines.len(), 10);
        assert_eq!(lines[0], "x: 10 %, 100 bytes of 1.0 kB");
        assert_eq!(lines[9], "x: 100 %, 1.0 kB of 1.0 kB");
        assert_eq!(task.due(500), None, "a restart repeats no line");
    }

    #[test]
    fn an_unknown_or_empty_total_divides_by_nothing() {
        let unknown = LogTask { label: "x".into(), total: None, logged: AtomicU64::new(0) };
        assert_eq!(unknown.due(1), None);
        assert_eq!(unknown.due(LOG_EVERY).as_deref(), Some("x: 67.1 MB"));
        let empty = LogTask { label: "x".into(), total: Some(0), logged: AtomicU64::new(0) };
        assert_eq!(empty.due(0), None);
    }

    #[test]
    fn every_kind_takes_a_whole_task() {
        let all: [Box<dyn Progress>; 3] = [Box::new(Silent), progress_for(false), progress_for(true)];
        for progress in all {
            let task = progress.begin("x", Some(10));
            task.advance_to(10);
            task.finish();
            drop(progress.begin("given up", None));
        }
    }
}
