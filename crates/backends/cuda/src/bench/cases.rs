//! The kernels to measure: instance, sizes, operands.

use octavo_kernels::manifest::{Chip, Dtype, Instance};
use octavo_kernels::params::Params;
use octavo_ops::BackendError;

use super::{At, CACHES, KernelBench, Launcher, MOST, unplanned};
use crate::arena::Plan;
use crate::build::Instances;
use crate::libraries::cublaslt::{Operands, Shape, bucket};
use crate::{DeviceInfo, failed};

/// A kernel with operands of certain sizes.
pub(crate) struct Case {
    pub(crate) kernel: String,
    pub(crate) what: String,
    pub(crate) bytes: u64,
    pub(crate) flops: u64,
    /// Size of one copy of the operands in bytes.
    pub(crate) footprint: u64,
    /// Integer arrays: ids, positions, block tables, plans.
    pub(crate) tables: Vec<u32>,
    pub(crate) needs_library: bool,
    pub(crate) launch: Launch,
}

type Launch = Box<dyn Fn(&Launcher, At) -> Result<(), BackendError>>;

impl Case {
    /// Returns the number of copies of the operands that fill the level-2 cache several times, at least two.
    pub(crate) fn copies(&self, cache_bytes: u64) -> usize {
        let copies = (CACHES * cache_bytes).div_ceil(self.footprint.max(1)) + 1;
        copies.clamp(2, MOST as u64) as usize
    }
}

/// Work of a kernel, passed by the code that adds its case.
pub(super) struct Work {
    /// Description of the operands.
    pub(super) what: String,
    /// Minimum number of bytes moved.
    pub(super) bytes: usize,
    pub(super) flops: usize,
    /// Locations of the operands in a copy.
    pub(super) plan: Plan,
    pub(super) tables: Tables,
}

/// The requested cases.
pub(super) struct Cases<'a> {
    pub(super) bench: &'a KernelBench,
    pub(super) device: &'a DeviceInfo,
    pub(super) dtype: Dtype,
    pub(super) list: Vec<Case>,
    pub(super) instances: Instances,
    /// Products that cuBLASLt must plan.
    pub(super) products: Vec<(Shape, u32)>,
}

impl<'a> Cases<'a> {
    pub(super) fn new(bench: &'a KernelBench, device: &'a DeviceInfo, dtype: Dtype) -> Self {
        Self { bench, device, dtype, list: Vec::new(), instances: Instances::default(), products: Vec::new() }
    }

    pub(super) fn all(&mut self, with_library: bool) {
        self.products(with_library);
        self.fused();
        self.experts();
        self.lora();
        self.attention();
        self.rows();
        self.sampling();
    }

    pub(super) fn chip(&self) -> Chip {
        self.device.chip
    }

    /// Returns the size of an element in bytes.
    pub(super) fn size(&self) -> usize {
        self.dtype.bytes()
    }

    /// Returns the number of rows of every step.
    pub(super) fn row_counts(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = self.bench.batch_sizes.iter().chain(&self.bench.prefill).copied().collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    fn wants(&self, kernel: &str, what: &str) -> bool {
        self.bench
            .filter
            .as_ref()
            .is_none_or(|filter| kernel.contains(filter.as_str()) || what.contains(filter.as_str()))
    }

    /// Adds a kernel. `make` returns its parameters and its grid, which may depend on the number of threads of a block.
    pub(super) fn kernel<P: Params + 'static>(
        &mut self,
        instance: Instance,
        work: Work,
        make: impl Fn(At, u32) -> (P, [u32; 3]) + 'static,
    ) {
        self.kernel_with_shared(instance, work, None, make);
    }

    /// Adds a kernel with this amount of dynamic shared memory in bytes instead of the maximum.
    pub(super) fn kernel_with_shared<P: Params + 'static>(
        &mut self,
        instance: Instance,
        work: Work,
        shared: Option<u32>,
        make: impl Fn(At, u32) -> (P, [u32; 3]) + 'static,
    ) {
        if !self.wants(&instance.name, &work.what) {
            return;
        }
        let name = instance.name.clone();
        let id = self.instances.id(instance);
        let launch = move |launcher: &Launcher, at: At| {
            let kernel = launcher.kernels.get(id);
            let (params, grid) = make(at, kernel.threads);
            Ok(launcher.gpu.launch(kernel, grid, shared.unwrap_or(kernel.shared), &params)?)
        };
        self.push(name, work, false, Box::new(launch));
    }

    /// Adds kernels that are launched one after the other with the same parameters and grid.
    pub(super) fn sequence<P: Params + 'static>(
        &mut self,
        name: &str,
        instances: impl IntoIterator<Item = Instance>,
        work: Work,
        make: impl Fn(At) -> (P, [u32; 3]) + 'static,
    ) {
        if !self.wants(name, &work.what) {
            return;
        }
        let ids: Vec<_> = instances.into_iter().map(|instance| self.instances.id(instance)).collect();
        let launch = move |launcher: &Launcher, at: At| {
            let (params, grid) = make(at);
            ids.iter().try_for_each(|id| {
                let kernel = launcher.kernels.get(*id);
                Ok(launcher.gpu.launch(kernel, grid, kernel.shared, &params)?)
            })
        };
        self.push(name.to_owned(), work, false, Box::new(launch));
    }

    /// Adds a product of cuBLASLt.
    pub(super) fn library(&mut self, shape: Shape, rows: u32, work: Work, make: impl Fn(At) -> Operands + 'static) {
        const NAME: &str = "cublasLt";
        if !self.wants(NAME, &work.what) {
            return;
        }
        let rows = bucket(rows);
        self.products.push((shape, rows));
        let launch = move |launcher: &Launcher, at: At| {
            let library = launcher.library.as_ref().ok_or_else(unplanned)?;
            match library.run(shape, rows, &make(at))? {
                true => Ok(()),
                false => Err(failed(format!("cuBLASLt does not multiply {shape:?} on {rows} rows"))),
            }
        };
        self.push(NAME.to_owned(), work, true, Box::new(launch));
    }

    fn push(&mut self, kernel: String, work: Work, needs_library: bool, launch: Launch) {
        let Work { what, bytes, flops, plan, tables } = work;
        let (bytes, flops, tables) = (bytes as u64, flops as u64, tables.words);
        self.list.push(Case { kernel, what, bytes, flops, footprint: plan.bytes(), tables, needs_library, launch });
    }
}

/// Concatenated integer arrays.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    words: Vec<u32>,
}

impl Tables {
    /// Adds an array and returns its first word.
    pub(super) fn add(&mut self, values: impl IntoIterator<Item = u32>) -> usize {
        // Arrays are aligned to 16 bytes, as in a step.
        self.words.resize(self.words.len().next_multiple_of(4), 0);
        let start = self.words.len();
        self.words.extend(values);
        start
    }
}

/// Formats a count: `1 row`, `8 rows`.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
