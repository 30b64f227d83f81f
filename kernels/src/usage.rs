//! Resource usage of a compiled kernel, from the compiler's log, and the number of CTAs that a multiprocessor can hold
//! with it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::manifest::Chip;

/// Resource usage of one instance on one chip.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Number of registers of a thread.
    pub registers: u32,
    /// Static shared memory of a CTA in bytes, without the dynamic memory of a launch.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared: u32,
    /// Stack of a thread in bytes: arrays that the compiler cannot keep in registers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stack: u32,
    /// Spilled registers of a thread in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spills: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Reads the usage of each kernel, by its name, from the log of a compilation with `--ptxas-options=-v`.
pub fn from_log(log: &str) -> BTreeMap<String, Usage> {
    let mut kernels = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.insert(name.clone(), Usage::default());
            current = Some(name);
        }
        let Some(usage) = current.as_ref().and_then(|name| kernels.get_mut(name)) else { continue };
        if line.contains("bytes stack frame") {
            usage.stack = number_before(line, " bytes stack frame").unwrap_or(0);
            usage.spills = number_before(line, " bytes spill stores").unwrap_or(0);
        } else if let Some((_, used)) = line.split_once(" : Used ") {
            usage.registers = number_before(used, " registers").unwrap_or(0);
            usage.shared = number_before(used, " bytes smem").unwrap_or(0);
            current = None;
        }
    }
    kernels
}

fn number_before(line: &str, word: &str) -> Option<u32> {
    let before = &line[..line.find(word)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Resources of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
struct Multiprocessor {
    threads: u32,
    ctas: u32,
    /// Shared memory in bytes.
    shared: u32,
    /// Shared memory in bytes that the system reserves for each CTA.
    reserved: u32,
}

/// Number of registers of a multiprocessor on every chip.
const REGISTERS: u32 = 65_536;

/// Unit in which registers are allocated to a warp.
const REGISTER_UNIT: u32 = 256;

impl Multiprocessor {
    const fn find(chip: Chip) -> Option<Self> {
        let (threads, ctas, kib, reserved) = match (chip.major, chip.minor) {
            (7, 0) => (2048, 32, 96, 0),
            (7, 5) => (1024, 16, 64, 0),
            (8, 0) => (2048, 32, 164, 1024),
            (8, 6) => (1536, 16, 100, 1024),
            (8, 9) => (1536, 24, 100, 1024),
            (9, 0) => (2048, 32, 228, 1024),
            _ => return None,
        };
        Some(Self { threads, ctas, shared: kib << 10, reserved })
    }
}

/// Returns the number of CTAs that a multiprocessor of a chip holds at once, each with `threads` threads and
/// `dynamic_shared` bytes of shared memory in addition to the kernel's own; `None` for a chip with unknown limits.
pub fn occupancy(chip: Chip, usage: &Usage, threads: u32, dynamic_shared: usize) -> Option<u32> {
    let limits = Multiprocessor::find(chip)?;
    let warps = threads.div_ceil(32).max(1);
    let registers = (usage.registers.max(1) * 32).next_multiple_of(REGISTER_UNIT) * warps;
    let shared = (usage.shared + dynamic_shared as u32 + limits.reserved).max(1);
    let most = [limits.ctas, limits.threads / (32 * warps), REGISTERS / registers, limits.shared / shared];
    most.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_89'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16896 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_89'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 416 bytes cmem[0]
";

    #[test]
    fn a_log_is_read() {
        let usage = from_log(LOG);
        assert_eq!(usage["first"], Usage { registers: 40, shared: 16896, stack: 16, spills: 8 });
        assert_eq!(usage["second"], Usage { registers: 12, ..Usage::default() });
        assert_eq!(usage.len(), 2);
    }

    #[test]
    fn the_scarcest_resource_limits_occupancy() {
        let of = |registers, shared| Usage { registers, shared, ..Usage::default() };
        // 168 registers of 128 threads are 21504, which fits three times in 65536.
        assert_eq!(occupancy(Chip::SM_90, &of(168, 0), 128, 0), Some(3));
        // 169 registers are allocated as 176.
        assert_eq!(occupancy(Chip::SM_90, &of(169, 0), 128, 0), Some(2));
        // The limits are threads, CTAs, and shared memory including the reserved part.
        assert_eq!(occupancy(Chip::SM_89, &of(16, 0), 256, 0), Some(6));
        assert_eq!(occupancy(Chip::SM_89, &of(16, 0), 32, 0), Some(24));
        assert_eq!(occupancy(Chip::SM_90, &of(32, 40 << 10), 128, 72 << 10), Some(2));
        assert_eq!(occupancy(Chip::SM_70, &of(32, 0), 128, 48 << 10), Some(2));
        assert_eq!(occupancy(Chip { major: 99, minor: 0 }, &of(1, 0), 32, 0), None);
    }
}
