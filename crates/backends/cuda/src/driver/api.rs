//! Functions of the driver, loaded from the library that was found.
//!
//! `cudarc` provides their types. Its own functions ask the loader for `libcuda.so` before `libcuda.so.1` and may
//! therefore load a toolkit's stub instead of the driver. There a missing function is a panic, and an unknown result is
//! undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUlaunchConfig,
    CUmodule, CUstream, CUstreamCaptureMode,
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use octavo_kernels::nvrtc::loaders_words;

use super::{DriverError, OLDEST_DRIVER, Unavailable};
use crate::libraries::{Version, functions};

functions! {
    /// Functions of the driver, all of which exist in every driver of CUDA 12.
    Functions {
        cuInit: fn(c_uint);
        cuDriverGetVersion: fn(*mut c_int);
        cuGetErrorName: fn(c_int, *mut *const c_char);
        cuDeviceGetCount: fn(*mut c_int);
        cuDeviceGet: fn(*mut c_int, c_int);
        cuDeviceGetName: fn(*mut c_char, c_int, c_int);
        cuDeviceTotalMem_v2: fn(*mut usize, c_int);
        cuDeviceGetAttribute: fn(*mut c_int, CUdevice_attribute, c_int);
        cuDevicePrimaryCtxRetain: fn(*mut CUcontext, c_int);
        cuDevicePrimaryCtxRelease_v2: fn(c_int);
        cuCtxSetCurrent: fn(CUcontext);
        cuMemGetInfo_v2: fn(*mut usize, *mut usize);
        cuMemAlloc_v2: fn(*mut u64, usize);
        cuMemFree_v2: fn(u64);
        cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost: fn(*mut c_void);
        cuMemcpyHtoDAsync_v2: fn(u64, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2: fn(*mut c_void, u64, usize, CUstream);
        cuMemcpyDtoDAsync_v2: fn(u64, u64, usize, CUstream);
        cuMemsetD8Async: fn(u64, u8, usize, CUstream);
        cuStreamCreate: fn(*mut CUstream, c_uint);
        cuStreamDestroy_v2: fn(CUstream);
        cuStreamSynchronize: fn(CUstream);
        cuStreamBeginCapture_v2: fn(CUstream, CUstreamCaptureMode);
        cuStreamEndCapture: fn(CUstream, *mut CUgraph);
        cuEventCreate: fn(*mut CUevent, c_uint);
        cuEventDestroy_v2: fn(CUevent);
        cuEventRecord: fn(CUevent, CUstream);
        cuEventSynchronize: fn(CUevent);
        cuEventElapsedTime: fn(*mut f32, CUevent, CUevent);
        cuGraphInstantiateWithFlags: fn(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphDestroy: fn(CUgraph);
        cuGraphUpload: fn(CUgraphExec, CUstream);
        cuGraphLaunch: fn(CUgraphExec, CUstream);
        cuGraphExecDestroy: fn(CUgraphExec);
        cuModuleLoadData: fn(*mut CUmodule, *const c_void);
        cuModuleUnload: fn(CUmodule);
        cuModuleGetFunction: fn(*mut CUfunction, CUmodule, *const c_char);
        cuFuncSetAttribute: fn(CUfunction, CUfunction_attribute, c_int);
        cuLaunchKernelEx: fn(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    }
}

impl Functions {
    /// Loads the driver's functions permanently, once per process; only the first call uses `folders`.
    pub(super) fn loaded(folders: &[PathBuf]) -> Result<&'static Self, Unavailable> {
        static LOADED: OnceLock<Result<Functions, Unavailable>> = OnceLock::new();
        LOADED.get_or_init(|| load(folders)).as_ref().map_err(Clone::clone)
    }

    /// Checks the result of a call of the driver.
    pub(super) fn check(&self, call: &'static str, result: c_int) -> Result<(), DriverError> {
        if result == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the name is written to a local pointer.
        let known = unsafe { (self.cuGetErrorName)(result, &raw mut name) } == 0;
        let name = match known && !name.is_null() {
            // SAFETY: the driver's names are constants that end with a zero.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => format!("error {result}"),
        };
        Err(DriverError { call, code: result.unsigned_abs(), name })
    }
}

/// File names of the driver's library, starting with that of the installed driver.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Folders of the library on systems whose loader does not search them: containers, WSL, and distributions with a
/// separate folder for it.
const FOLDERS: [&str; 10] = [
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/run/opengl-driver/lib",
    "/opt/nvidia/lib64",
];

fn load(folders: &[PathBuf]) -> Result<Functions, Unavailable> {
    let (library, path) = open(folders).ok_or(Unavailable::NoDriver)?;
    let read = Functions::read(&library).map_err(|error| lacking(&library, &path, &error));
    // The library is never unloaded, because its functions are called until the process ends.
    std::mem::forget(library);
    read
}

/// Opens the library from the first folder that contains it, else from the loader's search path.
fn open(folders: &[PathBuf]) -> Option<(Library, PathBuf)> {
    let named = NAMES.iter().map(PathBuf::from);
    let usual = FOLDERS.iter().map(|folder| PathBuf::from(folder).join(NAMES[0]));
    let configured = folders.iter().flat_map(|folder| NAMES.iter().map(move |name| folder.join(name)));
    configured.chain(named).chain(usual).find_map(|path| {
        // SAFETY: the driver's own initialisers run, as in every program that uses a GPU. The symbols are global,
        // because other libraries look them up by name.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }.ok()?;
        tracing::debug!(path = %path.display(), "the driver's library is loaded");
        Some((library, path))
    })
}

/// Returns the error of a library that lacks a function; usually it is too old.
fn lacking(library: &Library, path: &Path, error: &libloading::Error) -> Unavailable {
    let mut number = 0;
    // SAFETY: the type is that of cuda.h.
    let version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDriverGetVersion\0") };
    // SAFETY: the version is written to a local variable; this function may be called before any other.
    let told = version.is_ok_and(|version| unsafe { version(&raw mut number) } == 0);
    let found = Version::of_number(number);
    match told && found < OLDEST_DRIVER {
        true => Unavailable::OldDriver { found },
        false => Unavailable::Incomplete { path: path.to_owned(), reason: loaders_words(error) },
    }
}

#[cfg(test)]
#[cfg(feature = "testing")]
mod tests {
    use octavo_kernels::emulation;

    use super::*;

    /// Returns a folder with a `libcuda.so.1` compiled from this C++ code.
    fn driver(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("driver.cpp");
        std::fs::write(&source, text).unwrap();
        let mut command = emulation::compiler();
        command.args(["-shared", "-fPIC", "-o"]).arg(folder.path().join(NAMES[0])).arg(source);
        emulation::run(&mut command).unwrap();
        folder
    }

    fn why(folder: &Path) -> String {
        load(&[folder.to_owned()]).err().unwrap().to_string()
    }

    #[test]
    fn a_driver_that_lacks_functions_is_said_and_no_panic() {
        let version =
            |number: u32| format!("extern \"C\" int cuDriverGetVersion(int* v) {{ *v = {number}; return 0; }}");
        let old = "the NVIDIA driver is too old: it supports CUDA 11.4, but 12.0 is needed (driver 525 or later)";
        assert_eq!(why(driver(&version(11040)).path()), old);
        for text in [version(12020), "int nothing;".to_owned()] {
            let folder = driver(&text);
            let said = why(folder.path());
            let path = folder.path().join(NAMES[0]);
            assert!(said.starts_with(&format!("the NVIDIA driver {} cannot be used: ", path.display())), "{said}");
            assert!(said.contains("undefined symbol: cu"), "{said}");
        }
    }
}
