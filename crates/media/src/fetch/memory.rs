//! The memory of files that are being fetched or wait to be decoded.
//!
//! A fetch takes memory as bytes arrive, so a host that announces a large file and sends none of it holds nothing. Once
//! the shared memory is used up, fetches wait in their order, and one at a time continues in memory kept for it alone, so
//! fetches that wait for one another end. While a fetch waits, hosts that have stopped sending lose their memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::budget::{Budget, Lease};

/// Least bytes that a fetch takes at a time, unless its file is smaller.
const MIN_STEP: u64 = 256 << 10;

/// Most bytes that a fetch takes at a time.
const MAX_STEP: u64 = 16 << 20;

/// Bytes that a host must send within the patience of those who wait for its memory.
const PROGRESS: u64 = 256 << 10;

/// Bounds the memory of files. The handle is cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct FileMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Budget,
    /// The memory of a whole file, for one fetch at a time.
    alone: Arc<Semaphore>,
    patience: Duration,
    downloads: Mutex<Downloads>,
}

/// The downloads that hold memory.
#[derive(Debug, Default)]
struct Downloads {
    next: u64,
    running: HashMap<u64, Host>,
}

/// How the host of a download gets on.
#[derive(Debug)]
struct Host {
    /// When it had sent enough the last time.
    since: Instant,
    /// Bytes that it has sent since then.
    sent: u64,
    /// Whether the download waits for memory, and not for its host.
    waiting: bool,
    /// Ends the download.
    end: Arc<Notify>,
}

/// The memory of a file, returned when dropped.
#[derive(Debug, Default)]
pub(crate) struct FileLease {
    shared: Option<Lease>,
    alone: Option<OwnedSemaphorePermit>,
}

impl FileLease {
    fn merge(&mut self, more: Self) {
        match (&mut self.shared, more.shared) {
            (Some(lease), Some(more)) => lease.merge(more),
            (lease @ None, more) => *lease = more,
            (Some(_), None) => {}
        }
        self.alone = self.alone.take().or(more.alone);
    }
}

impl FileMemory {
    /// Memory of `shared` bytes for all files, and of one more file of any size. While a fetch waits for memory, a host
    /// that sends less than 256 KiB within `patience` loses its own.
    pub(crate) fn new(shared: u64, patience: Duration) -> Self {
        Self(Arc::new(Inner {
            shared: Budget::new(shared),
            alone: Arc::new(Semaphore::new(1)),
            patience,
            downloads: Mutex::default(),
        }))
    }

    /// Waits until there is room for `bytes`.
    pub(crate) async fn reserve(&self, bytes: u64) -> FileLease {
        let inner = &self.0;
        if let Some(lease) = inner.shared.take(bytes) {
            return FileLease { shared: Some(lease), alone: None };
        }
        let room = async {
            tokio::select! {
                lease = inner.shared.reserve(bytes), if bytes <= inner.shared.total() => {
                    FileLease { shared: Some(lease), alone: None }
                }
                permit = Arc::clone(&inner.alone).acquire_owned() => {
                    FileLease { shared: None, alone: Some(permit.expect("the semaphore is never closed")) }
                }
            }
        };
        tokio::pin!(room);
        loop {
            tokio::select! {
                biased;
                lease = &mut room => return lease,
                () = tokio::time::sleep(inner.patience / 4) => inner.end_a_stalled_download(),
            }
        }
    }

    /// A download, which has no memory yet.
    pub(crate) fn download(&self) -> Download {
        let mut downloads = self.0.downloads();
        let number = downloads.next;
        downloads.next += 1;
        Download { memory: self.clone(), number, size: 0, end: Arc::default(), lease: FileLease::default() }
    }
}

impl Inner {
    fn downloads(&self) -> MutexGuard<'_, Downloads> {
        self.downloads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the download whose host has sent too little for the longest time.
    fn end_a_stalled_download(&self) {
        let mut downloads = self.downloads();
        let stalled =
            downloads.running.iter().filter(|(_, host)| !host.waiting && host.since.elapsed() >= self.patience);
        if let Some(number) = stalled.min_by_key(|(_, host)| host.since).map(|(number, _)| *number)
            && let Some(host) = downloads.running.remove(&number)
        {
            host.end.notify_one();
        }
    }
}

/// The memory of a file that is arriving.
#[derive(Debug)]
pub(crate) struct Download {
    memory: FileMemory,
    number: u64,
    size: u64,
    end: Arc<Notify>,
    lease: FileLease,
}

impl Download {
    /// Bytes that there is room for.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Waits until there is room for `bytes` in all, and for some more if the file may have as many as `most`.
    pub(crate) async fn grow(&mut self, bytes: u64, most: u64) {
        let step = (self.size / 4).clamp(MIN_STEP, MAX_STEP);
        let size = (self.size + step).min(most).max(bytes);
        if self.lease.alone.is_none() {
            if let Some(host) = self.memory.0.downloads().running.get_mut(&self.number) {
                host.waiting = true;
            }
            let more = self.memory.reserve(size - self.size).await;
            self.lease.merge(more);
            let host = Host { since: Instant::now(), sent: 0, waiting: false, end: Arc::clone(&self.end) };
            self.memory.0.downloads().running.insert(self.number, host);
        }
        self.size = size;
    }

    /// Notes that the host has sent so many bytes.
    pub(crate) fn received(&self, bytes: u64) {
        if let Some(host) = self.memory.0.downloads().running.get_mut(&self.number) {
            host.sent += bytes;
            if host.sent >= PROGRESS {
                (host.since, host.sent) = (Instant::now(), 0);
            }
        }
    }

    /// Ends when the host has stalled and others need the memory.
    pub(crate) fn stalled(&self) -> impl Future<Output = ()> + use<> {
        let end = Arc::clone(&self.end);
        async move { end.notified().await }
    }

    /// The memory of the whole file.
    pub(crate) fn whole(mut self) -> FileLease {
        std::mem::take(&mut self.lease)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.memory.0.downloads().running.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Waits until as many downloads hold memory or wait for more of it.
    async fn waiting(memory: &FileMemory, count: usize) {
        while memory.0.downloads().running.values().filter(|host| host.waiting).count() < count {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn downloads_that_wait_for_one_another_end_one_by_one() {
        let memory = FileMemory::new(4 * MIB, Duration::from_secs(3600));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let mut download = memory.download();
            tasks.spawn(async move {
                // All the memory is held by files that need more.
                while download.size() < 3 * MIB {
                    download.grow(download.size() + 1, 3 * MIB).await;
                    tokio::task::yield_now().await;
                }
                download.whole()
            });
        }
        let mut ended = 0;
        while let Some(lease) = tasks.join_next().await {
            drop(lease.unwrap());
            ended += 1;
        }
        assert_eq!((ended, memory.0.shared.free()), (16, 4 * MIB));
        assert!(memory.0.downloads().running.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_host_that_stalled_first_loses_its_memory_and_only_if_it_is_needed() {
        let memory = FileMemory::new(2 * MIB, Duration::from_millis(20));
        let mut downloads = vec![];
        for _ in 0..3 {
            let mut download = memory.download();
            download.grow(MIB, MIB).await;
            downloads.push(download);
        }
        assert!(downloads[2].lease.alone.is_some(), "the third has the memory that is kept for one");
        tokio::time::sleep(Duration::from_millis(60)).await;
        downloads[0].received(PROGRESS);
        let mut ended = Box::pin(downloads[1].stalled());
        assert!(futures::poll!(&mut ended).is_pending(), "nobody waits");
        let small = tokio::spawn({
            let memory = memory.clone();
            async move {
                let mut download = memory.download();
                download.grow(10, 10).await;
                download
            }
        });
        ended.await;
        drop(downloads.remove(1));
        assert_eq!(small.await.unwrap().size(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_download_that_waits_for_memory_is_not_stalled() {
        let memory = FileMemory::new(MIB, Duration::from_millis(1));
        let (file, alone) = (memory.reserve(MIB - (8 << 10)).await, memory.reserve(MIB).await);
        let mut download = memory.download();
        download.grow(8 << 10, 8 << 10).await;
        let stalled = download.stalled();
        let task = tokio::spawn(async move {
            download.grow(MIB, MIB).await;
            download.size()
        });
        waiting(&memory, 1).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop((file, alone));
        assert_eq!(task.await.unwrap(), MIB);
        assert!(futures::poll!(Box::pin(stalled)).is_pending());
    }
}
