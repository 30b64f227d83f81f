//! Launches of single kernels on a device, so that tests of kernels can use it instead of the emulation.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use octavo_kernels::manifest::{self, Chip, Instance, Target};
use octavo_kernels::params::Params;

use crate::DriverError;
use crate::KernelPack;
use crate::build::in_parallel;
use crate::cache::Key;
use crate::driver::{DeviceMemory, Driver, Gpu, Kernel, Module};
use crate::libraries::{LibraryKind, Places, compiler, named_folders};

/// Host memory whose address is passed to a kernel, and which the kernel finds on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostArray {
    /// Address.
    pub start: u64,
    /// Length.
    pub bytes: usize,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// Instances compiled for the first device and loaded.
pub struct DeviceKernels {
    /// Loaded kernels. The lock allows one launch at a time, because tests share them.
    loaded: Mutex<Loaded>,
}

/// Sources of the code of kernels.
#[derive(Clone, Debug, Default)]
pub struct KernelPlaces {
    /// Folders of libraries, as in [`CudaConfig::libraries`](crate::CudaConfig::libraries).
    pub libraries: Vec<PathBuf>,
    /// Precompiled kernels, which have priority over a compiler.
    pub pack: Option<KernelPack>,
}

impl KernelPlaces {
    /// Reads the folders of `OCTAVO_CUDA_LIBS` and the pack of `OCTAVO_KERNEL_PACK`.
    ///
    /// # Errors
    /// Returns an error if the named pack cannot be read or belongs to another build of octavo.
    pub fn from_env() -> Result<Self, String> {
        let pack = pack_folder().map(|folder| KernelPack::read(&folder)).transpose().map_err(|e| e.to_string())?;
        pack.iter().try_for_each(KernelPack::check_all).map_err(|unfit| format!("OCTAVO_KERNEL_PACK: {unfit}"))?;
        Ok(Self { libraries: named_folders(), pack })
    }
}

/// Returns the folder in `OCTAVO_KERNEL_PACK`, if it is set.
pub fn pack_folder() -> Option<PathBuf> {
    std::env::var_os("OCTAVO_KERNEL_PACK").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

struct Loaded {
    gpu: Arc<Gpu>,
    kernels: Vec<(Instance, Kernel)>,
    /// Modules that hold their code.
    _modules: Vec<Module>,
}

impl Loaded {
    /// Loads the code of some instances.
    fn add(&mut self, code: &[u8], instances: &[Instance]) -> Result<(), String> {
        let named = |error: DriverError| {
            let names: Vec<_> = instances.iter().map(|instance| instance.name.as_str()).collect();
            format!("{}: {error}", names.join(", "))
        };
        let module = Module::new(&self.gpu, code).map_err(named)?;
        for instance in instances {
            let kernel = module.kernel(instance).map_err(named)?;
            self.kernels.push((instance.clone(), kernel));
        }
        self._modules.push(module);
        Ok(())
    }
}

/// An array's copy on the device.
struct Copy {
    array: HostArray,
    memory: DeviceMemory,
    /// Copied data: the array, and zeros up to a whole word.
    before: Vec<u32>,
}

/// Oldest chip that CUDA 13 supports, which is used to compile kernels for a V100.
const TURING: Chip = Chip { major: 7, minor: 5 };

impl DeviceKernels {
    /// Loads instances for the first device, from the pack or compiled with libraries from the folders of
    /// [`CudaConfig::libraries`]. An instance for the device's chip is machine code. An instance for a V100 only, or
    /// with `as_volta` every instance of a V100, is PTX of sm_70, which the driver compiles; PTX of sm_75 if neither
    /// the pack nor a compiler supports a V100.
    ///
    /// [`CudaConfig::libraries`]: crate::CudaConfig::libraries
    ///
    /// # Errors
    /// Returns a sentence that names what is missing, or the message of the compiler or the driver.
    pub fn new(places: &KernelPlaces, instances: &[Instance], as_volta: bool) -> Result<Self, String> {
        let folders = &places.libraries;
        let driver = Driver::open(folders).map_err(|e| e.to_string())?;
        let info = driver.device(0).map_err(|e| e.to_string())?;
        let chip = info.chip;
        let gpu = Gpu::new(driver, info, true).map_err(|e| e.to_string())?;
        let is_ptx = |i: &Instance| i.chips.contains(Chip::SM_70) && (as_volta || !i.chips.contains(chip));
        let mut loaded = Loaded { gpu, kernels: Vec::new(), _modules: Vec::new() };
        let packed = |instance: &Instance| {
            let target = if is_ptx(instance) { Target::Ptx(Chip::SM_70) } else { Target::Code(chip) };
            let pack = places.pack.as_ref()?;
            pack.check(target, Some(driver.version)).ok()?;
            pack.code(&Key::new(instance, target), target)
        };
        let mut missing = Vec::new();
        for instance in instances {
            match packed(instance) {
                Some(code) => loaded.add(&code, std::slice::from_ref(instance))?,
                None => missing.push(instance.clone()),
            }
        }
        if missing.is_empty() {
            return Ok(Self { loaded: Mutex::new(loaded) });
        }
        let found = Places::usual(folders).find(LibraryKind::Nvrtc);
        let mut programs = Vec::new();
        for source in manifest::sources(&missing) {
            for ptx in [false, true] {
                let is_own = |i: &&Instance| i.source == source && is_ptx(i) == ptx;
                let own: Vec<_> = missing.iter().filter(is_own).cloned().collect();
                if !own.is_empty() {
                    programs.push((source, ptx, own));
                }
            }
        }
        let volta = if compiler(&found, driver.version, Chip::SM_70).is_ok() { Chip::SM_70 } else { TURING };
        let codes = in_parallel(programs.len(), |number| {
            let (source, ptx, own) = &programs[number];
            let text = manifest::program(*source, own);
            let target = if *ptx { Target::Ptx(volta) } else { Target::Code(chip) };
            let (nvrtc, _) = compiler(&found, driver.version, target.chip())?;
            nvrtc.compile(source.path, &text, target).map(|compiled| compiled.code).map_err(|e| e.to_string())
        })?;
        for ((_, _, own), code) in programs.into_iter().zip(codes) {
            loaded.add(&code, &own)?;
        }
        Ok(Self { loaded: Mutex::new(loaded) })
    }

    /// Runs a kernel to its end. Addresses in `params` that are in one of `arrays` are replaced by those of its copy on
    /// the device. Afterwards the arrays have the content of the copies.
    ///
    /// # Safety
    /// The arrays to which `params` points must be memory of that length, which no other code accesses during the call
    /// and which may be written if it is writable.
    ///
    /// # Errors
    /// Returns the message of the driver, or an error if the kernel changed a read-only array.
    pub unsafe fn launch<P: Params>(
        &self,
        instance: &Instance,
        grid: [u32; 3],
        dynamic_shared: usize,
        params: &P,
        arrays: &[HostArray],
    ) -> Result<(), String> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let kernel = loaded.kernels.iter().find(|(known, _)| known == instance);
        let kernel = kernel.ok_or_else(|| format!("{} has not been compiled", instance.name))?.1;
        let gpu = &loaded.gpu;
        let mut copies: Vec<Copy> = Vec::new();
        let mut params = *params;
        for word in words(&mut params) {
            let Some(array) = arrays.iter().find(|array| array.holds(*word)) else { continue };
            let at = match copies.iter().position(|copy| copy.array == *array) {
                Some(at) => at,
                None => {
                    // SAFETY: an address in the array is among the parameters, so the caller guarantees that it is
                    // valid.
                    copies.push(unsafe { Copy::new(gpu, *array) }.map_err(|e| e.to_string())?);
                    copies.len() - 1
                }
            };
            *word = copies[at].memory.address() + (*word - array.start);
        }
        let shared = u32::try_from(dynamic_shared).map_err(|e| e.to_string())?;
        gpu.launch(kernel, grid, shared, &params).and_then(|()| gpu.synchronize()).map_err(|e| e.to_string())?;
        for copy in &copies {
            // SAFETY: the caller guarantees that writable arrays may be written.
            let unchanged = unsafe { copy.back(gpu) }.map_err(|e| e.to_string())?;
            if !unchanged {
                return Err(format!("{} wrote to an array that it may only read", instance.name));
            }
        }
        Ok(())
    }
}

/// Returns the parameters as 8-byte words, to which addresses are aligned.
fn words<P: Params>(params: &mut P) -> &mut [u64] {
    const { assert!(align_of::<P>() == 8 && size_of::<P>().is_multiple_of(8), "parameters begin with an address") };
    // SAFETY: `Params` guarantees plain numbers without padding; size and alignment are those of as many words.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(params).cast(), size_of::<P>() / 8) }
}

impl HostArray {
    fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.start).is_some_and(|at| at < self.bytes as u64)
    }
}

impl Copy {
    /// # Safety
    /// The array must be readable.
    unsafe fn new(gpu: &Arc<Gpu>, array: HostArray) -> Result<Self, DriverError> {
        let mut before = vec![0u32; array.bytes.div_ceil(size_of::<u32>())];
        // SAFETY: the caller guarantees that the array is readable, and there is room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(array.start as *const u8, before.as_mut_ptr().cast::<u8>(), array.bytes);
        }
        let memory = DeviceMemory::new(gpu, size_of_val(&before[..]) as u64)?;
        gpu.write(memory.address(), &before)?;
        Ok(Self { array, memory, before })
    }

    /// Copies it back if it may be written. Returns whether a read-only array is unchanged.
    ///
    /// # Safety
    /// A writable array must be valid for writing.
    unsafe fn back(&self, gpu: &Gpu) -> Result<bool, DriverError> {
        let mut after = vec![0u32; self.before.len()];
        gpu.download(&mut after, self.memory.address())?;
        if self.array.writable {
            // SAFETY: the caller guarantees that the array may be written and has that length.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    after.as_ptr().cast::<u8>(),
                    self.array.start as *mut u8,
                    self.array.bytes,
                );
            }
            return Ok(true);
        }
        Ok(after == self.before)
    }
}
