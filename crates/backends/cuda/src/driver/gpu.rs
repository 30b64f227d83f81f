//! A device in use: its context, its one stream, and the operations on it.

use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use octavo_kernels::manifest::Instance;
use octavo_kernels::params::Params;

use super::api::Functions;
use super::{DeviceInfo, Driver, DriverError, Pinned};
use crate::libraries::Version;

/// The device's primary context and a stream in it. Everything runs on this stream, in order.
pub(crate) struct Gpu {
    pub(super) api: &'static Functions,
    driver: Driver,
    info: DeviceInfo,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Whether a launch may begin before the one before ends. Kernels wait for its end themselves, from sm_90 on.
    may_begin_early: bool,
    /// Whether the last work on the stream is a kernel of ours, which lets the next begin before it ends.
    after_kernel: AtomicBool,
}

/// CUDA version of the oldest driver that records launches which begin before the one before ends.
const EARLY_DRIVER: Version = Version { major: 12, minor: 3 };

// SAFETY: contexts and streams may be used from any thread; the handles are never changed.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver's functions take their own locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Initialises a device for use. Without `early_launches`, every launch begins after the one before has ended.
    pub(crate) fn new(driver: Driver, info: DeviceInfo, early_launches: bool) -> Result<Arc<Self>, DriverError> {
        let api = driver.api;
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver is initialised and has a device with this index; handles are written to local variables.
        unsafe {
            api.check("cuDeviceGet", (api.cuDeviceGet)(&raw mut device, info.ordinal as i32))?;
            api.check("cuDevicePrimaryCtxRetain", (api.cuDevicePrimaryCtxRetain)(&raw mut context, device))?;
            api.check("cuCtxSetCurrent", (api.cuCtxSetCurrent)(context))?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            api.check("cuStreamCreate", (api.cuStreamCreate)(&raw mut stream, flags))?;
        }
        let may_begin_early = early_launches && info.chip.has_sm90() && driver.version >= EARLY_DRIVER;
        let after_kernel = AtomicBool::new(false);
        Ok(Arc::new(Self { api, driver, info, context, stream, may_begin_early, after_kernel }))
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns an attribute of the device, or 0 if the driver does not know it.
    pub(crate) fn attribute(&self, attribute: sys::CUdevice_attribute) -> u64 {
        let mut device = 0;
        // SAFETY: the handle is written to a local variable.
        let result = unsafe { (self.api.cuDeviceGet)(&raw mut device, self.info.ordinal as i32) };
        let found = self.api.check("cuDeviceGet", result).and_then(|()| self.driver.attribute(device, attribute));
        found.map_or(0, u64::from)
    }

    /// Returns the stream, for libraries that launch kernels themselves.
    pub(crate) fn stream(&self) -> *mut c_void {
        self.queue().cast()
    }

    /// Returns the stream for work other than a kernel of ours.
    fn queue(&self) -> sys::CUstream {
        self.after_kernel.store(false, Ordering::Relaxed);
        self.stream
    }

    /// Makes the context current in the calling thread.
    pub(crate) fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained as long as `self` lives.
        self.api.check("cuCtxSetCurrent", unsafe { (self.api.cuCtxSetCurrent)(self.context) })
    }

    /// Returns the numbers of free bytes and of all bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), DriverError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; sizes are written to local variables.
        self.api.check("cuMemGetInfo", unsafe { (self.api.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything that was launched. Errors of kernels are reported here.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        self.api.check("cuStreamSynchronize", unsafe { (self.api.cuStreamSynchronize)(self.stream) })
    }

    /// Waits and ignores errors, before memory is freed.
    pub(super) fn settle(&self) {
        if self.bind().and_then(|()| self.synchronize()).is_err() {
            tracing::debug!("the device is lost: what ran there is void");
        }
    }

    /// Copies the first words to the device, in the order of the stream. They must not change until the copy has
    /// completed.
    pub(crate) fn upload(&self, to: u64, from: &Pinned, words: usize) -> Result<(), DriverError> {
        self.send(to, &from[..words])
    }

    /// Does the same with some of the bytes.
    pub(crate) fn upload_bytes(&self, to: u64, from: &Pinned, range: Range<usize>) -> Result<(), DriverError> {
        self.send(to, &from.bytes()[range])
    }

    /// Copies any host memory to the device and waits for the copy. A device that shares the host's page tables may
    /// read the memory when the copy runs and not before the call returns, unlike others.
    pub(crate) fn write(&self, to: u64, from: &[u32]) -> Result<(), DriverError> {
        self.send(to, from)?;
        self.synchronize()
    }

    fn send<T>(&self, to: u64, from: &[T]) -> Result<(), DriverError> {
        let bytes = size_of_val(from);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `from` is readable for its length; the driver rejects a target outside the device's memory.
        let result = unsafe { (self.api.cuMemcpyHtoDAsync_v2)(to, from.as_ptr().cast(), bytes, self.queue()) };
        self.api.check("cuMemcpyHtoDAsync", result)
    }

    /// Copies from the device after everything that was launched, and waits for the copy.
    pub(crate) fn download(&self, to: &mut [u32], from: u64) -> Result<(), DriverError> {
        let bytes = size_of_val(to);
        if bytes == 0 {
            return self.synchronize();
        }
        // SAFETY: `to` is writable for its length and is not accessed before the copy has completed.
        let result = unsafe { (self.api.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, bytes, self.queue()) };
        self.api.check("cuMemcpyDtoHAsync", result)?;
        self.synchronize()
    }

    /// Copies the first words from the device, in the order of the stream. They must not be read before an event that
    /// is recorded after this call has completed.
    pub(crate) fn fetch(&self, to: &mut Pinned, words: usize, from: u64) -> Result<(), DriverError> {
        let to = &mut to[..words];
        // SAFETY: `to` is writable for its length and lives until the copy has completed, because it is freed only
        // then.
        let result =
            unsafe { (self.api.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, size_of_val(to), self.queue()) };
        self.api.check("cuMemcpyDtoHAsync", result)
    }

    /// Copies within the device, in the order of the stream.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the driver rejects addresses outside the device's memory.
        let result = unsafe { (self.api.cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, self.queue()) };
        self.api.check("cuMemcpyDtoDAsync", result)
    }

    /// Writes zeros, in the order of the stream.
    pub(crate) fn zero(&self, at: u64, bytes: u64) -> Result<(), DriverError> {
        // The driver rejects a length of 0.
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the driver rejects addresses outside the device's memory.
        self.api.check("cuMemsetD8Async", unsafe { (self.api.cuMemsetD8Async)(at, 0, bytes as usize, self.queue()) })
    }

    /// Launches a kernel with the single parameter `params` and `shared` bytes of dynamic shared memory.
    pub(crate) fn launch<P: Params>(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        shared: u32,
        params: &P,
    ) -> Result<(), DriverError> {
        debug_assert_eq!(size_of::<P>(), kernel.params_bytes, "the kernel's own parameter");
        let [x, y, z] = grid;
        let is_early = self.may_begin_early && self.after_kernel.load(Ordering::Relaxed);
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream,
            attrs: if is_early { &raw mut early } else { std::ptr::null_mut() },
            numAttrs: u32::from(is_early),
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel has one parameter of the size of `P`, which the driver copies before it returns.
        let result = unsafe {
            (self.api.cuLaunchKernelEx)(
                &raw const config,
                kernel.function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.api.check("cuLaunchKernelEx", result)?;
        self.after_kernel.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Records the launches of `work` instead of running them.
    pub(crate) fn capture<E: From<DriverError>>(
        self: &Arc<Self>,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is not being captured, because captures are not nested.
        let begun = unsafe { (self.api.cuStreamBeginCapture_v2)(self.queue(), mode) };
        self.api.check("cuStreamBeginCapture", begun)?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture began above, and the graph is written to a local pointer. The capture must end even after
        // an error.
        let ended = unsafe { (self.api.cuStreamEndCapture)(self.queue(), &raw mut graph) };
        let ended = self.api.check("cuStreamEndCapture", ended);
        let mut executable = std::ptr::null_mut();
        let instantiated = worked.and_then(|()| {
            ended?;
            // SAFETY: the graph was captured.
            let result = unsafe { (self.api.cuGraphInstantiateWithFlags)(&raw mut executable, graph, 0) };
            Ok(self.api.check("cuGraphInstantiate", result)?)
        });
        if !graph.is_null() {
            // SAFETY: the graph is not needed after its instantiation or after an error.
            let _ = unsafe { (self.api.cuGraphDestroy)(graph) };
        }
        instantiated?;
        let graph = Graph { gpu: self.clone(), executable };
        // SAFETY: the graph is alive.
        self.api.check("cuGraphUpload", unsafe { (self.api.cuGraphUpload)(graph.executable, self.stream) })?;
        Ok(graph)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: the handles are created in `new` and released once, after everything that holds `self`. Errors mean
        // that the device is lost, and nothing more can be done.
        unsafe {
            let _ = (self.api.cuCtxSetCurrent)(self.context);
            let _ = (self.api.cuStreamDestroy_v2)(self.stream);
            let mut device = 0;
            if (self.api.cuDeviceGet)(&raw mut device, self.info.ordinal as i32) == 0 {
                let _ = (self.api.cuDevicePrimaryCtxRelease_v2)(device);
            }
        }
    }
}

/// Recorded launches, which can be run again at once.
pub(crate) struct Graph {
    gpu: Arc<Gpu>,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be launched from any thread, one at a time; `&self` is used only on the device's one thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the graph after everything launched before.
    pub(crate) fn launch(&self) -> Result<(), DriverError> {
        // SAFETY: the graph and the stream are alive.
        self.gpu.api.check("cuGraphLaunch", unsafe { (self.gpu.api.cuGraphLaunch)(self.executable, self.gpu.queue()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.gpu.settle();
        // SAFETY: the graph is instantiated once and destroyed once.
        let _ = unsafe { (self.gpu.api.cuGraphExecDestroy)(self.executable) };
    }
}

/// Loaded kernels.
pub(crate) struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads machine code for the device's chip.
    pub(crate) fn new(gpu: &Arc<Gpu>, code: &[u8]) -> Result<Self, DriverError> {
        gpu.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is an object file whose header contains its size; the caller has checked that it is
        // complete.
        let result = unsafe { (gpu.api.cuModuleLoadData)(&raw mut module, code.as_ptr().cast()) };
        gpu.api.check("cuModuleLoadData", result)?;
        Ok(Self { gpu: gpu.clone(), module })
    }

    /// Returns a kernel of the module.
    pub(crate) fn kernel(&self, instance: &Instance) -> Result<Kernel, DriverError> {
        let symbol = CString::new(instance.name.as_str()).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends with a zero.
        let result = unsafe { (self.gpu.api.cuModuleGetFunction)(&raw mut function, self.module, symbol.as_ptr()) };
        self.gpu.api.check("cuModuleGetFunction", result)?;
        let shared = u32::try_from(instance.dynamic_shared).unwrap_or(u32::MAX);
        // A device grants 48 KiB without a request, including the memory that the kernel itself declares.
        if shared > 0 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            let result = unsafe { (self.gpu.api.cuFuncSetAttribute)(function, attribute, shared as i32) };
            self.gpu.api.check("cuFuncSetAttribute", result)?;
        }
        Ok(Kernel { function, threads: instance.threads, shared, params_bytes: instance.params_bytes })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.gpu.settle();
        // SAFETY: the module is loaded once and unloaded once.
        let _ = unsafe { (self.gpu.api.cuModuleUnload)(self.module) };
    }
}

/// A kernel of a [`Module`], which must outlive its launches.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    function: sys::CUfunction,
    /// Number of threads in a block.
    pub(crate) threads: u32,
    /// Maximum dynamic shared memory in bytes.
    pub(crate) shared: u32,
    params_bytes: usize,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Kernel {}
