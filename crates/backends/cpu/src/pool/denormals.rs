//! Denormal numbers as zero.

/// Runs `work` with denormal numbers treated as zero, as AMX always does. All instruction sets then compute the same
/// sums, and denormal numbers are slow.
#[cfg(target_arch = "x86_64")]
pub(crate) fn flushing_denormals(work: impl FnOnce()) {
    const FLUSH_TO_ZERO: u32 = 1 << 15;
    const DENORMALS_ARE_ZERO: u32 = 1 << 6;

    struct Restore(u32);

    impl Drop for Restore {
        fn drop(&mut self) {
            set_control(self.0);
        }
    }

    let control = control();
    let _restore = Restore(control);
    set_control(control | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    work();
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn flushing_denormals(work: impl FnOnce()) {
    work();
}

/// Returns the control and status register of SSE.
#[cfg(target_arch = "x86_64")]
fn control() -> u32 {
    let mut value = 0u32;
    // SAFETY: the instruction writes four bytes to `value`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn set_control(value: u32) {
    // SAFETY: the instruction reads four bytes of `value`, which this register held except for the two bits above.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags, readonly)) };
}
