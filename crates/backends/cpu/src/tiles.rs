//! AMX tiles and their products in bf16.
//!
//! Stable Rust has neither the intrinsics nor the target feature, but its assembler supports the instructions, and the
//! compiler never uses a tile register itself, so short blocks of assembly suffice. A tile is sixteen rows of 64 bytes.
//! The rows of the right operand hold four (integers) or two (bf16) consecutive inputs of sixteen outputs, which is
//! also the layout of weight panels and of blocks of the KV cache.

use std::arch::asm;

use crate::activation::TILE;
use crate::memory::LINE;

/// Number of results that are computed at once.
pub(crate) const SIDE: usize = 4;

/// The tile configuration of this thread, as LDTILECFG reads it.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Size of a row in bytes, by register.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The used part of a tile register.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
}

/// Tiles that are set up. They are released when dropped, so that the system need not save them for a thread that does
/// not use them.
pub(crate) struct Tiles(());

impl Tiles {
    /// Sets up the tiles for [`dot`] and [`add`], with `rows` rows on the left, at most sixteen. Registers 0 to 3 hold
    /// results; 4 holds 32 inputs of rows; 5 holds 32 inputs of sixteen outputs; 6 and 7 hold the same of 16 inputs.
    pub(crate) fn bf16(rows: usize) -> Self {
        let (left, right) = (Shape { rows, row_bytes: LINE }, Shape { rows: TILE, row_bytes: LINE });
        let (half_left, half_right) = (Shape { rows, row_bytes: LINE / 2 }, Shape { rows: TILE / 2, row_bytes: LINE });
        Self::set_up([left, left, left, left, left, right, half_left, half_right])
    }

    /// Sets up the tiles with these shapes, by register.
    pub(crate) fn set_up(shapes: [Shape; 8]) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (register, shape) in shapes.into_iter().enumerate() {
            (config.row_bytes[register], config.rows[register]) = (shape.row_bytes as u16, shape.rows as u8);
        }
        // SAFETY: tiles are set up only where AMX is available; the instruction reads the 64 bytes of `config`.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags)) };
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Start of the rows of a tile in memory, and the number of bytes from one to the next.
#[derive(Clone, Copy)]
pub(crate) struct Strided<T> {
    pub(crate) start: T,
    pub(crate) stride: usize,
}

/// Computes `out[i] = A · B[i]` for four right operands, `steps` times 32 inputs each. A's rows are `a.stride` bytes
/// apart, B's tiles are contiguous, and the results are `apart` bytes from each other.
///
/// # Safety
/// AMX must be available and set up by [`Tiles::bf16`], and all memory that this reads and writes must be valid.
pub(crate) unsafe fn dot(
    a: Strided<*const u16>,
    b: [*const u8; SIDE],
    steps: usize,
    out: Strided<*mut f32>,
    apart: usize,
) {
    debug_assert!(steps > 0);
    // SAFETY: the caller guarantees this.
    unsafe {
        zero();
        asm!(
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}]",
            "tileloadd tmm5, [{b0} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm5, [{b1} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm5",
            "tileloadd tmm5, [{b2} + {line}]",
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tileloadd tmm5, [{b3} + {line}]",
            "tdpbf16ps tmm3, tmm4, tmm5",
            "add {a}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {b2}, 1024",
            "add {b3}, 1024",
            "dec {steps}",
            "jnz 2b",
            a = inout(reg) a.start => _,
            a_stride = in(reg) a.stride,
            b0 = inout(reg) b[0] => _,
            b1 = inout(reg) b[1] => _,
            b2 = inout(reg) b[2] => _,
            b3 = inout(reg) b[3] => _,
            line = in(reg) LINE,
            steps = inout(reg) steps => _,
            options(nostack)
        );
        store(out, apart);
    }
}

/// Stores four results in the same way as [`dot`].
///
/// # Safety
/// The conditions of [`dot`] apply.
pub(crate) unsafe fn store(out: Strided<*mut f32>, apart: usize) {
    // SAFETY: the caller guarantees this.
    unsafe {
        asm!(
            "tilestored [{out} + {stride}], tmm0",
            "add {out}, {apart}",
            "tilestored [{out} + {stride}], tmm1",
            "add {out}, {apart}",
            "tilestored [{out} + {stride}], tmm2",
            "add {out}, {apart}",
            "tilestored [{out} + {stride}], tmm3",
            out = inout(reg) out.start => _,
            stride = in(reg) out.stride,
            apart = in(reg) apart,
            options(nostack)
        );
    }
}

/// Clears the sums of [`add`].
///
/// # Safety
/// The conditions of [`dot`] apply.
pub(crate) unsafe fn zero() {
    // SAFETY: the caller guarantees this.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nomem, nostack, preserves_flags)
        );
    }
}

/// Adds `A · B[i]` of 16 inputs to each of the four sums.
///
/// # Safety
/// The conditions of [`dot`] apply.
pub(crate) unsafe fn add(a: Strided<*const u16>, b: [*const u32; SIDE]) {
    // SAFETY: the caller guarantees this.
    unsafe {
        asm!(
            "tileloadd tmm6, [{a} + {stride}]",
            "tileloadd tmm7, [{b0} + {line}]",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tileloadd tmm7, [{b1} + {line}]",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tileloadd tmm7, [{b2} + {line}]",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tileloadd tmm7, [{b3} + {line}]",
            "tdpbf16ps tmm3, tmm6, tmm7",
            a = in(reg) a.start,
            stride = in(reg) a.stride,
            b0 = in(reg) b[0],
            b1 = in(reg) b[1],
            b2 = in(reg) b[2],
            b3 = in(reg) b[3],
            line = in(reg) LINE,
            options(nostack, preserves_flags)
        );
    }
}
