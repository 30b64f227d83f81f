//! GPU limits from data sheets, against which step times are compared.

use crate::cost::Peaks;

/// Limits of a GPU according to its data sheet, dense and without sparsity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataSheet {
    /// The driver's name of the GPU, without the manufacturer.
    pub name: &'static str,
    /// Number of multiprocessors. A partition of a device has fewer and does not match the sheet.
    pub processors: u32,
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// FLOP/s of the tensor cores in 16 bits with f32 accumulation.
    pub half_flops: f64,
    /// FLOP/s in f32, without tensor cores.
    pub single_flops: f64,
    /// Source of the figures.
    pub source: &'static str,
}

/// Creates a row of the table from GB/s, 16-bit TFLOP/s and f32 TFLOP/s.
const fn sheet(
    name: &'static str,
    processors: u32,
    gb: f64,
    half: f64,
    single: f64,
    source: &'static str,
) -> DataSheet {
    DataSheet { name, processors, bandwidth: gb * 1e9, half_flops: half * 1e12, single_flops: single * 1e12, source }
}

const V100: &str = "NVIDIA V100 data sheet (January 2020)";
const A100: &str = "NVIDIA A100 data sheet";
const H100: &str = "NVIDIA H100 data sheet, half of the figures with sparsity";
const H200: &str = "NVIDIA H200 data sheet, half of the figures with sparsity";
const L4: &str = "NVIDIA L4 data sheet, half of the figures with sparsity";
const L40S: &str = "NVIDIA L40S data sheet";

impl DataSheet {
    /// NVIDIA V100 SXM2, 32 GB.
    pub const V100: Self = sheet("Tesla V100-SXM2-32GB", 80, 900.0, 125.0, 15.7, V100);
    /// NVIDIA L40S.
    pub const L40S: Self = sheet("L40S", 142, 864.0, 362.05, 91.6, L40S);
    /// NVIDIA H100 SXM5.
    pub const H100: Self = sheet("H100 80GB HBM3", 132, 3350.0, 989.5, 67.0, H100);
    /// NVIDIA H200 SXM.
    pub const H200: Self = sheet("H200", 132, 4800.0, 989.5, 67.0, H200);

    /// All data sheets.
    pub const ALL: [Self; 14] = [
        Self::V100,
        sheet("Tesla V100-SXM2-16GB", 80, 900.0, 125.0, 15.7, V100),
        sheet("Tesla V100-PCIE-32GB", 80, 900.0, 112.0, 14.0, V100),
        sheet("Tesla V100-PCIE-16GB", 80, 900.0, 112.0, 14.0, V100),
        sheet("Tesla V100S-PCIE-32GB", 80, 1134.0, 130.0, 16.4, V100),
        sheet("A100-SXM4-40GB", 108, 1555.0, 312.0, 19.5, A100),
        sheet("A100-SXM4-80GB", 108, 2039.0, 312.0, 19.5, A100),
        sheet("A100 80GB PCIe", 108, 1935.0, 312.0, 19.5, A100),
        sheet("L4", 58, 300.0, 121.0, 30.3, L4),
        Self::L40S,
        Self::H100,
        sheet("H100 PCIe", 114, 2000.0, 756.5, 51.0, H100),
        sheet("H100 NVL", 132, 3938.0, 835.5, 60.0, H100),
        Self::H200,
    ];

    /// Finds the data sheet of a device by the driver's name and its number of multiprocessors.
    pub fn find(name: &str, processors: u32) -> Option<Self> {
        let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
        Self::ALL.into_iter().find(|sheet| sheet.name == name && sheet.processors == processors)
    }

    /// Returns the limits for 16-bit arithmetic or for f32.
    pub const fn peaks(&self, half: bool) -> Peaks {
        Peaks { bandwidth: self.bandwidth, flops: if half { self.half_flops } else { self.single_flops } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sheet_is_found_by_the_drivers_name() {
        assert_eq!(DataSheet::find("NVIDIA H200", 132), Some(DataSheet::H200));
        assert_eq!(DataSheet::find("Tesla V100-SXM2-32GB", 80), Some(DataSheet::V100));
        assert_eq!(
            DataSheet::find("NVIDIA L40S", 142).map(|sheet| sheet.peaks(true)),
            Some(Peaks { bandwidth: 864e9, flops: 362.05e12 })
        );
        // A partition, an emulated device and an unknown one have no sheet.
        for (name, processors) in
            [("NVIDIA H200 MIG 1g.18gb", 16), ("NVIDIA H200", 16), ("Emulated H200", 132), ("X", 1)]
        {
            assert_eq!(DataSheet::find(name, processors), None, "{name}");
        }
    }

    #[test]
    fn every_sheet_is_there_once_and_says_where_it_is_from() {
        for (at, sheet) in DataSheet::ALL.iter().enumerate() {
            assert!(DataSheet::ALL[..at].iter().all(|other| other.name != sheet.name), "{}", sheet.name);
            assert!(sheet.source.contains("data sheet") && sheet.half_flops > sheet.single_flops, "{}", sheet.name);
        }
    }
}
