//! The mailbox of a request: the engine thread writes it and the holder of the stream reads it.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::inbox::{End, Inbox, RequestId};
use crate::lock::lock;
use crate::{FinishReason, Logprobs, RequestEvent, StageTimes, TokenOutput};

/// Initial capacity of a mailbox in tokens: enough for a reader that keeps up.
const MAILBOX_TOKENS: usize = 4;

/// Data that accompanies the tokens of a request's first event.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FirstEvent {
    pub(crate) cached_tokens: u32,
    pub(crate) prompt_logprobs: Vec<Logprobs>,
}

/// Data that accompanies the end of a request, in the same event.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Ending {
    /// Whether the request gets its answer, or more of it, with this event.
    pub(crate) answered: bool,
    pub(crate) token: Option<TokenOutput>,
    pub(crate) times: Option<StageTimes>,
    pub(crate) embedding: Option<Vec<f32>>,
}

/// Events that the reader has not seen yet. Tokens of a slow reader accumulate here, at most `max_tokens` of them.
#[derive(Default)]
struct Mailbox {
    tokens: Vec<TokenOutput>,
    first: Option<FirstEvent>,
    times: Option<StageTimes>,
    embedding: Option<Vec<f32>>,
    finish: Option<FinishReason>,
    waker: Option<Waker>,
}

/// A mailbox shared by its two ends.
type SharedMailbox = Arc<Mutex<Mailbox>>;

/// The engine's end of a mailbox. Dropping it ends the request, so that no failure leaves a reader waiting.
pub(crate) struct EventSender {
    mailbox: SharedMailbox,
    open: bool,
}

impl EventSender {
    /// Adds a token with its stage times, and to the first token the data of the first event.
    ///
    /// The caller wakes the reader later.
    pub(crate) fn send(
        &mut self,
        token: TokenOutput,
        first: Option<FirstEvent>,
        times: Option<StageTimes>,
    ) -> Option<Waker> {
        debug_assert!(self.open, "a token after the end of its request");
        let mut mailbox = lock(&self.mailbox);
        mailbox.tokens.push(token);
        mailbox.times = times;
        if first.is_some() {
            mailbox.first = first;
        }
        mailbox.waker.take()
    }

    /// Ends the request. `first` is set if nothing was sent before.
    pub(crate) fn finish(mut self, ending: Ending, first: Option<FirstEvent>, reason: FinishReason) -> Option<Waker> {
        self.open = false;
        let mut mailbox = lock(&self.mailbox);
        mailbox.tokens.extend(ending.token);
        mailbox.times = ending.times;
        mailbox.embedding = ending.embedding;
        if first.is_some() {
            mailbox.first = first;
        }
        mailbox.finish = Some(reason);
        mailbox.waker.take()
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let waker = {
            let mut mailbox = lock(&self.mailbox);
            mailbox.finish = Some(FinishReason::Error("the engine has stopped".into()));
            mailbox.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The events of one request. Dropping it aborts the request.
///
/// It depends on no async runtime: any executor can poll it.
pub struct RequestStream {
    id: RequestId,
    mailbox: SharedMailbox,
    inbox: Arc<Inbox>,
    /// Buffer that the next event swaps for the mailbox's tokens, so that nothing is allocated under the lock.
    spare: Vec<TokenOutput>,
    /// Whether the final event was returned or the reader finished the request.
    done: bool,
}

impl RequestStream {
    /// Returns the next event; `None` after the final one. It is cancel-safe: an event is lost only with the stream.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next event, as [`RequestStream::next`] does.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<RequestEvent>> {
        if self.done {
            return Poll::Ready(None);
        }
        if self.spare.capacity() == 0 {
            self.spare.reserve_exact(MAILBOX_TOKENS);
        }
        let mut mailbox = lock(&self.mailbox);
        if mailbox.tokens.is_empty() && mailbox.finish.is_none() {
            match &mut mailbox.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        std::mem::swap(&mut mailbox.tokens, &mut self.spare);
        let (first, embedding, finish) = (mailbox.first.take(), mailbox.embedding.take(), mailbox.finish.take());
        let times = mailbox.times;
        drop(mailbox);
        self.done = finish.is_some();
        let cached_tokens = first.as_ref().map(|first| first.cached_tokens);
        let prompt_logprobs = first.map(|first| first.prompt_logprobs).unwrap_or_default();
        let tokens = std::mem::take(&mut self.spare);
        Poll::Ready(Some(RequestEvent { cached_tokens, prompt_logprobs, tokens, times, embedding, finish }))
    }

    /// Ends the request as stop because its text contains a stop string. Later tokens are dropped.
    pub fn finish(mut self) {
        self.end(End::Stop);
    }

    fn end(&mut self, how: End) {
        if self.done {
            return;
        }
        self.done = true;
        let ended_already = lock(&self.mailbox).finish.is_some();
        if !ended_already {
            self.inbox.end(self.id, how);
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        self.end(End::Abort);
    }
}

impl std::fmt::Debug for RequestStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestStream").field("id", &self.id).field("done", &self.done).finish_non_exhaustive()
    }
}

/// Creates both ends of a new request's mailbox.
pub(crate) fn mailbox(id: RequestId, inbox: Arc<Inbox>) -> (EventSender, RequestStream) {
    let tokens = Vec::with_capacity(MAILBOX_TOKENS);
    let mailbox = Arc::new(Mutex::new(Mailbox { tokens, ..Mailbox::default() }));
    let sender = EventSender { mailbox: mailbox.clone(), open: true };
    (sender, RequestStream { id, mailbox, inbox, spare: Vec::new(), done: false })
}
