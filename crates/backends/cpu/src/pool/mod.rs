//! The threads of the backend.
//!
//! A step is one parallel region: every thread runs the same closure, and the threads meet at barriers. Between regions
//! the threads sleep. A region costs one wake-up, and a barrier a few hundred nanoseconds while the threads keep pace.

mod pinning;
mod rendezvous;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

pub(crate) use pinning::available_threads;
use rendezvous::{Generation, Rendezvous};

/// Closure of a region with its lifetime erased: `Pool::run` does not return before every thread has finished with it.
#[derive(Clone, Copy)]
struct Region(*const (dyn Fn(Worker<'_>) + Sync));

// SAFETY: the closure is `Sync`, and the pointer is dereferenced only while `Pool::run` holds the closure.
unsafe impl Send for Region {}

/// The number of pieces taken from a thread's part of the work, in the stages between two barriers.
///
/// There are two numbers, for stages in turn. During a stage, nobody takes from the other number: the stage before has
/// ended, and the next begins only once this thread has arrived. So the thread can set it to zero, and no thread has to
/// do this for all.
#[derive(Default)]
// Processors fetch lines of 64 bytes in pairs.
#[repr(align(128))]
struct Taken([AtomicUsize; 2]);

impl Taken {
    /// Takes a piece, if any of `count` is left.
    fn take(&self, turn: usize, count: usize) -> Option<usize> {
        let taken = &self.0[turn];
        // A load leaves the line with all its readers, which an addition would take from them for nothing.
        if taken.load(Ordering::Relaxed) >= count {
            return None;
        }
        Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|&piece| piece < count)
    }

    fn clear(&self, turn: usize) {
        self.0[turn].store(0, Ordering::Relaxed);
    }
}

struct State {
    threads: usize,
    /// Barrier inside a region.
    barrier: Rendezvous,
    /// Generation that advances when a region begins.
    begun: Generation,
    /// The region; `None` ends the threads.
    region: Mutex<Option<Region>>,
    /// What has been taken of each thread's part of the work.
    taken: Box<[Taken]>,
    /// Payload of a thread's panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A team of threads, including the caller's.
pub(crate) struct Pool {
    state: Arc<State>,
    others: Vec<JoinHandle<()>>,
}

/// One thread in a region.
#[derive(Clone, Copy)]
pub(crate) struct Worker<'a> {
    state: &'a State,
    index: usize,
    /// Which of the numbers in [`Taken`] the current stage uses.
    turn: &'a Cell<usize>,
}

impl Pool {
    /// Creates a team of `threads`, at least one. If there are as many as processors that this process may use, each
    /// thread but the caller's is pinned to a processor.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let state = Arc::new(State {
            threads,
            barrier: Rendezvous::new(threads),
            begun: Generation::default(),
            region: Mutex::new(None),
            taken: (0..threads).map(|_| Taken::default()).collect(),
            panic: Mutex::new(None),
        });
        let places = pinning::places(threads);
        let mut pool = Self { state, others: Vec::with_capacity(threads - 1) };
        for index in 1..threads {
            let state = Arc::clone(&pool.state);
            let place = places.as_ref().and_then(|places| places.get(index).copied());
            let name = format!("octavo-cpu-{index}");
            pool.others.push(std::thread::Builder::new().name(name).spawn(move || {
                if let Some(place) = place {
                    pinning::pin(place);
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

    /// Runs `work` on every thread and returns when all have finished.
    ///
    /// # Panics
    /// Panics if `work` panics on a thread; the others then leave the region at their next barrier.
    pub(crate) fn run(&mut self, work: &(dyn Fn(Worker<'_>) + Sync)) {
        let state = &*self.state;
        // SAFETY: only the lifetime changes; no thread uses the pointer once this call has passed the last barrier
        // below.
        let region: *const (dyn Fn(Worker<'_>) + Sync + 'static) = unsafe { std::mem::transmute(work as *const _) };
        *lock(&state.region) = Some(Region(region));
        state.taken.iter().for_each(|taken| (0..2).for_each(|turn| taken.clear(turn)));
        state.begun.advance();
        state.take_part(0, work);
        state.barrier.reset();
        if let Some(panic) = lock(&state.panic).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        *lock(&self.state.region) = None;
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
            let Some(Region(region)) = *lock(&self.region) else { return };
            // SAFETY: `Pool::run` keeps the closure alive until all threads have met at the end of `take_part`.
            self.take_part(index, unsafe { &*region });
        }
    }

    fn take_part(&self, index: usize, work: &(dyn Fn(Worker<'_>) + Sync)) {
        let turn = &Cell::new(0);
        let worker = Worker { state: self, index, turn };
        let outcome = catch_unwind(AssertUnwindSafe(|| flushing_denormals(|| work(worker))));
        if let Err(panic) = outcome {
            lock(&self.panic).get_or_insert(panic);
            self.barrier.abandon();
        }
        self.barrier.leave();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker<'_> {
    /// Returns the number of threads of the region.
    pub(crate) fn threads(&self) -> usize {
        self.state.threads
    }

    /// Waits until every thread has reached the barrier. Writes before the barrier are visible after it. If another
    /// thread has panicked, this one silently leaves the region too, because its input is missing.
    pub(crate) fn barrier(&self) {
        if !self.state.barrier.meet() {
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
    pub(crate) fn share(&self, count: usize, mut piece: impl FnMut(usize)) {
        let threads = self.state.threads;
        let start = |thread: usize| thread * count / threads;
        for thread in (self.index..threads).chain(0..self.index) {
            let (start, end) = (start(thread), start(thread + 1));
            if start == end {
                continue;
            }
            while let Some(index) = self.state.taken[thread].take(self.turn.get(), end - start) {
                piece(start + index);
            }
        }
    }
}

/// Runs `work` with denormal numbers treated as zero, as AMX always does. All instruction sets then compute the same
/// sums, and denormal numbers are slow.
#[cfg(target_arch = "x86_64")]
fn flushing_denormals(work: impl FnOnce()) {
    const FLUSH_TO_ZERO: u32 = 1 << 15;
    const DENORMALS_ARE_ZERO: u32 = 1 << 6;

    struct Restore(u32);

    impl Drop for Restore {
        fn drop(&mut self) {
            set_control(self.0);
        }
    }

    let control = control();
    let _restore = Restore(control);
    set_control(control | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    work();
}

#[cfg(not(target_arch = "x86_64"))]
fn flushing_denormals(work: impl FnOnce()) {
    work();
}

/// Returns the control and status register of SSE.
#[cfg(target_arch = "x86_64")]
fn control() -> u32 {
    let mut value = 0u32;
    // SAFETY: the instruction writes four bytes to `value`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn set_control(value: u32) {
    // SAFETY: the instruction reads four bytes of `value`, which this register held except for the two bits above.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags, readonly)) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_piece_is_done_once_and_seen_after_the_barrier() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(threads).unwrap();
            let done: Vec<AtomicU64> = (0..1000).map(|_| AtomicU64::new(0)).collect();
            for round in 1..=50 {
                pool.run(&|worker| {
                    for phase in 0..5 {
                        worker.share(done.len(), |i| {
                            done[i].fetch_add(1, Ordering::Relaxed);
                        });
                        worker.barrier();
                        let expected = (round - 1) * 5 + phase + 1;
                        assert!(done.iter().all(|x| x.load(Ordering::Relaxed) >= expected));
                        worker.barrier();
                    }
                });
                assert!(done.iter().all(|x| x.load(Ordering::Relaxed) == round * 5));
            }
        }
    }

    #[test]
    fn a_thread_does_its_own_pieces_first_and_in_order() {
        let mut pool = Pool::new(4).unwrap();
        for count in [0, 1, 3, 4, 7, 200] {
            let orders = Mutex::new(Vec::new());
            pool.run(&|worker| {
                for _ in 0..3 {
                    let mut order = Vec::new();
                    worker.share(count, |piece| order.push(piece));
                    lock(&orders).push((worker.index, order));
                    worker.barrier();
                }
            });
            let orders = orders.into_inner().unwrap();
            assert_eq!(orders.iter().map(|(_, order)| order.len()).sum::<usize>(), 3 * count);
            for (index, order) in orders {
                let own = index * count / 4..(index + 1) * count / 4;
                let ahead = order.iter().take_while(|piece| own.contains(piece)).count();
                assert!(order[..ahead].is_sorted());
                assert!(order[ahead..].iter().all(|piece| !own.contains(piece)));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        for culprit in [0, 2] {
            let (mut pool, turn) = (Pool::new(3).unwrap(), AtomicUsize::new(0));
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    worker.barrier();
                    let index = turn.fetch_add(1, Ordering::Relaxed);
                    assert!(index != culprit, "culprit");
                    worker.barrier();
                    worker.barrier();
                });
            }));
            assert_eq!(*outcome.unwrap_err().downcast::<&str>().unwrap(), "culprit");
            let count = AtomicUsize::new(0);
            pool.run(&|worker| {
                worker.barrier();
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn denormals_are_zero_inside_only() {
        let tiny = std::hint::black_box(f32::MIN_POSITIVE);
        let mut pool = Pool::new(2).unwrap();
        let inside = Mutex::new(Vec::new());
        pool.run(&|_| lock(&inside).push(std::hint::black_box(tiny) * 0.5));
        if cfg!(target_arch = "x86_64") {
            assert_eq!(*lock(&inside), [0.0, 0.0]);
        }
        assert!(tiny * 0.5 > 0.0);
    }
}
