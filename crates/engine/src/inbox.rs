//! The bounded queue of new requests, with notices of requests that their callers have ended.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::lock::lock;
use crate::sequence::Sequence;
use crate::stream::EventSender;
use crate::{EngineConfig, RequestStream, SubmitError, stream};

/// Number of a request in the order of submission.
pub(crate) type RequestId = u64;

/// Way in which a caller ends its own request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The caller dropped the stream.
    Abort,
    /// The caller found a stop string.
    Stop,
}

/// Messages since the last read. The engine keeps one and swaps it with the inbox's, so that both keep their
/// allocations.
#[derive(Default)]
pub(crate) struct Mail {
    /// New sequences, in the order of submission.
    pub(crate) arrivals: Vec<Sequence>,
    /// Requests ended by their callers. Some may have ended by themselves in the meantime.
    pub(crate) ends: Vec<(RequestId, End)>,
    /// Aborts every request with a smaller number.
    pub(crate) abort_before: Option<RequestId>,
    /// Aborts every request and stops the engine.
    pub(crate) stop: bool,
    /// Commands, in the order of their arrival.
    pub(crate) commands: Vec<Command>,
}

/// Receives the result of a command. It is dropped if the engine ends first.
pub(crate) type Reply = Box<dyn FnOnce(bool) + Send>;

/// A command to the engine, applied after all other messages.
pub(crate) enum Command {
    /// Plans no step while `true`. Steps in flight complete.
    Freeze(bool),
    /// Reports `true` once no step is in flight and no request is left, or the engine is frozen.
    WhenIdle(Reply),
    /// Forgets the prefix cache, and reports whether that was possible.
    ResetPrefixCache {
        /// Preempts the running requests, whose blocks are free then.
        preempt: bool,
        /// Receives the result.
        reply: Reply,
    },
}

impl Mail {
    fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
            && self.ends.is_empty()
            && self.abort_before.is_none()
            && !self.stop
            && self.commands.is_empty()
    }
}

#[derive(Default)]
struct State {
    mail: Mail,
    next_id: RequestId,
    closed: bool,
    /// Whether new requests are refused because the engine is paused.
    paused: bool,
}

/// State shared by all handles and streams of an engine.
pub(crate) struct Inbox {
    state: Mutex<State>,
    /// Signalled when a message arrives. The idle engine blocks on it.
    arrived: Condvar,
    /// Number of requests that were never admitted, here or in the waiting queue. It grows only under the lock, so the
    /// limits hold.
    queued_requests: AtomicUsize,
    /// Number of prompt tokens of these requests.
    queued_tokens: AtomicUsize,
    max_requests: usize,
    max_tokens: usize,
}

impl Inbox {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            state: Mutex::default(),
            arrived: Condvar::new(),
            queued_requests: AtomicUsize::new(0),
            queued_tokens: AtomicUsize::new(0),
            max_requests: config.max_queued_requests,
            max_tokens: config.max_queued_tokens,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns an error if a request with a prompt of this many tokens would be refused now.
    pub(crate) fn check(&self, prompt_tokens: usize) -> Result<(), SubmitError> {
        let waiting = self.queued_requests.load(Relaxed);
        if waiting >= self.max_requests {
            return Err(SubmitError::TooManyRequests { waiting, limit: self.max_requests });
        }
        let waiting = self.queued_tokens.load(Relaxed);
        if waiting > 0 && waiting.saturating_add(prompt_tokens) > self.max_tokens {
            return Err(SubmitError::TooManyTokens { waiting, limit: self.max_tokens });
        }
        Ok(())
    }

    /// Accepts a request. `make` builds its sequence around the engine's end of the mailbox.
    pub(crate) fn submit(
        self: &Arc<Self>,
        prompt_tokens: usize,
        make: impl FnOnce(RequestId, EventSender) -> Sequence,
    ) -> Result<RequestStream, SubmitError> {
        let mut state = self.lock();
        if state.closed {
            return Err(SubmitError::Stopped);
        }
        if state.paused {
            return Err(SubmitError::Paused);
        }
        self.check(prompt_tokens)?;
        self.queued_requests.fetch_add(1, Relaxed);
        self.queued_tokens.fetch_add(prompt_tokens, Relaxed);
        let id = state.next_id;
        state.next_id += 1;
        let (sender, stream) = stream::mailbox(id, self.clone());
        state.mail.arrivals.push(make(id, sender));
        drop(state);
        self.arrived.notify_one();
        Ok(stream)
    }

    /// Removes a request from the counts of waiting ones, because it was admitted for the first time or ended before.
    pub(crate) fn leave_queue(&self, prompt_tokens: usize) {
        self.queued_requests.fetch_sub(1, Relaxed);
        self.queued_tokens.fetch_sub(prompt_tokens, Relaxed);
    }

    /// Returns the number of requests that were never admitted.
    pub(crate) fn queued_requests(&self) -> usize {
        self.queued_requests.load(Relaxed)
    }

    /// Records that a caller ended its request.
    pub(crate) fn end(&self, id: RequestId, how: End) {
        self.post(|mail| mail.ends.push((id, how)));
    }

    /// Aborts every request submitted so far.
    pub(crate) fn abort_all(&self) {
        let mut state = self.lock();
        state.mail.abort_before = Some(state.next_id);
        drop(state);
        self.arrived.notify_one();
    }

    /// Refuses new requests, and aborts those submitted so far if `abort` is set. No request comes between the two.
    pub(crate) fn pause(&self, abort: bool) {
        let mut state = self.lock();
        state.paused = true;
        if abort {
            state.mail.abort_before = Some(state.next_id);
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// Accepts new requests again.
    pub(crate) fn resume(&self) {
        self.lock().paused = false;
    }

    /// Sends a command. A closed engine drops it.
    pub(crate) fn command(&self, command: Command) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.mail.commands.push(command);
        drop(state);
        self.arrived.notify_one();
    }

    /// Refuses all further requests and asks the engine to stop.
    pub(crate) fn stop(&self) {
        self.lock().closed = true;
        self.post(|mail| mail.stop = true);
    }

    fn post(&self, add: impl FnOnce(&mut Mail)) {
        add(&mut self.lock().mail);
        self.arrived.notify_one();
    }

    /// Moves all messages to `mail`, which must be empty.
    pub(crate) fn take(&self, mail: &mut Mail) {
        debug_assert!(mail.is_empty());
        std::mem::swap(&mut self.lock().mail, mail);
    }

    /// Blocks until there is a message.
    pub(crate) fn wait(&self) {
        let mut state = self.lock();
        while state.mail.is_empty() {
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Refuses all further requests. Queued requests end with an error because their senders are dropped.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let mail = std::mem::take(&mut state.mail);
        drop(state);
        for arrival in &mail.arrivals {
            self.leave_queue(arrival.prompt_len());
        }
    }
}
