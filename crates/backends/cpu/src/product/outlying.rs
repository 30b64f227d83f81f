//! The steps of a group in which rows have high parts.

use std::ops::Range;

/// Returns the steps in which any of `N` rows has a high part, as bits. Those of the rows are `stride` bytes apart.
///
/// # Safety
/// There must be so many rows.
#[inline(always)]
pub(super) unsafe fn outlying<const N: usize>(rows: *const u8, stride: usize) -> u8 {
    let mut all = 0;
    for row in 0..N {
        // SAFETY: the caller guarantees this.
        all |= unsafe { rows.add(row * stride).read() };
    }
    all
}

/// Steps as bits.
pub(super) struct Bits(u32);

impl Bits {
    /// Returns those of some steps that are set.
    #[inline(always)]
    pub(super) fn of(bits: u8, steps: Range<usize>) -> Self {
        Self(u32::from(bits) & ((1 << steps.end) - (1 << steps.start)))
    }

    /// Returns whether there is none.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.0 == 0
    }
}

impl Iterator for Bits {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let step = (self.0 != 0).then(|| self.0.trailing_zeros() as usize)?;
        self.0 &= self.0 - 1;
        Some(step)
    }
}
