//! Host memory from which arrays are copied to the device.

use std::sync::Arc;

use octavo_ops::BackendError;

use crate::driver::{Event, Gpu, Pinned};
use crate::failed;

/// Page-locked memory that is written again once its copy has completed.
pub(crate) struct Staged {
    gpu: Arc<Gpu>,
    words: Pinned,
    /// Completes with the copy.
    copied: Event,
}

impl Staged {
    /// Allocates `words` words.
    pub(crate) fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self, BackendError> {
        Ok(Self { gpu: gpu.clone(), words: Pinned::new(gpu, words)?, copied: Event::new(gpu)? })
    }

    /// Waits for the last copy, lets `fill` write `words` words and returns how many are used, and starts to copy these.
    pub(crate) fn send(
        &mut self,
        to: u64,
        words: usize,
        fill: impl FnOnce(&mut [u32]) -> usize,
    ) -> Result<(), BackendError> {
        if words > self.words.len() {
            let found = self.words.len();
            return Err(failed(format!("a step of {words} words is more than the {found} it was made for")));
        }
        self.copied.wait()?;
        let used = fill(&mut self.words[..words]);
        self.gpu.upload(to, &self.words, used)?;
        Ok(self.copied.record()?)
    }
}
