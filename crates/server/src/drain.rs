//! Graceful shutdown: the first signal drains, the second ends the server at once.

use std::sync::Arc;

use tokio::sync::watch;

/// The progress of the shutdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Serving.
    #[default]
    Ready,
    /// Not ready any more; new requests are still served until the lag is over.
    Draining,
    /// New requests are refused; running ones are finished.
    Closing,
    /// The timeout is over: requests that still run are being ended.
    Ending,
    /// Asked to stop at once.
    Now,
}

/// A handle that shuts a server down. Clones share the state.
#[derive(Clone, Debug)]
pub struct Shutdown {
    phase: Arc<watch::Sender<Phase>>,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

impl Shutdown {
    /// A handle without a signal.
    pub fn new() -> Self {
        Self { phase: Arc::new(watch::Sender::new(Phase::Ready)) }
    }

    /// Signals a shutdown while load balancers may still send requests (SIGTERM). The first call begins the graceful
    /// shutdown, in which new requests are served until the lag is over. The second call ends the server at once.
    pub fn signal(&self) {
        self.step(Phase::Draining);
    }

    /// Signals a shutdown by hand (SIGINT): as [`Shutdown::signal`], without the lag.
    pub fn interrupt(&self) {
        self.step(Phase::Closing);
    }

    /// Ends the lag of a shutdown that has begun: a SIGINT came with the SIGTERM that began it.
    pub fn skip_lag(&self) {
        self.advance(Phase::Closing);
    }

    fn step(&self, first: Phase) {
        self.phase.send_modify(|phase| {
            *phase = if *phase == Phase::Ready { first } else { Phase::Now };
        });
    }

    /// Whether the shutdown has begun: readiness is false.
    pub(crate) fn is_draining(&self) -> bool {
        *self.phase.borrow() >= Phase::Draining
    }

    /// Whether requests that still run are being ended.
    pub(crate) fn is_ending(&self) -> bool {
        *self.phase.borrow() >= Phase::Ending
    }

    /// Marks the end of the timeout.
    pub(crate) fn end(&self) {
        self.advance(Phase::Ending);
    }

    /// Waits for the first signal.
    pub async fn draining(&self) {
        self.reached(Phase::Draining).await;
    }

    /// Waits until new requests are to be refused.
    pub(crate) async fn closing(&self) {
        self.reached(Phase::Closing).await;
    }

    /// Passes on the signals of `other`; returns after the second.
    pub(crate) async fn follow(&self, other: &Self) {
        let mut phases = other.phase.subscribe();
        loop {
            let phase = *phases.borrow_and_update();
            if phase == Phase::Now {
                return;
            }
            self.advance(phase);
            // The sender lives in `other`, so the wait ends only by a change.
            let _ = phases.changed().await;
        }
    }

    fn advance(&self, to: Phase) {
        self.phase.send_if_modified(|phase| {
            let later = to > *phase;
            *phase = to.max(*phase);
            later
        });
    }

    async fn reached(&self, target: Phase) {
        // The sender lives in `self`, so the wait ends only by the phase.
        let _ = self.phase.subscribe().wait_for(|phase| *phase >= target).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_signal_drains_and_the_second_ends() {
        let shutdown = Shutdown::new();
        assert!(!shutdown.is_draining());
        let waiter = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { Shutdown::new().follow(&shutdown).await }
        });
        shutdown.signal();
        shutdown.draining().await;
        assert!(shutdown.is_draining() && !shutdown.is_ending());
        shutdown.end();
        assert!(shutdown.is_ending() && !waiter.is_finished());
        shutdown.signal();
        waiter.await.unwrap();
    }

    #[tokio::test]
    async fn an_interrupt_has_no_lag_and_counts_as_a_signal() {
        let (outer, inner) = (Shutdown::new(), Shutdown::new());
        let waiter = tokio::spawn({
            let (outer, inner) = (outer.clone(), inner.clone());
            async move { inner.follow(&outer).await }
        });
        outer.interrupt();
        inner.closing().await;
        assert!(inner.is_draining() && !inner.is_ending() && !waiter.is_finished());
        outer.interrupt();
        waiter.await.unwrap();
    }

    #[tokio::test]
    async fn a_lag_that_has_begun_can_be_skipped() {
        let (outer, inner) = (Shutdown::new(), Shutdown::new());
        let waiter = tokio::spawn({
            let (outer, inner) = (outer.clone(), inner.clone());
            async move { inner.follow(&outer).await }
        });
        outer.signal();
        inner.draining().await;
        outer.skip_lag();
        inner.closing().await;
        assert!(!inner.is_ending() && !waiter.is_finished());
        outer.signal();
        waiter.await.unwrap();
    }
}
