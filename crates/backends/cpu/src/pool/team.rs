//! The team of threads and its regions.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;

use super::denormals::flushing_denormals;
use super::pinning::{self, Place};
use super::rendezvous::{Generation, Rendezvous, lock};
use super::sync::{Arc, AtomicPtr, AtomicUsize, Builder, JoinHandle, Mutex, Ordering};

/// Closure of a region, with any lifetime.
type Region<'a> = &'a (dyn Fn(Worker<'_>) + Sync);

/// The number of pieces taken from a thread's part of the work, in the stages between two barriers.
///
/// There are two numbers, for stages in turn. During a stage, nobody takes from the other number: the stage before has
/// ended, and the next begins only once this thread has arrived. So the thread can set it to zero, and no thread has to
/// do this for all.
// Processors fetch lines of 64 bytes in pairs.
#[repr(align(128))]
struct Taken([AtomicUsize; 2]);

impl Taken {
    fn new() -> Self {
        Self([AtomicUsize::new(0), AtomicUsize::new(0)])
    }

    /// Takes a piece, if more than `spared` of `count` are left.
    fn take(&self, turn: usize, count: usize, spared: usize) -> Option<usize> {
        let taken = &self.0[turn];
        // A load leaves the line with all its readers, which an addition would take from them for nothing.
        if taken.load(Ordering::Relaxed) + spared >= count {
            return None;
        }
        // Others may have taken pieces since then. This one must be done all the same, because nobody can return it.
        Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|&piece| piece < count)
    }

    fn clear(&self, turn: usize) {
        self.0[turn].store(0, Ordering::Relaxed);
    }
}

/// When a thread takes pieces from another.
#[derive(Clone, Copy)]
pub(crate) enum Help {
    /// Whenever it has none of its own.
    Always,
    /// Only while the other has more than an eighth of its pieces left, so as to be of use to one that the system has interrupted.
    ///
    /// This is for stages of many rows whose pieces are in the order of rows: each thread reads what it wrote a stage before. If
    /// another takes a piece, the rows of that piece move to its cache, and back in the next stage. That takes about as long as the
    /// piece if the two share no cache.
    Late,
}

impl Help {
    /// Returns how many of its `count` pieces a thread is left with.
    fn spares(self, count: usize) -> usize {
        match self {
            Self::Always => 0,
            Self::Late => count.div_ceil(8),
        }
    }
}

struct State {
    threads: usize,
    /// The threads of each NUMA node.
    nodes: Vec<Range<usize>>,
    /// Barrier inside a region.
    barrier: Rendezvous,
    /// Generation that advances when a region begins.
    begun: Generation,
    /// The region, which `Pool::run` keeps alive until all threads have left it; null ends the threads.
    region: AtomicPtr<Region<'static>>,
    /// What has been taken of each thread's part of the work.
    taken: Box<[Taken]>,
    /// Payload of a thread's panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A team of threads, including the caller's.
pub(crate) struct Pool {
    state: Arc<State>,
    others: Vec<JoinHandle<()>>,
    /// Processor of the caller's thread.
    first: Option<usize>,
}

/// One thread in a region.
#[derive(Clone, Copy)]
pub(crate) struct Worker<'a> {
    state: &'a State,
    pub(super) index: usize,
    /// Which of the numbers in [`Taken`] the current stage uses.
    turn: &'a Cell<usize>,
}

impl Pool {
    /// Creates a team of `threads`, at least one. If there are as many as processors that this process may use, each
    /// thread but the caller's is pinned to a processor. The caller's moves to its own when a region begins: the system may have woken
    /// it on that of another, and then both would share one for many milliseconds. It is not pinned between regions, because threads
    /// that it starts must be free to run elsewhere.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        Self::on(&pinning::places(threads.max(1)))
    }

    /// Creates a team with a thread for each place. The places must be in the order of their nodes, and at least one.
    pub(crate) fn on(places: &[Place]) -> std::io::Result<Self> {
        debug_assert!(!places.is_empty() && places.is_sorted_by_key(|place| place.node));
        let threads = places.len();
        let state = Arc::new(State {
            threads,
            nodes: nodes(places),
            barrier: Rendezvous::new(threads),
            begun: Generation::new(),
            region: AtomicPtr::new(null_mut()),
            taken: (0..threads).map(|_| Taken::new()).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { state, others: Vec::with_capacity(threads - 1), first: places[0].processor };
        for (index, &Place { processor, .. }) in places.iter().enumerate().skip(1) {
            let state = Arc::clone(&pool.state);
            let name = format!("octavo-cpu-{index}");
            pool.others.push(Builder::new().name(name).spawn(move || {
                if let Some(processor) = processor {
                    pinning::pin(processor);
                }
                state.serve(index);
            })?);
        }
        Ok(pool)
    }

    /// Returns the number of threads in the team.
    pub(crate) fn threads(&self) -> usize {
        self.state.threads
    }

    /// Returns the number of NUMA nodes on which the threads run, as far as that is known.
    pub(crate) fn nodes(&self) -> usize {
        self.state.nodes.len()
    }

    /// Runs `work` on every thread and returns when all have finished.
    ///
    /// # Panics
    /// Panics if `work` panics on a thread; the others then leave the region at their next barrier.
    pub(crate) fn run(&mut self, work: Region<'_>) {
        let _pinned = pinning::pin_for_a_time(self.first);
        let state = &*self.state;
        let region = &raw const work;
        state.region.store(region.cast_mut().cast(), Ordering::Relaxed);
        state.taken.iter().for_each(|taken| (0..2).for_each(|turn| taken.clear(turn)));
        state.begun.advance();
        state.take_part(0, work);
        state.barrier.leave(0);
        let panic = lock(&state.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Returns the threads of each node.
fn nodes(places: &[Place]) -> Vec<Range<usize>> {
    let mut start = 0;
    let node = |places: &[Place]| {
        let threads = start..start + places.len();
        start = threads.end;
        threads
    };
    places.chunk_by(|a, b| a.node == b.node).map(node).collect()
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.region.store(null_mut(), Ordering::Relaxed);
        self.state.begun.advance();
        for thread in self.others.drain(..) {
            // A thread catches the panics of its regions.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Serves regions on a thread other than the caller's.
    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.begun.wait_beyond(seen);
            let region = self.region.load(Ordering::Relaxed);
            if region.is_null() {
                return;
            }
            // SAFETY: `begun` made the pointer visible, and `Pool::run` returns only after this thread has left.
            self.take_part(index, unsafe { *region });
            self.barrier.leave(index);
        }
    }

    fn take_part(&self, index: usize, work: Region<'_>) {
        let turn = &Cell::new(0);
        let worker = Worker { state: self, index, turn };
        let outcome = catch_unwind(AssertUnwindSafe(|| flushing_denormals(|| work(worker))));
        if let Err(panic) = outcome {
            lock(&self.panic).get_or_insert(panic);
            self.barrier.abandon();
        }
    }
}

impl Worker<'_> {
    /// Returns the number of threads of the region.
    pub(crate) fn threads(&self) -> usize {
        self.state.threads
    }

    /// Waits until every thread has reached the barrier. Writes before the barrier are visible after it. If another
    /// thread has panicked, this one silently leaves the region too, because its input is missing.
    pub(crate) fn barrier(&self) {
        if !self.state.barrier.meet(self.index) {
            resume_unwind(Box::new("another thread has panicked"));
        }
        let ended = self.turn.get();
        self.turn.set(1 - ended);
        self.state.taken[self.index].clear(ended);
    }

    /// Runs the pieces `0..count` of work, each once, together with the other threads, each of which must call this
    /// with the same count. Only one such call may occur between two barriers.
    ///
    /// Each thread begins with adjacent pieces of its own, in order, so that it reads weights sequentially and finds in
    /// its cache the rows that it wrote a stage before. Then it helps the others.
    pub(crate) fn share(&self, count: usize, piece: impl FnMut(usize)) {
        self.share_with(Help::Always, count, piece);
    }

    /// Does the same, with this kind of help.
    pub(crate) fn share_with(&self, help: Help, count: usize, piece: impl FnMut(usize)) {
        self.share_among(0..self.state.threads, help, count, piece);
    }

    /// Returns the pieces with which this thread begins if all threads share `count`.
    pub(crate) fn own(&self, count: usize) -> Range<usize> {
        own(self.index, self.state.threads, count)
    }

    /// Does the same on each NUMA node by itself: its threads run all pieces.
    pub(crate) fn share_on_each_node(&self, count: usize, piece: impl FnMut(usize)) {
        self.share_among(self.state.nodes[self.node()].clone(), Help::Always, count, piece);
    }

    /// Returns the NUMA node of the thread.
    pub(crate) fn node(&self) -> usize {
        self.state.nodes.partition_point(|threads| threads.end <= self.index)
    }

    /// Runs the pieces together with some threads, of which this is one.
    fn share_among(&self, threads: Range<usize>, help: Help, count: usize, mut piece: impl FnMut(usize)) {
        for thread in (self.index..threads.end).chain(threads.start..self.index) {
            let pieces = own(thread - threads.start, threads.len(), count);
            if pieces.is_empty() {
                continue;
            }
            let spared = if thread == self.index { 0 } else { help.spares(pieces.len()) };
            while let Some(index) = self.state.taken[thread].take(self.turn.get(), pieces.len(), spared) {
                piece(pieces.start + index);
            }
        }
    }
}

/// Returns the part of `count` pieces that belongs to one of some threads.
fn own(index: usize, threads: usize, count: usize) -> Range<usize> {
    index * count / threads..(index + 1) * count / threads
}
