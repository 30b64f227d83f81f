//! A progress bar for measurements.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// Update interval.
const TICK: Duration = Duration::from_millis(200);

/// Runs `work`, which counts its progress up to `total`, and shows a bar if standard error is a terminal.
pub(super) async fn watched<T>(what: &'static str, total: usize, work: impl AsyncFnOnce(Arc<AtomicUsize>) -> T) -> T {
    let done = Arc::new(AtomicUsize::new(0));
    let shown = tokio::spawn(show(bar(what, total), Arc::clone(&done)));
    let result = work(done).await;
    shown.abort();
    result
}

/// A bar that disappears when it is dropped.
fn bar(what: &'static str, total: usize) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg} [{bar:30}] {pos} of {len}, {per_sec}").expect("the template is valid");
    let bar = ProgressBar::new(total as u64).with_message(what).with_style(style.progress_chars("#> "));
    bar.with_finish(ProgressFinish::AndClear)
}

/// Shows the progress until the task is aborted.
async fn show(bar: ProgressBar, done: Arc<AtomicUsize>) {
    loop {
        tokio::time::sleep(TICK).await;
        bar.set_position(done.load(Ordering::Relaxed) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_work_is_done_with_and_without_a_terminal() {
        assert_eq!(bar("requests", 100).length(), Some(100), "the template is valid");
        let counted = watched("requests", 3, async |done| {
            done.fetch_add(3, Ordering::Relaxed);
            tokio::time::sleep(TICK * 2).await;
            done.load(Ordering::Relaxed)
        });
        assert_eq!(counted.await, 3);
    }
}
