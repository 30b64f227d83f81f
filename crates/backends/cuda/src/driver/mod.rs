//! The NVIDIA driver: its library, its errors and its devices.
//!
//! Its functions are called directly and not through `cudarc`'s safe layer, which tracks events in a way that graph
//! capture does not allow, and panics without a driver.

mod api;
mod device;
mod event;
mod gpu;
mod memory;

use std::path::PathBuf;

use octavo_ops::BackendError;

use crate::libraries::Version;
use api::Functions;
pub use device::DeviceInfo;
pub(crate) use event::Event;
pub(crate) use gpu::{Gpu, Graph, Kernel, Module};
pub(crate) use memory::{DeviceMemory, Pinned};

/// CUDA version of the oldest supported driver, which has every function that is called.
pub(crate) const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name}")]
pub struct DriverError {
    /// Name of the function.
    pub call: &'static str,
    /// Code of the result.
    pub code: u32,
    /// Name of the result, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
}

impl DriverError {
    /// Returns whether the error is permanent: the context and everything in it are lost.
    fn is_lost(&self) -> bool {
        // These are defects of memory and links, invalid accesses of kernels, a client ended by MPS, and errors that
        // the driver cannot name.
        matches!(self.code, 214 | 220 | 226 | 700 | 702 | 709..=710 | 714..=719 | 721 | 806 | 810 | 999)
    }

    /// Returns advice for a driver or a device that does not start: empty, or text that continues the message.
    fn advice(&self) -> &'static str {
        match self.code {
            2 => ": the GPU's memory is full",
            34 => {
                ": the library is a toolkit's stub; the driver's own is not here (a container needs the NVIDIA runtime)"
            }
            46 => ": another process has the GPU for itself, as its compute mode is exclusive",
            802 => {
                ": the links between GPUs are not set up (is nvidia-fabricmanager running, in the driver's release?)"
            }
            803 => {
                ": the library and the kernel module are of different releases (reboot after an update of the driver)"
            }
            804 => {
                ": a cuda-compat library was found, which does not go with this GPU (keep its folder from the loader)"
            }
            805..=809 => ": MPS is on, and its server does not take this process",
            304 | 999 => ": the kernel module nvidia_uvm may not be loaded (`nvidia-modprobe -u` loads it)",
            _ => "",
        }
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

/// Reason why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// There is no driver.
    #[error(
        "there is no NVIDIA driver: no library libcuda.so.1 is found (a container needs the NVIDIA runtime, as by `--gpus all`)"
    )]
    NoDriver,
    /// The driver does not work.
    #[error("the NVIDIA driver does not start: {0}{advice}", advice = .0.advice())]
    Broken(DriverError),
    /// The driver lacks a function.
    #[error("the NVIDIA driver {path} cannot be used: {reason}")]
    Incomplete {
        /// Path of its file.
        path: PathBuf,
        /// Message of the loader.
        reason: String,
    },
    /// The driver is too old.
    #[error("the NVIDIA driver is too old: it supports CUDA {found}, but {oldest} is needed (driver 525 or later)", oldest = OLDEST_DRIVER)]
    OldDriver {
        /// CUDA version that it supports.
        found: Version,
    },
    /// The driver finds no GPU.
    #[error("the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it, or a container was given none)")]
    NoDevice,
    /// There is no GPU with this index.
    #[error("there is no GPU {wanted}: the driver finds {found}")]
    NoSuchDevice {
        /// Requested index, from 0.
        wanted: usize,
        /// Number of GPUs.
        found: usize,
    },
    /// The GPU is too old.
    #[error("{name} is too old: its compute capability is {major}.{minor}, but 7.0 is needed (Volta or later)")]
    OldChip {
        /// Name of the device.
        name: String,
        /// Major compute capability.
        major: u32,
        /// Minor compute capability.
        minor: u32,
    },
    /// The GPU does not support the element type.
    #[error("{name} ({chip}) has no {dtype}: use --dtype half")]
    Dtype {
        /// Name of the device.
        name: String,
        /// Architecture of the device.
        chip: String,
        /// Requested element type.
        dtype: &'static str,
    },
}

/// The initialised driver.
#[derive(Clone, Copy)]
pub(crate) struct Driver {
    api: &'static Functions,
    /// CUDA version that it supports.
    pub(crate) version: Version,
}

impl Driver {
    /// Loads and initialises the driver, once per process; only the first call uses `folders`.
    pub(crate) fn open(folders: &[PathBuf]) -> Result<Self, Unavailable> {
        let api = Functions::loaded(folders)?;
        // SAFETY: no flags are defined.
        api.check("cuInit", unsafe { (api.cuInit)(0) }).map_err(|error| match error.code {
            NO_DEVICE => Unavailable::NoDevice,
            _ => Unavailable::Broken(error),
        })?;
        let mut number = 0;
        // SAFETY: the version is written to a local variable.
        let result = unsafe { (api.cuDriverGetVersion)(&raw mut number) };
        api.check("cuDriverGetVersion", result).map_err(Unavailable::Broken)?;
        let version = Version::of_number(number);
        if version < OLDEST_DRIVER {
            return Err(Unavailable::OldDriver { found: version });
        }
        Ok(Self { api, version })
    }
}

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u32) -> DriverError {
        DriverError { call: "cuInit", code, name: format!("error {code}") }
    }

    #[test]
    fn what_stays_is_told_from_what_does_not() {
        // The codes are an ECC error, one contained by the chip, an invalid access, a failed launch, leaked tensor
        // memory, a client ended by MPS, and errors that the driver cannot name.
        for code in [214, 220, 226, 700, 702, 709, 710, 716, 719, 721, 806, 810, 999] {
            assert!(matches!(error(code).into(), BackendError::DeviceLost { .. }), "{code}");
        }
        // The codes are no memory, no compiler for PTX, too many registers, and an impossible recording.
        for code in [1, 2, 209, 221, 222, 701, 900, 901] {
            assert!(matches!(error(code).into(), BackendError::Failed { .. }), "{code}");
        }
    }

    #[test]
    fn a_driver_that_does_not_start_says_what_may_help() {
        let said = |code| Unavailable::Broken(error(code)).to_string();
        assert_eq!(said(3), "the NVIDIA driver does not start: cuInit: error 3");
        for (code, word) in [
            (2, "memory is full"),
            (34, "stub"),
            (46, "compute mode"),
            (802, "nvidia-fabricmanager"),
            (803, "reboot"),
            (804, "cuda-compat"),
            (807, "MPS"),
            (999, "nvidia_uvm"),
        ] {
            assert!(said(code).contains(word), "{}", said(code));
        }
    }
}
