//! Memory of the device, and memory of the host that the device reads.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{DriverError, Gpu};

/// A piece of the device's memory, freed when dropped.
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// That many bytes, undefined.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: u64) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; the address is written to a number of ours. 0 bytes are refused by the driver.
        gpu.api.check("cuMemAlloc", unsafe { (gpu.api.cuMemAlloc_v2)(&raw mut address, bytes.max(1) as usize) })?;
        Ok(Self { gpu: gpu.clone(), address, bytes })
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // What was launched may still use it.
        self.gpu.settle();
        // SAFETY: allocated in `new` and freed once. An error means that the device is lost, and its memory with it.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuMemFree_v2)(self.address) });
    }
}

/// Page-locked memory of the host, as words: copies between it and the device run beside other work. Not write-combined,
/// which would be slow to read.
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    start: NonNull<u32>,
    words: usize,
}

// SAFETY: the memory is owned, and of plain numbers.
unsafe impl Send for Pinned {}

impl Pinned {
    /// That many zeros.
    pub(crate) fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self, DriverError> {
        gpu.bind()?;
        let bytes = words.max(1) * size_of::<u32>();
        let mut start = std::ptr::null_mut();
        // SAFETY: the context is current; the address is written to a pointer of ours.
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
}

impl std::ops::Deref for Pinned {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: `words` initialised numbers lie there; after `Gpu::fetch`, which lets the device write them, its caller waits
        // for an event before it reads.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl std::ops::DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `deref`; the access is exclusive, and whoever let the device read this waits for an event before it
        // writes.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.gpu.settle();
        // SAFETY: allocated in `new` and freed once; an error means that the device is lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuMemFreeHost)(self.start.as_ptr().cast()) });
    }
}
