//! Launches kernels on the CPU emulation, or with `OCTAVO_GPU=1` on the first GPU. On a GPU the arrays of a test are
//! copied to the device for each launch and back, so that a test need not know about it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};

use octavo_backend_cuda::testing::{DeviceKernels, HostArray, KernelPlaces};
use octavo_backend_cuda::{named_folders, probe};
use octavo_kernels::emulation::{BankUse, Emulation, Order};
use octavo_kernels::manifest::{Chip, Dtype, Instance};
use octavo_kernels::params::Params;

use crate::races::Edit;

/// Environment variable: with 1, kernels run on the first GPU; with `volta` too, and kernels of a V100 run as its PTX.
pub(crate) const GPU: &str = "OCTAVO_GPU";

fn gpu() -> Option<String> {
    std::env::var(GPU).ok().filter(|asked| asked != "0" && !asked.is_empty())
}

/// Returns whether kernels run on a device.
pub(crate) fn on_device() -> bool {
    gpu().is_some()
}

/// Returns the chip on which kernels run; `None` for the emulation, which supports the kernels of every chip.
fn chip() -> Option<Chip> {
    static CHIP: LazyLock<Option<Chip>> =
        LazyLock::new(|| gpu().map(|_| probe(&named_folders()).usable(0).unwrap_or_else(|e| panic!("{e}")).chip));
    *CHIP
}

/// Returns the element types of the kernels that can run.
pub(crate) fn dtypes() -> Vec<Dtype> {
    Dtype::ALL.into_iter().filter(|dtype| chip().is_none_or(|chip| chip.has(*dtype))).collect()
}

/// Returns whether kernels for sm_80 and later run.
pub(crate) fn has_sm80() -> bool {
    chip().is_none_or(Chip::has_sm80)
}

/// Returns whether kernels for the chips of data centres from Hopper on run, which have most shared memory.
pub(crate) fn has_large_memory() -> bool {
    chip().is_none_or(|chip| matches!(chip.major, 9 | 10))
}

/// Returns whether kernels that multiply 8-bit floating-point numbers run.
pub(crate) fn has_fp8_mma() -> bool {
    chip().is_none_or(Chip::has_fp8_mma)
}

/// Returns whether the chip has 8-bit floating-point numbers.
pub(crate) fn has_fp8() -> bool {
    chip().is_none_or(Chip::has_fp8)
}

/// Instances that can be launched.
pub(crate) enum Kernels {
    /// Compiled when the first is launched.
    Emulated(Vec<Instance>, OnceLock<Emulation>),
    OnDevice(DeviceKernels),
}

thread_local! {
    /// The change of the sources with which kernels of this thread run while races are found.
    static EDIT: Cell<Option<&'static Edit>> = const { Cell::new(None) };
}

/// Returns whether `work` panics, and with what. A race in it ends the launch of a kernel on the emulation. Kernels are
/// compiled from sources with the change `edit`.
pub(crate) fn finding_races(edit: &'static Edit, work: impl FnOnce()) -> Result<(), String> {
    EDIT.set(Some(edit));
    let result = catch_unwind(AssertUnwindSafe(work));
    EDIT.set(None);
    result.map_err(|panic| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(_) => "a panic without a text".to_owned(),
    })
}

/// Returns whether [`finding_races`] is at work in this thread.
pub(crate) fn finds_races() -> bool {
    EDIT.get().is_some()
}

/// Returns an instance that finds races, compiled once.
fn finding(edit: &'static Edit, instance: &Instance) -> &'static Emulation {
    type Loaded = HashMap<(&'static str, String), &'static Emulation>;
    // A mutant's libraries are not used again, but a library is never unloaded.
    static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded.entry((edit.name.as_str(), instance.name.clone())).or_insert_with(|| {
        let emulation = Emulation::finding_races(std::slice::from_ref(instance), |source, instances| {
            edit.apply(source.path, octavo_kernels::manifest::program(source, instances))
        });
        Box::leak(Box::new(emulation.unwrap_or_else(|e| panic!("{e}"))))
    })
}

impl Kernels {
    pub(crate) fn new(instances: &[Instance]) -> Self {
        match gpu() {
            None => Self::Emulated(instances.to_vec(), OnceLock::new()),
            Some(asked) => {
                let places = KernelPlaces::from_env();
                let kernels = places.and_then(|places| DeviceKernels::new(&places, instances, asked == "volta"));
                Self::OnDevice(kernels.unwrap_or_else(|e| panic!("{e}")))
            }
        }
    }

    /// Returns the bank use of the launches of `work`; `None` on a device, which does not report it.
    pub(crate) fn bank_use(&self, work: impl FnOnce()) -> Option<BankUse> {
        match self {
            Self::Emulated(instances, loaded) => Some(Self::emulation(instances, loaded).bank_use(work)),
            Self::OnDevice(_) => None,
        }
    }

    fn emulation<'a>(instances: &[Instance], loaded: &'a OnceLock<Emulation>) -> &'a Emulation {
        loaded.get_or_init(|| Emulation::new(instances).unwrap_or_else(|e| panic!("{e}")))
    }

    /// Launches an instance with this dynamic shared memory. The order of threads applies to the emulation; on a device
    /// it is arbitrary.
    pub(crate) fn launch<P: Params>(
        &self,
        order: Order,
        instance: &Instance,
        grid: [u32; 3],
        dynamic_shared: usize,
        params: &P,
    ) {
        // SAFETY: tests pass addresses of memory that they own and that outlives the launch, from `address` and
        // `address_mut`.
        let result = unsafe {
            match self {
                Self::Emulated(instances, loaded) => {
                    let emulation = match EDIT.get() {
                        Some(edit) => finding(edit, instance),
                        None => Self::emulation(instances, loaded),
                    };
                    emulation.launch(order, instance, grid, dynamic_shared, params).map_err(|e| e.to_string())
                }
                Self::OnDevice(kernels) => {
                    ARRAYS.with_borrow(|arrays| kernels.launch(instance, grid, dynamic_shared, params, arrays))
                }
            }
        };
        result.unwrap_or_else(|e| panic!("{}: {e}", instance.name));
    }
}

thread_local! {
    /// Arrays whose addresses this thread has requested. Some may have been freed since; no parameters refer to them.
    static ARRAYS: RefCell<Vec<HostArray>> = const { RefCell::new(Vec::new()) };
}

fn note<T>(values: &[T], writable: bool) -> u64 {
    let mut array = HostArray { start: values.as_ptr() as u64, bytes: size_of_val(values), writable };
    if array.bytes > 0 && on_device() {
        ARRAYS.with_borrow_mut(|arrays| {
            // An array that is read and written by the same launch stays writable; former arrays at this address are
            // gone.
            array.writable |=
                arrays.iter().any(|old| (old.start, old.bytes, old.writable) == (array.start, array.bytes, true));
            arrays.retain(|old| {
                old.start >= array.start + array.bytes as u64 || array.start >= old.start + old.bytes as u64
            });
            arrays.push(array);
        });
    }
    array.start
}

/// Returns the address from which a kernel reads the elements.
pub(crate) fn address<T>(values: &[T]) -> u64 {
    note(values, false)
}

/// Returns the address at which a kernel reads and writes the elements.
pub(crate) fn address_mut<T>(values: &mut [T]) -> u64 {
    note(values, true)
}
