//! Kernels that keep a unit busy, with enough independent sums to hide the latency and without memory access.

use std::arch::asm;
use std::arch::is_x86_feature_detected as has;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::{Kernel, Unit};
use crate::activation::TILE;
use crate::isa::Isa;
use crate::memory::LINE;
use crate::tiles::{self, SIDE, Shape, Tiles};

/// Number of independent sums: a multiply-add takes up to six cycles, two start in each cycle, and AVX2 has sixteen
/// registers.
const SUMS: usize = 12;

/// Number of 32-bit sums in a register of AVX2.
const LANES_AVX2: usize = 8;

/// Number of 32-bit sums in a register of AVX-512.
const LANES: usize = 16;

/// Returns the kernel of a unit, if this machine has it.
pub(super) fn kernel(unit: Unit) -> Option<Kernel> {
    // Number of operations of a round: multiply-adds of all sums with `products` products each.
    let vectors = |lanes: usize, products: usize| (2 * SUMS * lanes * products) as f64;
    let tiles = |inputs: usize| (2 * SIDE * TILE * TILE * inputs) as f64;
    let avx512 = Isa::Avx512.is_available();
    let kernel = |run, operations| Some(Kernel { run, operations });
    match unit {
        // SAFETY: the guard checks that the machine supports the instructions of the function.
        Unit::Fma if avx512 => kernel(|rounds| unsafe { fma_avx512(rounds) }, vectors(LANES, 1)),
        // SAFETY: as above.
        Unit::Fma if Isa::Avx2.is_available() => kernel(|rounds| unsafe { fma_avx2(rounds) }, vectors(LANES_AVX2, 1)),
        // SAFETY: as above.
        Unit::Bf16 if avx512 && has!("avx512bf16") => kernel(|rounds| unsafe { bf16(rounds) }, vectors(LANES, 2)),
        // SAFETY: as above.
        Unit::Vnni if avx512 => kernel(|rounds| unsafe { vnni(rounds) }, vectors(LANES, 4)),
        // SAFETY: as above.
        Unit::AmxBf16 if Isa::Amx.is_available() => kernel(|rounds| unsafe { amx_bf16(rounds) }, tiles(LINE / 2)),
        // SAFETY: as above.
        Unit::AmxInt8 if Isa::Amx.is_available() => kernel(|rounds| unsafe { amx_int8(rounds) }, tiles(LINE)),
        _ => None,
    }
}

/// Adds to all sums, round after round. Their initial values differ, because the compiler would merge equal sums.
macro_rules! spin {
    ($rounds:ident, $set:expr, |$sum:ident| $add:expr) => {{
        let mut sums: [_; SUMS] = std::array::from_fn(|index| $set(black_box(index as f32)));
        for _ in 0..$rounds {
            for $sum in &mut sums {
                *$sum = $add;
            }
        }
        black_box(sums);
    }};
}

#[target_feature(enable = "avx2,fma")]
fn fma_avx2(rounds: usize) {
    let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
    spin!(rounds, |x| _mm256_set1_ps(x), |sum| _mm256_fmadd_ps(*sum, a, b));
}

#[target_feature(enable = "avx512f")]
fn fma_avx512(rounds: usize) {
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    spin!(rounds, |x| _mm512_set1_ps(x), |sum| _mm512_fmadd_ps(*sum, a, b));
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16(rounds: usize) {
    let pair = |x: f32| _mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(x));
    let (a, b) = (pair(black_box(0.5)), pair(black_box(-1.0)));
    spin!(rounds, |x| _mm512_set1_ps(x), |sum| _mm512_dpbf16_ps(*sum, a, b));
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn vnni(rounds: usize) {
    let (a, b) = (_mm512_set1_epi8(black_box(77)), _mm512_set1_epi8(black_box(-55)));
    spin!(rounds, |x: f32| _mm512_set1_epi32(x as i32), |sum| _mm512_dpbusd_epi32(*sum, a, b));
}

/// Multiplies two left with two right operands of whole tiles, each with each.
macro_rules! spin_tiles {
    ($rounds:ident, $product:literal) => {{
        // The operand is 1.0 in bf16; as integers the value does not matter.
        let operand = [0x3f80u16; TILE * LINE / 2];
        let _tiles = Tiles::set_up([Shape { rows: TILE, row_bytes: LINE }; 8]);
        // SAFETY: the tiles are set up, and the operand fills one.
        unsafe {
            tiles::zero();
            asm!(
                "tileloadd tmm4, [{operand} + {line}]",
                "tileloadd tmm5, [{operand} + {line}]",
                "tileloadd tmm6, [{operand} + {line}]",
                "tileloadd tmm7, [{operand} + {line}]",
                "2:",
                concat!($product, " tmm0, tmm4, tmm6"),
                concat!($product, " tmm1, tmm4, tmm7"),
                concat!($product, " tmm2, tmm5, tmm6"),
                concat!($product, " tmm3, tmm5, tmm7"),
                "dec {rounds}",
                "jnz 2b",
                operand = in(reg) operand.as_ptr(),
                line = in(reg) LINE,
                rounds = inout(reg) $rounds.max(1) => _,
                options(nostack, readonly)
            );
        }
    }};
}

/// # Safety
/// AMX must be available.
unsafe fn amx_bf16(rounds: usize) {
    spin_tiles!(rounds, "tdpbf16ps");
}

/// # Safety
/// AMX must be available.
unsafe fn amx_int8(rounds: usize) {
    spin_tiles!(rounds, "tdpbsud");
}
