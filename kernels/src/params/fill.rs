//! Parameters of the kernel that makes weights up: `cuda/fill.cu`.

use super::{DevicePtr, params};

params! {
    /// `out[i] = centre + spread · u(seed, i)`, u even between −1 and 1. Grid: [`FillParams::grid`].
    FillParams {
        /// T `[count]`.
        out: DevicePtr,
        /// Elements.
        count: u64,
        /// Of the tensor.
        seed: u32,
        /// The mean.
        centre: f32,
        /// How far values are from it at most.
        spread: f32,
        /// 0.
        reserved: u32,
    }
}

/// CTAs of a launch for each multiprocessor, at most. Every chip holds as many at once, and they keep enough stores under way.
pub const FILL_CTAS: u32 = 4;

impl FillParams {
    /// CTAs of the launch of `threads` threads each, on a device of `processors` multiprocessors.
    pub fn grid(&self, threads: u32, processors: u32) -> [u32; 3] {
        let most = u64::from(processors * FILL_CTAS).max(1);
        // The bound keeps it within 32 bits.
        [self.count.div_ceil(u64::from(threads)).clamp(1, most) as u32, 1, 1]
    }
}
