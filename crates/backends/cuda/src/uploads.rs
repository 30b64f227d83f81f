//! Copies to the device of data that threads write: while the device copies some buffers, threads fill others.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Scope};

use octavo_ops::{BackendError, WeightError};

use crate::driver::{Event, Gpu, Pinned};
use crate::failed;

/// Size of a buffer in words: large enough for the full rate of copies.
const BUFFER_WORDS: usize = 1 << 20;

/// Maximum number of threads. A few read a mapped file faster than a device copies it.
const MOST_THREADS: usize = 8;

/// Number of full buffers that the device may copy while all threads fill others.
const FULL_BUFFERS: usize = 4;

/// Writes the data of a buffer.
type Fill<'a> = Box<dyn FnOnce(&mut [u8]) -> Result<(), WeightError> + Send + 'a>;

/// Page-locked memory that is written again once its copy has completed.
struct Buffer {
    words: Pinned,
    /// Completes with the copies of the buffer.
    copied: Event,
}

/// Bytes of a buffer, after those of the pieces before, and their address on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) to: u64,
    pub(crate) bytes: usize,
}

/// A buffer to be filled.
struct Task<'a> {
    buffer: Buffer,
    pieces: Vec<Piece>,
    fill: Fill<'a>,
}

/// A buffer that a thread has filled, or failed to fill.
struct Filled {
    buffer: Buffer,
    pieces: Vec<Piece>,
    result: Result<(), BackendError>,
}

/// Copies to the device. Only the thread that owns it calls the driver.
pub(crate) struct Uploads<'a> {
    gpu: Arc<Gpu>,
    /// Tasks of the threads; `None` once there are no more.
    tasks: Option<Sender<Task<'a>>>,
    filled: Receiver<Filled>,
    /// Buffers that no thread has, in the order of their copies.
    free: VecDeque<Buffer>,
    /// Number of buffers that threads have.
    lent: usize,
    /// Number of buffers that may still be allocated.
    room: usize,
}

impl<'a> Uploads<'a> {
    /// Size of a buffer in bytes.
    pub(crate) const BUFFER_BYTES: usize = BUFFER_WORDS * size_of::<u32>();

    /// Starts the threads, which end with it.
    pub(crate) fn new<'scope>(gpu: &Arc<Gpu>, scope: &'scope Scope<'scope, '_>) -> Result<Self, BackendError>
    where
        'a: 'scope,
    {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let (tasks, queue) = channel();
        let (done, filled) = channel();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, done) = (queue.clone(), done.clone());
            let thread = Builder::new().name("weights".into()).spawn_scoped(scope, move || run(&queue, &done));
            thread.map_err(|e| failed(format!("no thread can be started: {e}")))?;
        }
        let (free, room) = (VecDeque::new(), threads + FULL_BUFFERS);
        Ok(Self { gpu: gpu.clone(), tasks: Some(tasks), filled, free, lent: 0, room })
    }

    /// Lets a thread write a buffer, from whose start on the pieces are then copied. They may be copied in another order than
    /// that of the calls.
    pub(crate) fn push(
        &mut self,
        pieces: Vec<Piece>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), WeightError> + Send + 'a,
    ) -> Result<(), BackendError> {
        if pieces.iter().map(|piece| piece.bytes).sum::<usize>() > Self::BUFFER_BYTES {
            return Err(failed("a copy to the device exceeds its buffer"));
        }
        let buffer = self.buffer()?;
        let tasks = self.tasks.as_ref().ok_or_else(ended)?;
        tasks.send(Task { buffer, pieces, fill: Box::new(fill) }).map_err(|_| ended())?;
        self.lent += 1;
        Ok(())
    }

    /// Waits until everything is on the device.
    pub(crate) fn finish(&mut self) -> Result<(), BackendError> {
        while self.lent > 0 {
            let filled = self.filled.recv().map_err(|_| ended())?;
            self.copy(filled)?;
        }
        Ok(self.gpu.synchronize()?)
    }

    /// Returns a buffer that can be written.
    fn buffer(&mut self) -> Result<Buffer, BackendError> {
        // The device gets its work before anything else is waited for.
        while let Ok(filled) = self.filled.try_recv() {
            self.copy(filled)?;
        }
        loop {
            if let Some(buffer) = self.free.pop_front() {
                buffer.copied.wait()?;
                return Ok(buffer);
            }
            if self.room > 0 {
                self.room -= 1;
                return Ok(Buffer { words: Pinned::new(&self.gpu, BUFFER_WORDS)?, copied: Event::new(&self.gpu)? });
            }
            let filled = self.filled.recv().map_err(|_| ended())?;
            self.copy(filled)?;
        }
    }

    /// Starts the copies of a buffer.
    fn copy(&mut self, filled: Filled) -> Result<(), BackendError> {
        let Filled { buffer, pieces, result } = filled;
        self.lent -= 1;
        result?;
        let mut from = 0;
        for Piece { to, bytes } in pieces {
            self.gpu.upload_bytes(to, &buffer.words, from..from + bytes)?;
            from += bytes;
        }
        buffer.copied.record()?;
        self.free.push_back(buffer);
        Ok(())
    }
}

impl Drop for Uploads<'_> {
    /// Takes the buffers back, because freeing them calls the driver.
    fn drop(&mut self) {
        self.tasks = None;
        while self.filled.recv().is_ok() {}
    }
}

/// Fills buffers until there are no more tasks.
fn run(queue: &Mutex<Receiver<Task<'_>>>, done: &Sender<Filled>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { mut buffer, pieces, fill }) = next else { return };
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        let out = &mut bytes_of(&mut buffer.words)[..bytes];
        // A thread that ended would take its buffer along, for which others wait.
        let result = match catch_unwind(AssertUnwindSafe(|| fill(out))) {
            Ok(result) => result.map_err(BackendError::from),
            Err(_) => Err(failed("a thread that reads weights panicked")),
        };
        if done.send(Filled { buffer, pieces, result }).is_err() {
            return;
        }
    }
}

/// Returns the error of threads that are not there any more.
fn ended() -> BackendError {
    failed("the threads that read weights have ended")
}

/// Returns the bytes of words.
pub(crate) fn bytes_of(words: &mut [u32]) -> &mut [u8] {
    // SAFETY: numbers have no padding; bytes have no alignment; the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{DeviceMemory, Driver};
    use crate::testing::devices::H200;
    use crate::testing::standin;

    fn gpu() -> Arc<Gpu> {
        let driver = Driver::open(&[standin()]).unwrap();
        Gpu::new(driver, driver.device(H200).unwrap(), true).unwrap()
    }

    /// Runs `work` with uploads and returns its result.
    fn uploading<T>(gpu: &Arc<Gpu>, work: impl FnOnce(&mut Uploads<'_>) -> T) -> T {
        std::thread::scope(|scope| work(&mut Uploads::new(gpu, scope).unwrap()))
    }

    /// The stand-in copies a buffer when it is waited for, so that one that is written again too early is noticed.
    #[test]
    fn more_than_all_buffers_hold_arrives() {
        const WORDS: usize = 1 << 10;
        let gpu = gpu();
        let count = 5 * (MOST_THREADS + FULL_BUFFERS);
        let memory = DeviceMemory::new(&gpu, (count * WORDS * 4) as u64).unwrap();
        uploading(&gpu, |uploads| {
            for number in 0..count {
                // The halves of a buffer change places.
                let at = |half: usize| memory.address() + ((2 * number + half) * WORDS * 2) as u64;
                let pieces = [1, 0].map(|half| Piece { to: at(half), bytes: WORDS * 2 });
                let fill = move |out: &mut [u8]| {
                    for (half, out) in out.chunks_mut(WORDS * 2).enumerate() {
                        out.fill((2 * number + 1 - half) as u8);
                    }
                    Ok(())
                };
                uploads.push(pieces.to_vec(), fill).unwrap();
            }
            uploads.finish().unwrap();
        });
        let mut found = vec![0; count * WORDS];
        gpu.download(&mut found, memory.address()).unwrap();
        for (half, words) in found.chunks(WORDS / 2).enumerate() {
            assert!(words.iter().all(|word| *word == u32::from_ne_bytes([half as u8; 4])), "half {half}");
        }
    }

    fn filled_with(byte: u8) -> impl FnOnce(&mut [u8]) -> Result<(), WeightError> + Send {
        move |out| {
            out.fill(byte);
            Ok(())
        }
    }

    #[test]
    fn what_a_thread_fails_at_is_an_error() {
        let gpu = gpu();
        let memory = DeviceMemory::new(&gpu, 4).unwrap();
        let pieces = || vec![Piece { to: memory.address(), bytes: 4 }];
        let missing = || Err(WeightError::Missing("w".into()));
        let errors = uploading(&gpu, |uploads| {
            uploads.push(pieces(), move |_| missing()).unwrap();
            let first = uploads.finish().unwrap_err();
            uploads.push(pieces(), |_| panic!("as asked")).unwrap();
            let second = uploads.finish().unwrap_err();
            // The threads are still there.
            uploads.push(pieces(), filled_with(7)).unwrap();
            uploads.finish().unwrap();
            [first, second]
        });
        let panicked = failed("a thread that reads weights panicked").to_string();
        assert_eq!(errors.map(|e| e.to_string()), [BackendError::from(missing().unwrap_err()).to_string(), panicked]);
        let mut found = [0];
        gpu.download(&mut found, memory.address()).unwrap();
        assert_eq!(found, [0x0707_0707]);
    }

    #[test]
    fn buffers_under_way_are_taken_back_after_an_error() {
        let gpu = gpu();
        let memory = DeviceMemory::new(&gpu, 4).unwrap();
        let error = uploading(&gpu, |uploads| {
            let tries = (0..100).map(|_| {
                // The address is not the device's.
                uploads.push(vec![Piece { to: memory.address() + 4096, bytes: 4 }], filled_with(1))
            });
            tries.collect::<Result<Vec<_>, _>>().unwrap_err()
        });
        assert!(error.to_string().contains("cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE"), "{error}");
        gpu.synchronize().unwrap();
    }
}
