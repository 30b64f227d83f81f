//! What the simulator knows of a device.

use std::time::Duration;

/// A device as a roofline: peaks, memory, and a fixed cost of every step.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// For people.
    pub name: &'static str,
    /// Memory bandwidth in bytes a second.
    pub bandwidth: f64,
    /// Dense 16-bit matrix throughput in FLOP/s.
    pub peak_flops: f64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// What every step costs besides: launches, synchronisation, the host's part.
    pub step_overhead: Duration,
    /// Where the peaks come from.
    pub source: &'static str,
}

const GB: u64 = 1_000_000_000;

/// Launch and synchronisation of a step that replays captured graphs. An assumption, no data sheet states it.
const GRAPH_STEP: Duration = Duration::from_micros(100);

impl Device {
    /// NVIDIA V100 SXM2, 32 GB.
    pub const V100: Self = Self {
        name: "v100",
        bandwidth: 900e9,
        peak_flops: 125e12,
        memory_bytes: 32 * GB,
        step_overhead: GRAPH_STEP,
        source: "NVIDIA V100 data sheet (January 2020): 900 GB/s HBM2, 125 TFLOP/s tensor FP16, 32 GB",
    };

    /// NVIDIA L40S.
    pub const L40S: Self = Self {
        name: "l40s",
        bandwidth: 864e9,
        peak_flops: 362.05e12,
        memory_bytes: 48 * GB,
        step_overhead: GRAPH_STEP,
        source: "NVIDIA L40S data sheet: 864 GB/s GDDR6, 362.05 TFLOP/s BF16 tensor without sparsity, 48 GB",
    };

    /// NVIDIA H100 SXM5.
    pub const H100: Self = Self {
        name: "h100",
        bandwidth: 3.35e12,
        peak_flops: 989.5e12,
        memory_bytes: 80 * GB,
        step_overhead: GRAPH_STEP,
        source: "NVIDIA H100 data sheet, SXM: 3.35 TB/s HBM3, 1,979 TFLOP/s BF16 tensor with sparsity (half without), \
                 80 GB",
    };

    /// NVIDIA H200 SXM.
    pub const H200: Self = Self {
        name: "h200",
        bandwidth: 4.8e12,
        peak_flops: 989.5e12,
        memory_bytes: 141 * GB,
        step_overhead: GRAPH_STEP,
        source: "NVIDIA H200 data sheet, SXM: 4.8 TB/s HBM3e, 1,979 TFLOP/s BF16 tensor with sparsity (half without), \
                 141 GB",
    };

    /// Every preset.
    pub const PRESETS: [Self; 4] = [Self::V100, Self::L40S, Self::H100, Self::H200];

    /// The preset of that name, in any case.
    pub fn preset(name: &str) -> Option<Self> {
        Self::PRESETS.into_iter().find(|device| device.name.eq_ignore_ascii_case(name))
    }

    /// The device at a fraction of its peaks: published engines reach 0.6 to 0.8 of a data sheet's bandwidth in decode.
    #[must_use]
    pub fn derated(self, fraction: f64) -> Self {
        Self { bandwidth: self.bandwidth * fraction, peak_flops: self.peak_flops * fraction, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_found_by_name_and_state_their_source() {
        assert_eq!(Device::preset("L40S"), Some(Device::L40S));
        assert_eq!(Device::preset("abacus"), None);
        for device in Device::PRESETS {
            assert!(device.source.contains("data sheet"), "{}", device.name);
        }
        assert_eq!(Device::H100.derated(0.5).bandwidth, 1.675e12);
    }
}
