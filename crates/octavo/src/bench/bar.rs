//! A progress bar for measurements.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Update interval.
const TICK: Duration = Duration::from_millis(200);

/// Width of the bar in characters.
const WIDTH: usize = 30;

/// Runs `work`, which counts its progress up to `total`, and shows a bar if standard error is a terminal.
pub(super) async fn watched<T>(what: &'static str, total: usize, work: impl AsyncFnOnce(Arc<AtomicUsize>) -> T) -> T {
    let done = Arc::new(AtomicUsize::new(0));
    let bar = stderr().is_terminal().then(|| tokio::spawn(show(what, Arc::clone(&done), total)));
    let result = work(done).await;
    if let Some(bar) = bar {
        bar.abort();
        // Clears the line. A failure means that the terminal is closed.
        let _ = write!(stderr(), "\r\x1b[K");
    }
    result
}

/// Shows the progress until the task is aborted.
async fn show(what: &str, done: Arc<AtomicUsize>, total: usize) {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(TICK).await;
        let line = line(what, done.load(Ordering::Relaxed), total, begun.elapsed());
        let _ = write!(stderr(), "\r{line}\x1b[K").and_then(|()| stderr().flush());
    }
}

fn line(what: &str, done: usize, total: usize, elapsed: Duration) -> String {
    let filled = WIDTH * done.min(total) / total.max(1);
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-3);
    format!("{what} [{:<WIDTH$}] {done} of {total}, {rate:.1} a second", "#".repeat(filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_tells_how_far_it_is() {
        let half = line("requests", 50, 100, Duration::from_secs(10));
        assert_eq!(half, "requests [###############               ] 50 of 100, 5.0 a second");
        assert!(line("x", 0, 0, Duration::ZERO).starts_with("x [ "));
    }
}
