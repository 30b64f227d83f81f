//! Work that several requests wait for is done once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};

type Running<T> = WeakShared<BoxFuture<'static, T>>;

/// Work in progress by key. The work is cancelled when the last request that waits for it leaves.
#[derive(Debug)]
pub(crate) struct Flights<K, T>(Arc<Mutex<HashMap<K, Flight<T>>>>);

struct Flight<T> {
    /// Number of the flight, unlike that of a later one with the same key.
    number: u64,
    running: Running<T>,
}

impl<T> std::fmt::Debug for Flight<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Flight({})", self.number)
    }
}

/// Removes a flight that has ended or was cancelled.
struct Remove<K: Eq + Hash, T> {
    flights: Arc<Mutex<HashMap<K, Flight<T>>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, T> Drop for Remove<K, T> {
    fn drop(&mut self) {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if flights.get(&self.key).is_some_and(|flight| flight.number == self.number) {
            flights.remove(&self.key);
        }
    }
}

impl<K: Clone + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> Flights<K, T> {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    /// The result of `work`, or of the same key's work that is in progress.
    pub(crate) async fn run(&self, key: K, work: impl Future<Output = T> + Send + 'static) -> T {
        self.join(key, work).await
    }

    fn join(&self, key: K, work: impl Future<Output = T> + Send + 'static) -> Shared<BoxFuture<'static, T>> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = flights.get(&key);
        if let Some(running) = previous.and_then(|flight| flight.running.upgrade()) {
            return running;
        }
        let number = previous.map_or(0, |flight| flight.number + 1);
        let remove = Remove { flights: Arc::clone(&self.0), key: key.clone(), number };
        let running = async move {
            let result = work.await;
            drop(remove);
            result
        };
        let running = running.boxed().shared();
        if let Some(weak) = running.downgrade() {
            flights.insert(key, Flight { number, running: weak });
        }
        running
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn equal_work_is_done_once_and_survives_the_first_client() {
        let flights = Arc::new(Flights::<u32, u32>::new());
        let runs = Arc::new(AtomicUsize::new(0));
        let (finish, finished) = oneshot::channel::<()>();
        let mut finished = Some(finished);
        let mut clients: Vec<_> = (0..100)
            .map(|_| {
                let (flights, runs, finished) = (Arc::clone(&flights), Arc::clone(&runs), finished.take());
                tokio::spawn(async move {
                    let work = async move {
                        runs.fetch_add(1, Ordering::Relaxed);
                        if let Some(finished) = finished {
                            finished.await.unwrap();
                        }
                        7
                    };
                    flights.run(1, work).await
                })
            })
            .collect();
        while Arc::strong_count(&runs) > 2 {
            tokio::task::yield_now().await;
        }
        clients.swap_remove(0).abort();
        tokio::task::yield_now().await;
        finish.send(()).unwrap();
        for client in clients {
            assert_eq!(client.await.unwrap(), 7);
        }
        assert_eq!((runs.load(Ordering::Relaxed), flights.len()), (1, 0));
    }

    #[tokio::test]
    async fn work_without_clients_is_cancelled_and_can_start_anew() {
        let flights = Arc::new(Flights::<u32, u32>::new());
        let (alive, mut cancelled) = oneshot::channel::<()>();
        let client = tokio::spawn({
            let flights = Arc::clone(&flights);
            async move {
                let work = async move {
                    let _alive = alive;
                    std::future::pending().await
                };
                flights.run(1, work).await
            }
        });
        while flights.len() == 0 {
            tokio::task::yield_now().await;
        }
        client.abort();
        assert!((&mut cancelled).await.is_err());
        assert_eq!(flights.run(1, async { 2 }).await, 2);
        assert_eq!(flights.len(), 0);
    }
}
