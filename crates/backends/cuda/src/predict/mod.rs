//! Predicted times of steps, without a GPU.
//!
//! The launches are those of the backend: a program is lowered for a chip as on a device, and its launches are listed instead of run
//! ([`Launcher`](crate::launcher::Launcher)). A model of time ([`time`]) turns each of them into seconds, by the figures of its
//! machine code ([`octavo_kernels::figures`]) and by what is assumed of a GPU ([`ChipModel`]).

mod chips;
mod paper;
mod time;
mod work;

use std::collections::BTreeMap;

use octavo_kernels::params::KV_BLOCK;
use octavo_ops::cost::{ElementBytes, StepShape, step_cost};
use octavo_ops::{BackendError, Program, StepBatch};

pub use chips::{CORRECTED_BY, ChipModel};
pub use time::Cause;

use crate::CudaConfig;
use crate::backend::usual_dtype;
use paper::{LIBRARY, PaperProgram};

/// Predicts the times of the steps of a program.
pub struct Predictor {
    chip: ChipModel,
    program: Program,
    paper: PaperProgram,
}

/// The predicted time of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrediction {
    /// Time in seconds.
    pub seconds: f64,
    /// The least time by the data sheet: weights, keys and values once, or all FLOPs.
    pub bound: f64,
    /// Number of launches.
    pub launches: usize,
    /// Its kernels, those that take most time first.
    pub kernels: Vec<KernelPrediction>,
}

/// All launches of a kernel with a weight of the same sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelPrediction {
    /// Name of the instance, `cublasLt`, `copy`, or `step` for what is no kernel.
    pub name: String,
    /// Sizes of the weight, `24576x4096`; empty if it has none.
    pub what: String,
    /// Number of launches.
    pub launches: usize,
    /// Time of all of them in seconds.
    pub seconds: f64,
    /// The least time of all of them.
    pub bound: f64,
    /// Seconds above the bound by cause, the largest first.
    pub losses: Vec<(Cause, f64)>,
    /// Whether nothing is known of the machine code: only bytes and FLOPs count.
    pub memory_only: bool,
}

impl KernelPrediction {
    /// Returns whether an assumption takes the place of machine code.
    pub fn is_assumed(&self) -> bool {
        self.name == LIBRARY
    }
}

/// A loss of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss<'a> {
    /// Where.
    pub kernel: &'a KernelPrediction,
    /// Why.
    pub cause: Cause,
    /// How much, in seconds.
    pub seconds: f64,
}

impl StepPrediction {
    /// Returns the losses, the largest first.
    pub fn losses(&self) -> Vec<Loss<'_>> {
        let mut losses = Vec::new();
        for kernel in &self.kernels {
            losses.extend(kernel.losses.iter().map(|&(cause, seconds)| Loss { kernel, cause, seconds }));
        }
        losses.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        losses
    }

    /// Returns the seconds that all kernels lose for a cause.
    pub fn lost(&self, cause: Cause) -> f64 {
        let losses = self.kernels.iter().flat_map(|kernel| &kernel.losses);
        losses.filter(|(of, _)| *of == cause).fold(0.0, |sum, (_, seconds)| sum + seconds)
    }

    /// Adds the prediction of a step that follows.
    pub fn add(&mut self, next: Self) {
        self.seconds += next.seconds;
        self.bound += next.bound;
        self.launches += next.launches;
        for kernel in next.kernels {
            match self.kernels.iter_mut().find(|known| known.name == kernel.name && known.what == kernel.what) {
                Some(known) => known.add(&kernel),
                None => self.kernels.push(kernel),
            }
        }
        self.sort();
    }

    fn sort(&mut self) {
        self.kernels.iter_mut().for_each(|kernel| kernel.losses.sort_by(|a, b| b.1.total_cmp(&a.1)));
        self.kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    }
}

impl KernelPrediction {
    fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.seconds += other.seconds;
        self.bound += other.bound;
        self.memory_only |= other.memory_only;
        for &(cause, seconds) in &other.losses {
            match self.losses.iter_mut().find(|known| known.0 == cause) {
                Some(known) => known.1 += seconds,
                None => self.losses.push((cause, seconds)),
            }
        }
    }
}

impl Predictor {
    /// Number of tokens of a KV block.
    pub const BLOCK_SIZE: usize = KV_BLOCK;

    /// Lowers a program for a GPU.
    ///
    /// # Errors
    /// The backend does not support the program on this chip.
    pub fn new(program: &Program, config: &CudaConfig, chip: ChipModel) -> Result<Self, BackendError> {
        let dtype = config.dtype.unwrap_or_else(|| usual_dtype(chip.chip));
        if !chip.chip.has(dtype) {
            return Err(crate::unsupported(format!("{} on {}", dtype.name(), chip.name)));
        }
        let paper = PaperProgram::new(program, config, (chip.chip, chip.sheet.processors), dtype)?;
        Ok(Self { chip, program: program.clone(), paper })
    }

    /// Returns the sizes of elements.
    pub fn elements(&self) -> ElementBytes {
        self.paper.elements()
    }

    /// Predicts the time of a step.
    ///
    /// # Errors
    /// An op cannot be launched.
    pub fn step(&self, batch: &StepBatch) -> Result<StepPrediction, BackendError> {
        let (launches, is_recorded) = self.paper.launches(batch)?;
        let mut kernels: BTreeMap<(String, String), KernelPrediction> = BTreeMap::new();
        let (mut count, mut after_ours) = (0, false);
        let timed = launches.into_iter().map(|launch| {
            count += 1;
            let is_ours = launch.instance.is_some();
            let gap = self.chip.gap(is_recorded, after_ours && is_ours);
            after_ours = is_ours;
            let time = self.chip.time(&launch, gap);
            (launch.name, launch.what, 1, time)
        });
        let step = ("step".to_owned(), String::new(), 0, self.chip.step());
        for (name, what, launches, time) in timed.chain([step]) {
            let time::LaunchTime { seconds, bound, losses, memory_only } = time;
            let new = KernelPrediction { name, what, launches, seconds, bound, losses, memory_only };
            let key = (new.name.clone(), new.what.clone());
            kernels.entry(key).and_modify(|known| known.add(&new)).or_insert(new);
        }
        let kernels: Vec<_> = kernels.into_values().collect();
        let seconds = kernels.iter().map(|kernel| kernel.seconds).sum();
        let cost = step_cost(&self.program, &StepShape::from_batch(batch), self.elements());
        let bound = cost.bound_seconds(&self.chip.sheet.peaks(true));
        let mut prediction = StepPrediction { seconds, bound, launches: count, kernels };
        prediction.sort();
        Ok(prediction)
    }
}
