//! Reading of a group of a stored panel with NEON.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::LANES;
use crate::memory::LINE;
use crate::weights::{Codes, E2M1_CODES, E2M1_OFFSET, IQ4_CODES, IQ4_OFFSET, Layout, PANEL, STEPS, Scales};

/// Number of registers in a step of a panel, and of registers of f32 for its output rows.
pub(super) const REGISTERS: usize = PANEL / LANES;

/// Codes of a step: four inputs of four output rows in each register, within −128 to 127.
pub(super) type Step = [int8x16_t; REGISTERS];

/// Order of the codes of an unpacked group.
pub(super) trait Order {
    /// Returns the registers of two steps in the order in which they are multiplied.
    ///
    /// # Safety
    /// NEON must be available.
    unsafe fn arranged(first: Step, second: Step) -> [Step; 2];
}

/// The order of the stored panel.
pub(super) struct Stepwise;

/// Eight inputs of two output rows in each register: a step has those of eight output rows.
pub(super) struct Paired;

impl Order for Stepwise {
    #[inline(always)]
    unsafe fn arranged(first: Step, second: Step) -> [Step; 2] {
        [first, second]
    }
}

impl Order for Paired {
    #[inline(always)]
    unsafe fn arranged(first: Step, second: Step) -> [Step; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [a, b] = [pairs(first[0], second[0]), pairs(first[1], second[1])];
            let [c, d] = [pairs(first[2], second[2]), pairs(first[3], second[3])];
            [[a[0], a[1], b[0], b[1]], [c[0], c[1], d[0], d[1]]]
        }
    }
}

/// Puts the words of two registers beside each other.
#[inline(always)]
unsafe fn pairs(first: int8x16_t, second: int8x16_t) -> [int8x16_t; 2] {
    // SAFETY: the caller of `arranged` guarantees this.
    unsafe {
        let (first, second) = (vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second));
        [vreinterpretq_s8_s32(vzip1q_s32(first, second)), vreinterpretq_s8_s32(vzip2q_s32(first, second))]
    }
}

/// Codes of a group of a panel as bytes.
#[repr(align(64))]
pub(super) struct Bytewise([[i8; LINE]; STEPS]);

impl Bytewise {
    pub(super) const EMPTY: Self = Self([[0; LINE]; STEPS]);

    /// Unpacks a group.
    ///
    /// # Safety
    /// The conditions of [`ReadCodes::step`] apply.
    #[inline(always)]
    pub(super) unsafe fn fill<C: ReadCodes, O: Order>(&mut self, panel: *const u8, layout: &Layout, group: usize) {
        for (pair, lines) in self.0.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            // SAFETY: the caller guarantees this; a line has four registers.
            unsafe {
                let first = C::step(panel, layout, group, 2 * pair);
                let second = C::step(panel, layout, group, 2 * pair + 1);
                for (line, step) in lines.iter_mut().zip(O::arranged(first, second)) {
                    for (index, register) in step.into_iter().enumerate() {
                        vst1q_s8(line.as_mut_ptr().add(16 * index), register);
                    }
                }
            }
        }
    }
}

/// Codes of a group. It is a trait because the compiler does not inline every closure that returns registers.
pub(super) trait Steps {
    /// # Safety
    /// NEON must be available, and there must be this step.
    unsafe fn step(&self, step: usize) -> Step;
}

impl Steps for Bytewise {
    #[inline(always)]
    unsafe fn step(&self, step: usize) -> Step {
        // SAFETY: the caller guarantees this; a line has four registers.
        unsafe {
            let line = self.0.get_unchecked(step).as_ptr();
            [vld1q_s8(line), vld1q_s8(line.add(16)), vld1q_s8(line.add(32)), vld1q_s8(line.add(48))]
        }
    }
}

/// Codes of a stored panel. The panel must have this layout and group.
pub(super) struct Stored<'a, C> {
    pub(super) panel: *const u8,
    pub(super) layout: &'a Layout,
    pub(super) group: usize,
    pub(super) codes: PhantomData<C>,
}

impl<C: ReadCodes> Steps for Stored<'_, C> {
    #[inline(always)]
    unsafe fn step(&self, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe { C::step(self.panel, self.layout, self.group, step) }
    }
}

/// Reads the codes of a stored panel.
pub(super) trait ReadCodes {
    /// Number that was subtracted from the codes, so that they are signed.
    const OFFSET: i32 = 0;

    /// Number of products of a code with the high part of an input whose sum fits 16 bits.
    const PAUSE: usize;

    /// Returns the codes of four inputs of sixteen output rows.
    ///
    /// # Safety
    /// NEON must be available, and the panel must have this layout, these codes and this group.
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step;
}

pub(super) struct Four;
pub(super) struct Five;
pub(super) struct Six;
pub(super) struct E2m1;
pub(super) struct Iq4;
pub(super) struct Eight;

impl ReadCodes for Four {
    const PAUSE: usize = 8;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe { signed(nibbles(panel.add(layout.codes_at(Codes::Four, group)), step)) }
    }
}

impl ReadCodes for E2m1 {
    const PAUSE: usize = 8;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe { signed(looked_up(&E2M1_CODES, nibbles(panel.add(layout.codes_at(Codes::E2m1, group)), step))) }
    }
}

impl ReadCodes for Iq4 {
    const OFFSET: i32 = IQ4_OFFSET as i32;
    const PAUSE: usize = 2;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        const { assert!(IQ4_OFFSET == 128) };
        // SAFETY: the caller guarantees this.
        unsafe { centred(looked_up(&IQ4_CODES, nibbles(panel.add(layout.codes_at(Codes::Iq4, group)), step))) }
    }
}

impl ReadCodes for Five {
    const PAUSE: usize = 8;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe {
            let mut codes = nibbles(panel.add(layout.codes_at(Codes::Five, group)), step);
            let mask = vld1_u8(panel.add(layout.uppers_at(Codes::Five, group) + step * 8));
            let mask = vcombine_u8(mask, mask);
            for (codes, order) in codes.iter_mut().zip(&MASKS) {
                *codes = fifth(*codes, mask, vld1q_u8(order.as_ptr()));
            }
            signed(codes)
        }
    }
}

impl ReadCodes for Six {
    const PAUSE: usize = 4;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe {
            let mut codes = nibbles(panel.add(layout.codes_at(Codes::Six, group)), step);
            let uppers = line(panel.add(layout.uppers_at(Codes::Six, group) + step % 2 * LINE));
            for (codes, uppers) in codes.iter_mut().zip(uppers) {
                *codes = sixth(*codes, uppers, step);
            }
            signed(codes)
        }
    }
}

impl ReadCodes for Eight {
    const OFFSET: i32 = 128;
    const PAUSE: usize = 2;

    #[inline(always)]
    unsafe fn step(panel: *const u8, layout: &Layout, group: usize, step: usize) -> Step {
        // SAFETY: the caller guarantees this.
        unsafe { centred(line(panel.add(layout.codes_at(Codes::Eight, group) + step * LINE))) }
    }
}

#[inline(always)]
unsafe fn line(at: *const u8) -> [uint8x16_t; REGISTERS] {
    // SAFETY: the caller of `step` guarantees this.
    unsafe { [vld1q_u8(at), vld1q_u8(at.add(16)), vld1q_u8(at.add(32)), vld1q_u8(at.add(48))] }
}

#[inline(always)]
unsafe fn signed(codes: [uint8x16_t; REGISTERS]) -> Step {
    let [a, b, c, d] = codes;
    // SAFETY: the caller of `step` guarantees this.
    unsafe { [vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b), vreinterpretq_s8_u8(c), vreinterpretq_s8_u8(d)] }
}

/// Subtracts 128 from codes.
#[inline(always)]
unsafe fn centred(mut codes: [uint8x16_t; REGISTERS]) -> Step {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        for codes in &mut codes {
            *codes = veorq_u8(*codes, vdupq_n_u8(128));
        }
        signed(codes)
    }
}

/// Replaces codes by the values of a table.
#[inline(always)]
unsafe fn looked_up(table: &[u8; 16], mut codes: [uint8x16_t; REGISTERS]) -> [uint8x16_t; REGISTERS] {
    // SAFETY: the caller of `step` guarantees this; the table has sixteen bytes.
    unsafe {
        let table = vld1q_u8(table.as_ptr());
        for codes in &mut codes {
            *codes = vqtbl1q_u8(table, *codes);
        }
        codes
    }
}

/// Unpacks nibbles: those of step j are the low ones of line j, those of step j + 4 its high ones.
#[inline(always)]
unsafe fn nibbles(at: *const u8, step: usize) -> [uint8x16_t; REGISTERS] {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let mut codes = line(at.add(step % (STEPS / 2) * LINE));
        for codes in &mut codes {
            *codes = if step < STEPS / 2 { vandq_u8(*codes, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(*codes) };
        }
        codes
    }
}

/// Order of the bytes of a mask of 64, so that each code of a register gets the byte that has its bit.
static MASKS: [[u8; 16]; REGISTERS] = {
    let mut orders = [[0; 16]; REGISTERS];
    let mut code = 0;
    while code < 16 * REGISTERS {
        orders[code / 16][code % 16] = (code / 8) as u8;
        code += 1;
    }
    orders
};

/// Adds the fifth bits of a register.
#[inline(always)]
unsafe fn fifth(codes: uint8x16_t, mask: uint8x16_t, order: uint8x16_t) -> uint8x16_t {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let bits = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        let set = vtstq_u8(vqtbl1q_u8(mask, order), bits);
        vorrq_u8(codes, vandq_u8(set, vdupq_n_u8(16)))
    }
}

/// Adds the two upper bits, which are those from bit step / 2 · 2 on.
#[inline(always)]
unsafe fn sixth(codes: uint8x16_t, uppers: uint8x16_t, step: usize) -> uint8x16_t {
    // SAFETY: the caller of `step` guarantees this.
    unsafe {
        let uppers = match step / 2 {
            0 => vshlq_n_u8::<4>(uppers),
            1 => vshlq_n_u8::<2>(uppers),
            2 => uppers,
            _ => vshrq_n_u8::<2>(uppers),
        };
        vorrq_u8(codes, vandq_u8(uppers, vdupq_n_u8(0x30)))
    }
}

/// Scales of a group, a register for each quarter of the output rows.
pub(super) struct GroupScales {
    pub(super) scales: [float32x4_t; REGISTERS],
    pub(super) minima: [float32x4_t; REGISTERS],
    /// Factors of the halves of the inputs, if they have any; there is no minimum then.
    pub(super) factors: Option<[[int32x4_t; REGISTERS]; 2]>,
    /// Scales of the halves of the inputs, if they have any; there are no others then.
    pub(super) pair: Option<[[float32x4_t; REGISTERS]; 2]>,
}

/// Reads the scales of a group.
///
/// # Safety
/// NEON must be available, and the panel must have this layout and group.
#[inline(always)]
pub(super) unsafe fn scales(panel: *const u8, layout: &Layout, kind: Scales, index: usize) -> GroupScales {
    // SAFETY: the caller guarantees this.
    unsafe {
        let (at, supers) = (panel.add(layout.scales_at(kind, index)), panel.add(layout.supers_at(kind, index)));
        let (scales, minima) = match kind {
            Scales::Fixed(offset) => {
                let scales = halves(at);
                (scales, scaled(scales, [vdupq_n_f32(offset); REGISTERS]))
            }
            Scales::Two => (halves(at), halves(at.add(2 * PANEL))),
            Scales::Super => {
                let mut least = halves(supers.add(2 * PANEL));
                for least in &mut least {
                    *least = vnegq_f32(*least);
                }
                (scaled(halves(supers), integers(at)), scaled(least, integers(at.add(PANEL))))
            }
            Scales::Halves => (halves(supers), [vdupq_n_f32(0.0); REGISTERS]),
            Scales::Pair => ([vdupq_n_f32(0.0); REGISTERS], [vdupq_n_f32(0.0); REGISTERS]),
            Scales::Power => {
                let scales = powers(at);
                (scales, scaled(scales, [vdupq_n_f32(-f32::from(E2M1_OFFSET)); REGISTERS]))
            }
            Scales::Signed => {
                let [a, b, c, d] = factors(at);
                let factors = [vcvtq_f32_s32(a), vcvtq_f32_s32(b), vcvtq_f32_s32(c), vcvtq_f32_s32(d)];
                let scales = scaled(halves(supers), factors);
                (scales, scaled(scales, [vdupq_n_f32(-f32::from(IQ4_OFFSET)); REGISTERS]))
            }
            Scales::Zero => {
                let scales = halves(at);
                (scales, below_zero(scales, at.add(2 * PANEL)))
            }
            Scales::Wide => {
                let scales = wide(at);
                (scales, below_zero(scales, at.add(4 * PANEL)))
            }
        };
        let mut group = GroupScales { scales, minima, factors: None, pair: None };
        if matches!(kind, Scales::Pair) {
            group.pair = Some([small(at), small(at.add(PANEL))]);
        }
        if matches!(kind, Scales::Halves) {
            group.factors = Some([factors(at), factors(at.add(PANEL))]);
        }
        group
    }
}

/// Reads sixteen f32.
#[inline(always)]
unsafe fn wide(at: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let at = at.cast::<f32>();
        [vld1q_f32(at), vld1q_f32(at.add(LANES)), vld1q_f32(at.add(2 * LANES)), vld1q_f32(at.add(3 * LANES))]
    }
}

/// Reads sixteen e4m3 numbers, over [`E4M3_OVER_F16`](crate::weights::E4M3_OVER_F16).
#[inline(always)]
unsafe fn small(at: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let bytes = vld1q_u8(at);
        let (low, high) = (as_f16(vmovl_u8(vget_low_u8(bytes))), as_f16(vmovl_high_u8(bytes)));
        [
            super::widened(vget_low_u16(low)),
            super::widened(vget_high_u16(low)),
            super::widened(vget_low_u16(high)),
            super::widened(vget_high_u16(high)),
        ]
    }
}

/// Moves the bits of e4m3 numbers to their places in f16.
#[inline(always)]
unsafe fn as_f16(codes: uint16x8_t) -> uint16x8_t {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let sign = vandq_u16(vshlq_n_u16::<8>(codes), vdupq_n_u16(0x8000));
        vorrq_u16(sign, vandq_u16(vshlq_n_u16::<7>(codes), vdupq_n_u16(0x3f80)))
    }
}

/// Reads sixteen factors.
#[inline(always)]
unsafe fn factors(at: *const u8) -> [int32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let bytes = vld1q_s8(at.cast());
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)]
    }
}

/// Returns the minima that sixteen zero points make.
#[inline(always)]
unsafe fn below_zero(scales: [float32x4_t; REGISTERS], zeros: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let mut zeros = integers(zeros);
        for zeros in &mut zeros {
            *zeros = vnegq_f32(*zeros);
        }
        scaled(zeros, scales)
    }
}

/// Multiplies sixteen numbers with sixteen others.
#[inline(always)]
unsafe fn scaled(mut x: [float32x4_t; REGISTERS], y: [float32x4_t; REGISTERS]) -> [float32x4_t; REGISTERS] {
    for (x, y) in x.iter_mut().zip(y) {
        // SAFETY: the caller of `scales` guarantees this.
        *x = unsafe { vmulq_f32(*x, y) };
    }
    x
}

/// Reads sixteen exponents of powers of two.
#[inline(always)]
unsafe fn powers(at: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let mut powers = [vdupq_n_f32(0.0); REGISTERS];
        for (power, exponents) in powers.iter_mut().zip(bytes(at)) {
            let exponents = vreinterpretq_s32_u32(exponents);
            // Half of 2^(exponent − 127). The two smallest are denormal.
            let normal = vshlq_n_s32::<23>(vsubq_s32(exponents, vdupq_n_s32(1)));
            let denormal = vshlq_s32(vdupq_n_s32(0x20_0000), exponents);
            let is_normal = vcgtq_s32(exponents, vdupq_n_s32(1));
            *power = vreinterpretq_f32_s32(vbslq_s32(is_normal, normal, denormal));
        }
        powers
    }
}

/// Reads sixteen bytes as f32.
#[inline(always)]
unsafe fn integers(at: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let [a, b, c, d] = bytes(at);
        [vcvtq_f32_u32(a), vcvtq_f32_u32(b), vcvtq_f32_u32(c), vcvtq_f32_u32(d)]
    }
}

/// Reads sixteen bytes.
#[inline(always)]
unsafe fn bytes(at: *const u8) -> [uint32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let bytes = vld1q_u8(at);
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
    }
}

/// Reads sixteen f16.
#[inline(always)]
unsafe fn halves(at: *const u8) -> [float32x4_t; REGISTERS] {
    // SAFETY: the caller of `scales` guarantees this.
    unsafe {
        let at = at.cast::<u16>();
        [
            super::widened(vld1_u16(at)),
            super::widened(vld1_u16(at.add(4))),
            super::widened(vld1_u16(at.add(8))),
            super::widened(vld1_u16(at.add(12))),
        ]
    }
}
