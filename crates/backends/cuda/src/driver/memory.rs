//! Device memory, and host memory that the device reads.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{DriverError, Gpu};

/// Device memory that is freed when dropped.
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates uninitialised memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: u64) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; the address is written to a local variable. The driver rejects 0 bytes.
        gpu.api.check("cuMemAlloc", unsafe { (gpu.api.cuMemAlloc_v2)(&raw mut address, bytes.max(1) as usize) })?;
        Ok(Self { gpu: gpu.clone(), address, bytes })
    }

    /// Returns its address.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Returns its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Launched work may still use the memory.
        self.gpu.settle();
        // SAFETY: the memory is allocated in `new` and freed once. An error means that the device and its memory are
        // lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuMemFree_v2)(self.address) });
    }
}

/// Page-locked host memory, as words: copies between it and the device run concurrently with other work. It is not
/// write-combined, which would make reads slow.
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    start: NonNull<u32>,
    words: usize,
}

// SAFETY: the memory is owned and consists of plain numbers.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `words` zeros.
    pub(crate) fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self, DriverError> {
        gpu.bind()?;
        let bytes = words.max(1) * size_of::<u32>();
        let mut start = std::ptr::null_mut();
        // SAFETY: the context is current; the address is written to a local pointer.
        gpu.api.check("cuMemHostAlloc", unsafe { (gpu.api.cuMemHostAlloc)(&raw mut start, bytes, 0) })?;
        let start = NonNull::new(start.cast::<u32>()).ok_or(DriverError {
            call: "cuMemHostAlloc",
            code: 0,
            name: "no address".into(),
        })?;
        // SAFETY: that many bytes were allocated there, aligned to a page.
        unsafe { start.write_bytes(0, words) };
        Ok(Self { gpu: gpu.clone(), start, words })
    }

    /// Returns its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: numbers have no padding, and bytes have no alignment.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.words * size_of::<u32>()) }
    }
}

impl std::ops::Deref for Pinned {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: the memory holds `words` initialised numbers. After `Gpu::fetch`, which lets the device write them,
        // the caller waits for an event before reading.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl std::ops::DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `deref`; the access is exclusive, and a caller that let the device read this waits for an event
        // before writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.gpu.settle();
        // SAFETY: the memory is allocated in `new` and freed once; an error means that the device is lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuMemFreeHost)(self.start.as_ptr().cast()) });
    }
}
