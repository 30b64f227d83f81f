//! Unpacking of floating-point numbers in fewer than 16 bits to panels of bf16, which are multiplied as any other. It serves the
//! instruction sets that do not multiply them as integers: AMX, those of AArch64 and plain Rust.
//!
//! A weight is its code's value times the group's scale, in f32, rounded to bf16: the same bits as if it had been unpacked
//! when it was loaded. A panel is unpacked once for all rows of a piece.

use half::bf16;
use octavo_ops::{FP4_VALUES, NF4_VALUES, e4m3};

use crate::isa::Isa;
use crate::memory::LINE;
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL, PanelKind, nibble_at};

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Values of the codes of e4m3.
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < values.len() {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

/// Unpacks a panel to one of bf16.
pub(super) fn unpack(isa: Isa, panel: &[u8], layout: &Layout, out: &mut [u8]) {
    let PanelKind::Packed(numbers) = layout.kind else { unreachable!("only packed numbers are unpacked") };
    let lines = &mut out.as_chunks_mut::<LINE>().0[..layout.groups() * PAIRS];
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx {
        // SAFETY: the instruction set is available; the panel has this layout, and there is a line for each pair.
        return unsafe { wide::unpack(numbers, panel, layout, lines) };
    }
    let _ = isa;
    for (index, line) in lines.iter_mut().enumerate() {
        for (at, number) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *number = bf16::from_f32(value(numbers, panel, layout, (index * 2 + at % 2, at / 2))).to_le_bytes();
        }
    }
}

/// Reads one row of a panel.
pub(super) fn read(panel: &[u8], layout: &Layout, lane: usize, out: &mut [f32]) {
    let PanelKind::Packed(numbers) = layout.kind else { unreachable!("only packed numbers are read") };
    for (k, out) in out.iter_mut().enumerate() {
        *out = bf16::from_f32(value(numbers, panel, layout, (k, lane))).to_f32();
    }
}

/// Returns the weight of an input and a row.
#[inline(always)]
fn value(numbers: Numbers, panel: &[u8], layout: &Layout, (k, lane): (usize, usize)) -> f32 {
    let nibble = || {
        let (at, shift) = nibble_at(k % GROUP, lane);
        usize::from(panel[k / GROUP * numbers.bytes() + at] >> shift & 15)
    };
    let value = match numbers {
        Numbers::F8 => E4M3[usize::from(panel[(k / 2 * PANEL + lane) * 2 + k % 2])],
        Numbers::Nf4 => NF4_VALUES[nibble()],
        Numbers::Fp4 => FP4_VALUES[nibble()],
    };
    let at = layout.number_scales_at(numbers, k / GROUP) + 4 * lane;
    value * f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
}

#[cfg(target_arch = "x86_64")]
mod wide {
    //! The same for AMX: a line of sixteen pairs at a time, eight rows in each of two registers.

    use std::arch::x86_64::*;
    use std::marker::PhantomData;

    use super::super::bf16::words;
    use super::*;

    /// Codes of a kind of numbers.
    trait Decode {
        const NUMBERS: Numbers;

        /// Factor of the scales that makes up for that of the values.
        const FACTOR: f32 = 1.0;

        /// Returns the values of a pair of inputs of a group: those of each row beside each other, eight rows in a register.
        ///
        /// # Safety
        /// AVX-512 F and BW must be available, and the codes must be those of a group.
        unsafe fn values(codes: *const u8, pair: usize) -> [__m512; 2];
    }

    struct F8;
    struct Nf4;
    struct Fp4;

    impl Decode for F8 {
        const NUMBERS: Numbers = Numbers::F8;
        const FACTOR: f32 = 256.0;

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn values(codes: *const u8, pair: usize) -> [__m512; 2] {
            // SAFETY: the caller guarantees this.
            let codes = unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(codes.add(pair * 2 * PANEL).cast())) };
            // As f16, whose exponent is five bits with a bias of 15, the bits are the value over 256. The sign is extended to
            // the left of the exponent, and masked between.
            let mask = _mm512_set1_epi16(0xbf80_u16 as i16);
            let halves = _mm512_and_si512(_mm512_slli_epi16::<7>(codes), mask);
            [_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves))]
        }
    }

    impl Decode for Nf4 {
        const NUMBERS: Numbers = Numbers::Nf4;

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn values(codes: *const u8, pair: usize) -> [__m512; 2] {
            // SAFETY: the caller guarantees this.
            unsafe { looked_up(&NF4_VALUES, codes, pair) }
        }
    }

    impl Decode for Fp4 {
        const NUMBERS: Numbers = Numbers::Fp4;

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn values(codes: *const u8, pair: usize) -> [__m512; 2] {
            // SAFETY: the caller guarantees this.
            unsafe { looked_up(&FP4_VALUES, codes, pair) }
        }
    }

    /// Replaces the nibbles of a pair of inputs by the values of a table.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn looked_up(values: &[f32; 16], codes: *const u8, pair: usize) -> [__m512; 2] {
        let (at, shift) = nibble_at(2 * pair, 0);
        // SAFETY: the caller guarantees this; the table fills a register.
        let (table, line) =
            unsafe { (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_si512(codes.add(at / LINE * LINE).cast())) };
        // Of each sixteen bytes, eight are of this pair.
        let codes = _mm512_maskz_compress_epi64(if at % LINE == 0 { 0x55 } else { 0xaa }, line);
        let codes = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32));
        // Of an index, only the lowest four bits count.
        let first = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(codes));
        let second = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<1>(codes));
        [_mm512_permutexvar_ps(first, table), _mm512_permutexvar_ps(second, table)]
    }

    /// A panel of packed numbers.
    struct Panel<'a, D> {
        at: *const u8,
        layout: &'a Layout,
        kind: PhantomData<D>,
    }

    impl<'a, D: Decode> Panel<'a, D> {
        fn new(panel: &[u8], layout: &'a Layout) -> Self {
            assert!(panel.len() >= layout.bytes);
            Self { at: panel.as_ptr(), layout, kind: PhantomData }
        }

        /// Returns the scales of a group, two for each row.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn doubled(&self, group: usize) -> [__m512; 2] {
            // SAFETY: the caller guarantees that the panel has sixteen scales for this group.
            let scales =
                unsafe { _mm512_loadu_ps(self.at.add(self.layout.number_scales_at(D::NUMBERS, group)).cast()) };
            let scales = _mm512_mul_ps(scales, _mm512_set1_ps(D::FACTOR));
            let rows = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            let others = _mm512_add_epi32(rows, _mm512_set1_epi32(8));
            [_mm512_permutexvar_ps(rows, scales), _mm512_permutexvar_ps(others, scales)]
        }

        /// Returns the weights of a pair of inputs.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn scaled(&self, scales: [__m512; 2], group: usize, pair: usize) -> [__m512; 2] {
            // SAFETY: the caller guarantees that the panel has this pair.
            let [first, second] = unsafe { D::values(self.at.add(group * D::NUMBERS.bytes()), pair) };
            [_mm512_mul_ps(first, scales[0]), _mm512_mul_ps(second, scales[1])]
        }
    }

    /// Calls a function with the type of the numbers.
    macro_rules! with_numbers {
        ($numbers:expr, $function:ident, ($($arg:expr),*)) => {
            match $numbers {
                Numbers::F8 => $function::<F8>($($arg),*),
                Numbers::Nf4 => $function::<Nf4>($($arg),*),
                Numbers::Fp4 => $function::<Fp4>($($arg),*),
            }
        };
    }

    /// Unpacks a panel.
    ///
    /// # Safety
    /// AVX-512 with BF16 must be available, the panel must have this layout, and there must be a line for each pair of inputs.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn unpack(numbers: Numbers, panel: &[u8], layout: &Layout, lines: &mut [[u8; LINE]]) {
        // SAFETY: the caller guarantees this.
        unsafe { with_numbers!(numbers, unpack_as, (panel, layout, lines)) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn unpack_as<D: Decode>(panel: &[u8], layout: &Layout, lines: &mut [[u8; LINE]]) {
        let panel = Panel::<D>::new(panel, layout);
        for (group, lines) in lines.chunks_exact_mut(PAIRS).enumerate() {
            // SAFETY: the caller guarantees this; a line has 64 bytes.
            unsafe {
                let scales = panel.doubled(group);
                for (index, line) in lines.iter_mut().enumerate() {
                    let [first, second] = panel.scaled(scales, group, index);
                    let pair = words(_mm512_cvtne2ps_pbh(second, first));
                    _mm512_storeu_si512(line.as_mut_ptr().cast(), pair);
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use octavo_ops::StorageType;
    use octavo_ops::testing::TestRng;

    use super::*;

    /// The kernel for AMX does not need AMX itself.
    #[test]
    fn numbers_are_unpacked_for_amx_as_by_portable_code() {
        if !Isa::Avx512Bf16.is_available() {
            return;
        }
        for storage in [StorageType::F8E4M3, StorageType::Nf4, StorageType::Fp4] {
            let layout = Layout::new(storage, 192).unwrap();
            let PanelKind::Packed(numbers) = layout.kind else { unreachable!("all three are packed numbers") };
            let (mut panel, mut rng) = (vec![0; layout.bytes], TestRng(5));
            for (row, index) in (0..PANEL).flat_map(|row| (0..layout.groups()).map(move |index| (row, index))) {
                let codes = std::array::from_fn(|_| match numbers {
                    // The largest code of a sign is none of a number.
                    Numbers::F8 => rng.below(0x7f) as u8 | (rng.below(2) as u8) << 7,
                    Numbers::Nf4 | Numbers::Fp4 => rng.below(16) as u8,
                });
                layout.put_numbers(&mut panel, row, index, rng.signed().to_le_bytes(), &codes);
            }
            let lines = layout.groups() * PAIRS;
            let (mut found, mut expected) = (vec![[0; LINE]; lines], vec![[0; LINE]; lines]);
            unpack(Isa::Portable, &panel, &layout, expected.as_flattened_mut());
            // SAFETY: the instruction set is available; the panel has this layout, and there is a line for each pair.
            unsafe { wide::unpack(numbers, &panel, &layout, &mut found) };
            assert_eq!(found, expected, "{storage}");
        }
    }
}
