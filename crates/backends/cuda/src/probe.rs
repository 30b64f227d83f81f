//! The CUDA installation of this machine, for `octavo doctor` and for choosing a device.

use std::path::PathBuf;

use octavo_kernels::manifest::{Chip, Target};

use crate::driver::{DeviceInfo, Driver, Unavailable};
use crate::libraries::{Candidate, LibraryKind, Places, Unfit, Version, compiler, fits, ranked};
use crate::{KernelPack, PackUnfit};

/// The driver, its devices and the libraries found.
#[derive(Clone, Debug)]
pub struct Report {
    /// CUDA version that the driver supports.
    pub driver: Result<Version, Unavailable>,
    /// GPUs that the driver finds.
    pub devices: Vec<DeviceInfo>,
    /// Libraries found, whether they fit or not. Without a driver none are searched.
    pub libraries: Vec<Candidate>,
}

/// A library that was found, and whether it fits a chip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    /// The library.
    pub library: &'a Candidate,
    /// Reason why it is not used, if any.
    pub verdict: Result<(), Unfit>,
}

/// Searches for the driver, GPUs and libraries: in `folders`, then in the usual places.
pub fn probe(folders: &[PathBuf]) -> Report {
    let driver = match Driver::open(folders) {
        Ok(driver) => driver,
        Err(reason) => return Report { driver: Err(reason), devices: Vec::new(), libraries: Vec::new() },
    };
    let places = Places::usual(folders);
    let kinds = [LibraryKind::Nvrtc, LibraryKind::CublasLt, LibraryKind::Nccl];
    let libraries = kinds.into_iter().flat_map(|kind| places.find(kind)).collect();
    let count = driver.devices().unwrap_or(0);
    let devices = (0..count).filter_map(|ordinal| driver.device(ordinal).ok()).collect();
    Report { driver: driver.devices().map(|_| driver.version), devices, libraries }
}

impl Report {
    /// Returns the GPU with this index, if it can be used.
    ///
    /// # Errors
    /// Returns the reason why it cannot be used.
    pub fn usable(&self, ordinal: usize) -> Result<&DeviceInfo, Unavailable> {
        if let Err(reason) = &self.driver {
            return Err(reason.clone());
        }
        let missing = Unavailable::NoSuchDevice { wanted: ordinal, found: self.devices.len() };
        let device = self.devices.iter().find(|device| device.ordinal == ordinal).ok_or(missing)?;
        device.check().map(|()| device)
    }

    /// Returns the libraries of a kind with their fit for a chip. Names that only the system's loader can resolve are
    /// omitted if a file was found.
    pub fn libraries_for(&self, kind: LibraryKind, chip: Chip) -> Vec<Found<'_>> {
        let driver = self.driver.clone().unwrap_or(Version { major: 0, minor: 0 });
        let is_file = |library: &&Candidate| library.path.is_absolute();
        let of_kind = self.libraries.iter().filter(|library| library.kind == kind).filter(is_file);
        of_kind.map(|library| Found { library, verdict: fits(library.major(), driver, chip) }).collect()
    }

    /// Returns the files of NCCL. They are not checked for fit, because they are not used yet.
    pub fn nccl(&self) -> impl Iterator<Item = &Candidate> {
        self.libraries.iter().filter(|library| library.kind == LibraryKind::Nccl && library.path.is_absolute())
    }

    /// Returns the path and the release of the compiler for a chip.
    ///
    /// # Errors
    /// Returns a sentence that names the missing library and how to install it.
    pub fn compiler(&self, chip: Chip) -> Result<(PathBuf, (u32, u32)), String> {
        let driver = self.driver.as_ref().map_err(ToString::to_string)?;
        compiler(&self.libraries, *driver, chip).map(|(nvrtc, path)| (path, nvrtc.version()))
    }

    /// Returns the target of a pack whose kernels are used on a chip.
    ///
    /// # Errors
    /// Returns the reason why they are not used.
    pub fn takes(&self, pack: &KernelPack, chip: Chip) -> Result<Target, PackUnfit> {
        pack.target(chip, self.driver.as_ref().ok().copied())
    }

    /// Returns the library of a kind that is tried first for a chip.
    pub fn chosen(&self, kind: LibraryKind, chip: Chip) -> Option<&Candidate> {
        let driver = self.driver.as_ref().ok()?;
        ranked(&self.libraries, kind, *driver, chip).into_iter().find(|library| library.path.is_absolute())
    }
}
