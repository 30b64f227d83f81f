//! The timer thread of the statistics line.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::StatsLine;

/// Keeps the timer thread running; dropping it stops the thread.
#[derive(Debug)]
pub struct UpkeepGuard {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl UpkeepGuard {
    pub(crate) fn spawn(mut stats: StatsLine, interval: Duration) -> Self {
        let (stop, stopped) = mpsc::channel::<()>();
        let run = move || {
            let mut last = Instant::now();
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                let now = Instant::now();
                if let Some(line) = stats.line(now - last) {
                    tracing::info!("{line}");
                }
                last = now;
            }
        };
        match thread::Builder::new().name("octavo-upkeep".into()).spawn(run) {
            Ok(thread) => Self { stop: Some(stop), thread: Some(thread) },
            Err(error) => {
                // The server works without its statistics line.
                tracing::warn!(%error, "no statistics line will be logged: the timer thread could not be started");
                Self { stop: None, thread: None }
            }
        }
    }
}

impl Drop for UpkeepGuard {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread itself reports a panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Telemetry, TelemetryConfig};

    #[test]
    fn dropping_the_guard_ends_the_thread_at_once() {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 1 });
        let guard = UpkeepGuard::spawn(telemetry.stats_line(false), Duration::from_secs(3600));
        drop(guard);
    }
}
