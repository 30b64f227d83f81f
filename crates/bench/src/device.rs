//! Device descriptions for the simulator.

use std::time::Duration;

use octavo_ops::datasheet::DataSheet;

/// A device as a roofline: peaks, memory, and a fixed cost of every step.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Display name.
    pub name: &'static str,
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Dense 16-bit matrix throughput in FLOP/s.
    pub peak_flops: f64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Fixed cost of a step: launches, synchronisation and host work.
    pub step_overhead: Duration,
    /// Source of the peaks.
    pub source: &'static str,
}

const GB: u64 = 1_000_000_000;

/// Launch and synchronisation time of a step that replays captured graphs: an assumption, since no data sheet states it.
const GRAPH_STEP: Duration = Duration::from_micros(100);

/// A device from its data sheet with `gigabytes` GB of memory.
const fn preset(name: &'static str, sheet: DataSheet, gigabytes: u64) -> Device {
    Device {
        name,
        bandwidth: sheet.bandwidth,
        peak_flops: sheet.half_flops,
        memory_bytes: gigabytes * GB,
        step_overhead: GRAPH_STEP,
        source: sheet.source,
    }
}

impl Device {
    /// NVIDIA V100 SXM2, 32 GB.
    pub const V100: Self = preset("v100", DataSheet::V100, 32);

    /// NVIDIA L40S.
    pub const L40S: Self = preset("l40s", DataSheet::L40S, 48);

    /// NVIDIA H100 SXM5.
    pub const H100: Self = preset("h100", DataSheet::H100, 80);

    /// NVIDIA H200 SXM.
    pub const H200: Self = preset("h200", DataSheet::H200, 141);

    /// Every preset.
    pub const PRESETS: [Self; 4] = [Self::V100, Self::L40S, Self::H100, Self::H200];

    /// The preset with this name; case is ignored.
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
