//! A place in the stream that the host can wait for.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{DriverError, Gpu};

/// Passed once everything that was launched before it was recorded is done.
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread; the handle is never changed.
unsafe impl Send for Event {}

impl Event {
    /// One that is passed.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; the handle is written to a variable of ours.
        gpu.api.check("cuEventCreate", unsafe { (gpu.api.cuEventCreate)(&raw mut event, flags) })?;
        Ok(Self { gpu: gpu.clone(), event })
    }

    /// Puts it behind what has been launched so far.
    pub(crate) fn record(&self) -> Result<(), DriverError> {
        // SAFETY: event and stream are alive.
        self.gpu
            .api
            .check("cuEventRecord", unsafe { (self.gpu.api.cuEventRecord)(self.event, self.gpu.stream().cast()) })
    }

    /// Waits until it is passed. Here errors of kernels come to light.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        self.gpu.api.check("cuEventSynchronize", unsafe { (self.gpu.api.cuEventSynchronize)(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once; the driver keeps what the device still needs of it. An error means that
        // the device is lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuEventDestroy_v2)(self.event) });
    }
}
