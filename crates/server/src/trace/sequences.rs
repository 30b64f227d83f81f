//! What a request's span is told of its sequences.

use std::time::Instant;

use octavo_engine::StageTimes;
use octavo_telemetry::{SequenceTimes, TracedRequest, TracedSequence};

use crate::choices::Output;
use crate::error::ApiError;
use crate::trace::RequestTrace;

/// The sequences of a request whose span is recorded; told when dropped.
pub(crate) struct TracedSequences {
    trace: RequestTrace,
    sequences: Vec<TracedSequence>,
    ended: Option<Instant>,
}

impl TracedSequences {
    /// Tells what the request asks for. None if nobody wants to know.
    pub(crate) fn new(trace: &RequestTrace, asked: impl FnOnce(&mut TracedRequest)) -> Option<Self> {
        if !trace.is_recorded() {
            return None;
        }
        trace.tell(asked);
        Some(Self { trace: trace.clone(), sequences: vec![], ended: None })
    }

    /// The engine has taken the next sequence, which it was offered at `submitted`: a moment after that it may have
    /// computed for a while already.
    pub(crate) fn submitted(&mut self, submitted: Instant) {
        self.sequences.push(TracedSequence { submitted, times: None, tokens: 0, cached_tokens: 0, finish: None });
    }

    /// A sequence has an output.
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

    /// A sequence's stages took so long by now.
    pub(crate) fn timed(&mut self, index: usize, times: Option<StageTimes>) {
        if let Some((sequence, times)) = self.sequences.get_mut(index).zip(times) {
            let StageTimes { queue, prefill, decode } = times;
            sequence.times = Some(SequenceTimes { queue, prefill, decode });
        }
    }

    /// A sequence has ended.
    pub(crate) fn finished(&mut self, index: usize, reason: &'static str) {
        if let Some(sequence) = self.sequences.get_mut(index) {
            sequence.finish = Some(reason);
            self.ended = Some(Instant::now());
        }
    }

    /// The request ends with an error, and its sequences with it.
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
        // Whoever drops sequences that have not ended aborts them.
        self.unfinished("abort");
        let (sequences, ended) = (std::mem::take(&mut self.sequences), self.ended);
        self.trace.tell(|request| {
            request.sequences = sequences;
            request.ended = ended;
        });
    }
}
