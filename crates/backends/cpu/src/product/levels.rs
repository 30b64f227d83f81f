//! Integers of 16 bits of floating-point numbers in fewer bits.

use octavo_ops::{FP4_VALUES, NF4_VALUES};

use crate::weights::{E2M1_CODES, E2M1_OFFSET, Numbers};

/// The values of a table as integers.
pub(super) struct Levels {
    pub(super) words: [i16; 16],
    /// Factor of the integers.
    pub(super) inverse: f32,
}

/// Values of a kind of nibbles.
pub(super) trait Values: Copy {
    const NUMBERS: Numbers;
    /// Values by their codes.
    const VALUES: &'static [f32; 16];
    const LEVELS: Levels;
}

#[derive(Clone, Copy)]
pub(super) struct Nf4;
#[derive(Clone, Copy)]
pub(super) struct Fp4;

impl Values for Nf4 {
    const NUMBERS: Numbers = Numbers::Nf4;
    const VALUES: &'static [f32; 16] = &NF4_VALUES;
    const LEVELS: Levels = NF4;
}

impl Values for Fp4 {
    const NUMBERS: Numbers = Numbers::Fp4;
    const VALUES: &'static [f32; 16] = &FP4_VALUES;
    const LEVELS: Levels = FP4;
}

/// Largest integer of NF4. The sum of a group's products with codes of 12 bits is below 2³¹. A weight is within 2⁻¹⁶ times its
/// scale.
const NF4: Levels = levels(&NF4_VALUES, 32767.0);

/// All values of FP4 are whole 192nds.
const FP4: Levels = levels(&FP4_VALUES, 192.0 * 170.0);

const fn levels(values: &[f32; 16], factor: f32) -> Levels {
    let mut levels = Levels { words: [0; 16], inverse: 1.0 / factor };
    let mut code = 0;
    while code < values.len() {
        let scaled = values[code] * factor;
        levels.words[code] = (if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i16;
        code += 1;
    }
    levels
}

/// Factors of the integers of e4m3, by the upper bits of a code: its sign, and its exponent but for the lowest bit. They are powers of
/// four. Groups are scaled when they are loaded: their largest number is from 240 to 448, and its integer from 15 to 28 times 2⁹.
/// Numbers below 2⁻⁵ become 0. A weight is within an 8000th of the largest of its group and row.
pub(super) const FACTORS: Levels = {
    let mut factors = Levels { words: [0; 16], inverse: 1.0 / 32.0 };
    let mut bits = 1;
    while bits < 8 {
        factors.words[bits] = 1 << (2 * bits);
        factors.words[8 + bits] = -factors.words[bits];
        bits += 1;
    }
    factors
};

/// The mantissas of e4m3 times 4 with their first bit, shifted by the lowest bit of the exponent: by the lower bits of a code. Times
/// 256 and times the factor, a mantissa is the number times 2²⁰, and the upper bits of the product, rounded, are its integer.
pub(super) const MANTISSAS: [u8; 16] = {
    let mut mantissas = [0; 16];
    let mut bits = 0;
    while bits < mantissas.len() {
        mantissas[bits] = (8 + bits as u8 % 8) << (2 + bits / 8);
        bits += 1;
    }
    mantissas
};

/// Twice the values of e2m1 by their codes, as signed bytes.
pub(super) static E2M1_VALUES: [u8; 16] = {
    let mut values = E2M1_CODES;
    let mut code = 0;
    while code < values.len() {
        values[code] = values[code].wrapping_sub(E2M1_OFFSET);
        code += 1;
    }
    values
};
