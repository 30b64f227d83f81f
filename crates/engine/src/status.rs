//! Status of a running engine, kept in atomics so that reading it takes no lock.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// State of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// The engine accepts requests.
    Running,
    /// The executor failed for good, or the engine thread died.
    Failed,
    /// The engine was asked to stop.
    Stopped,
}

/// Snapshot of the engine. The numbers are read one after the other and may be a step apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineStatus {
    /// State of the engine.
    pub state: EngineState,
    /// Number of running sequences.
    pub running: usize,
    /// Number of waiting requests, including preempted ones.
    pub waiting: usize,
    /// Number of KV blocks in use, over all groups.
    pub blocks_used: usize,
    /// Number of KV blocks, over all groups, without null blocks.
    pub blocks_total: usize,
    /// Time since the engine last made progress; zero when it is idle.
    pub last_step_age: Duration,
    /// Time without progress after which the engine counts as stuck:
    /// [`EngineConfig::stuck_after`](crate::EngineConfig::stuck_after), or more if the steps in flight are expected to
    /// take long.
    pub stuck_after: Duration,
}

impl EngineStatus {
    /// Returns whether there is work that has made no progress for [`stuck_after`](Self::stuck_after).
    pub fn stuck(&self) -> bool {
        self.last_step_age >= self.stuck_after
    }
}

/// Value of `progress` for an idle engine.
const IDLE: u64 = u64::MAX;

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).map_or(IDLE - 1, |millis| millis.min(IDLE - 1))
}

/// Status cells that the engine thread writes.
pub(crate) struct StatusCells {
    started: Instant,
    state: AtomicU8,
    running: AtomicUsize,
    preempted: AtomicUsize,
    blocks_used: AtomicUsize,
    blocks_total: usize,
    /// Least value of `patience`, in milliseconds.
    stuck_after: u64,
    /// Milliseconds without progress after which the engine counts as stuck.
    patience: AtomicU64,
    /// Milliseconds from `started` to the last progress, or [`IDLE`].
    progress: AtomicU64,
}

impl StatusCells {
    pub(crate) fn new(blocks_total: usize, stuck_after: Duration) -> Self {
        let stuck_after = millis(stuck_after);
        Self {
            started: Instant::now(),
            state: AtomicU8::new(EngineState::Running as u8),
            running: AtomicUsize::new(0),
            preempted: AtomicUsize::new(0),
            blocks_used: AtomicUsize::new(0),
            blocks_total,
            stuck_after,
            patience: AtomicU64::new(stuck_after),
            progress: AtomicU64::new(IDLE),
        }
    }

    /// Sets the numbers of running sequences, preempted ones in the queue and blocks in use.
    pub(crate) fn set_load(&self, running: usize, preempted: usize, blocks_used: usize) {
        self.running.store(running, Relaxed);
        self.preempted.store(preempted, Relaxed);
        self.blocks_used.store(blocks_used, Relaxed);
    }

    pub(crate) fn set_state(&self, state: EngineState) {
        self.state.store(state as u8, Relaxed);
    }

    /// Records that the engine made progress.
    pub(crate) fn progress(&self) {
        self.progress.store(millis(self.started.elapsed()), Relaxed);
    }

    /// Sets the time without progress after which the engine counts as stuck, if it is more than the configured one.
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.patience.store(self.stuck_after.max(millis(patience)), Relaxed);
    }

    /// Records that the engine is idle.
    pub(crate) fn idle(&self) {
        self.progress.store(IDLE, Relaxed);
    }

    /// Returns the status. `never_admitted` requests wait in the inbox and the queue in addition to the preempted ones.
    pub(crate) fn read(&self, never_admitted: usize) -> EngineStatus {
        let state = match self.state.load(Relaxed) {
            s if s == EngineState::Running as u8 => EngineState::Running,
            s if s == EngineState::Stopped as u8 => EngineState::Stopped,
            _ => EngineState::Failed,
        };
        let last_step_age = match self.progress.load(Relaxed) {
            IDLE => Duration::ZERO,
            millis => self.started.elapsed().saturating_sub(Duration::from_millis(millis)),
        };
        EngineStatus {
            state,
            running: self.running.load(Relaxed),
            waiting: never_admitted + self.preempted.load(Relaxed),
            blocks_used: self.blocks_used.load(Relaxed),
            blocks_total: self.blocks_total,
            last_step_age,
            stuck_after: Duration::from_millis(self.patience.load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_engine_is_not_stuck() {
        let cells = StatusCells::new(10, Duration::from_secs(30));
        assert_eq!(cells.read(0).last_step_age, Duration::ZERO);
        cells.progress();
        let mut status = cells.read(3);
        assert_eq!((status.state, status.waiting), (EngineState::Running, 3));
        assert!(!status.stuck());
        status.last_step_age = Duration::from_millis(29_999);
        assert!(!status.stuck());
        status.last_step_age = Duration::from_secs(30);
        assert!(status.stuck());
        cells.set_patience(Duration::from_secs(7));
        assert_eq!(cells.read(0).stuck_after, Duration::from_secs(30), "never less than configured");
        cells.set_patience(Duration::from_secs(70));
        assert_eq!(cells.read(0).stuck_after, Duration::from_secs(70));
        cells.idle();
        assert_eq!(cells.read(0).last_step_age, Duration::ZERO);
    }
}
