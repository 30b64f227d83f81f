//! The model of time: how long a launch takes on a GPU, and which causes take it longer than its bound.
//!
//! The bound of a launch is the larger of two times: that of its weights, keys and values at the stated bandwidth, and that of its
//! FLOPs at the stated rate. A launch of our own kernels takes
//! - the gap to the launch before, which is shorter between two kernels of ours if the second may begin before the first ends;
//! - the time in which its first loads arrive, one after the other where one has the address of the next (*start*);
//! - the time of its waves of CTAs. All CTAs of a wave run at once, as many as registers and shared memory allow. A wave takes the
//!   longest of: its bytes at the rate of the memory; what it asks for at the rates of the second-level cache and of a
//!   multiprocessor's port; its instructions at the rate of the schedulers of the multiprocessor with most CTAs; its FLOPs at the
//!   rate of the tensor instructions; and the iterations of a CTA's main loop, each of which waits for its loads (*in flight*).
//!
//! What a fluid without CTAs would take beyond the bound counts for the slowest of these, and what whole CTAs add counts as *waves*.
//! Times of instructions on data in shared memory, of its banks, and of barriers are not modelled.

use std::fmt;

use octavo_kernels::figures;
use octavo_kernels::manifest::Instance;
use octavo_kernels::sources::{self, Source};
use octavo_kernels::usage::occupancy;

use super::chips::{ChipModel, ISSUED, LIBRARY_MEMORY, PORT_BYTES, STEP, WARP_CYCLES};
use super::paper::{LIBRARY, Launch};

/// Why a launch takes longer than its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The gap between two kernels.
    Gap,
    /// Loads that wait for each other before the main loop.
    Start,
    /// The memory delivers less than its data sheet states.
    Memory,
    /// Activations pass through the memory.
    Activations,
    /// Too few bytes are in flight.
    InFlight,
    /// The schedulers issue the instructions of no more warps.
    Issue,
    /// The second-level cache, or a multiprocessor's port to it.
    Cache,
    /// The tensor instructions of a warp reach less than the data sheet states.
    Tensor,
    /// CTAs that are too few, or the last of them.
    Waves,
    /// What the library is assumed to lose.
    Library,
    /// Copies, and the start of a step.
    Step,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 11] = [
        Self::Gap,
        Self::Start,
        Self::Waves,
        Self::InFlight,
        Self::Issue,
        Self::Memory,
        Self::Cache,
        Self::Activations,
        Self::Tensor,
        Self::Library,
        Self::Step,
    ];
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gap => "gap",
            Self::Start => "start",
            Self::Memory => "memory",
            Self::Activations => "activations",
            Self::InFlight => "in flight",
            Self::Issue => "issue",
            Self::Cache => "cache",
            Self::Tensor => "tensor",
            Self::Waves => "waves",
            Self::Library => "library",
            Self::Step => "step",
        })
    }
}

/// The time of a launch.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LaunchTime {
    /// Predicted time in seconds, with the gap before it.
    pub(super) seconds: f64,
    /// Bound in seconds.
    pub(super) bound: f64,
    /// Seconds above the bound by cause.
    pub(super) losses: Vec<(Cause, f64)>,
    /// Whether nothing is known of the machine code, so that only bytes and FLOPs were counted.
    pub(super) memory_only: bool,
}

/// Number of loads that wait for each other before and after a kernel's main loop. It follows from the sources: a decode plan, a block
/// table, keys; partial results that another CTA merges; a norm's sum before its weights. A product that normalises its input loads
/// its first weights meanwhile, and they take longer.
fn chain(source: Source, has_parts: bool) -> f64 {
    match source {
        sources::ATTENTION_DECODE | sources::ATTENTION_DECODE_VOLTA | sources::ATTENTION_LATENT => 5.0,
        sources::ATTENTION_PREFILL | sources::ATTENTION_PREFILL_VOLTA | sources::ATTENTION_PLAIN => 3.0,
        sources::GEMM_SKINNY | sources::GEMM_SKINNY_QUANT | sources::GEMM_SKINNY_VOLTA if has_parts => 3.0,
        // The parameters of a row, a ticket, and the parts of the other CTAs.
        sources::SAMPLING => 3.0,
        sources::ROWS | sources::QKV_POST => 2.0,
        _ => 1.0,
    }
}

/// Number of iterations of a main loop whose copies are in flight at once while others are multiplied: stages that are neither
/// multiplied nor about to be, and in attention all others. `None` where a warp waits for its own loads.
fn depth(instance: &Instance) -> Option<f64> {
    let busy = if instance.stage_keys.is_some() { 1 } else { 2 };
    Some(f64::from(instance.stages?.saturating_sub(busy).max(1)))
}

/// Returns whether a kernel has code for several cases, of which one runs in a CTA: rows that are no multiple of 16 bytes, activations,
/// or one of two weights.
fn has_cases(instance: &Instance) -> bool {
    let is_pair = instance.name.starts_with("mmvq_pair");
    is_pair || [sources::ROWS, sources::QKV_POST, sources::IMAGES, sources::GEMV_FUSED].contains(&instance.source)
}

/// Returns whether a kernel multiplies on the tensor cores.
fn has_tensor(source: Source) -> bool {
    ["#include \"tiles.h\"", "mma_m16n8k16(", "mma_m8n8k4_"].iter().any(|call| source.text.contains(call))
}

/// Rates and sizes of one launch of our own kernels, for a number of its CTAs.
struct Waves<'a> {
    chip: &'a ChipModel,
    /// CTAs that run at once.
    slots: f64,
    tasks: f64,
    /// Of a task: bytes of the memory, bytes that it asks for, instructions of its warps, FLOPs on tensor cores.
    memory: f64,
    asked: f64,
    instructions: f64,
    flops: f64,
    /// Time of its iterations one after the other.
    iterations: f64,
}

impl Waves<'_> {
    fn processors(&self) -> f64 {
        f64::from(self.chip.sheet.processors)
    }

    /// Times by cause of so many tasks at once, of which the busiest multiprocessor has `busiest`.
    fn times(&self, tasks: f64, busiest: f64, iterations: f64) -> [(Cause, f64); 5] {
        let chip = self.chip;
        let port = busiest * self.asked / (PORT_BYTES * chip.clock);
        let tensor = busiest * self.flops * self.processors() / (chip.sheet.half_flops * chip.tensor);
        [
            (Cause::Memory, tasks * self.memory / (chip.sheet.bandwidth * chip.memory)),
            (Cause::Cache, (tasks * self.asked / chip.cache_bandwidth).max(port)),
            (Cause::Issue, busiest * self.instructions / (ISSUED * chip.clock)),
            (Cause::Tensor, tensor),
            (Cause::InFlight, iterations),
        ]
    }

    /// Time of a wave.
    fn wave(&self, tasks: f64) -> f64 {
        if tasks <= 0.0 {
            return 0.0;
        }
        let busiest = (tasks / self.processors()).ceil();
        slowest(&self.times(tasks, busiest, self.iterations)).1
    }

    /// Time of all waves.
    fn seconds(&self) -> f64 {
        let whole = (self.tasks / self.slots).floor();
        whole * self.wave(self.slots) + self.wave(self.tasks - whole * self.slots)
    }

    /// Time and cause of a fluid, which all multiprocessors share evenly.
    fn fluid(&self, resident: f64) -> (Cause, f64) {
        let share = self.tasks / self.processors();
        slowest(&self.times(self.tasks, share, share / resident * self.iterations))
    }
}

fn slowest(times: &[(Cause, f64)]) -> (Cause, f64) {
    times.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((Cause::Memory, 0.0))
}

impl ChipModel {
    /// Returns the time of the work of a step beside its launches.
    pub(super) fn step(&self) -> LaunchTime {
        LaunchTime { seconds: STEP, bound: 0.0, losses: vec![(Cause::Step, STEP)], memory_only: false }
    }

    /// Returns the time between a launch and the one before, in a recorded graph or by themselves. `are_ours` tells whether both are
    /// kernels of ours.
    pub(super) fn gap(&self, is_recorded: bool, are_ours: bool) -> f64 {
        match self.early_gap {
            _ if !is_recorded => self.launch_gap,
            Some(gap) if are_ours => gap,
            _ => self.gap,
        }
    }

    /// Returns the time of a launch after a gap.
    pub(super) fn time(&self, launch: &Launch, gap: f64) -> LaunchTime {
        let work = &launch.work;
        let bound = (work.stored as f64 / self.sheet.bandwidth).max(work.flops as f64 / self.sheet.half_flops);
        // Activations that fill the cache have left it before they are used.
        let spilled = if work.activations > self.cache_bytes / 2 { work.activations } else { 0 };
        let mut losses = vec![(Cause::Gap, gap)];
        let mut memory_only = false;
        let busy = match &launch.instance {
            None => {
                let seconds = self.foreign(launch, spilled);
                losses.push((Cause::Library, seconds - bound));
                seconds
            }
            Some(instance) => {
                let waves = self.waves(launch, instance, spilled);
                memory_only = waves.instructions <= 0.0;
                losses.push((Cause::Start, chain(instance.source, launch.grid[1] > 1) * self.latency));
                let (cause, fluid) = waves.fluid(self.resident(launch, instance));
                let fluid = fluid.max(bound);
                let seconds = waves.seconds().max(fluid);
                self.lose(&mut losses, (cause, fluid - bound), spilled);
                losses.push((Cause::Waves, seconds - fluid));
                seconds
            }
        };
        losses.retain(|(_, seconds)| *seconds > 0.0);
        let fixed: f64 =
            losses.iter().filter(|loss| matches!(loss.0, Cause::Gap | Cause::Start)).map(|loss| loss.1).sum();
        LaunchTime { seconds: fixed + busy, bound, losses, memory_only }
    }

    /// Adds the loss of a fluid. Where that is the memory's, activations have their part.
    fn lose(&self, losses: &mut Vec<(Cause, f64)>, (cause, seconds): (Cause, f64), spilled: u64) {
        let activations = match cause {
            Cause::Memory => (spilled as f64 / (self.sheet.bandwidth * self.memory)).min(seconds),
            _ => 0.0,
        };
        losses.extend([(cause, seconds - activations), (Cause::Activations, activations)]);
    }

    /// Returns the time of a product of the library, or of a copy.
    fn foreign(&self, launch: &Launch, spilled: u64) -> f64 {
        let work = &launch.work;
        let (memory, flops) = match launch.name == LIBRARY {
            true => (LIBRARY_MEMORY, self.library),
            false => (self.memory, self.library),
        };
        let bytes = work.stored + spilled;
        (bytes as f64 / (self.sheet.bandwidth * memory)).max(work.flops as f64 / (self.sheet.half_flops * flops))
    }

    /// Returns the number of CTAs of a launch on a multiprocessor at once.
    fn resident(&self, launch: &Launch, instance: &Instance) -> f64 {
        let figures = figures::of(self.chip, &instance.name);
        let held = figures.and_then(|(usage, _)| occupancy(self.chip, &usage, instance.threads, launch.shared));
        f64::from(held.unwrap_or(1).max(1))
    }

    fn waves(&self, launch: &Launch, instance: &Instance, spilled: u64) -> Waves<'_> {
        let work = &launch.work;
        let tasks = if work.tasks > 0 { work.tasks } else { launch.ctas() }.max(1) as f64;
        let of_task = |n: u64| n as f64 / tasks;
        let (_, code) = figures::of(self.chip, &instance.name).unwrap_or_default();
        let (warps, threads) = (f64::from(instance.threads.div_ceil(32)), f64::from(instance.threads));
        let known = code.instructions > 0 && work.asked > 0;
        let iterations = match work.iterations {
            0 if code.loaded > 0 => of_task(work.asked) / (f64::from(code.loaded) * threads),
            iterations => iterations as f64,
        };
        let main_loop = f64::from(code.main_loop);
        let multiplied = main_loop * WARP_CYCLES / self.clock;
        let iteration = match depth(instance) {
            Some(depth) => (self.loaded_latency / depth).max(multiplied),
            None => self.loaded_latency + multiplied,
        };
        let around = f64::from(code.instructions.saturating_sub(code.main_loop));
        let around = if has_cases(instance) { around.min(main_loop) } else { around };
        let held = f64::from(self.sheet.processors) * self.resident(launch, instance);
        Waves {
            chip: self,
            slots: held.min(launch.ctas().max(1) as f64),
            tasks,
            memory: of_task(work.stored + spilled),
            asked: of_task(work.asked),
            instructions: if known { warps * (around + iterations * main_loop) } else { 0.0 },
            flops: if has_tensor(instance.source) { of_task(work.flops) } else { 0.0 },
            iterations: if known { iterations * iteration } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{self, Chip, Dtype};

    use super::*;
    use crate::predict::work::Work;

    const H200: ChipModel = ChipModel::ALL[0];

    fn launch(instance: Option<Instance>, name: &str, ctas: u32, work: Work) -> Launch {
        Launch { name: name.into(), what: String::new(), instance, grid: [ctas, 1, 1], shared: 0, work }
    }

    fn of(time: &LaunchTime, cause: Cause) -> f64 {
        time.losses.iter().filter(|loss| loss.0 == cause).map(|loss| loss.1).sum()
    }

    #[test]
    fn losses_are_what_a_launch_takes_beyond_its_bound() {
        let gemv = manifest::gemv(Dtype::Bf16, Dtype::Bf16, 1);
        let work = Work { stored: 1 << 26, activations: 1 << 13, asked: 100 << 20, flops: 1 << 26, ..Work::default() };
        let library = Work { flops: 1 << 40, ..work };
        for launch in [
            launch(Some(gemv.clone()), &gemv.name, 1024, work),
            launch(Some(gemv.clone()), &gemv.name, 3, work),
            launch(None, LIBRARY, 0, library),
            launch(None, "copy", 0, Work { activations: 1 << 28, ..Work::default() }),
        ] {
            let time = H200.time(&launch, H200.gap);
            let lost: f64 = time.losses.iter().map(|loss| loss.1).sum();
            assert!((time.seconds - time.bound - lost).abs() < 1e-12, "{launch:?}: {time:?}");
            assert!(time.losses.iter().all(|loss| loss.1 > 0.0), "{time:?}");
        }
    }

    #[test]
    fn few_ctas_wait_and_many_do_not() {
        let gemv = manifest::gemv(Dtype::Bf16, Dtype::Bf16, 1);
        let work = Work { stored: 1 << 30, asked: 1 << 30, ..Work::default() };
        let time = |ctas| H200.time(&launch(Some(gemv.clone()), &gemv.name, ctas, work), H200.gap);
        assert!(of(&time(20_000), Cause::Waves) < 0.02 * time(20_000).seconds, "{:?}", time(20_000));
        assert!(of(&time(20), Cause::Waves) > 0.5 * time(20).seconds, "{:?}", time(20));
        assert!(of(&time(20_000), Cause::Memory) > 0.0);
    }

    #[test]
    fn more_instructions_take_longer_than_the_memory() {
        let time = |rows| {
            let gemv = manifest::gemv(Dtype::Bf16, Dtype::Bf16, rows);
            let iterations = if rows <= 4 { 4 } else { 8 };
            let work = Work { stored: 1 << 28, asked: 1 << 28, iterations, ..Work::default() };
            H200.time(&launch(Some(gemv.clone()), &gemv.name, 8192, work), H200.gap)
        };
        assert_eq!(of(&time(1), Cause::Issue), 0.0, "{:?}", time(1));
        assert!(of(&time(16), Cause::Issue) > time(16).bound, "{:?}", time(16));
    }

    #[test]
    fn stages_of_decode_attention_are_in_flight() {
        let kernel = manifest::paged_decode(Chip::SM_90, Dtype::Bf16, 128, 4);
        let found = kernel.map(|kernel| depth(&kernel.instance));
        assert_eq!(found, Some(Some(1.0)));
    }

    #[test]
    fn what_is_not_known_of_a_kernel_is_said() {
        let gemv = manifest::gemv(Dtype::Bf16, Dtype::Bf16, 1);
        let work = Work { stored: 1 << 28, ..Work::default() };
        assert!(H200.time(&launch(Some(gemv.clone()), &gemv.name, 8192, work), H200.gap).memory_only);
        let unknown = Instance { name: "none".into(), ..gemv };
        let work = Work { asked: 1 << 28, ..work };
        assert!(H200.time(&launch(Some(unknown), "none", 8192, work), H200.gap).memory_only);
    }

    #[test]
    fn launches_are_closer_in_a_graph_and_closest_among_our_own() {
        let copy = launch(None, "copy", 0, Work::default());
        let time = |(is_recorded, are_ours)| H200.time(&copy, H200.gap(is_recorded, are_ours)).seconds;
        let found = [(false, false), (false, true), (true, false), (true, true)].map(time);
        assert_eq!(found, [H200.launch_gap, H200.launch_gap, H200.gap, H200.early_gap.unwrap()]);
        let old = ChipModel { early_gap: None, ..H200 };
        assert_eq!(old.gap(true, true), old.gap);
    }
}
