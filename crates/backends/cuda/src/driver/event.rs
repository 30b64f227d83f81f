//! A position in the stream for which the host can wait.

use std::sync::Arc;
use std::time::Duration;

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
        Self::create(gpu, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that is complete and keeps the time of its completion.
    pub(crate) fn timed(gpu: &Arc<Gpu>) -> Result<Self, DriverError> {
        Self::create(gpu, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn create(gpu: &Arc<Gpu>, flags: sys::CUevent_flags) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current; the handle is written to a local variable.
        gpu.api.check("cuEventCreate", unsafe { (gpu.api.cuEventCreate)(&raw mut event, flags as u32) })?;
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

    /// Returns the time from the completion of an earlier event to that of this one. Both were recorded, keep their times
    /// and are complete.
    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: the events are alive; the time is written to a local variable.
        let call = unsafe { (self.gpu.api.cuEventElapsedTime)(&raw mut milliseconds, earlier.event, self.event) };
        self.gpu.api.check("cuEventElapsedTime", call)?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is created once and destroyed once; the driver keeps the parts that the device still needs.
        // An error means that the device is lost.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.api.cuEventDestroy_v2)(self.event) });
    }
}
