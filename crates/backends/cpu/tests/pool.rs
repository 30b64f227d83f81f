//! A model of the protocol of the threads: the pool's own code runs with loom's types, which try every order of events
//! and every value that the memory model lets a thread read, within a bound of involuntary switches between threads.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../src/pool/rendezvous.rs"]
mod rendezvous;
#[path = "../src/pool/team.rs"]
mod team;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::cell::UnsafeCell;
use team::{Help, Pool, Worker};

/// The types of the model.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::{Builder, JoinHandle};

    /// Three threads need two levels.
    pub(crate) const GROUP: usize = 2;

    /// Asks once: a thread that asks again is one that was slow the first time.
    pub(crate) fn poll<T>(value: impl Fn() -> Option<T>) -> Option<T> {
        value()
    }
}

mod denormals {
    pub(crate) fn flushing_denormals(work: impl FnOnce()) {
        work();
    }
}

mod pinning {
    #[derive(Clone, Copy)]
    pub(crate) struct Place {
        pub(crate) node: usize,
        pub(crate) processor: Option<usize>,
    }

    /// The last thread is on a node of its own.
    pub(crate) fn places(threads: usize) -> Vec<Place> {
        (0..threads).map(|thread| Place { node: usize::from(thread + 1 == threads), processor: None }).collect()
    }

    pub(crate) fn pin(_: usize) {}

    pub(crate) fn pin_for_a_time(_: Option<usize>) -> impl Drop {
        Vec::<()>::new()
    }
}

/// Memory that the pieces of a stage write. The model fails on an access that another one may overlap.
struct Memory(Vec<UnsafeCell<usize>>);

// SAFETY: this is what the model checks.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(pieces: usize) -> Self {
        Self((0..pieces).map(|_| UnsafeCell::new(0)).collect())
    }

    fn increment(&self, piece: usize) {
        // SAFETY: the model checks that no other access overlaps.
        self.0[piece].with_mut(|value| unsafe { *value += 1 });
    }

    fn assert_all(&self, expected: usize) {
        for value in &self.0 {
            // SAFETY: as above.
            assert_eq!(value.with(|value| unsafe { *value }), expected);
        }
    }
}

/// Runs `work` with a team in all orders with at most `switches` involuntary switches.
fn check(threads: usize, switches: usize, work: impl Fn(&mut Pool) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    model.check(move || work(&mut Pool::new(threads).unwrap()));
}

fn increment_together(worker: Worker<'_>, memory: &Memory) {
    worker.share(memory.0.len(), |piece| memory.increment(piece));
}

/// Each thread writes, and all read it after the barrier.
fn meet(pool: &mut Pool) {
    let memory = Memory::new(pool.threads());
    pool.run(&|worker| {
        memory.increment(worker.index);
        worker.barrier();
        memory.assert_all(1);
    });
}

/// One thread panics before the barrier at which the others wait.
fn panic(pool: &mut Pool, culprit: usize) {
    let memory = Memory::new(pool.threads());
    let run = || {
        pool.run(&|worker| {
            memory.increment(worker.index);
            if worker.index == culprit {
                resume_unwind(Box::new("culprit"));
            }
            worker.barrier();
            unreachable!("a thread of {} has not arrived", worker.threads());
        });
    };
    let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(*payload.downcast::<&str>().unwrap(), "culprit");
    memory.assert_all(1);
}

/// The third stage takes pieces with the numbers of the first. The second has more pieces, so that a number left from the
/// first would not hide that it is cleared too late.
#[test]
fn two_threads_share_three_stages() {
    check(2, 2, |pool| {
        let (memory, more) = (Memory::new(2), Memory::new(4));
        pool.run(&|worker| {
            increment_together(worker, &memory);
            worker.barrier();
            increment_together(worker, &more);
            worker.barrier();
            increment_together(worker, &memory);
        });
        memory.assert_all(2);
        more.assert_all(1);
    });
}

/// Between the question whether enough pieces are left and the taking of one, the other thread takes pieces too.
#[test]
fn two_threads_help_each_other_late() {
    check(2, 3, |pool| {
        let memory = Memory::new(6);
        pool.run(&|worker| {
            assert_eq!(worker.own(6), 3 * worker.index..3 * worker.index + 3);
            worker.share_with(Help::Late, 6, |piece| memory.increment(piece));
        });
        memory.assert_all(1);
    });
}

#[test]
fn two_threads_share_two_regions() {
    check(2, 3, |pool| {
        for _ in 0..2 {
            let memory = Memory::new(2);
            pool.run(&|worker| increment_together(worker, &memory));
            memory.assert_all(1);
        }
    });
}

#[test]
fn three_threads_share_a_stage() {
    check(3, 1, |pool| {
        let memory = Memory::new(2);
        pool.run(&|worker| increment_together(worker, &memory));
        memory.assert_all(1);
    });
}

#[test]
fn two_nodes_do_all_pieces_each() {
    check(3, 1, |pool| {
        let memories = [Memory::new(2), Memory::new(2)];
        assert_eq!(pool.nodes(), memories.len());
        pool.run(&|worker| {
            worker.share_on_each_node(2, |piece| memories[worker.node()].increment(piece));
        });
        memories.iter().for_each(|memory| memory.assert_all(1));
    });
}

#[test]
fn three_threads_meet_on_two_levels() {
    check(3, 1, meet);
}

#[test]
fn two_threads_meet_after_a_panic() {
    for culprit in 0..2 {
        check(2, 3, move |pool| {
            panic(pool, culprit);
            meet(pool);
        });
    }
}

#[test]
fn a_panic_ends_the_wait_of_two_threads() {
    for culprit in 0..3 {
        check(3, 1, move |pool| panic(pool, culprit));
    }
}
