//! The attributes of a request's span that describe its sequences.

use std::time::Instant;

use octavo_engine::StageTimes;
use octavo_telemetry::{SequenceTimes, TracedRequest, TracedSequence};

use crate::choices::Output;
use crate::error::ApiError;
use crate::trace::RequestTrace;

/// The sequences of a request with a recorded span; they are recorded when dropped.
pub(crate) struct TracedSequences {
    trace: RequestTrace,
    sequences: Vec<TracedSequence>,
    ended: Option<Instant>,
}

impl TracedSequences {
    /// Records the parameters of the request. `None` if the span is not recorded.
    pub(crate) fn new(trace: &RequestTrace, asked: impl FnOnce(&mut TracedRequest)) -> Option<Self> {
        if !trace.is_recorded() {
            return None;
        }
        trace.tell(asked);
        Some(Self { trace: trace.clone(), sequences: vec![], ended: None })
    }

    /// Records that the engine accepted the next sequence, which was submitted at `submitted`; the engine may have started
    /// to compute it since.
    pub(crate) fn submitted(&mut self, submitted: Instant) {
        self.sequences.push(TracedSequence { submitted, times: None, tokens: 0, cached_tokens: 0, finish: None });
    }

    /// Records an output of a sequence.
    pub(crate) fn output(&mut self, output: &Output) {
        let index = output.index as usize;
        if let Some(sequence) = self.sequences.get_mut(index) {
            sequence.tokens += output.tokens.len();
            sequence.cached_tokens += output.cached_tokens.unwrap_or(0) as usize;
        }
        self.timed(index, output.times);
        if let Some(finish) = &output.finish {
            self.finished(index, finish.reason());
        }
    }

    /// Records the timings of a sequence so far.
    pub(crate) fn timed(&mut self, index: usize, times: Option<StageTimes>) {
        if let Some((sequence, times)) = self.sequences.get_mut(index).zip(times) {
            let StageTimes { queue, prefill, decode } = times;
            sequence.times = Some(SequenceTimes { queue, prefill, decode });
        }
    }

    /// Records the end of a sequence.
    pub(crate) fn finished(&mut self, index: usize, reason: &'static str) {
        if let Some(sequence) = self.sequences.get_mut(index) {
            sequence.finish = Some(reason);
            self.ended = Some(Instant::now());
        }
    }

    /// Records that the request and its sequences end with an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.unfinished("error");
        self.trace.tell(|request| request.error = Some(error.status().as_u16()));
    }

    fn unfinished(&mut self, how: &'static str) {
        for sequence in &mut self.sequences {
            sequence.finish.get_or_insert(how);
        }
    }
}

impl Drop for TracedSequences {
    fn drop(&mut self) {
        // Sequences that are dropped before their end are aborted.
        self.unfinished("abort");
        let (sequences, ended) = (std::mem::take(&mut self.sequences), self.ended);
        self.trace.tell(|request| {
            request.sequences = sequences;
            request.ended = ended;
        });
    }
}
