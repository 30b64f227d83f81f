use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

use super::rendezvous::lock;
use super::sync::{AtomicUsize, Mutex, Ordering};
use super::*;

#[test]
fn every_piece_is_done_once_and_seen_after_the_barrier() {
    for threads in [1, 2, 3, 8, 9, 65] {
        let mut pool = Pool::new(threads).unwrap();
        let done: Vec<AtomicU64> = (0..1000).map(|_| AtomicU64::new(0)).collect();
        for round in 1..=20 {
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
fn late_help_leaves_the_last_pieces_to_their_thread() {
    let mut pool = Pool::new(2).unwrap();
    for count in [2, 16, 34, 200] {
        let (helped, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        pool.run(&|worker| {
            if worker.index == 1 {
                // The other has done its own pieces, and all of those of this thread that it takes.
                while helped.load(Ordering::Acquire) == 0 {
                    std::thread::yield_now();
                }
            }
            worker.share_with(Help::Late, count, |piece| lock(&done).push((worker.index, piece)));
            helped.store(1, Ordering::Release);
        });
        let mut done = done.into_inner().unwrap();
        let left = (count / 2usize).div_ceil(8);
        let by_second: Vec<_> = done.iter().filter(|(index, _)| *index == 1).map(|(_, piece)| *piece).collect();
        assert_eq!(by_second, (count - left..count).collect::<Vec<_>>());
        done.sort_unstable_by_key(|(_, piece)| *piece);
        assert!(done.iter().map(|(_, piece)| *piece).eq(0..count));
    }
}

#[test]
fn each_node_does_all_pieces_with_its_own_threads() {
    for nodes in [&[0][..], &[0, 1], &[0, 0, 0, 1, 1], &[0, 1, 2, 2, 2, 2, 2, 2, 2, 2]] {
        let places: Vec<Place> = nodes.iter().map(|&node| Place { node, processor: None }).collect();
        let mut pool = Pool::on(&places).unwrap();
        assert_eq!(pool.nodes(), nodes[nodes.len() - 1] + 1);
        for count in [0, 1, 3, 200] {
            let done = Mutex::new(vec![vec![0; count]; pool.nodes()]);
            pool.run(&|worker| {
                assert_eq!(worker.node(), nodes[worker.index]);
                for _ in 0..3 {
                    worker.share_on_each_node(count, |piece| lock(&done)[nodes[worker.index]][piece] += 1);
                    worker.barrier();
                }
            });
            assert!(done.into_inner().unwrap().iter().flatten().all(|&times| times == 3), "{nodes:?}");
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_goes_on() {
    for (threads, culprit) in [(3, 0), (3, 2), (20, 0), (20, 9)] {
        let (mut pool, turn) = (Pool::new(threads).unwrap(), AtomicUsize::new(0));
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
        assert_eq!(count.into_inner(), threads);
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
