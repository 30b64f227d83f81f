//! Runs parsing, template rendering, tokenization, the compilation of grammars and the writing of large answers outside
//! the threads that serve sockets.
//!
//! Each kind of work has a lane with a limited number of places. Work that can be interrupted calls [`take_turns`] every
//! few milliseconds. It then goes to the end of the lane's queue, so that requests share a lane evenly however much work
//! each has. If its client has gone, it ends.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Size in bytes above which a body or an answer uses the lane for large ones.
pub(crate) const LARGE_BODY: usize = 64 << 10;

/// Maximum number of requests of a lane that take turns. Each occupies a thread of the blocking pool, which has 512.
const MAX_STARTED: usize = 64;

/// Maximum number of requests that wait for other processes. More would keep their lanes from starting others.
const MAX_ELSEWHERE: usize = 8;

/// Time that a request works before it lets others work. Most requests need less.
const SLICE: Duration = Duration::from_millis(5);

/// The kind of a request's work, which decides its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Parsing, rendering and tokenizing a body of this many bytes.
    Body(usize),
    /// Compiling a grammar.
    Grammar,
    /// Writing a large answer.
    Answer,
}

/// The lanes onto the blocking pool: for small bodies, for large bodies and answers, and for grammars. No kind delays another.
#[derive(Clone)]
pub(crate) struct Workers {
    small: Lane,
    large: Lane,
    grammars: Lane,
    elsewhere: Lane,
}

#[derive(Clone)]
struct Lane {
    /// The requests whose work has begun.
    started: Arc<Semaphore>,
    /// The requests that work at this moment. Waiters are served in their order.
    places: Arc<Semaphore>,
    slice: Duration,
}

/// The present work of a thread.
struct Turn {
    lane: Lane,
    place: Option<OwnedSemaphorePermit>,
    since: Instant,
    cancelled: Arc<AtomicBool>,
    runtime: Handle,
}

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

impl Workers {
    /// As many places as cores for small bodies, and half as many for each of the others.
    pub(crate) fn new() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        let half = cores.div_ceil(2);
        let lane = |places| Lane::new(places, SLICE);
        Self {
            small: lane(cores),
            large: lane(half),
            grammars: lane(half),
            elsewhere: Lane::with_limit(MAX_ELSEWHERE, half, SLICE),
        }
    }

    /// Waits for work of another process, in a lane of its own; the caller's place in its lane is free meanwhile.
    ///
    /// # Errors
    /// Too many requests wait already, or the client has gone.
    pub(crate) fn elsewhere<T>(&self, work: impl FnOnce() -> T) -> Result<T, ApiError> {
        let Ok(_waiting) = self.elsewhere.started.try_acquire() else {
            return Err(ApiError::busy("too many chat templates of requests are being rendered"));
        };
        TURN.with_borrow_mut(|turn| match turn {
            Some(turn) => turn.leave_for(&self.elsewhere, work),
            // Outside a lane.
            None => Ok(work()),
        })
    }

    fn lane(&self, work: Work) -> &Lane {
        match work {
            Work::Body(bytes) if bytes > LARGE_BODY => &self.large,
            Work::Body(_) => &self.small,
            Work::Answer => &self.large,
            Work::Grammar => &self.grammars,
        }
    }

    /// Runs work of the given kind. If the caller is dropped while it waits, it never runs; later, it ends where it next
    /// takes turns.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        kind: Work,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let lane = self.lane(kind).clone();
        let Ok(started) = Arc::clone(&lane.started).acquire_owned().await else { return Err(ApiError::internal()) };
        let Ok(place) = Arc::clone(&lane.places).acquire_owned().await else { return Err(ApiError::internal()) };
        let cancelled = Arc::new(AtomicBool::new(false));
        let _cancel = CancelOnDrop(Arc::clone(&cancelled));
        let turn = Turn { lane, place: Some(place), since: Instant::now(), cancelled, runtime: Handle::current() };
        // Its log lines belong to the same request.
        let span = tracing::Span::current();
        let task = tokio::task::spawn_blocking(move || {
            let _started = started;
            let _turn = turn.begin();
            span.in_scope(work)
        });
        task.await.unwrap_or_else(|error| {
            tracing::error!(%error, "a request could not be prepared");
            Err(ApiError::internal())
        })
    }
}

impl Lane {
    fn new(places: usize, slice: Duration) -> Self {
        Self::with_limit(MAX_STARTED, places, slice)
    }

    fn with_limit(started: usize, places: usize, slice: Duration) -> Self {
        Self { started: Arc::new(Semaphore::new(started.max(places))), places: Arc::new(Semaphore::new(places)), slice }
    }
}

/// Lets the other requests of the lane work before the caller goes on.
///
/// # Errors
/// The client has gone, so nobody sees the error.
pub(crate) fn take_turns() -> Result<(), ApiError> {
    TURN.with_borrow_mut(|turn| match turn {
        Some(turn) => turn.pass(),
        // Outside a lane.
        None => Ok(()),
    })
}

impl Turn {
    /// Makes it the turn of this thread, until the result is dropped.
    fn begin(self) -> EndTurn {
        TURN.set(Some(self));
        EndTurn
    }

    fn pass(&mut self) -> Result<(), ApiError> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(ApiError::internal());
        }
        // A free place means that nobody waits.
        if self.since.elapsed() < self.lane.slice || self.lane.places.available_permits() > 0 {
            return Ok(());
        }
        self.place = None;
        self.take_place()
    }

    /// Waits for a place in the lane.
    fn take_place(&mut self) -> Result<(), ApiError> {
        self.place = Some(self.wait(&self.lane)?);
        self.since = Instant::now();
        Ok(())
    }

    /// Does `work` in another lane.
    fn leave_for<T>(&mut self, lane: &Lane, work: impl FnOnce() -> T) -> Result<T, ApiError> {
        self.place = None;
        let place = self.wait(lane)?;
        let result = work();
        drop(place);
        self.take_place()?;
        Ok(result)
    }

    /// Waits for a place in a lane. An error if the client has gone.
    fn wait(&self, lane: &Lane) -> Result<OwnedSemaphorePermit, ApiError> {
        let place = self.runtime.block_on(Arc::clone(&lane.places).acquire_owned());
        let place = place.ok().filter(|_| !self.cancelled.load(Ordering::Relaxed));
        place.ok_or_else(ApiError::internal)
    }
}

struct EndTurn;

impl Drop for EndTurn {
    fn drop(&mut self) {
        TURN.take();
    }
}

struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use octavo_text::{ChatTemplate, SpecialTokens, TemplateInput};

    use super::*;

    const LARGE: Work = Work::Body(LARGE_BODY + 1);

    fn one_place() -> Workers {
        let lane = || Lane::new(1, Duration::ZERO);
        Workers { small: lane(), large: lane(), grammars: lane(), elsewhere: lane() }
    }

    /// Work that waits until its sender is dropped.
    fn blocked() -> (Sender<()>, Arc<Mutex<Receiver<()>>>) {
        let (release, blocked) = channel();
        (release, Arc::new(Mutex::new(blocked)))
    }

    #[tokio::test]
    async fn large_bodies_delay_neither_small_ones_nor_grammars() {
        let (workers, (release, blocked)) = (Workers::new(), blocked());
        let large: Vec<_> = (0..64)
            .map(|_| {
                let (workers, blocked) = (workers.clone(), Arc::clone(&blocked));
                tokio::spawn(
                    async move { workers.run(LARGE, move || Ok(blocked.lock().unwrap().recv().is_err())).await },
                )
            })
            .collect();
        assert_eq!(workers.run(Work::Body(LARGE_BODY), || Ok(7)).await, Ok(7));
        assert_eq!(workers.run(Work::Grammar, || Ok(8)).await, Ok(8));
        drop(release);
        for task in large {
            assert_eq!(task.await.unwrap(), Ok(true));
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_gives_its_lane_back() {
        let workers = Workers::new();
        for _ in 0..100 {
            let result: Result<(), _> = workers.run(Work::Body(0), || panic!("on purpose")).await;
            assert_eq!(result.unwrap_err().status(), 500);
        }
        assert_eq!(workers.run(Work::Body(0), take_turns).await, Ok(()), "nobody else's turn is left");
    }

    #[tokio::test]
    async fn requests_of_a_lane_work_in_turns() {
        let (workers, (release, blocked)) = (one_place(), blocked());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = {
            let (workers, order) = (workers.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                let work = move || {
                    let _ = blocked.lock().unwrap().recv();
                    for _ in 0..100 {
                        order.lock().unwrap().push("giant");
                        take_turns()?;
                    }
                    Ok(())
                };
                workers.run(LARGE, work).await
            })
        };
        while workers.large.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let others: Vec<_> = (0..3)
            .map(|_| {
                let (workers, order) = (workers.clone(), Arc::clone(&order));
                tokio::spawn(async move {
                    workers
                        .run(LARGE, move || {
                            order.lock().unwrap().push("other");
                            Ok(())
                        })
                        .await
                })
            })
            .collect();
        // They wait in line once they have all started.
        while workers.large.started.available_permits() > MAX_STARTED - 4 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        drop(release);
        for task in others.into_iter().chain([first]) {
            assert_eq!(task.await.unwrap(), Ok(()));
        }
        let order = order.lock().unwrap();
        let last = order.iter().rposition(|who| *who == "other").unwrap();
        assert_eq!((order.len(), last), (103, 3), "all of them before the second piece: {order:?}");
    }

    /// The template calls for a turn at every message, so a small chat waits for one of them.
    #[tokio::test]
    async fn a_giant_conversation_delays_others_by_one_message() {
        let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let template = Arc::new(ChatTemplate::new(source, &SpecialTokens::default()).unwrap());
        let (workers, (release, blocked)) = (one_place(), blocked());
        let order = Arc::new(Mutex::new(Vec::new()));
        let render = |messages: usize, wait: Option<Arc<Mutex<Receiver<()>>>>| {
            let (workers, order, template) = (workers.clone(), Arc::clone(&order), Arc::clone(&template));
            tokio::spawn(async move {
                let work = move || -> Result<(), ApiError> {
                    if let Some(wait) = wait {
                        assert!(wait.lock().unwrap().recv().is_err());
                    }
                    let messages = vec![serde_json::json!({"role": "user", "content": "x"}); messages];
                    let kwargs = serde_json::Map::new();
                    let input = TemplateInput {
                        messages: &messages,
                        tools: None,
                        documents: None,
                        add_generation_prompt: true,
                        continue_final_message: false,
                        kwargs: &kwargs,
                    };
                    let text = template.render_in_turns(&input, take_turns)?;
                    order.lock().unwrap().push(text.len());
                    Ok(())
                };
                workers.run(LARGE, work).await
            })
        };
        let giant = render(5000, Some(blocked));
        while workers.large.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let small = render(1, None);
        while workers.large.started.available_permits() > MAX_STARTED - 2 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        drop(release);
        for task in [small, giant] {
            assert_eq!(task.await.unwrap(), Ok(()));
        }
        assert_eq!(*order.lock().unwrap(), [1, 5000]);
    }

    #[tokio::test]
    async fn the_work_of_a_client_that_has_gone_ends() {
        let workers = one_place();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let endless = {
            let workers = workers.clone();
            tokio::spawn(async move {
                let work = move || -> Result<(), ApiError> {
                    let _ = begun.send(());
                    loop {
                        take_turns()?;
                        std::thread::yield_now();
                    }
                };
                workers.run(LARGE, work).await
            })
        };
        has_begun.await.unwrap();
        endless.abort();
        // It gets the lane's only place, and the endless work does not take it again.
        assert_eq!(workers.run(LARGE, || Ok(1)).await, Ok(1));
        let ended = workers.large.started.acquire_many(MAX_STARTED as u32).await;
        assert!(ended.is_ok(), "all have ended");
    }
}
