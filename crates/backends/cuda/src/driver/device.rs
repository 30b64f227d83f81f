//! Properties of a device, as reported by the driver.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use octavo_kernels::manifest::Chip;

use super::{Driver, DriverError, Unavailable};
use crate::libraries::OLDEST_CHIP;

/// A GPU as described by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index, from 0.
    pub ordinal: usize,
    /// Name.
    pub name: String,
    /// Compute capability.
    pub chip: Chip,
    /// Size of its memory in bytes.
    pub memory: u64,
    /// Number of multiprocessors.
    pub processors: u32,
    /// Maximum shared memory of a thread block in bytes.
    pub shared_memory: u32,
}

impl DeviceInfo {
    /// Checks that there are kernels for its chip.
    pub fn check(&self) -> Result<(), Unavailable> {
        if self.chip >= OLDEST_CHIP {
            return Ok(());
        }
        let Chip { major, minor } = self.chip;
        Err(Unavailable::OldChip { name: self.name.clone(), major, minor })
    }
}

impl Driver {
    /// Returns the number of GPUs.
    pub(crate) fn devices(self) -> Result<usize, Unavailable> {
        let mut count = 0;
        // SAFETY: the driver is initialised; the count is written to a local variable.
        let result = unsafe { (self.api.cuDeviceGetCount)(&raw mut count) };
        self.api.check("cuDeviceGetCount", result).map_err(Unavailable::Broken)?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Unavailable::NoDevice),
        }
    }

    /// Returns a GPU by its index.
    pub(crate) fn device(self, ordinal: usize) -> Result<DeviceInfo, Unavailable> {
        let found = self.devices()?;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < found);
        let number = number.ok_or(Unavailable::NoSuchDevice { wanted: ordinal, found })?;
        self.describe(ordinal, number).map_err(Unavailable::Broken)
    }

    /// Returns an attribute of a device, or an error if the driver does not know it.
    pub(super) fn attribute(self, device: i32, attribute: Attribute) -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: the driver is initialised; the result is written to a local variable.
        let result = unsafe { (self.api.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
        self.api.check("cuDeviceGetAttribute", result).map(|()| value.unsigned_abs())
    }

    fn describe(self, ordinal: usize, number: i32) -> Result<DeviceInfo, DriverError> {
        let (mut device, mut memory, mut name) = (0, 0, [0; 128]);
        // SAFETY: the driver is initialised; the results are written to local variables, the name with its length.
        unsafe {
            self.api.check("cuDeviceGet", (self.api.cuDeviceGet)(&raw mut device, number))?;
            self.api.check("cuDeviceTotalMem", (self.api.cuDeviceTotalMem_v2)(&raw mut memory, device))?;
            self.api
                .check("cuDeviceGetName", (self.api.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32, device))?;
        }
        let name: Vec<u8> = name.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        let attribute = |attribute| self.attribute(device, attribute);
        Ok(DeviceInfo {
            ordinal,
            name: String::from_utf8_lossy(&name).into_owned(),
            chip: Chip {
                major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            memory: memory as u64,
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }
}
