//! Threads that advance constraints and fill the masks of a step beside the engine thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, available_parallelism};
use std::time::Instant;

use crate::Constraint;
use crate::mask_pace::MaskPace;
use crate::sequence::SequenceKey;

/// Maximum number of helper threads.
const MOST_HELPERS: usize = 7;

/// Least numbers of jobs that are worth the threads: masks take some ten microseconds each, tokens a few.
const LEAST_MASKS: usize = 2;
const LEAST_TOKENS: usize = 8;

/// Work for a constraint. It owns what it needs, so that any thread can do it.
pub(crate) struct MaskJob {
    pub(crate) key: SequenceKey,
    pub(crate) constraint: Box<dyn Constraint>,
    pub(crate) task: MaskTask,
}

/// What a job does.
#[derive(Debug, PartialEq)]
pub(crate) enum MaskTask {
    /// Fills a mask.
    Fill {
        /// Index of the mask in its step.
        row: usize,
        /// Words of the mask.
        mask: Vec<u32>,
        /// Whether the filled mask allows no token.
        unsatisfiable: bool,
    },
    /// Accepts a token that was drawn.
    Accept {
        token: u32,
        /// Whether the constraint allows it.
        accepted: bool,
    },
}

impl MaskJob {
    fn run(&mut self) {
        match &mut self.task {
            MaskTask::Fill { mask, unsatisfiable, .. } => {
                self.constraint.fill_mask(mask);
                *unsatisfiable = mask.iter().all(|&word| word == 0);
            }
            MaskTask::Accept { token, accepted } => *accepted = self.constraint.accept(*token),
        }
    }

    /// Returns the least number of such jobs that is worth the threads.
    fn least(&self) -> usize {
        if matches!(self.task, MaskTask::Fill { .. }) { LEAST_MASKS } else { LEAST_TOKENS }
    }
}

/// Does jobs on the caller's thread and on helper threads, which start with the first step that has several.
pub(crate) struct MaskFiller {
    /// Jobs of the step; empty between steps. Its memory is kept.
    pub(crate) jobs: Vec<MaskJob>,
    /// Times of the jobs, beside those of the device.
    pub(crate) pace: MaskPace,
    desk: Arc<Desk>,
    /// Number of helper threads to start.
    helpers: usize,
    threads: Vec<JoinHandle<()>>,
}

/// Where jobs lie.
#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    /// There are jobs, or no more will come.
    work: Condvar,
    /// A job is done that the caller waits for.
    done: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<MaskJob>,
    done: Vec<MaskJob>,
    /// Number of jobs in the hands of a thread.
    held: usize,
    panic: Option<Box<dyn Any + Send>>,
    closed: bool,
}

impl Desk {
    /// A job that panics is caught before the state is locked, so the state is sound whatever happens.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does jobs until none waits, and returns the state.
    fn work<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while let Some(mut job) = state.waiting.pop() {
            state.held += 1;
            drop(state);
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run()));
            state = self.lock();
            state.held -= 1;
            match outcome {
                Ok(()) => state.done.push(job),
                Err(panic) => state.panic = Some(panic),
            }
        }
        state
    }

    fn help(&self) {
        let mut state = self.lock();
        while !state.closed {
            state = self.work(state);
            if state.held == 0 {
                self.done.notify_one();
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl MaskFiller {
    /// Creates a filler with a helper for each further processor, up to a few.
    pub(crate) fn new() -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        Self::with_helpers((processors - 1).min(MOST_HELPERS))
    }

    fn with_helpers(helpers: usize) -> Self {
        Self { jobs: Vec::new(), pace: MaskPace::default(), desk: Arc::default(), helpers, threads: Vec::new() }
    }

    /// Does all jobs, which are of one kind and whose order may change. A panic of a constraint goes on in the caller.
    pub(crate) fn run(&mut self) {
        let begun = Instant::now();
        self.run_jobs();
        match self.jobs.first().map(|job| &job.task) {
            Some(MaskTask::Fill { .. }) => self.pace.filled(self.jobs.len(), begun.elapsed()),
            Some(MaskTask::Accept { .. }) => self.pace.accepted(self.jobs.len(), begun.elapsed()),
            None => {}
        }
    }

    fn run_jobs(&mut self) {
        let least = self.jobs.first().map_or(usize::MAX, MaskJob::least);
        if self.jobs.len() < least || self.helpers == 0 {
            self.jobs.iter_mut().for_each(MaskJob::run);
            return;
        }
        self.start();
        let mut state = self.desk.lock();
        state.waiting.append(&mut self.jobs);
        self.desk.work.notify_all();
        state = self.desk.work(state);
        while state.held > 0 {
            state = self.desk.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.jobs.append(&mut state.done);
        if let Some(panic) = state.panic.take() {
            drop(state);
            resume_unwind(panic);
        }
    }

    /// Starts the helper threads, unless they run. The caller does all jobs if there is no thread to be had.
    fn start(&mut self) {
        while self.threads.len() < self.helpers {
            let desk = self.desk.clone();
            let thread = std::thread::Builder::new().name(format!("octavo-masks-{}", self.threads.len()));
            match thread.spawn(move || desk.help()) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    tracing::warn!("no further thread fills masks: {error}");
                    self.helpers = self.threads.len();
                }
            }
        }
    }
}

impl Drop for MaskFiller {
    fn drop(&mut self) {
        self.desk.lock().closed = true;
        self.desk.work.notify_all();
        for thread in self.threads.drain(..) {
            // A helper catches the panics of constraints and has no others.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::{Duration, Instant};

    use super::*;

    /// Waits until as many masks are filled at a time, or some seconds; allows the token of its number.
    struct Together {
        number: u32,
        filling: Arc<AtomicUsize>,
        expected: usize,
    }

    impl Constraint for Together {
        fn fill_mask(&mut self, mask: &mut [u32]) {
            assert_ne!(self.number, 99, "a constraint that panics");
            self.filling.fetch_add(1, SeqCst);
            let begun = Instant::now();
            while self.filling.load(SeqCst) < self.expected && begun.elapsed() < Duration::from_secs(20) {
                std::thread::yield_now();
            }
            mask.fill(0);
            mask[0] = self.number;
        }

        fn accept(&mut self, token: u32) -> bool {
            self.fill_mask(&mut [0]);
            token == self.number
        }

        fn rollback(&mut self, _: usize) {}
    }

    fn add(filler: &mut MaskFiller, number: u32, filling: &Arc<AtomicUsize>, expected: usize) {
        let row = filler.jobs.len();
        let task = MaskTask::Fill { row, mask: vec![u32::MAX; 2], unsatisfiable: false };
        push(filler, number, filling, expected, task);
    }

    fn push(filler: &mut MaskFiller, number: u32, filling: &Arc<AtomicUsize>, expected: usize, task: MaskTask) {
        let constraint = Box::new(Together { number, filling: filling.clone(), expected });
        filler.jobs.push(MaskJob { key: SequenceKey::default(), constraint, task });
    }

    #[test]
    fn helpers_fill_masks_beside_the_caller() {
        let mut filler = MaskFiller::with_helpers(2);
        for _ in 0..3 {
            let filling = Arc::default();
            for number in 0..9 {
                add(&mut filler, number, &filling, 3);
            }
            let begun = Instant::now();
            filler.run();
            assert!(begun.elapsed() < Duration::from_secs(20), "three at a time");
            let done: Vec<MaskTask> = filler.jobs.drain(..).map(|job| job.task).collect();
            for row in 0..9 {
                let expected = MaskTask::Fill { row, mask: vec![row as u32, 0], unsatisfiable: row == 0 };
                assert!(done.contains(&expected), "{expected:?} of {done:?}");
            }
        }
    }

    #[test]
    fn helpers_accept_tokens_if_there_are_some() {
        for (count, expected) in [(7, 1), (8, 3), (20, 3)] {
            let mut filler = MaskFiller::with_helpers(2);
            let filling = Arc::default();
            for number in 0..count {
                let task = MaskTask::Accept { token: number % 5, accepted: false };
                push(&mut filler, number, &filling, expected, task);
            }
            filler.run();
            let accepted = |job: &&MaskJob| matches!(job.task, MaskTask::Accept { accepted: true, .. });
            assert_eq!((filler.jobs.iter().filter(accepted).count(), filler.jobs.len()), (5, count as usize));
            assert_eq!(filler.threads.len(), if expected == 1 { 0 } else { 2 });
        }
    }

    #[test]
    fn one_mask_needs_no_helper() {
        let mut filler = MaskFiller::with_helpers(2);
        add(&mut filler, 5, &Arc::default(), 1);
        filler.run();
        assert_eq!(filler.jobs[0].task, MaskTask::Fill { row: 0, mask: vec![5, 0], unsatisfiable: false });
        assert_eq!(filler.threads.len(), 0);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_helpers_go_on() {
        let mut filler = MaskFiller::with_helpers(1);
        for number in [1, 99, 2] {
            add(&mut filler, number, &Arc::default(), 1);
        }
        assert!(catch_unwind(AssertUnwindSafe(|| filler.run())).is_err());
        filler.jobs.clear();
        for number in [1, 2] {
            add(&mut filler, number, &Arc::default(), 1);
        }
        filler.run();
        assert_eq!(filler.jobs.len(), 2);
    }
}
