//! A stand-in for the driver and the libraries, for tests where there is no GPU: kernels run on the CPU emulation of
//! `octavo-kernels`. It comes in as a folder of libraries ([`CudaConfig::libraries`](crate::CudaConfig::libraries)); the
//! backend does not know of it.

mod kernels;
#[cfg(test)]
mod tests;

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use octavo_kernels::emulation::{self, EmulationError};

pub use kernels::{DeviceKernels, HostArray, KernelPlaces, pack_folder};

/// Devices of the stand-in, unless OCTAVO_STANDIN_DEVICES names others.
pub mod devices {
    /// sm_90, 1 GiB.
    pub const H200: usize = 0;
    /// sm_89, 1 GiB.
    pub const L40S: usize = 1;
    /// sm_70, 1 GiB.
    pub const V100: usize = 2;
    /// sm_60, which is too old.
    pub const P100: usize = 3;
    /// sm_90, 8 MiB.
    pub const SMALL: usize = 4;
    /// sm_75, 1 GiB, with less shared memory than its older kin.
    pub const T4: usize = 5;
}

/// The stand-in's libraries and their sources.
const LIBRARIES: [(&str, &str); 4] = [
    ("libcuda.so.1", "cuda.cpp"),
    ("libnvrtc.so.12", "nvrtc.cpp"),
    ("libnvrtc.so.13", "nvrtc.cpp"),
    ("libcublasLt.so.12", "cublaslt.cpp"),
];

/// The folder of the stand-in's libraries, built on first use; once for each content of their sources.
///
/// # Panics
/// If there is no C++ compiler.
pub fn standin() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| build().expect("a C++ compiler builds the stand-in")).clone()
}

/// A folder for OCTAVO_CACHE, in which kernels that the stand-in has compiled are kept from run to run: as long as the emulation is
/// the same, which is no part of a kernel's key.
pub fn cache() -> PathBuf {
    standin().join("cache")
}

/// The folder of those kernels.
pub fn kernel_cache() -> PathBuf {
    cache().join("kernels")
}

fn build() -> Result<PathBuf, EmulationError> {
    let (arguments, objects) = emulation::library_arguments()?;
    let mut words: Vec<String> = arguments.clone();
    // Objects come before the program's own file, whose language is told.
    words.extend(objects.iter().map(|object| object.display().to_string()));
    let quoted: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
    let folder = emulation::cache_folder().join(format!("standin-{:016x}", emulation::sources_key("driver")?));
    for (library, source) in LIBRARIES {
        emulation::make_once(&folder.join(library), |partial| {
            let source = Path::new(emulation::FOLDER).join("driver").join(source);
            let mut command = emulation::compiler();
            command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]);
            command.arg(format!("-I{}", emulation::FOLDER));
            command.arg(format!("-DEMULATION_ARGUMENTS={}", quoted.join(", ")));
            command.arg(format!("-Wl,-soname,{library}")).arg(source).arg("-ldl").arg("-o").arg(partial);
            run(&mut command)
        })?;
    }
    Ok(folder)
}

fn run(command: &mut Command) -> Result<(), EmulationError> {
    emulation::run(command).map(drop)
}

/// What tests tell the stand-in driver and ask it, beside NVIDIA's interface. Faults and counts are those of the calling thread.
pub struct Control {
    library: Library,
}

impl Control {
    /// Of the driver that this process has loaded, or will load.
    ///
    /// # Panics
    /// If it cannot be loaded.
    pub fn new() -> Self {
        let path = standin().join(LIBRARIES[0].0);
        // SAFETY: the library is ours; its initialisers do nothing.
        let library = unsafe { Library::open(Some(path), RTLD_NOW) };
        Self { library: library.expect("the stand-in driver") }
    }

    fn symbol<T>(&self, name: &str) -> Symbol<T> {
        // SAFETY: the callers give the types of `driver.h`.
        unsafe { self.library.get(name.as_bytes()) }.expect("a function of the stand-in driver")
    }

    /// Lets the call of `function` after the next `after` calls fail with `code`; if `sticky`, every later call too.
    pub fn fail(&self, function: &str, after: u32, code: i32, sticky: bool) {
        let name = CString::new(function).unwrap_or_default();
        let fail: Symbol<unsafe extern "C" fn(*const c_char, u32, i32, i32)> = self.symbol("standin_fail");
        // SAFETY: the name ends with a zero.
        unsafe { fail(name.as_ptr(), after, code, i32::from(sticky)) }
    }

    /// Forgets faults and counts.
    pub fn reset(&self) {
        let reset: Symbol<unsafe extern "C" fn()> = self.symbol("standin_reset");
        // SAFETY: it touches the stand-in's own memory.
        unsafe { reset() }
    }

    /// Calls of a function since the last reset.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap_or_default();
        let calls: Symbol<unsafe extern "C" fn(*const c_char) -> u64> = self.symbol("standin_calls");
        // SAFETY: the name ends with a zero.
        unsafe { calls(name.as_ptr()) }
    }

    /// Calls of functions that allocate, of the device or of the host.
    pub fn allocations(&self) -> u64 {
        ["cuMemAlloc_v2", "cuMemHostAlloc"].into_iter().map(|function| self.calls(function)).sum()
    }
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}
