//! Parameters of the kernel that writes dummy weights: `cuda/fill.cu`.

use super::{DevicePtr, params};

params! {
    /// Computes `out[i] = centre + spread · u(seed, i)` with u uniform between −1 and 1. Grid: [`FillParams::grid`].
    FillParams {
        /// T `[count]`.
        out: DevicePtr,
        /// Number of elements.
        count: u64,
        /// Seed of the tensor.
        seed: u32,
        /// Mean.
        centre: f32,
        /// Maximum distance from the mean.
        spread: f32,
        /// Padding, 0.
        reserved: u32,
    }
}

/// Maximum number of CTAs of a launch per multiprocessor. Every chip holds this many at once, and they keep enough
/// stores in flight.
pub const FILL_CTAS: u32 = 4;

impl FillParams {
    /// Returns the grid of the launch with `threads` threads per CTA on a device of `processors` multiprocessors.
    pub fn grid(&self, threads: u32, processors: u32) -> [u32; 3] {
        let most = u64::from(processors * FILL_CTAS).max(1);
        // The limit keeps it within 32 bits.
        [self.count.div_ceil(u64::from(threads)).clamp(1, most) as u32, 1, 1]
    }
}
