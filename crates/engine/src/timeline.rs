//! Timestamps of a request. Preemption changes none of them: the first admission and the first token count.

use std::time::{Duration, Instant};

use octavo_telemetry::EngineMetrics;

use crate::StageTimes;

/// Timestamps of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeline {
    /// Time when the front end received the request.
    arrival: Instant,
    /// Time when it entered the inbox.
    queued: Instant,
    /// Time when it was first planned in a step.
    scheduled: Option<Instant>,
    /// Completion times of the first and the latest step that sampled a token for it, or of the step with its answer if
    /// that is no token.
    tokens: Option<(Instant, Instant)>,
}

/// Durations of a request's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stages {
    pub(crate) e2e: Duration,
    pub(crate) queue: Option<Duration>,
    pub(crate) prefill: Option<Duration>,
    pub(crate) decode: Option<Duration>,
}

impl Timeline {
    pub(crate) fn new(arrival: Instant, queued: Instant) -> Self {
        Self { arrival, queued, scheduled: None, tokens: None }
    }

    /// Returns the time when the front end received the request.
    pub(crate) fn arrival(&self) -> Instant {
        self.arrival
    }

    /// Records that the request was planned in a step. Returns `true` the first time.
    pub(crate) fn on_scheduled(&mut self, now: Instant) -> bool {
        let first = self.scheduled.is_none();
        self.scheduled.get_or_insert(now);
        first
    }

    /// Returns whether the request was planned in a step at least once.
    pub(crate) fn was_scheduled(&self) -> bool {
        self.scheduled.is_some()
    }

    /// Records the completion of a step that drew tokens or gave an answer that is no token: observes TTFT and the first
    /// token's other metrics, or the time since the step before, as vLLM does.
    pub(crate) fn on_answer(&mut self, now: Instant, prompt: u64, cached: u64, metrics: &EngineMetrics) {
        match &mut self.tokens {
            Some((_, last)) => {
                metrics.next_token(now.saturating_duration_since(*last));
                *last = now;
            }
            none => {
                *none = Some((now, now));
                metrics.first_token(now.saturating_duration_since(self.arrival), prompt, cached);
            }
        }
    }

    /// Returns the stage times up to the latest token; `None` before the first.
    pub(crate) fn times(&self) -> Option<StageTimes> {
        let ((first, latest), scheduled) = self.tokens.zip(self.scheduled)?;
        Some(StageTimes {
            queue: scheduled.saturating_duration_since(self.queued),
            prefill: first.saturating_duration_since(scheduled),
            decode: latest.saturating_duration_since(first),
        })
    }

    /// Returns the stages of a request that ends now.
    pub(crate) fn stages(&self, now: Instant) -> Stages {
        let times = self.times();
        Stages {
            e2e: now.saturating_duration_since(self.arrival),
            queue: self.scheduled.map(|scheduled| scheduled.saturating_duration_since(self.queued)),
            prefill: times.map(|times| times.prefill),
            decode: times.map(|times| times.decode),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_meet_at_the_first_admission_and_the_first_token() {
        let at = |millis| Duration::from_millis(millis);
        let zero = Instant::now();
        let mut timeline = Timeline::new(zero, zero + at(5));
        let none = Stages { e2e: at(7), queue: None, prefill: None, decode: None };
        assert_eq!(timeline.stages(zero + at(7)), none);

        assert!(timeline.on_scheduled(zero + at(10)));
        assert!(!timeline.on_scheduled(zero + at(50)), "preempted and planned again");
        let metrics = EngineMetrics::disabled();
        for millis in [30, 40, 60] {
            timeline.on_answer(zero + at(millis), 1, 0, &metrics);
        }
        let stages = timeline.stages(zero + at(61));
        assert_eq!(stages.e2e, at(61));
        assert_eq!((stages.queue, stages.prefill, stages.decode), (Some(at(5)), Some(at(20)), Some(at(30))));
    }
}
