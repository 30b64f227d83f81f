//! The device memory of a model, allocated once and divided into regions.

use std::sync::Arc;

use octavo_ops::BackendError;

use crate::driver::{DeviceMemory, Gpu};
use crate::failed;

/// Alignment of every region: more than any kernel's widest load needs, and a multiple of a memory transaction.
const ALIGNMENT: u64 = 256;

/// Layout of the memory before it is allocated: offsets are assigned one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    bytes: u64,
}

/// A region of the arena, as offset and size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Plan {
    /// Adds a region of `bytes` bytes. Saturates, so that an overflow exceeds any device.
    pub(crate) fn take(&mut self, bytes: u64) -> Region {
        let offset = self.bytes;
        self.bytes = offset.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        Region { offset, bytes }
    }

    /// Returns the total number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Device memory that is divided into regions: weights and step buffers of a program, or the KV cache.
pub(crate) struct Arena {
    memory: Memory,
}

/// Memory of an arena.
enum Memory {
    Device(DeviceMemory),
    /// So many bytes that do not exist: the addresses tell regions apart, and nothing is read or written.
    Paper(u64),
}

/// Address of memory that does not exist: aligned, and not 0, which means that there is none.
const PAPER: u64 = 1 << 40;

impl Arena {
    /// Allocates the arena. `what` names its content in an error.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: u64, what: &str) -> Result<Self, BackendError> {
        let out_of_memory = |error: crate::DriverError| match error.code {
            OUT_OF_MEMORY => BackendError::OutOfMemory { what: what.into(), needed: bytes },
            _ => failed(error),
        };
        DeviceMemory::new(gpu, bytes).map(|memory| Self { memory: Memory::Device(memory) }).map_err(out_of_memory)
    }

    /// Returns an arena of memory that does not exist, for launches that are never run.
    pub(crate) fn on_paper(bytes: u64) -> Self {
        Self { memory: Memory::Paper(bytes) }
    }

    /// Returns the device address of a region.
    pub(crate) fn at(&self, region: Region) -> u64 {
        debug_assert!(region.offset.saturating_add(region.bytes) <= self.bytes(), "{region:?} is beyond the arena");
        self.start() + region.offset
    }

    /// Returns its device address.
    pub(crate) fn start(&self) -> u64 {
        match &self.memory {
            Memory::Device(memory) => memory.address(),
            Memory::Paper(_) => PAPER,
        }
    }

    /// Returns its size.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Device(memory) => memory.bytes(),
            Memory::Paper(bytes) => *bytes,
        }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        let mut plan = Plan::default();
        let regions = [1, 256, 0, 300].map(|bytes| plan.take(bytes));
        assert_eq!(regions.map(|r| r.offset), [0, 256, 512, 512]);
        assert_eq!(plan.bytes(), 1024);
    }

    #[test]
    fn what_overflows_is_too_large() {
        let mut plan = Plan::default();
        plan.take(u64::MAX - 5);
        plan.take(1000);
        assert_eq!(plan.bytes(), u64::MAX);
    }
}
