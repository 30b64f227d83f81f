//! Measurement of the time of each kernel at the sizes of a model, for `octavo bench kernels`.
//!
//! A kernel is launched repeatedly on different copies of its operands, so many that none is still in the level-2 cache
//! when it is used again. The launches are one recorded graph, whose time is divided by their number. Operands are
//! random numbers and never zeros, which a device multiplies faster.

mod attention;
mod cases;
mod ceilings;
mod experts;
mod fused;
mod lora;
mod products;
mod rows;

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_kernels::manifest::Dtype;
use octavo_ops::BackendError;
use octavo_ops::cost::Peaks;
use octavo_ops::dummy::DummyRule;

use crate::arena::{Arena, Region};
use crate::build::{Builder, Kernels};
use crate::driver::Gpu;
use crate::dummy::Fill;
use crate::libraries::cublaslt::{CublasLt, WORKSPACE};
use crate::loaded::Opened;
use crate::peaks::{cache_bytes, peaks};
use crate::{CudaBackend, failed};

use cases::{Case, Cases};
pub use ceilings::{Ceilings, CeilingsBench, ProductRate};

/// Sizes of the model and of the steps whose kernels are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelBench {
    /// Hidden size H.
    pub hidden: usize,
    /// Number of columns of the gated activation.
    pub inner: usize,
    /// Experts, if the model has any.
    pub experts: Option<ExpertSizes>,
    /// Numbers of query heads and of key-value heads, and number of elements of a head.
    pub heads: octavo_ops::HeadShape,
    /// Number of layers, because a KV block contains all of them.
    pub layers: usize,
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Numbers of rows of decode steps.
    pub batch_sizes: Vec<usize>,
    /// Numbers of tokens of each of their sequences.
    pub contexts: Vec<usize>,
    /// Numbers of rows of prefill steps, which are the tokens of one prompt.
    pub prefill: Vec<usize>,
    /// Text that the name or the sizes of a kernel must contain to be measured.
    pub filter: Option<String>,
    /// Minimum duration of one measurement of a kernel.
    pub min_time: Duration,
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    /// Number of experts.
    pub count: usize,
    /// Number of experts of a token.
    pub chosen: usize,
    /// Number of columns of an expert's gated activation.
    pub inner: usize,
}

/// Time of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Name of the instance, or `cublasLt`.
    pub kernel: String,
    /// Description of the operands: `gate_up 24576x4096, 8 rows`.
    pub what: String,
    /// Median time of a launch in seconds, including the start of the next one.
    ///
    /// # Errors
    /// Contains the reason why there is no time.
    pub seconds: Result<f64, Unmeasured>,
    /// Minimum number of bytes moved.
    pub bytes: u64,
    /// Number of floating-point operations.
    pub flops: u64,
    /// Number of copies of its operands that were used in turn.
    pub copies: usize,
}

/// Reason why a kernel was not measured, while others may be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmeasured {
    /// The operands exceed the memory.
    #[error("does not fit the memory")]
    Memory,
    /// A required library was not found.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A library or the driver refused the launch.
    #[error("refused: {0}")]
    Refused(String),
}

/// Number of measurements of a kernel, of which the median counts.
const MEASUREMENTS: usize = 7;

/// Maximum number of launches in a graph.
const MOST: usize = 4096;

/// Number of level-2 caches that the copies of operands fill.
const CACHES: u64 = 3;

/// Values of the operands.
const OPERANDS: DummyRule = DummyRule { seed: 1, centre: 0.0, spread: 1.0 };

/// Location of a case's operands: a copy of its data, and the integer arrays shared by all copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    data: u64,
    tables: u64,
}

impl At {
    /// Returns the address of an operand.
    fn data(self, region: Region) -> u64 {
        self.data + region.offset
    }

    /// Returns the address of an array by its first word.
    fn table(self, word: usize) -> u64 {
        self.tables + (word * size_of::<u32>()) as u64
    }
}

impl CudaBackend {
    /// Returns the limits stated by the device's manufacturer for the backend's element type; `None` if they are
    /// unknown.
    pub fn stated_peaks(&self) -> Option<Peaks> {
        let opened = self.opened();
        peaks(opened.gpu, opened.dtype)
    }

    /// Prepares the measurement of kernels. No model needs to be loaded.
    ///
    /// # Errors
    /// Returns an error if there is no compiler for the kernels, or the device fails.
    pub fn kernel_bencher(&self, bench: &KernelBench) -> Result<KernelBencher<'_>, BackendError> {
        let opened = self.opened();
        opened.gpu.bind()?;
        KernelBencher::new(&opened, bench)
    }
}

/// Measures kernels one after the other.
pub struct KernelBencher<'a> {
    gpu: &'a Arc<Gpu>,
    dtype: Dtype,
    launcher: Launcher,
    fill: Fill,
    cases: Vec<Case>,
    memory: Arena,
    /// Size of cuBLASLt's workspace and of the integer arrays in bytes, which come before the operands.
    table_bytes: u64,
    cache_bytes: u64,
    min_time: Duration,
}

/// Launches cases.
pub(crate) struct Launcher {
    gpu: Arc<Gpu>,
    kernels: Kernels,
    library: Option<CublasLt>,
}

impl<'a> KernelBencher<'a> {
    fn new(opened: &Opened<'a>, bench: &KernelBench) -> Result<Self, BackendError> {
        let (gpu, dtype) = (opened.gpu, opened.dtype);
        let builder = Builder { gpu, driver: opened.driver, config: opened.config };
        let with_library = dtype != Dtype::F32;
        let mut cases = Cases::new(bench, gpu.info(), dtype);
        cases.all(with_library);
        let Cases { list, instances, products, .. } = cases;
        let kernels = builder.build(&instances)?;

        let cache_bytes = cache_bytes(gpu).unwrap_or(0);
        let words = list.iter().map(|case| case.tables.len()).max().unwrap_or(0);
        let table_bytes = ((words * size_of::<u32>()) as u64).next_multiple_of(ALIGNMENT);
        let free = gpu.memory()?.0 / 10 * 9;
        let operands = list.iter().map(|case| case.footprint * case.copies(cache_bytes) as u64);
        let wanted = operands.max().unwrap_or(0) + table_bytes + WORKSPACE;
        let memory = Arena::new(gpu, wanted.min(free), "operands")?;
        let library = if with_library && !products.is_empty() { opened.cublaslt(memory.start()) } else { None };
        let mut launcher = Launcher { gpu: gpu.clone(), kernels, library };
        if let Some(library) = &mut launcher.library {
            for (shape, rows) in products {
                library.prepare(shape, rows, None);
            }
        }
        let table_bytes = table_bytes + WORKSPACE;
        let fill = Fill::for_dtype(&builder, dtype)?;
        let min_time = bench.min_time;
        let cases = list.into_iter().filter(|case| launcher.library.is_some() || !case.needs_library).collect();
        Ok(Self { gpu, dtype, launcher, fill, cases, memory, table_bytes, cache_bytes, min_time })
    }

    /// Returns the kernels and their sizes, in the order of their numbers.
    pub fn cases(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.cases.iter().map(|case| (case.kernel.as_str(), case.what.as_str()))
    }

    /// Measures a kernel by its number.
    ///
    /// # Errors
    /// Returns an error if the device no longer works, so that no other kernel can be measured either. A launch that a
    /// library or the driver refuses is part of the result.
    pub fn measure(&self, number: usize) -> Result<KernelTime, BackendError> {
        let case = &self.cases[number];
        let room = self.memory.bytes().saturating_sub(self.table_bytes);
        let copies = case.copies(self.cache_bytes).min((room / case.footprint.max(1)) as usize);
        let seconds = match copies {
            0 => Err(Unmeasured::Memory),
            _ => match self.seconds(case, copies) {
                Ok(seconds) => Ok(seconds),
                // After a fault of a kernel every call fails; after a refusal the device is unchanged.
                Err(error) => match self.gpu.synchronize() {
                    Ok(()) => Err(Unmeasured::Refused(error.to_string())),
                    Err(_) => return Err(error),
                },
            },
        };
        let (kernel, what) = (case.kernel.clone(), case.what.clone());
        Ok(KernelTime { kernel, what, seconds, bytes: case.bytes, flops: case.flops, copies })
    }

    fn seconds(&self, case: &Case, copies: usize) -> Result<f64, BackendError> {
        // The operands are written again for each case, because results grow when they are used as operands of the
        // next.
        let operands = copies as u64 * case.footprint / self.dtype.bytes() as u64;
        self.fill.write(self.memory.start() + self.table_bytes, operands, self.dtype, &OPERANDS)?;
        let tables = self.memory.start() + WORKSPACE;
        if !case.tables.is_empty() {
            self.gpu.write(tables, &case.tables)?;
        }
        let at = |copy: usize| At {
            data: self.memory.start() + self.table_bytes + (copy % copies) as u64 * case.footprint,
            tables,
        };
        launch_seconds(self.gpu, self.min_time, &|launch| (case.launch)(&self.launcher, at(launch)))
    }
}

/// Returns the median time of a launch in seconds. `launch` is called with the number of the launch. Launches of at
/// least `min_time` are recorded as one graph, which runs [`MEASUREMENTS`] times.
fn launch_seconds(
    gpu: &Arc<Gpu>,
    min_time: Duration,
    launch: &dyn Fn(usize) -> Result<(), BackendError>,
) -> Result<f64, BackendError> {
    let timed = |work: &dyn Fn() -> Result<(), BackendError>| -> Result<Duration, BackendError> {
        let begun = Instant::now();
        work()?;
        gpu.synchronize()?;
        Ok(begun.elapsed())
    };
    // The first launch includes initialisation.
    launch(0)?;
    gpu.synchronize()?;
    let once = timed(&|| launch(1))?;
    let repetitions = min_time.as_secs_f64() / once.as_secs_f64().max(1e-9);
    let launches = (repetitions as usize).clamp(1, MOST);
    let graph = gpu.capture(|| (0..launches).try_for_each(launch))?;
    let run = || Ok(graph.launch()?);
    timed(&run)?;
    let mut times = (0..MEASUREMENTS).map(|_| timed(&run)).collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    Ok(times[MEASUREMENTS / 2].as_secs_f64() / launches as f64)
}

/// Alignment of operands in bytes.
const ALIGNMENT: u64 = 256;

/// Returns the error of a product that cuBLASLt was not asked to plan, which is a defect of the cases.
fn unplanned() -> BackendError {
    failed("cuBLASLt is not there")
}
