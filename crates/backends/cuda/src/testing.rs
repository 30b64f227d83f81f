//! A stand-in for the driver and the libraries, for tests without a GPU: kernels run on the CPU emulation of
//! `octavo-kernels`. It is passed as a folder of libraries ([`CudaConfig::libraries`](crate::CudaConfig::libraries)),
//! and the backend does not know about it.

mod kernels;
#[cfg(test)]
mod tests;

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use octavo_kernels::emulation::{self, EmulationError};

use crate::{CacheType, CudaConfig, Dtype, Memory};

pub use kernels::{DeviceKernels, HostArray, KernelPlaces, pack_folder};

/// Returns the hash of a list of texts that names the files of caches: 128 bits in hexadecimal.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    crate::cache::hash(parts)
}

/// Devices of the stand-in, unless OCTAVO_STANDIN_DEVICES lists others.
pub mod devices {
    /// A device with sm_90 and 1 GiB.
    pub const H200: usize = 0;
    /// A device with sm_89 and 1 GiB.
    pub const L40S: usize = 1;
    /// A device with sm_70 and 1 GiB.
    pub const V100: usize = 2;
    /// A device with sm_60, which is too old.
    pub const P100: usize = 3;
    /// A device with sm_90 and 8 MiB.
    pub const SMALL: usize = 4;
    /// A device with sm_75 and 1 GiB, and with less shared memory than older chips.
    pub const T4: usize = 5;
    /// A device with sm_90 and 1 GiB that only one test at a time may open. The memory in use is that of all threads, so
    /// a test that compares what is free at two times must not share the device.
    pub const H100: usize = 6;
}

/// The stand-in's libraries and their sources.
const LIBRARIES: [(&str, &str); 4] = [
    ("libcuda.so.1", "cuda.cpp"),
    ("libnvrtc.so.12", "nvrtc.cpp"),
    ("libnvrtc.so.13", "nvrtc.cpp"),
    ("libcublasLt.so.12", "cublaslt.cpp"),
];

/// Returns the folder of the stand-in's libraries, which are built on first use, once for each content of their
/// sources.
///
/// # Panics
/// Panics if there is no C++ compiler.
pub fn standin() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| build().expect("a C++ compiler builds the stand-in")).clone()
}

/// Returns a folder for OCTAVO_CACHE in which kernels compiled by the stand-in are kept between runs. It depends on the
/// emulation, which is no part of a kernel's key.
pub fn cache() -> PathBuf {
    standin().join("cache")
}

/// Returns the folder of those kernels.
pub fn kernel_cache() -> PathBuf {
    cache().join("kernels")
}

/// Returns sizes for small models in f32, on the newest of the stand-in's devices.
pub fn config() -> CudaConfig {
    CudaConfig {
        device: devices::H200,
        dtype: Some(Dtype::F32),
        kv_cache: CacheType::Activation,
        libraries: vec![standin()],
        kernel_pack: None,
        kernel_cache: kernel_cache(),
        tuning: None,
        max_num_batched_tokens: 256,
        max_num_seqs: 8,
        max_rows: 256,
        max_model_len: 512,
        max_patches: 512,
        adapters: None,
        memory: Memory::KvCache(16 << 20),
        graphs: false,
        early_launches: true,
        batch_invariant: false,
    }
}

fn build() -> Result<PathBuf, EmulationError> {
    let (arguments, objects) = emulation::library_arguments()?;
    let mut words: Vec<String> = arguments.clone();
    // Objects come before the program's own file, whose language is specified.
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

/// Control of the stand-in driver by tests, outside NVIDIA's interface. Faults and counts belong to the calling thread.
pub struct Control {
    library: Library,
}

impl Control {
    /// Returns the control of the driver that this process has loaded or will load.
    ///
    /// # Panics
    /// Panics if it cannot be loaded.
    pub fn new() -> Self {
        let path = standin().join(LIBRARIES[0].0);
        // SAFETY: the library belongs to this project; its initialisers do nothing.
        let library = unsafe { Library::open(Some(path), RTLD_NOW) };
        Self { library: library.expect("the stand-in driver") }
    }

    fn symbol<T>(&self, name: &str) -> Symbol<T> {
        // SAFETY: the callers specify the types of `driver.h`.
        unsafe { self.library.get(name.as_bytes()) }.expect("a function of the stand-in driver")
    }

    /// Makes a call of `function` fail with `code` after `after` successful calls. If `sticky`, every later call fails
    /// too.
    pub fn fail(&self, function: &str, after: u32, code: i32, sticky: bool) {
        let name = CString::new(function).unwrap_or_default();
        let fail: Symbol<unsafe extern "C" fn(*const c_char, u32, i32, i32)> = self.symbol("standin_fail");
        // SAFETY: the name ends with a zero.
        unsafe { fail(name.as_ptr(), after, code, i32::from(sticky)) }
    }

    /// Makes every call of `function` fail with `code`, until [`Control::reset`].
    pub fn refuse(&self, function: &str, code: i32) {
        let name = CString::new(function).unwrap_or_default();
        let refuse: Symbol<unsafe extern "C" fn(*const c_char, i32)> = self.symbol("standin_refuse");
        // SAFETY: the name ends with a zero.
        unsafe { refuse(name.as_ptr(), code) }
    }

    /// Gives the devices a clock, as if times had a meaning, until [`Control::reset`].
    pub fn set_clock(&self) {
        let set: Symbol<unsafe extern "C" fn(i32)> = self.symbol("standin_set_clock");
        // SAFETY: the function accesses only the stand-in's own memory.
        unsafe { set(1_000_000) }
    }

    /// Sets the CUDA version of the driver for backends that are opened until [`Control::reset`], such as 12020.
    pub fn set_driver(&self, version: i32) {
        let set: Symbol<unsafe extern "C" fn(i32)> = self.symbol("standin_set_driver");
        // SAFETY: the function accesses only the stand-in's own memory.
        unsafe { set(version) }
    }

    /// Sets the times of products by the algorithms of cuBLASLt in milliseconds, in their order, until [`Control::reset`].
    pub fn set_algorithm_times(&self, milliseconds: &[f32]) {
        let set: Symbol<unsafe extern "C" fn(*const f32, usize)> = self.symbol("standin_set_algorithm_times");
        // SAFETY: the times are readable for their number.
        unsafe { set(milliseconds.as_ptr(), milliseconds.len()) }
    }

    /// Resets faults, counts, the clock, the driver's version and the times of algorithms.
    pub fn reset(&self) {
        let reset: Symbol<unsafe extern "C" fn()> = self.symbol("standin_reset");
        // SAFETY: the function accesses only the stand-in's own memory.
        unsafe { reset() }
    }

    /// Returns the number of calls of a function since the last reset.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap_or_default();
        let calls: Symbol<unsafe extern "C" fn(*const c_char) -> u64> = self.symbol("standin_calls");
        // SAFETY: the name ends with a zero.
        unsafe { calls(name.as_ptr()) }
    }

    /// Returns the number of calls of functions that allocate device or host memory.
    pub fn allocations(&self) -> u64 {
        ["cuMemAlloc_v2", "cuMemHostAlloc"].into_iter().map(|function| self.calls(function)).sum()
    }
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}
