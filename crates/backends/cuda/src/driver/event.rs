//! A position in the stream for which the host can wait.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{DriverError, Gpu};

/// Completes when everything that was launched before it was recorded has completed.
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread; the handle is never changed.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event that is complete.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; the handle is written to a local variable.
        gpu.api.check("cuEventCreate", unsafe { (gpu.api.cuEventCreate)(&raw mut event, flags) })?;
        Ok(Self { gpu: gpu.clone(), event })
    }

    /// Records the event after everything launched so far.
    pub(crate) fn record(&self) -> Result<(), DriverError> {
        // SAFETY: event and stream are alive.
        self.gpu
            .api
            .check("cuEventRecord", unsafe { (self.gpu.api.cuEventRecord)(self.event, self.gpu.stream().cast()) })
    }

    /// Waits until the event completes. Errors of kernels are reported here.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        self.gpu.api.check("cuEventSynchronize", unsafe { (self.gpu.api.cuEventSynchronize)(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is created once and destroyed once; the driver keeps the parts that the device still needs.
        // An error means that the device is lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuEventDestroy_v2)(self.event) });
    }
}
