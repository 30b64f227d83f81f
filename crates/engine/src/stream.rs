//! The way back: one mailbox a request, written by the engine thread and read by whoever holds the stream.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::inbox::{End, Inbox, RequestId};
use crate::{FinishReason, RequestEvent, TokenOutput};

/// Tokens that a mailbox holds before its memory grows: enough for a reader that keeps up.
const MAILBOX_TOKENS: usize = 4;

/// What the reader has not seen yet. Tokens of a slow reader pile up here, at most `max_tokens` of them.
#[derive(Default)]
struct Mailbox {
    tokens: Vec<TokenOutput>,
    cached_tokens: Option<u32>,
    finish: Option<FinishReason>,
    waker: Option<Waker>,
}

/// Both ends of a mailbox.
type SharedMailbox = Arc<Mutex<Mailbox>>;

fn lock(mailbox: &SharedMailbox) -> MutexGuard<'_, Mailbox> {
    mailbox.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine's end of a mailbox. It ends the request when dropped, so that no way of dying leaves a reader waiting.
pub(crate) struct EventSender {
    mailbox: SharedMailbox,
    open: bool,
}

impl EventSender {
    /// Adds a token and says how many prompt tokens were cached; the latter goes out with the first event.
    ///
    /// The caller wakes the reader when it has the time.
    pub(crate) fn send(&mut self, token: TokenOutput, cached_tokens: Option<u32>) -> Option<Waker> {
        debug_assert!(self.open, "a token after the end of its request");
        let mut mailbox = lock(&self.mailbox);
        mailbox.tokens.push(token);
        mailbox.cached_tokens = cached_tokens.or(mailbox.cached_tokens);
        mailbox.waker.take()
    }

    /// Ends the request, with its last token if that is what ended it: both come out in one event.
    pub(crate) fn finish(
        mut self,
        token: Option<TokenOutput>,
        cached_tokens: Option<u32>,
        reason: FinishReason,
    ) -> Option<Waker> {
        self.open = false;
        let mut mailbox = lock(&self.mailbox);
        mailbox.tokens.extend(token);
        mailbox.cached_tokens = cached_tokens.or(mailbox.cached_tokens);
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

/// The tokens of one request. Dropping it ends the request as abort.
///
/// It belongs to no async runtime: any executor can poll it.
pub struct RequestStream {
    id: RequestId,
    mailbox: SharedMailbox,
    inbox: Arc<Inbox>,
    /// Memory that the next event swaps for the mailbox's tokens, so that nothing is allocated under the lock.
    spare: Vec<TokenOutput>,
    /// The final event is out, or the request was finished from this side.
    done: bool,
}

impl RequestStream {
    /// The next event; `None` after the final one. Cancel-safe: an event is lost only with the stream.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// What [`RequestStream::next`] polls.
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
        let (cached_tokens, finish) = (mailbox.cached_tokens.take(), mailbox.finish.take());
        drop(mailbox);
        self.done = finish.is_some();
        Poll::Ready(Some(RequestEvent { cached_tokens, tokens: std::mem::take(&mut self.spare), finish }))
    }

    /// Ends the request as stop: its text contains a stop string. Tokens drawn meanwhile are dropped.
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

/// Both ends of a new request's mailbox.
pub(crate) fn mailbox(id: RequestId, inbox: Arc<Inbox>) -> (EventSender, RequestStream) {
    let tokens = Vec::with_capacity(MAILBOX_TOKENS);
    let mailbox = Arc::new(Mutex::new(Mailbox { tokens, ..Mailbox::default() }));
    let sender = EventSender { mailbox: mailbox.clone(), open: true };
    (sender, RequestStream { id, mailbox, inbox, spare: Vec::new(), done: false })
}
