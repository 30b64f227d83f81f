//! Progress of long work (a download, loading weights): a bar on a terminal, log lines elsewhere.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

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

/// A bar on standard error if that is a terminal, else log lines.
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

/// Logs a line when a task starts, at about every tenth of it, at most once a second, and when it ends. A task that takes
/// less than a second has only the first line.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogProgress;

/// Number of bytes between two lines of a task whose total is unknown.
const LOG_EVERY: u64 = 64 << 20;

/// Least time between two lines of a task.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

struct LogTask {
    label: String,
    total: Option<u64>,
    last: Mutex<LastLine>,
}

/// The last line of a task.
struct LastLine {
    /// Tenths, or multiples of [`LOG_EVERY`].
    step: u64,
    at: Instant,
}

impl Progress for LogProgress {
    fn begin(&self, label: &str, total: Option<u64>) -> Box<dyn ProgressTask> {
        match total {
            Some(total) => tracing::info!("{label}: {}", human_bytes(total)),
            None => tracing::info!("{label}"),
        }
        Box::new(LogTask::new(label, total))
    }

    fn message(&self, text: &str) {
        tracing::info!("{text}");
    }
}

impl LogTask {
    fn new(label: &str, total: Option<u64>) -> Self {
        Self { label: label.to_owned(), total, last: Mutex::new(LastLine { step: 0, at: Instant::now() }) }
    }

    /// Whether the last line is old enough for another one.
    fn is_slow(&self, now: Instant) -> bool {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(last.at) >= LOG_INTERVAL
    }

    /// The line to log at `now`, if one is due.
    fn due(&self, done: u64, now: Instant) -> Option<String> {
        let step = match self.total {
            Some(0) => return None,
            Some(total) => u128::from(done) * 10 / u128::from(total),
            None => u128::from(done / LOG_EVERY),
        };
        let step = u64::try_from(step).unwrap_or(u64::MAX);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if step <= last.step || now.saturating_duration_since(last.at) < LOG_INTERVAL {
            return None;
        }
        *last = LastLine { step, at: now };
        Some(match self.total {
            Some(total) => format!("{}: {} %, {} of {}", self.label, step * 10, human_bytes(done), human_bytes(total)),
            None => format!("{}: {}", self.label, human_bytes(done)),
        })
    }
}

impl ProgressTask for LogTask {
    fn advance_to(&self, done: u64) {
        if let Some(line) = self.due(done, Instant::now()) {
            tracing::info!("{line}");
        }
    }

    fn finish(self: Box<Self>) {
        if self.is_slow(Instant::now()) {
            tracing::info!("{}: done", self.label);
        }
    }
}

/// A byte count for people, in binary units: `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of a task that does `done` at each of these seconds.
    fn lines(task: &LogTask, steps: &[(f64, u64)]) -> Vec<String> {
        let begun = task.last.lock().unwrap().at;
        steps.iter().filter_map(|&(at, done)| task.due(done, begun + Duration::from_secs_f64(at))).collect()
    }

    #[test]
    fn a_slow_task_logs_each_tenth_once() {
        let task = LogTask::new("x", Some(10 << 20));
        let steps: Vec<_> = (0..=100).map(|step: u32| (f64::from(step), u64::from(step) * (10 << 20) / 100)).collect();
        let said = lines(&task, &steps);
        assert_eq!(said.len(), 10);
        assert_eq!(said[0], "x: 10 %, 1.00 MiB of 10.00 MiB");
        assert_eq!(said[9], "x: 100 %, 10.00 MiB of 10.00 MiB");
        assert!(lines(&task, &[(200.0, 5 << 20)]).is_empty(), "a restart repeats no line");
    }

    #[test]
    fn lines_are_at_least_a_second_apart() {
        let quick = LogTask::new("x", Some(100));
        assert!(lines(&quick, &[(0.1, 10), (0.2, 50), (0.9, 100)]).is_empty());
        let task = LogTask::new("x", Some(100));
        let begun = quick.last.lock().unwrap().at;
        assert!(!quick.is_slow(begun + LOG_INTERVAL / 2), "its end is no line either");
        assert_eq!(
            lines(&task, &[(1.0, 20), (1.5, 40), (2.1, 60)]),
            ["x: 20 %, 20 B of 100 B", "x: 60 %, 60 B of 100 B"]
        );
    }

    #[test]
    fn an_unknown_or_empty_total_divides_by_nothing() {
        let unknown = LogTask::new("x", None);
        assert_eq!(lines(&unknown, &[(2.0, 1), (4.0, LOG_EVERY)]), ["x: 64.00 MiB"]);
        assert!(lines(&LogTask::new("x", Some(0)), &[(2.0, 0)]).is_empty());
    }

    #[test]
    fn bytes_have_binary_units() {
        assert_eq!([0, 1023, 1536, 3 << 30].map(human_bytes), ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]);
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
