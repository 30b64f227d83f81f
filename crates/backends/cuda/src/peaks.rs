//! Peak rates of a GPU: from its data sheet, or from its clocks if there is none.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use octavo_kernels::manifest::{Chip, Dtype};
use octavo_ops::cost::Peaks;
use octavo_ops::datasheet::DataSheet;

use crate::DeviceInfo;
use crate::driver::Gpu;

/// Clocks and memory as reported by the driver; 0 means unknown.
#[derive(Clone, Copy, Debug, Default)]
struct Clocks {
    /// Maximum clock of the multiprocessors, in kHz.
    processors: u64,
    /// Maximum clock of the memory, in kHz.
    memory: u64,
    /// Width of the memory bus, in bits.
    bus: u64,
}

/// Returns the limits of a device for products of an element type; `None` if they are unknown.
pub(crate) fn peaks(gpu: &Gpu, dtype: Dtype) -> Option<Peaks> {
    let device = gpu.info();
    match DataSheet::find(&device.name, device.processors) {
        Some(sheet) => Some(sheet.peaks(dtype != Dtype::F32)),
        // A MIG partition reports the clocks of the whole device.
        None if device.name.contains("MIG") => None,
        None => by_clocks(device, dtype, &clocks(gpu)),
    }
}

/// Returns the size of the level-2 cache in bytes, if the driver reports it.
pub(crate) fn cache_bytes(gpu: &Gpu) -> Option<u64> {
    Some(gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)).filter(|&bytes| bytes > 0)
}

/// Reads the clocks. The driver still reports them in CUDA 13, where only the runtime's struct of properties lacks
/// them; on devices that share the host's memory they are 0.
fn clocks(gpu: &Gpu) -> Clocks {
    Clocks {
        processors: gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        memory: gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        bus: gpu.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
    }
}

fn by_clocks(device: &DeviceInfo, dtype: Dtype, clocks: &Clocks) -> Option<Peaks> {
    let a_cycle = flops_a_cycle(device.chip, dtype)?;
    // The memory makes two transfers per cycle.
    let bandwidth = (2 * 1000 * clocks.memory * (clocks.bus / 8)) as f64;
    let flops = (1000 * clocks.processors * u64::from(device.processors) * a_cycle) as f64;
    (bandwidth > 0.0 && flops > 0.0).then_some(Peaks { bandwidth, flops })
}

/// Returns the FLOPs of a multiprocessor per cycle; `None` if chips of one compute capability differ.
const fn flops_a_cycle(chip: Chip, dtype: Dtype) -> Option<u64> {
    Some(match (chip.major, chip.minor, dtype) {
        (7, 0, Dtype::F32) | (8, 0, Dtype::F32) => 128,
        (9, 0, Dtype::F32) => 256,
        (7, 0, _) => 1024,
        (8, 0, _) => 2048,
        (9, 0, _) => 4096,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, chip: Chip, processors: u32) -> DeviceInfo {
        DeviceInfo { ordinal: 0, name: name.into(), chip, memory: 0, processors, shared_memory: 0 }
    }

    #[test]
    fn clocks_come_near_the_data_sheets() {
        let cases = [
            (DataSheet::V100, Chip::SM_70, Clocks { processors: 1_530_000, memory: 877_000, bus: 4096 }),
            (DataSheet::H100, Chip::SM_90, Clocks { processors: 1_980_000, memory: 2_619_000, bus: 5120 }),
            (DataSheet::H200, Chip::SM_90, Clocks { processors: 1_980_000, memory: 3_201_000, bus: 6144 }),
        ];
        for (sheet, chip, clocks) in cases {
            let device = device("another", chip, sheet.processors);
            for dtype in [Dtype::F16, Dtype::F32] {
                let (found, stated) = (by_clocks(&device, dtype, &clocks).unwrap(), sheet.peaks(dtype != Dtype::F32));
                assert!((found.bandwidth / stated.bandwidth - 1.0).abs() < 0.03, "{}: {found:?}", sheet.name);
                // The highest clock of a Hopper exceeds that of its data sheet.
                assert!((found.flops / stated.flops - 1.0).abs() < 0.1, "{}: {found:?}", sheet.name);
            }
        }
    }

    #[test]
    fn what_nobody_states_is_not_guessed() {
        let clocks = Clocks { processors: 2_520_000, memory: 10_501_000, bus: 384 };
        // A GeForce of this capability accumulates at half the rate of a data-centre GPU.
        assert_eq!(by_clocks(&device("x", Chip::SM_89, 128), Dtype::F16, &clocks), None);
        assert_eq!(by_clocks(&device("x", Chip::SM_90, 132), Dtype::F16, &Clocks::default()), None);
    }
}
