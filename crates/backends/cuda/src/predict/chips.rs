//! The GPUs for which times are predicted, and everything that is assumed of them.
//!
//! A measurement corrects a figure here, in one place, and is named in [`CORRECTED_BY`].

use octavo_kernels::manifest::Chip;
use octavo_ops::datasheet::DataSheet;

/// Measurements on GPUs by which the figures were corrected, for people.
pub const CORRECTED_BY: &[&str] = &[];

/// A GPU, as far as times depend on it.
///
/// Sources: *sheet*: the maker's data sheet, in [`DataSheet`]. *Luo*: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
/// Architecture", arXiv 2402.13499. *Jia*: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv
/// 1804.06826. *C&C*: Chips and Cheese, "Nvidia's H100: Funny L2, and Tons of Bandwidth" (2023) and its microbenchmarks of Ada.
/// *HR*: Hazy Research, "Look Ma, No Bubbles!" (2025). Whatever has no source is an assumption.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChipModel {
    /// Name for the command line: `H200`.
    pub name: &'static str,
    /// Compute capability.
    pub chip: Chip,
    /// Limits that the maker states. The bound is computed with them.
    pub sheet: DataSheet,
    /// Clock of the multiprocessors in Hz: that of the stated FLOP/s (*sheet*). A power limit may lower it.
    pub clock: f64,
    /// Share of the stated bandwidth that the memory delivers. H200: 4.3 of 4.8 TB/s, a copy measured on the device. V100: 790 of 900
    /// GB/s, a copy (paranumal.com, 2018). The others: assumed between.
    pub memory: f64,
    /// Time in seconds from a load of an idle memory to its value. H100: 479 cycles, L40S: 542 of an RTX 4090 (*Luo*). V100: about 400
    /// cycles (*Jia*). The cycles are those of the devices on which they were measured.
    pub latency: f64,
    /// The same under load, which decides how many bytes must be in flight. Assumed as about twice that of an idle memory.
    pub loaded_latency: f64,
    /// Bytes per second that the second-level cache delivers: *C&C* for Hopper and Ada, *Jia* for Volta.
    pub cache_bandwidth: f64,
    /// Size of that cache in bytes (*sheet*).
    pub cache_bytes: u64,
    /// Time in seconds between two kernels of a recorded graph: 1.3 µs on an H100 (*HR*). The others: assumed alike.
    pub gap: f64,
    /// The same between two kernels of ours of which the second may begin before the first ends; `None` before sm_90. Assumed as half.
    /// It fits what llama.cpp reports on an RTX PRO 6000 (pull request 22522): 0.35 ms less for a token of a model of 24 layers.
    pub early_gap: Option<f64>,
    /// Time in seconds between two kernels that are launched one by one: 2.1 µs on an H100 (*HR*).
    pub launch_gap: f64,
    /// Share of the stated FLOP/s that the tensor instructions of a warp reach: 62.9 % on Hopper (*Luo*). The others: assumed, with the
    /// clock that a power limit leaves.
    pub tensor: f64,
    /// Share of the stated FLOP/s that cuBLASLt reaches. H200: 769 to 798 of 989 TFLOP/s, measured on the device for large square
    /// matrices. The others: assumed.
    pub library: f64,
}

/// Share of the stated bandwidth that cuBLASLt reaches with few rows: assumed, as nothing is known of its code.
pub(super) const LIBRARY_MEMORY: f64 = 0.8;

/// Instructions that a multiprocessor issues in a cycle: one for each of its four schedulers.
pub(super) const ISSUED: f64 = 4.0;

/// Cycles from one instruction of a warp to its next: results arrive after four cycles (*Jia*), and half of the instructions are assumed
/// to depend on the one before.
pub(super) const WARP_CYCLES: f64 = 2.0;

/// Bytes that a multiprocessor takes from the second-level cache in a cycle: its port has 64.
pub(super) const PORT_BYTES: f64 = 64.0;

/// Time in seconds of a step beside its kernels: copies of its arrays and its tokens, the start of a graph. Assumed.
pub(super) const STEP: f64 = 20e-6;

const HOPPER: ChipModel = ChipModel {
    name: "H200",
    chip: Chip::SM_90,
    sheet: DataSheet::H200,
    clock: 1.83e9,
    memory: 0.9,
    latency: 479.0 / 1.755e9,
    loaded_latency: 700e-9,
    cache_bandwidth: 5.5e12,
    cache_bytes: 50 << 20,
    gap: 1.3e-6,
    early_gap: Some(0.65e-6),
    launch_gap: 2.1e-6,
    tensor: 0.629,
    library: 0.78,
};

impl ChipModel {
    /// The GPUs.
    pub const ALL: [Self; 4] = [
        HOPPER,
        Self { name: "H100", sheet: DataSheet::H100, ..HOPPER },
        Self {
            name: "L40S",
            chip: Chip::SM_89,
            sheet: DataSheet::L40S,
            clock: 2.49e9,
            memory: 0.88,
            latency: 542.0 / 2.52e9,
            loaded_latency: 600e-9,
            cache_bandwidth: 4.5e12,
            cache_bytes: 96 << 20,
            early_gap: None,
            tensor: 0.65,
            library: 0.65,
            ..HOPPER
        },
        Self {
            name: "V100",
            chip: Chip::SM_70,
            sheet: DataSheet::V100,
            clock: 1.53e9,
            memory: 0.88,
            latency: 400.0 / 1.38e9,
            loaded_latency: 600e-9,
            cache_bandwidth: 2.155e12,
            cache_bytes: 6 << 20,
            early_gap: None,
            tensor: 0.7,
            library: 0.75,
            ..HOPPER
        },
    ];

    /// Finds a GPU by its name, in any case.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_reaches_is_less_than_its_data_sheet() {
        for model in ChipModel::ALL {
            for share in [model.memory, model.tensor, model.library] {
                assert!((0.5..1.0).contains(&share), "{}", model.name);
            }
            assert!(model.loaded_latency > model.latency && model.launch_gap > model.gap, "{}", model.name);
            assert_eq!(model.early_gap.is_some(), model.chip.has_sm90(), "{}", model.name);
            assert!(model.early_gap.is_none_or(|gap| gap < model.gap), "{}", model.name);
            assert!(model.cache_bandwidth > model.sheet.bandwidth, "{}", model.name);
            // FLOPs of a multiprocessor per cycle.
            let flops = model.sheet.half_flops / f64::from(model.sheet.processors) / model.clock;
            let stated = [1024.0, 4096.0].map(|stated| (flops / stated - 1.0).abs());
            assert!(stated.into_iter().any(|off| off < 0.01), "{}: {flops}", model.name);
            assert_eq!(ChipModel::find(&model.name.to_lowercase()), Some(model));
        }
        assert_eq!(ChipModel::find("H300"), None);
    }
}
