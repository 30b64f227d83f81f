//! The NVIDIA driver: finding it, its errors, its devices.
//!
//! `cudarc`'s raw bindings are called, not its safe layer: that one tracks events by itself, which graph capture does not
//! allow, and panics where there is no driver.

mod device;
mod event;
mod gpu;
mod memory;

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use octavo_ops::BackendError;

use crate::libraries::Version;
pub use device::DeviceInfo;
pub(crate) use event::Event;
pub(crate) use gpu::{Gpu, Graph, Kernel, Module};
pub(crate) use memory::{DeviceMemory, Pinned};

/// The oldest driver whose CUDA is supported: every function that is called is in it.
pub(crate) const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// What the driver's library is called, first as it is installed.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Where it lies on systems whose loader does not look there: containers and WSL.
const FOLDERS: [&str; 3] = ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib/x86_64-linux-gnu"];

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name}")]
pub struct DriverError {
    /// The function.
    pub call: &'static str,
    /// Its result.
    pub code: u32,
    /// The result's name, `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
}

impl DriverError {
    /// Whether the error stays: the context is gone, and with it all that was in it.
    fn is_lost(&self) -> bool {
        // A defect of the memory, kernels that went astray, and whatever the driver cannot name.
        matches!(self.code, 214 | 220..=221 | 700 | 702 | 709..=710 | 714..=719 | 999)
    }
}

impl From<DriverError> for BackendError {
    fn from(error: DriverError) -> Self {
        match error.is_lost() {
            true => Self::DeviceLost { backend: crate::NAME, reason: error.to_string() },
            false => crate::failed(error),
        }
    }
}

/// Why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// There is no driver.
    #[error(
        "there is no NVIDIA driver: no library libcuda.so.1 is found (a container needs the NVIDIA runtime, as by `--gpus all`)"
    )]
    NoDriver,
    /// There is one, which does not work.
    #[error("the NVIDIA driver does not start: {0}")]
    Broken(DriverError),
    /// There is one, but it is too old.
    #[error("the NVIDIA driver is too old: it supports CUDA {found}, but {oldest} is needed (driver 525 or later)", oldest = OLDEST_DRIVER)]
    OldDriver {
        /// The CUDA that it supports.
        found: Version,
    },
    /// The driver finds no GPU.
    #[error("the NVIDIA driver finds no GPU")]
    NoDevice,
    /// There are fewer GPUs.
    #[error("there is no GPU {wanted}: the driver finds {found}")]
    NoSuchDevice {
        /// What was asked for, from 0.
        wanted: usize,
        /// How many there are.
        found: usize,
    },
    /// The GPU is too old.
    #[error("{name} is too old: its compute capability is {major}.{minor}, but 7.0 is needed (Volta or later)")]
    OldChip {
        /// The device's name.
        name: String,
        /// Of the compute capability.
        major: u32,
        /// Of the compute capability.
        minor: u32,
    },
    /// The GPU has no arithmetic of the element type.
    #[error("{name} ({chip}) has no {dtype}: use --dtype half")]
    Dtype {
        /// The device's name.
        name: String,
        /// Its architecture.
        chip: String,
        /// What was asked for.
        dtype: &'static str,
    },
}

/// The result of a driver's call.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<(), DriverError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver is loaded, as it gave a result; the name is written to a pointer of ours.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut name) } == sys::CUresult::CUDA_SUCCESS;
    let name = match known && !name.is_null() {
        // SAFETY: the driver's names are constants that end with a zero.
        true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        false => format!("error {}", result as u32),
    };
    Err(DriverError { call, code: result as u32, name })
}

/// The driver, initialised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// The CUDA that it supports.
    pub(crate) version: Version,
}

impl Driver {
    /// Loads the driver and initialises it, once in a process: `folders` matter to the first call only.
    pub(crate) fn open(folders: &[PathBuf]) -> Result<Self, Unavailable> {
        static LOADED: OnceLock<bool> = OnceLock::new();
        if !*LOADED.get_or_init(|| preload(folders)) {
            return Err(Unavailable::NoDriver);
        }
        // SAFETY: the library is loaded; no flags are defined.
        check("cuInit", unsafe { sys::cuInit(0) }).map_err(|error| match error.code {
            NO_DEVICE => Unavailable::NoDevice,
            _ => Unavailable::Broken(error),
        })?;
        let mut number = 0;
        // SAFETY: the version is written to a number of ours.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut number) })
            .map_err(Unavailable::Broken)?;
        let number = number.unsigned_abs();
        let version = Version { major: number / 1000, minor: number % 1000 / 10 };
        if version < OLDEST_DRIVER {
            return Err(Unavailable::OldDriver { found: version });
        }
        Ok(Self { version })
    }
}

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: u32 = 100;

/// Loads the library for good, from the first folder that has it or else from where the loader looks. Afterwards the
/// bindings, which ask for it by name, get this very one.
fn preload(folders: &[PathBuf]) -> bool {
    let named = NAMES.iter().map(PathBuf::from);
    let usual = FOLDERS.iter().map(|folder| PathBuf::from(folder).join(NAMES[0]));
    let configured = folders.iter().flat_map(|folder| NAMES.iter().map(move |name| folder.join(name)));
    for path in configured.chain(named).chain(usual) {
        // SAFETY: the driver's own initialisers run, as in every program that uses a GPU.
        if let Ok(library) = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            tracing::debug!(path = %path.display(), "the driver's library is loaded");
            std::mem::forget(library);
            return true;
        }
    }
    false
}
